# SPDX-License-Identifier: Apache-2.0
"""What users of other programs type from habit, and what to write here."""

from __future__ import annotations

from typing import Any

# Of calls that generate. The command line says the same, with flags in place of settings.
HABITS = {
    "max_length": "write max_new_tokens, which leaves the prompt out of the count",
    "max_tokens": "write max_new_tokens",
    "max_completion_tokens": "write max_new_tokens",
    "n_predict": "write max_new_tokens",
    "min_length": "write min_new_tokens, which leaves the prompt out of the count",
    "min_tokens": "write min_new_tokens",
    "max_time": "there is no limit of time; leave a loop over tsjax.stream(...) when it is enough",
    "stopping_criteria": "write stop_strings, or leave a loop over tsjax.stream(...) when it is "
    "enough",
    "stop": "write stop_strings for texts, or eos_token_id for token ids",
    "stop_token_ids": "write eos_token_id",
    "ignore_eos": "write eos_token_id=()",
    "temp": "write temperature, beside do_sample",
    "n": "write num_return_sequences",
    "num_beams": "there is no beam search; leave it out",
    "length_penalty": "it belongs to beam search, which tsjax does not have; leave it out",
    "early_stopping": "it belongs to beam search, which tsjax does not have; leave it out",
    "penalty_alpha": "there is no contrastive search; leave it out",
    "guidance_scale": "there is no guidance; leave it out",
    "repeat_penalty": "write repetition_penalty",
    "repeat_last_n": "write repetition_window",
    "logit_bias": "write logits_processor=tsjax.token_bias({token: bias}, vocab_size)",
    "bad_words_ids": "write logits_processor=tsjax.bad_words(words, vocab_size)",
    "bad_words": "write logits_processor=tsjax.bad_words(words, vocab_size), words as token ids",
    "allowed_token_ids": "write logits_processor=tsjax.allowed_tokens(tokens, vocab_size)",
    "prefix_allowed_tokens_fn": "write logits_processor=, a function inside jit",
    "grammar": "there are no grammars; logits_processor= takes a function inside jit",
    "output_scores": "write logprobs=N, for those of the chosen token and of the N best",
    "prompt_logprobs": "call tsjax.score(model, prompt, continuation)",
    "return_dict_in_generate": "leave it out: the result has tokens, text, figures and, with "
    "logprobs=N, log-probabilities",
    "pad_token_id": "leave it out: nothing is padded; prompts of different lengths make one list",
    "use_cache": "leave it out: the cache is always used",
    "past_key_values": "write prefix=tsjax.read(model, text)",
    "skip_special_tokens": "leave it out: text comes without special tokens",
    "echo": "leave it out: the result has what is new, and result.prompts",
    "tokenizer": "leave it out: the model has its own",
    "stream": "leave it out and call tsjax.stream(...), which yields text as it comes; the command "
    "line prints it so by itself",
    "generation_config": "pass config=",
    "sampling_params": "pass its values one by one: max_new_tokens=, temperature=, seed=",
    "assistant_model": "write draft_model=tsjax.load(...)",
    "prompt_lookup_num_tokens": "write method='ngram', or method='auto'",
    "speculative_config": "write method='auto', or draft_model=tsjax.load(...)",
    "tools": "put them into the prompt: model.tokenizer.apply_chat_template(messages, tools=tools, "
    "add_generation_prompt=True)",
    "n_ctx": "write capacity; by default it is what prompt and new tokens need",
}
for _others, _known in (
    (("best_of", "num_samples"), "n"), (("sequence_bias",), "logit_bias"),
    (("output_logits",), "output_scores"), (("max_generation_steps",), "max_tokens"),
    (("guided_json", "guided_decoding", "response_format", "structured_outputs"), "grammar"),
    (("prompt_cache", "cache_prompt"), "past_key_values"), (("max_prompt_length",), "n_ctx"),
):  # fmt: skip
    HABITS |= dict.fromkeys(_others, HABITS[_known])

# What does nothing here is taken where its value asks for nothing; None always does.
NEUTRAL = {
    "num_beams": (1,), "n": (1,), "best_of": (1,), "length_penalty": (1, 1.0, 0),
    "early_stopping": (False,), "penalty_alpha": (0,), "guidance_scale": (1,),
    "use_cache": (True,), "return_dict_in_generate": (True, False), "output_scores": (False,),
    "output_logits": (False,), "ignore_eos": (False,), "stream": (False,), "echo": (False,),
    "skip_special_tokens": (True,), "min_length": (0,), "stop": ([], ()), "logit_bias": ({},),
    "bad_words": ([],), "bad_words_ids": ([],), "stop_token_ids": ([], ()), "repeat_penalty": (1,),
}  # fmt: skip

