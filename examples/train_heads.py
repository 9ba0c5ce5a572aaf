# SPDX-License-Identifier: Apache-2.0
"""Train draft heads for a model of your own: python examples/train_heads.py [CHECKPOINT] [FOLDER].

The text to train on is one that the model writes itself, so that nothing is downloaded; real heads
need books, the paper's recipe and a GPU (docs/training.md). The heads are kept in FOLDER.
"""

import sys
import tempfile

import numpy as np

import tsjax


def main(path: str = tsjax.EMBEDDED, folder: str | None = None) -> None:
    model = tsjax.load(path, dtype="float32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or f"{temporary}/heads"

        # 1. Texts: four rows of 128 tokens. Text files or folders of them would do as well.
        written = tsjax.generate(
            model,
            ["The", "He", "She", "When"],
            max_new_tokens=128,
            min_new_tokens=128,
            do_sample=True,
            min_p=0.1,
        )

        # 2. Heads: the model stays as it is, its heads learn the tokens further ahead.
        trained = tsjax.training.train_heads(
            model,
            np.stack(written.tokens),
            num_heads=2,
            sequence_length=128,
            steps=12,
            warmup_steps=2,
            batch_size=4,
            micro_batch=4,
            learning_rate=0.02,
            save_to=folder,
        )
        for record in (trained.history[0], trained.history[-1]):
            losses = ", ".join(f"{loss:.3f}" for loss in record["head_losses"])
            print(f"step {record['step']}: losses of the heads {losses}")

        # 3. Drafts: the heads as an adapter of the same checkpoint.
        model = tsjax.load(path, dtype="float32", heads=folder)
        method = tsjax.TokenSwift(
            tree=(2, 1), draft_from="verified_state", num_ngrams=0, suffix_length=0
        )
        result = tsjax.generate(model, "The", method=method, max_new_tokens=60)
        plain = tsjax.generate(model, "The", max_new_tokens=60)
        print(f"{result.stats.accepted} of {result.stats.drafted} drafts accepted")
        print("the same text as without heads:", result.text == plain.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
