# SPDX-License-Identifier: Apache-2.0
"""Print two continuations as they come: python examples/streaming.py CHECKPOINT."""

import sys

import tsjax


def main(path: str) -> None:
    model = tsjax.load(path)
    prompts = ["Once upon a time", "The little dog"]
    texts = [""] * len(prompts)
    for chunk in tsjax.stream(model, prompts, max_new_tokens=100, stop_strings=[" end"]):
        for row, (text, reason) in enumerate(
            zip(chunk.text or [], chunk.finish_reason, strict=True)
        ):
            texts[row] += text
            if reason is not None:
                print(f"[{row}] {prompts[row]} ... {texts[row]} ({reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
