# SPDX-License-Identifier: Apache-2.0
"""The pytrees of a run and of a step: DecodeState, Verdict, Acceptance.

Knows what each buffer holds and what its unused part means. Does not know how a step changes them.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp

from tsjax.base.typing import Array, Bool, Int, Key, UInt
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.processors import KnownText
from tsjax.decoding.sampling import SamplingValues
from tsjax.model.cache import KVCache
from tsjax.model.passes import Rows

RUNNING, EOS, LENGTH, STOPPED, BROKEN = 0, 1, 2, 3, 4  # values of DecodeState.finish


class StepStats(flax.struct.PyTreeNode):
    """Counters of a run, per batch row. A step counts for a row that was still running."""

    steps: Int[Array, "B"]
    drafted: Int[Array, "B"]  # nodes of all trees, the roots not counted
    accepted: Int[Array, "B J+1"]  # steps that emitted 0, 1, ... J drafted tokens
    by_source: Int[Array, "B sources"]  # emitted drafted tokens that a source drafted


class DecodeState(flax.struct.PyTreeNode):
    """Everything a step reads and writes. All buffers are preallocated; `length` says what counts.

    Attributes:
      kv: the cache of all tokens but the last known one: kv.length == length - 1.
      tokens: [B, C] int32, prompt and output. Entries at `length` and beyond are unspecified.
      sources: [B, C] uint8, who drafted each token: bit i stands for the method's sources[i]. 0
        for the prompt and for tokens that no draft had. Entries at `length` and beyond are
        unspecified.
      prompt_length: [B] int32.
      max_length: [B] int32, the length at which the row is full; at most C.
      last_seen: [B, V] int32, the last position below `length` that holds the token, or
        NEVER_SEEN; None where nothing is penalised.
      counts: [B, V] int32, how often each token was generated; None where nothing asks.
      logprobs: [B, C], of each generated token; None where nobody asks. Entries at `length` and
        beyond, and those of the prompt, are unspecified.
      row_key: [B] PRNG keys; the noise of a position follows from row key and position alone.
      finish: [B] int8, RUNNING, EOS, LENGTH, STOPPED (by the host) or BROKEN (the next token's
        scores are no numbers). A finished row no longer changes.
      sampling: the values a user chose, as arrays, so that they never recompile; which of them are
        on is static.
      stats: counters.
      emitted: [B] int32, tokens that the last step emitted; 0 for a row that had finished.
      room: [B] int32, the most tokens that the next step may emit, for those who wrap a step.
      memory: the method's, see `Method.init`.
      prompt: what a lazy prefill remembers; None for a full one.
    """

    kv: KVCache
    tokens: Int[Array, "B C"]
    sources: UInt[Array, "B C"]
    prompt_length: Int[Array, "B"]
    max_length: Int[Array, "B"]
    last_seen: Int[Array, "B V"] | None
    counts: Int[Array, "B V"] | None
    logprobs: LogProbs | None
    row_key: Key[Array, "B"]
    finish: Int[Array, "B"]
    sampling: SamplingValues
    stats: StepStats
    emitted: Int[Array, "B"]
    room: Int[Array, "B"]
    memory: Any = ()
    prompt: Any = None

    @property
    def length(self) -> Int[Array, "B"]:
        """[B] int32, known tokens. The last of them, the root, is not in the cache yet."""
        return self.kv.length + 1

    @property
    def root(self) -> Int[Array, "B"]:
        """[B] int32, the last known token of each row."""
        return jnp.take_along_axis(self.tokens, self.kv.length[:, None], axis=1)[:, 0]

    @property
    def text(self) -> KnownText:
        """What the penalties read."""
        return KnownText(self.tokens, self.length, self.prompt_length, self.last_seen, self.counts)

    @property
    def running(self) -> Bool[Array, "B"]:
        return self.finish == RUNNING


class Verdict(flax.struct.PyTreeNode):
    """Attributes:
    target: [B, T] int32, the token that follows each node, from its logits and its noise.
    rows: what the pass yields for all nodes.
    logprobs: [B, T], of each node's target; None where nobody asks.
    broken: [B, T] bool, where the best score is NaN or infinite and so no token follows; None
      where targets are given.
    """

    target: Int[Array, "B T"]
    rows: Rows
    logprobs: LogProbs | None = None
    broken: Bool[Array, "B T"] | None = None


class Acceptance(flax.struct.PyTreeNode):
    """Attributes:
    path: [B, J + 1] int32, the accepted nodes, the root first; beyond `count` unspecified.
    count: [B] int32, accepted nodes after the root.
    """

    path: Int[Array, "B J+1"]
    count: Int[Array, "B"]
