# SPDX-License-Identifier: Apache-2.0
"""Generate text from a checkpoint: python examples/quickstart.py CHECKPOINT ["a prompt"]."""

import sys

import tsjax


def main(path: str, prompt: str = "Once upon a time") -> None:
    model = tsjax.load(path)
    result = tsjax.generate(
        model,
        prompt,
        max_new_tokens=200,
        do_sample=True,
        min_p=0.1,
        repetition_penalty=1.2,
        repetition_window=1024,
        seed=0,
    )
    print(result.text)
    print(result.finish_reason, f"{result.stats.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
