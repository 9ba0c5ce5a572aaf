# SPDX-License-Identifier: Apache-2.0
"""What a lazy prefill remembers of a prompt: how far each token has come, and where it is.

Knows the buffers and what their unused parts mean. Does not know how they are filled.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax.numpy as jnp

from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int
from tsjax.lazy.settings import LazySettings

UNSEEN = 2**31 - 1  # the rank of a token that no row sees: beyond every position


class PromptState(flax.struct.PyTreeNode):
    """What a lazy prefill remembers of each prompt token, P of them, by position.

    The layers before the first cut are stage 0, those between two cuts or after the last are the
    stages that follow. A token is computed stage by stage, so one number says how far it has come
    and one hidden state is enough to go on from there. Entries of positions that are no prompt's
    are unspecified.

    Attributes:
      prefix: [] int32, how many tokens at the beginning of each prompt were read before: all layers
        have them, they always take part, and shares are of those after them.
      hidden: [B, P, D], the paper's aux cache: what the last layer that computed the token gave.
        Where that is the one before the first cut, what this layer takes: of tokens that go no
        further it computes keys and values, and no more.
      done: [B, P] int8, stages that computed it.
      chosen: one [B, P] bool per stage, the tokens that take part in it; all in the first. True at
        positions that are no prompt's.
      slots: one [B, P] int32 per stage but the first, where the token is in the caches of its
        layers; C where they lack it. In the first stage it is the position.
      order: one [B, C] int32 per stage but the first, the position of the token in each slot of its
        layers, or UNSEEN if it takes no part. Entries beyond the rows of a layer are unspecified.
      computed: [stages, B, P] int8, how often a stage computed the token: at most once.
      last: [B, W, D], what the last W prompt tokens have come to during the prefill.
    """

    prefix: Int[Array, ""]
    hidden: Float[Array, "B P D"]
    done: Int[Array, "B P"]
    chosen: tuple[Bool[Array, "B P"], ...]
    slots: tuple[Int[Array, "B P"], ...]
    order: tuple[Int[Array, "B C"], ...]
    computed: Int[Array, "stages B P"]
    last: Float[Array, "B window D"]

    @property
    def capacity(self) -> int:
        """P."""
        return self.hidden.shape[1]

    def after_prefix(self, length) -> PromptState:
        """Where nothing is computed yet but the first `length` (traced) tokens, in all layers."""
        position = jnp.arange(self.capacity, dtype=jnp.int32)
        read = position < length
        slot = jnp.arange(self.order[0].shape[1], dtype=jnp.int32)
        stages = jnp.int8(len(self.chosen))
        return self.replace(
            prefix=jnp.asarray(length, jnp.int32),
            done=jnp.where(read, stages, self.done),
            slots=tuple(jnp.where(read, position, slots) for slots in self.slots),
            order=tuple(jnp.where(slot < length, slot, order) for order in self.order),
        )


class LazyPlan(NamedTuple):
    """A lazy prefill of a model: the cuts are named, so the stages are known."""

    lazy: LazySettings
    model: ModelConfig

    @property
    def stages(self) -> tuple[range, ...]:
        cuts = [layer for layer, _ in self.lazy.cuts]
        return tuple(map(range, [0, *cuts], [*cuts, self.model.num_layers]))

    @property
    def last_stage(self) -> int:
        return len(self.lazy.cuts)

    @property
    def halved(self) -> range:
        """The layer before the first cut, if there is one: tokens get their keys and values there
        in the first stage, and the rest with the second one, which many never see. All tokens of a
        prompt are in its cache, so what a token sees there is the same at any time."""
        return self.stages[0][-1:]


def init_prompt(plan: LazyPlan, prompt_length, prompt_capacity: int, capacity: int) -> PromptState:
    """A PromptState with nothing computed yet and every token to take part.

    The prompt's last token comes with the first step of decoding, so nothing here computes it.
    """
    stages, D, dtype = len(plan.stages), plan.model.embed_dim, plan.model.dtype
    batch, P = prompt_length.shape[0], prompt_capacity
    is_last = jnp.arange(P) == prompt_length[:, None] - 1
    return PromptState(
        prefix=jnp.zeros((), jnp.int32),
        hidden=jnp.zeros((batch, P, D), dtype),
        done=jnp.where(is_last, stages, 0).astype(jnp.int8),
        chosen=tuple(jnp.ones((batch, P), bool) for _ in range(stages)),
        slots=tuple(jnp.full((batch, P), capacity, jnp.int32) for _ in range(stages - 1)),
        order=tuple(jnp.zeros((batch, capacity), jnp.int32) for _ in range(stages - 1)),
        computed=jnp.zeros((stages, batch, P), jnp.int8),
        last=jnp.zeros((batch, plan.lazy.last_tokens, D), dtype),
    )
