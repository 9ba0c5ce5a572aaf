# SPDX-License-Identifier: Apache-2.0
"""Generate text twice, plainly and with TokenSwift: python examples/quickstart.py [CHECKPOINT].

The small English model that comes with tsjax is used unless a checkpoint is given: a HuggingFace
folder, a hub id or a tsjax checkpoint.
"""

import sys

import tsjax


def main(path: str = tsjax.EMBEDDED, prompt: str = "Once upon a time") -> None:
    model = tsjax.load(path, dtype="float32")
    config = tsjax.GenerationConfig(
        max_new_tokens=200,
        do_sample=True,
        min_p=0.1,
        repetition_penalty=1.2,
        repetition_window=1024,
        seed=0,
    )
    plain = tsjax.generate(model, prompt, config=config)
    print(prompt + str(plain.text))
    print(plain.finish_reason, f"{plain.stats.tokens_per_step:.2f} tokens per step")

    # The method says how tokens are found, not which.
    method = tsjax.TokenSwift(tree=(1, 1), draft_passes=2, num_ngrams=2, suffix_length=4)
    swift = tsjax.generate(model, prompt, config=config, method=method)
    print("the same text:", swift.text == plain.text)
    print(swift.finish_reason, f"{swift.stats.tokens_per_step:.2f} tokens per step")


if __name__ == "__main__":
    main(*sys.argv[1:])
