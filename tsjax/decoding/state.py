# SPDX-License-Identifier: Apache-2.0
"""The pytrees of a run: DecodeState and its parts.

Knows what each buffer holds and what its unused part means. Does not know how a step changes them.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.decoding.sampling import SamplingValues
from tsjax.methods.history import NgramTable
from tsjax.model.cache import DraftCache, KVCache

RUNNING, EOS, LENGTH, STOPPED = 0, 1, 2, 3  # values of DecodeState.finish


class StepStats(flax.struct.PyTreeNode):
    """Counters of a run, per batch row. A step counts for a row that was still running."""

    steps: jax.Array  # [B] int32
    drafted: jax.Array  # [B] int32, nodes of all trees, the roots not counted
    accepted: jax.Array  # [B, J + 1] int32, steps that emitted 0, 1, ... J drafted tokens
    by_source: jax.Array  # [B, len(SOURCES)] int32, emitted drafted tokens that a source drafted


class DraftState(flax.struct.PyTreeNode):
    """What a method remembers for its drafts; None where it does not need it.

    Attributes:
      cache: for passes of the model on few tokens.
      hidden: [B, D], last layer's output for the last committed token; zero before there is one.
      ngrams: of prompt and output.
    """

    cache: DraftCache | None = None
    hidden: jax.Array | None = None
    ngrams: NgramTable | None = None


HIDDEN = 2**31 - 1  # behind every position


class PromptState(flax.struct.PyTreeNode):
    """What a lazy prefill remembers of each prompt token, P of them, by position.

    The layers before the first cut are stage 0, those between two cuts or behind the last are the
    stages that follow. A token is computed stage by stage, so one number says how far it has come
    and one hidden state is enough to go on from there. Entries of positions that are no prompt's
    are unspecified.

    Attributes:
      hidden: [B, P, D], what the last layer that computed the token gave: the paper's aux cache.
      done: [B, P] int8, stages that computed it.
      chosen: one [B, P] bool per stage, the tokens that take part in it; all in the first. True at
        positions that are no prompt's.
      slots: one [B, P] int32 per stage but the first, where the token is in the caches of its
        layers; C where they lack it. In the first stage it is the position.
      order: one [B, C] int32 per stage but the first, the position of the token in each slot of its
        layers, or HIDDEN if it takes no part. Entries beyond the rows of a layer are unspecified.
      computed: [stages, B, P] int8, how often a stage computed the token: at most once.
      last: [B, W, D], what the last W prompt tokens have come to during the prefill.
    """

    hidden: jax.Array
    done: jax.Array
    chosen: tuple[jax.Array, ...]
    slots: tuple[jax.Array, ...]
    order: tuple[jax.Array, ...]
    computed: jax.Array
    last: jax.Array

    @property
    def capacity(self) -> int:
        """P."""
        return self.hidden.shape[1]


class DecodeState(flax.struct.PyTreeNode):
    """Everything a step reads and writes. All buffers are preallocated; `length` says what counts.

    Attributes:
      kv: the cache of all tokens but the last known one: kv.length == length - 1.
      tokens: [B, C] int32, prompt and output. Entries at `length` and beyond are unspecified.
      sources: [B, C] uint8, who drafted each token: bit i stands for tree.SOURCES[i]. 0 for the
        prompt and for tokens that no draft had. Entries at `length` and beyond are unspecified.
      prompt_length: [B] int32.
      max_length: [B] int32, the length at which the row is full; at most C.
      last_seen: [B, V] int32, the last position below `length` that holds the token, or
        NEVER_SEEN.
      row_key: [B] PRNG keys; the noise of a position follows from row key and position alone.
      finish: [B] int8, RUNNING, EOS, LENGTH or STOPPED (by the host). A finished row no longer
        changes.
      sampling: the values a user chose, as arrays, so that they never recompile.
      stats: counters.
      draft: what the method remembers for its drafts.
      prompt: what a lazy prefill remembers; None for a full one.
    """

    kv: KVCache
    tokens: jax.Array
    sources: jax.Array
    prompt_length: jax.Array
    max_length: jax.Array
    last_seen: jax.Array
    row_key: jax.Array
    finish: jax.Array
    sampling: SamplingValues
    stats: StepStats
    draft: DraftState
    prompt: PromptState | None = None

    @property
    def length(self) -> jax.Array:
        """[B] int32, known tokens. The last of them, the root, is not in the cache yet."""
        return self.kv.length + 1

    @property
    def root(self) -> jax.Array:
        """[B] int32, the last known token of each row."""
        return jnp.take_along_axis(self.tokens, self.kv.length[:, None], axis=1)[:, 0]

    @property
    def running(self) -> jax.Array:
        return self.finish == RUNNING
