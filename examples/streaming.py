# SPDX-License-Identifier: Apache-2.0
"""Print text as it comes, until a stop string: python examples/streaming.py [CHECKPOINT].

A chunk holds what is new since the one before: tokens, text, and who drafted each token.
"""

import sys

import tsjax


def main(path: str = tsjax.EMBEDDED) -> None:
    model = tsjax.load(path, dtype="float32")
    prompt, drafted, count = "The old man", 0, 0
    print(prompt, end="")
    for chunk in tsjax.stream(
        model,
        prompt,
        method="ngram",
        max_new_tokens=100,
        repetition_penalty=1.2,
        stop_strings=["."],
    ):
        assert chunk.text is not None  # the model has a tokenizer
        print(chunk.text[0], end="", flush=True)
        count += len(chunk.tokens[0])
        drafted += int((chunk.sources[0] > 0).sum())
        if chunk.finish_reason[0] is not None:
            print(f"\n[{chunk.finish_reason[0]}: {count} tokens, {drafted} of them drafted]")


if __name__ == "__main__":
    main(*sys.argv[1:])
