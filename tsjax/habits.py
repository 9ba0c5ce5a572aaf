# SPDX-License-Identifier: Apache-2.0
"""What users of other programs type from habit, and what to write here."""

# The command line says the same, with flags in place of the names of settings.
HABITS = {
    "max_length": "write max_new_tokens, which leaves the prompt out of the count",
    "max_tokens": "write max_new_tokens",
    "max_completion_tokens": "write max_new_tokens",
    "min_length": "write min_new_tokens, which leaves the prompt out of the count",
    "min_tokens": "write min_new_tokens",
    "max_time": "there is no limit of time; leave a loop over tsjax.stream(...) when it is enough",
    "stop": "write stop_strings for texts, or eos_token_id for token ids",
    "stop_token_ids": "write eos_token_id",
    "temp": "write temperature, beside do_sample",
    "n": "write num_return_sequences",
    "num_beams": "there is no beam search; leave it out",
    "length_penalty": "it belongs to beam search, which tsjax does not have; leave it out",
    "early_stopping": "it belongs to beam search, which tsjax does not have; leave it out",
    "logit_bias": "write logits_processor=tsjax.token_bias({token: bias}, vocab_size)",
    "bad_words_ids": "write logits_processor=tsjax.bad_words(words, vocab_size)",
    "bad_words": "write logits_processor=tsjax.bad_words(words, vocab_size), words as token ids",
    "allowed_token_ids": "write logits_processor=tsjax.allowed_tokens(tokens, vocab_size)",
    "output_scores": "write logprobs=N, for those of the chosen token and of the N best",
    "return_dict_in_generate": "leave it out: the result has tokens, text, figures and, with "
    "logprobs=N, log-probabilities",
    "pad_token_id": "leave it out: nothing is padded; prompts of different lengths make one list",
    "use_cache": "leave it out: the cache is always used",
    "stream": "leave it out and call tsjax.stream(...), which yields text as it comes; the command "
    "line prints it so by itself",
    "generation_config": "pass config=tsjax.GenerationConfig.from_hf(...)",
}
HABITS["best_of"], HABITS["sequence_bias"] = HABITS["n"], HABITS["logit_bias"]
HABITS["output_logits"] = HABITS["output_scores"]
