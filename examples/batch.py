# SPDX-License-Identifier: Apache-2.0
"""Several prompts in one call, a seed for each: python examples/batch.py [CHECKPOINT].

What a row's tokens depend on: its prompt, its seed, the settings, and how many earlier rows have
the same prompt (so that repeated prompts differ). Not on the other rows, their number or length.
"""

import sys

import tsjax

PROMPTS = ["The old house", "She opened the door and", "The old house", "The old house"]
SEEDS = (1, 2, 1, 7)


def main(path: str = tsjax.EMBEDDED) -> None:
    model = tsjax.load(path, dtype="float32")
    settings = {"max_new_tokens": 24, "do_sample": True, "min_p": 0.1}
    batch = tsjax.generate(model, PROMPTS, seed=SEEDS, **settings)
    for prompt, seed, text in zip(PROMPTS, SEEDS, batch.text, strict=True):
        print(f"seed {seed}: {' '.join((prompt + text).split())}")

    alone = tsjax.generate(model, PROMPTS[1], seed=SEEDS[1], **settings)
    print("row 1 alone is row 1 of the batch:", alone.text == batch.text[1])
    print("row 0 and row 2, same prompt and seed, differ:", batch.text[0] != batch.text[2])


if __name__ == "__main__":
    main(*sys.argv[1:])
