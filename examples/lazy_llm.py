# SPDX-License-Identifier: Apache-2.0
"""Read less of a long prompt: python examples/lazy_llm.py [CHECKPOINT].

The first token comes sooner, and what is said may change: this is an approximation. The small
English model that comes with tsjax is used unless a checkpoint is given.
"""

import sys

import tsjax

STORY = (
    "The old man had a garden behind his house, and in the garden stood a tree. Every evening he "
    "sat under it with a book, and every evening the boy from the mill came to the gate. "
)


def main(path: str = tsjax.EMBEDDED, prompt: str = 8 * STORY + "One evening") -> None:
    model = tsjax.load(path, dtype="float32")
    third = max(1, model.cfg.num_layers // 3)
    keep = {third: 0.5, 2 * third: 0.25}  # of the prompt, after this many layers
    config = tsjax.GenerationConfig(max_new_tokens=24)

    full = tsjax.generate(model, prompt, config=config)
    print("whole prompt:", full.text)
    for revive in ("in_batches", "on_demand", "never"):
        setting = tsjax.LazyPrefill(keep=keep, revive=revive)
        result = tsjax.generate(model, prompt, config=config, prefill=setting)
        shares = ", ".join(f"{share:.0%}" for share in result.stats.prompt_computed)
        print(f"revive={revive!r}:", result.text)
        print(f"computed by each group of layers: {shares}")

    # Drafts go with a lazy prefill: the tokens are those of plain decoding after the same prefill.
    setting = tsjax.LazyPrefill(keep=keep)
    plain = tsjax.generate(model, prompt, config=config, prefill=setting)
    swift = tsjax.generate(model, prompt, config=config, prefill=setting, method=tsjax.NGram())
    print("the same text with drafts:", swift.text == plain.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
