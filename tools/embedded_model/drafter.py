# SPDX-License-Identifier: Apache-2.0
"""A one-layer drafter for the small English model, small enough to lie beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tsjax
from tsjax.base.model_config import RopeConfig
from tsjax.files.drafter_files import DRAFTER_CONFIG, DRAFTER_FILE
from tsjax.training.drafter_run import TEXT
from tsjax.training.own_text import read_own_text

ASKED = Path(__file__).with_name("asked.json")
SAMPLING = tsjax.GenerationConfig(do_sample=True, temperature=0.8)
# Where its model's logits come from, and no more: 1 MB has no room for three taps.
SHAPE = tsjax.training.OneLayer(mlp_dim=32, words=2048, taps=(6,), rope=RopeConfig(theta=10_000.0))
MOST_BYTES = 10**6
CARD = """\
# The small English model's drafter

One layer with an MLP of {mlp}, which reads the model's last layer, keeps its last {window} rows and
can say {words:,} tokens: {nbytes:,} bytes.
`tsjax.load(tsjax.EMBEDDED, drafter=tsjax.EMBEDDED)` loads it, and `tsjax demo` uses it. For a model
as small as this no drafts pay but those of a text that repeats itself.

It learned from {tokens:,} tokens of the model's own text (temperature {temperature}), {steps:,}
steps, {minutes:.0f} minutes in all, by `{command}`
on {device} (python {python}, jax {jax}, {date}). On held-out text of that kind a step finds
{found:.2f} tokens with a chain of four drafts, nothing learned in the run; a draft is right in
{right} of the cases where those before it are.
"""


def make_drafter(work: Path, out: Path, minutes: float, tokens: int, shown: dict[str, Any]) -> str:
    """Trains it in `work` and writes the folder `out`; returns its card."""
    model = tsjax.load(tsjax.EMBEDDED)
    trained = tsjax.training.train_drafter(
        model, save_to=work, minutes=minutes, prompts=ASKED, tokens=tokens, sampling=SAMPLING,
        shape=SHAPE, cache_hidden=True, progress=True,
    )  # fmt: skip
    nbytes = (work / DRAFTER_FILE).stat().st_size
    if nbytes > MOST_BYTES:
        raise ValueError(f"the drafter has {nbytes:,} bytes, of {MOST_BYTES:,}")
    out.mkdir(parents=True, exist_ok=True)
    for name in (DRAFTER_CONFIG, DRAFTER_FILE):
        shutil.copy(work / name, out / name)
    texts, found = read_own_text(str(work / TEXT)), trained.evaluation
    right = ", ".join(f"{share:.0%}" for share in found["right"])
    card = CARD.format(
        mlp=SHAPE.mlp_dim, window=SHAPE.window, words=SHAPE.words, nbytes=nbytes,
        tokens=sum(len(text.ids) - text.prompt for text in texts), steps=len(trained.history),
        temperature=SAMPLING.temperature, minutes=trained.history[-1]["elapsed"] / 60,
        found=found["tokens_per_step"], right=right, **shown,
    )  # fmt: skip
    (out / "README.md").write_text(card, "utf-8")
    return card