# Of files: HuggingFace's settings that change the output, with the values that do nothing, beside
# None.
HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), (1,)),
    "encoder_repetition_penalty": (1,),
    **dict.fromkeys(("min_length", "token_healing", "penalty_alpha"), (0,)),
    "encoder_no_repeat_ngram_size": (0,),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    **dict.fromkeys(("top_h", "dola_layers", "constraints", "force_words_ids"), ()),
}

# Of `load`.
LOADING = {
    "torch_dtype": "write dtype='bfloat16', or whichever",
    "device": "leave it out: arrays lie on jax's first device; with jax.default_device(...): says "
    "another one, mesh= several",
    "trust_remote_code": "leave it out: code that lies beside weights is never run",
    "load_in_4bit": "write weights='int4'",
    "load_in_8bit": "write weights='int8'",
    "quantization_config": "write weights='int8' or 'int4', which rounds the matrices",
    "attn_implementation": "leave it out: kernels are chosen by the device",
    "low_cpu_mem_usage": "leave it out: one array is read at a time",
    "tensor_parallel_size": "write mesh=jax.make_mesh((1, N), ('data', 'model'))",
    "max_model_len": "leave it out: each call needs what its prompt and new tokens need",
    "gguf_file": "give the file's path in place of the folder's",
    "tokenizer": "leave it out: it is read from the same place",
    "state_dict": "call tsjax.from_hf(tensors, config)",
    "peft_config": "write adapter=, the folder of the adapter",
}
for _others, _known in (
    (("device_map", "n_gpu_layers", "backend"), "device"),
    (("quantization",), "quantization_config"), (("max_seq_length", "n_ctx"), "max_model_len"),
    (("lora_path", "lora", "enable_lora"), "peft_config"),
):  # fmt: skip
    LOADING |= dict.fromkeys(_others, LOADING[_known])
LOADING |= dict.fromkeys(
    ("use_safetensors", "use_cache", "gpu_memory_utilization"),
    "leave it out: it means nothing here",
)

# Of what `load` returns, and of the package: names of other programs.
OF_MODEL = {
    "generate": "call tsjax.generate(model, prompt)",
    "forward": "call tsjax.forward(model, tokens)",
    "chat": "call tsjax.generate(model, messages=[...]), or tsjax.Conversation(model)",
    "to": "arrays are placed by tsjax.load(mesh=...), and jax.device_put moves model.params",
    "eval": "leave it out: there is no mode of training",
    "train": "leave it out: there is no mode of training",
    "config": "the settings are model.cfg",
    "dtype": "it is model.cfg.dtype",
    "device": "jax.tree.leaves(model.params)[0].devices() tells",
    "parameters": "the arrays are model.params",
    "state_dict": "call tsjax.to_hf(model)",
    "load_state_dict": "call tsjax.from_hf(tensors, config), or model.with_params(params)",
    "save_pretrained": "call tsjax.save_hf(model, folder), or tsjax.save(model, folder)",
    "from_pretrained": "call tsjax.load(path)",
    "generation_config": "tsjax.GenerationConfig.from_hf(model.path) reads it",
}
OF_MODEL |= dict.fromkeys(("cuda", "cpu", "half", "bfloat16", "float"), OF_MODEL["to"])
OF_MODEL["apply"] = OF_MODEL["forward"]
OF_PACKAGE = {
    "LLM": "model = tsjax.load(path), and then tsjax.generate(model, prompts)",
    "SamplingParams": "its values as arguments of tsjax.generate: temperature=0.8, seed=0",
    "AutoTokenizer": "model.tokenizer is there after model = tsjax.load(path)",
    "chat": "tsjax.generate(model, messages=[...]), or tsjax.Conversation(model)",
    "TextStreamer": "tsjax.stream(model, prompt) yields text, and streamer= takes transformers'",
    "Sampler": "tsjax.rollout(model, prompts), or tsjax.TunixSampler(model)",
}
OF_PACKAGE |= dict.fromkeys(
    ("AutoModelForCausalLM", "AutoModel", "Llama", "pipeline", "from_pretrained"), OF_PACKAGE["LLM"]
)
