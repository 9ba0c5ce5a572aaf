# SPDX-License-Identifier: Apache-2.0
"""The training of draft heads and of one-layer drafters, and the text that it learns from."""

# ruff: noqa: I001
from tsjax.training.run import train_heads, TrainedHeads
from tsjax.base.training_config import HeadTraining, DrafterTraining
from tsjax.files.presets import training_preset
from tsjax.training.drafter_run import train_drafter, TrainedDrafter
from tsjax.base.model_config import OneLayer

__all__ = [
    "train_heads", "TrainedHeads", "HeadTraining", "training_preset",
    "train_drafter", "TrainedDrafter", "DrafterTraining", "OneLayer",
]  # fmt: skip
