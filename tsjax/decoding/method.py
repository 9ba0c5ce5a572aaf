# SPDX-License-Identifier: Apache-2.0
"""What a method of decoding is, and plain decoding, which is one.

Knows what a step wants from a method. Does not know how drafts are found: that is in each method's
own file. Every method returns the tokens of `Autoregressive`; they differ in how many a step
finds. In bfloat16 and float16 drafts may part from it at a near-tie, as wider passes round
otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Float
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.decoding.tree import SOURCES, DraftTree, merge_paths
from tsjax.model.params import Params

Memory = Any  # a pytree of arrays: what a method remembers from step to step
Noise = Float[Array, "B levels V"]  # of the positions from state.length on


class Sizes(NamedTuple):
    """The static sizes of a method's trees.

    Attributes:
      width: T, the root and every node that a step can draft.
      depth: J, drafted tokens on the longest path. A step emits at most one more.
      levels: depths for which `draft` gets the noise, to rank its tokens with it.
      narrower: widths of narrower passes to compile beside the one of `width` rows; a step takes
        the narrowest that holds its tree.
      positions: depths that count in `RunStats.alpha`; 0 for all.
      with_attended: whether `learn` reads `verdict.rows.attended`.
      with_taps: whether it reads `verdict.rows.taps`, what the model's drafter reads.
    """

    width: int = 1
    depth: int = 0
    levels: int = 0
    narrower: tuple[int, ...] = ()
    positions: int = 0
    with_attended: bool = False
    with_taps: bool = False

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """Rows of the passes that a step can choose from, ascending; the last is `width`."""
        return (*sorted({rows for rows in self.narrower if rows < self.width}), self.width)


class Tried(NamedTuple):
    """A method that drafted before: its seconds per token, at which mean length of the rows, and
    the tokens that a step of it found."""

    method: Method
    seconds: float
    context: int
    tokens_per_step: float


class Measured(NamedTuple):
    """What the host knows when a method chooses what drafts from here on.

    Attributes:
      model: its config.
      platform, device_kind: of the device, as jax names them.
      context: mean length of the rows, prompt included: during the run, or now once it has begun.
      batch: rows.
      new_tokens: the most that a row may get; None where that is not known.
      current: the method that drafts; None before the first step.
      steps, tokens, seconds: how many steps it took lately, the tokens they found, and how long
        they took, each summed over the rows. What a method's first chunk of steps did is left out.
      since: seconds, summed over the rows, since this method was taken.
      tried: what is known of others that drafted before in this run.
      repeats: how many of the last tokens stood together before, the mean of the rows.
      first: the method that the run was to begin with and waits for; None once it has begun.
      moving: seconds that moving to it takes.
      foretold: the share of the last tokens that what stands in the text before has foretold.
      tokens_left: that a row is expected to get: as many as it has, 128 at least, at most what it
        may still get.
      compiling: seconds that the programs of a method took to compile in this run, on average.
      costs: what the parts of a step take here, a tsjax.costs.Costs; None for methods that do not
        want them.
      plain: plain decoding as an earlier run knew it; None where none did.
      int8_fits: whether there is memory for a copy of the model in int8.
      corpus: whether there are earlier texts to draft from.
      draft_model: the config of the second model of the call, None without one.
    """

    model: ModelConfig
    platform: str
    device_kind: str
    context: int
    batch: int
    new_tokens: int | None = None
    current: Method | None = None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    since: float = 0.0
    tried: tuple[Tried, ...] = ()
    repeats: int = 0
    first: Method | None = None
    moving: float = 0.0
    foretold: float = 0.0
    tokens_left: float = math.inf
    compiling: float = 0.0
    costs: Any = None
    plain: Tried | None = None
    int8_fits: bool = True
    corpus: bool = False
    draft_model: ModelConfig | None = None


class DraftPasses(NamedTuple):
    """Passes of a model that every step runs to draft: how many, on how many slots of a cache."""

    number: float
    slots: float
    model: ModelConfig
    in_int8: bool = False


class Promise(NamedTuple):
    """What a step is expected to find and to take, on average.

    Attributes:
      tokens: that it emits.
      seconds: that it takes by a table of costs.
      width: rows of the pass that judges its drafts.
      passes: of the model, to draft.
      positions: how many tokens deep models draft; 0 where drafts come from the text alone.
      drafting: the passes that every step runs; None where a step may leave them out.
    """

    tokens: float
    seconds: float
    width: int = 1
    passes: float = 0
    positions: int = 0
    drafting: tuple[DraftPasses, ...] | None = ()

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


class Method:
    """Drafts the tree of each step. A frozen dataclass whose fields are its settings.

    A step calls `draft`, judges the tree and then calls `learn`. Nothing here can change the tokens
    that are returned. Methods are constants of the compiled step: what changes from step to step is
    in their memory.
    """

    sources: ClassVar[tuple[str, ...]] = ("drafts",)  # what a drafted token can come from
    reads_corpus: ClassVar[bool] = False  # whether it can draft from `params.corpus`
    takes_draft_model: ClassVar[bool] = False  # ... with `params.draft_model`, a second model
    chooses: ClassVar[bool] = False  # whether others draft in its place: it has no sizes then

    @property
    def wants_costs(self) -> bool:
        """Whether `next` wants `Measured.costs`. To measure them takes seconds, once per model."""
        return False

    @property
    def wants_int8(self) -> bool:
        """Whether `draft` wants `params.drafts`, the model in int8."""
        return False

    @property
    def drafts_from_text_alone(self) -> bool:
        """Whether it drafts, and no pass of a model does."""
        return False

    def promise(self, model: ModelConfig, costs: Any, context: float) -> Promise | None:
        """What a step finds and takes at `context` tokens, by `costs`, a tsjax.costs.Costs; None
        where that is not known."""
        return None

    def sizes(self, model: ModelConfig) -> Sizes:
        """Static sizes; ValueError for a model that lacks what the method needs."""
        return Sizes()

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> Memory:
        """The memory before anything is known. On a mesh, arrays that are not placed go to every
        device."""
        return ()

    def in_steps(self) -> Method:
        """As its programs are compiled: some settings are arrays of its memory (`priced`)."""
        return self

    def priced(self, model: ModelConfig, memory: Memory) -> Memory:
        """The memory that `in_steps().init` gave, with the settings that it left out."""
        return memory

    def read(self, model: ModelConfig, params: Params, memory: Memory, state: DecodeState):
        """The memory with all known tokens, of which it may know some.

        Comes before each chunk of steps, so it has to cost little where nothing is new.
        """
        return memory

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[Memory, DraftTree]:
        """The memory, and the tree of one step."""
        raise NotImplementedError

    def learn(
        self,
        model: ModelConfig,
        params: Params,
        memory: Memory,
        state: DecodeState,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> Memory:
        """The memory after a step, whose tokens `state` has already: state.emitted of each row."""
        return memory

    def next(self, measured: Measured) -> Method:
        """On the host, before a run and between chunks of steps: the method that drafts next.

        One of the same sources, or plain decoding, whose trees are no deeper than those of the
        first. Its memory begins anew, reads what is known and is `taught`.
        """
        return self

    def lesson(self, memory: Memory) -> Any:
        """The part of the memory that another method can reuse; None for nothing."""
        return None

    def taught(self, memory: Memory, lesson: Any) -> Memory:
        """The memory with the last lesson of a method that drafted before in this run."""
        return memory


@dataclasses.dataclass(frozen=True)
class Autoregressive(Method):
    """Plain decoding, one token per step: the definition every other method must reproduce."""

    sources: ClassVar[tuple[str, ...]] = SOURCES

    def promise(self, model: ModelConfig, costs: Any, context: float) -> Promise:
        return Promise(1.0, costs.plain(context))

    def draft(self, model, params, state, noise):
        batch = state.root.shape[0]
        nothing = jnp.zeros((batch, 0, 0), jnp.int32), jnp.zeros((batch, 0), jnp.int32)
        return (), merge_paths(state.root, *nothing, width=1, num_sources=len(self.sources))


PLAINLY = Autoregressive()
