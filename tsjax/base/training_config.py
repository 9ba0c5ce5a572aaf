# SPDX-License-Identifier: Apache-2.0
"""The static settings of training: what a user may ask of `train_heads`.

Does not know arrays, texts or files.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tsjax.base.checks import check, check_fields, one_of
from tsjax.base.model_config import CHAINED, HEAD_KINDS


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """How heads are trained. The defaults are TokenSwift's Table 9 (all models but the 14B one).

    Where the table is silent the defaults are those of the published code: Adam's epsilon, weights
    that start from a normal distribution, gradients clipped to norm 1, no decay of norms.

    Attributes:
      num_heads: heads to train; head i guesses the token i + 1 further.
      sequence_length: tokens of each sequence.
      steps: steps of the optimiser. Where nobody says how many, nor gives `settings` (a --preset),
        they end after 50 passes over the data: few sequences make fewer steps, of fewer sequences,
        with a shorter warm-up.
      batch_size: sequences per step.
      micro_batch: sequences per pass, on each part of the mesh's data axis.
      learning_rate: the highest, after the warm-up.
      warmup_steps: steps until it is reached.
      weight_decay: AdamW's, for the heads' matrices.
      beta1, beta2: AdamW's.
      max_grad_norm: clip gradients to this norm; 0 is off.
      init_scale: standard deviation of the first weights.
      chunk_tokens: positions whose logits exist at a time.
      seed: of the first weights and of the order of the sequences.
      head_kind: TokenSwift's heads, or Medusa's with the model's vocabulary matrix or with their
        own; Medusa's have other defaults (tsjax.training.HeadTraining.of_kind).
      loss_decay: what a head's loss counts, for 1 of the head before it.
    """

    num_heads: int = 3
    sequence_length: int = 8192
    steps: int = 200
    batch_size: int = 120
    micro_batch: int = 3
    learning_rate: float = 5e-3  # it falls to 0 as a cosine
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    init_scale: float = 0.02
    chunk_tokens: int = 1024
    seed: int = 0
    head_kind: str = CHAINED  # one of HEAD_KINDS
    loss_decay: float = 1.0

    def __post_init__(self):
        shares = ("beta1", "beta2", "loss_decay")
        check_fields(self, may_be_0=("warmup_steps", "seed"), up_to_1=shares)
        check(self.head_kind in HEAD_KINDS, "head_kind", self.head_kind, one_of(HEAD_KINDS))
        check(self.loss_decay > 0, "loss_decay", self.loss_decay, "above 0; 1.0 counts all alike")
        for name in ("beta1", "beta2"):
            check(getattr(self, name) < 1, name, getattr(self, name), "below 1")
        length, heads, warmup = self.sequence_length, self.num_heads, self.warmup_steps
        wanted = f"at least {heads + 2}: the label of head {heads} is {heads + 1} tokens further"
        check(length >= heads + 2, "sequence_length", length, wanted)
        check(warmup < self.steps, "warmup_steps", warmup, f"less than steps={self.steps}")

    @classmethod
    def of_kind(cls, kind: str, **changes: Any) -> HeadTraining:
        """The defaults for heads of that kind.

        For parallel ones those of Medusa's published code, where it says something: each head's
        loss counts 0.8 of the one before, matrices begin at zero, nothing decays, 40 warm-up steps,
        sequences of 4,096 tokens. Four heads, as no published tree uses a fifth.
        """
        check(kind in HEAD_KINDS, "head_kind", kind, one_of(HEAD_KINDS))
        medusa = dict(
            num_heads=4, sequence_length=4096, learning_rate=2e-3, warmup_steps=40,
            weight_decay=0.0, init_scale=0.0, loss_decay=0.8,
        )  # fmt: skip
        return cls(**{**(medusa if kind != CHAINED else {}), "head_kind": kind, **changes})

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """What each head's mean loss counts."""
        return tuple(self.loss_decay**i for i in range(self.num_heads))

    @property
    def labels(self) -> tuple[int, ...]:
        """Labels per sequence of each head: head i (from 1) at position t has token t + 1 + i."""
        return tuple(self.sequence_length - 1 - i for i in range(1, self.num_heads + 1))


@dataclasses.dataclass(frozen=True)
class DrafterTraining:
    """How a one-layer drafter is trained.

    Attributes:
      steps: steps of the optimiser; 0 where a time says when it is over.
      step_tokens: tokens of the texts of a step.
      depth: drafts in a row that are trained.
      every: train drafts after the first from one in so many positions.
      learning_rate: the highest, after the warm-up.
      warmup_steps: steps until it is reached.
      beta1, beta2: Adam's.
      max_grad_norm: clip gradients to this norm.
      depth_weight: what a draft's loss counts, for 1 of the draft before it.
      temperature: at which it is to agree with the model.
      variation: what total variation counts in the loss; cross-entropy has the rest.
      seed: of the first weights and of the order of the texts.
    """

    steps: int = 0
    step_tokens: int = 1024
    depth: int = 4
    every: int = 4
    learning_rate: float = 2e-4  # it falls to a twentieth as a cosine
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    depth_weight: float = 0.8
    temperature: float = 0.7
    variation: float = 0.9
    seed: int = 0

    def __post_init__(self):
        shares = ("beta1", "beta2", "depth_weight", "variation")
        check_fields(self, may_be_0=("steps", "warmup_steps", "seed"), up_to_1=shares)
        for name in ("beta1", "beta2"):
            check(getattr(self, name) < 1, name, getattr(self, name), "below 1")
        for name in ("temperature", "learning_rate", "max_grad_norm", "depth_weight"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        check(128 % self.every == 0, "every", self.every, "a divisor of 128")
        check(self.depth <= 16, "depth", self.depth, "at most 16")
