# SPDX-License-Identifier: Apache-2.0
"""Measures what the parts of a step take on the device where a model lies.

Knows the parts, small programs that run each of them, and a clock. Does not know what is chosen by
the seconds. A program has a few layers, which compile in a fraction of the time of the whole model,
and is called with the weights of one after the other: what it reads has to come from memory, as in
a step, and not from a processor's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from tsjax.base.generation_config import GenerationConfig
from tsjax.base.model_config import OWN_VOCABULARY, ModelConfig
from tsjax.base.typing import accumulation_dtype
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Autoregressive
from tsjax.decoding.noise import position_noise, row_keys
from tsjax.decoding.programs import compiler_options
from tsjax.decoding.sampling import best, nucleus, sampling_values
from tsjax.decoding.start import init_state
from tsjax.decoding.state import DecodeState
from tsjax.host import processes
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.methods.devices import device_of, estimated
from tsjax.methods.likely_sources import CHILDREN
from tsjax.methods.one_layer import LayerMemory, can_adapt, draft_chain, init_layer_memory
from tsjax.methods.partial_cache import DraftCache, init_draft_cache, refresh_draft_cache
from tsjax.model.cache import KVCache, cache_bytes, init_cache
from tsjax.model.int8 import as_int8
from tsjax.model.params import Params
from tsjax.model.passes import run_layers
from tsjax.model.sharding import everywhere, mesh_of
from tsjax.model.transformer import ModelWeights, final_norm, int8_weights, unembed

# Rows of the passes that are measured. Others lie on straight lines between and beyond them.
ROWS_OF_CPU, ROWS_OF_GPU = (1, 4, 8, 16), (1, 8, 16, 32, 64)
FEW = 8  # rows that say what one more row's token takes
DEEPEST = 8  # positions whose noise is made in a step
SLOTS, CHOICE_LAYERS = 512, 8  # of the partial cache; as many layers are chosen at once
NEAR = 512  # the shorter of two contexts; the longer one is the run's, of these lengths
SMALLEST_FAR, FAR_STEP, LARGEST_FAR = 1024, 4, 2**18
# Weights of the layers that stand for all, and bytes of their caches: more than processors keep.
MOST_WEIGHTS, CACHE_BYTES = 2**27, 2**28
# A program has so many layers as take longer than to call it: bytes of theirs, and at most so many.
PROGRAM_BYTES, PROGRAM_BYTES_OF_GPU, PROGRAM_LAYERS = 2**22, 2**30, 4
# A small part is repeated in one call for that long; each part is called so often or until its
# budget is spent; all parts in turn, in so many rounds.
CALL_SECONDS, MOST_REPEATS, MOST_CALLS, BUDGET = 0.01, 64, 3, 0.01
REPETITIONS = 5
USUAL_TOP_P = 0.95
# Of the one-layer drafter: drafts in a row, and the tokens of a step that it reads before them.
CHAIN, READ = 4, 2
LEAST_OF_WEIGHTS = 0.001  # of the shorter context's seconds: noise may not say that there are none

Clock = Callable[[], float]


def measure(
    params: Params, cfg: ModelConfig, batch: int, longest: int, clock: Clock = time.perf_counter
) -> Costs:
    """The table of seconds for runs of `batch` rows of up to `longest` tokens."""
    going = pieces(params, cfg, batch, longest, clock, at_once=True)
    while True:
        try:
            next(going)
        except StopIteration as end:
            return end.value


def pieces(
    params: Params, cfg: ModelConfig, batch: int, longest: int, clock: Clock = time.perf_counter,
    *, at_once: bool = False,
) -> Generator[None, None, Costs]:  # fmt: skip
    """As `measure`, in pieces of a fraction of a second: a run may go on after each. What is
    measured `at_once` is compiled side by side."""
    parts = Parts(params, cfg, batch, longest)
    yield
    passes = {rows: parts.passes(rows) for rows in parts.rows}
    in_int8 = [] if cfg.is_narrow else parts.passes(1, in_int8=True)  # it drafts with itself
    choice = parts.choice()
    tokens, few_tokens = parts.tokens(1), parts.tokens(FEW)
    int8_tokens = [parts.tokens(1, in_int8=True)] if in_int8 and cfg.num_draft_heads else []
    chains = [parts.chain(passes[1][0].part)] if cfg.drafter is not None else []
    at_both = [share.part for share in itertools.chain(*passes.values(), in_int8, [choice])]
    at_one = [share.part for share in (tokens, few_tokens, *int8_tokens, *chains)]
    # The programs that others end with first, so that these find them.
    first = [share.part for share in (*in_int8[:1], choice, tokens, few_tokens)]
    rest = [part for part in dict.fromkeys([*at_both, *at_one]) if part not in first]
    for some in (first, rest) if at_once else [[part] for part in (*first, *rest)]:
        compile_all(some)
        yield
    near, far = parts.contexts
    jobs = dict.fromkeys(
        [*itertools.product(at_both, (near, far)), *((part, near) for part in at_one)]
    )
    seconds: dict[tuple[Clocked, int], float] = {}
    # What disturbs a round need not disturb the next.
    for part, context in [*jobs] * REPETITIONS:
        found = part.seconds(context, clock)
        seconds[part, context] = min(found, seconds.get((part, context), found))
        yield

    def at(context: int, shares: Sequence[Share]) -> float:
        return sum(times * seconds[part, context] for part, times in shares)

    def line(*shares: Share) -> Line:
        first, last = at(near, shares), at(far, shares)
        slope = max((last - first) / (far - near), 0.0)
        return Line(max(first - slope * near, LEAST_OF_WEIGHTS * first), slope)

    one_row = at(near, [tokens])
    per_row = max(at(near, [few_tokens]) - one_row, 0.0) / (FEW - 1)
    lines: list[tuple[int, Line]] = []
    for rows, shares in passes.items():
        layers = line(*shares)
        new = Line(layers.seconds + (rows - 1) * per_row, layers.per_token)
        if lines:  # what was disturbed may seem to take less than a narrower pass
            new = Line(*map(max, lines[-1][1], new))
            # Or more than its rows one by one.
            new = Line(*map(min, new, (rows * x for x in lines[0][1])))
        lines.append((rows, new))

    def candidates(of_state: float) -> float:
        """Of all heads, where those of one state take so long."""
        heads = cfg.num_draft_heads
        if cfg.head_kind == OWN_VOCABULARY:
            return heads * one_row
        return of_state + heads * per_row if heads else 0.0

    formula = estimated(cfg, device_of(*device_in(params)), batch)
    return Costs(
        passes=tuple(lines),
        heads=candidates(one_row),
        choice=line(choice),
        # Microseconds, which a formula says as well.
        suffix=formula.suffix,
        ngrams=formula.ngrams,
        overhead=formula.overhead,
        origin="measured",
        int8=Int8Costs(one_row=line(*in_int8), heads=candidates(at(near, int8_tokens)))
        if in_int8
        else None,
        any_rows=formula.any_rows,
        one_layer=at(near, chains) / CHAIN,
    )


class Share(NamedTuple):
    """A part, and how many times its seconds count."""

    part: Clocked
    times: float = 1.0


class Clocked:
    """What is measured: a program, or several in turn."""

    def compile(self) -> None:
        """Before it is measured."""
        raise NotImplementedError

    def seconds(self, context: int, clock: Clock) -> float:
        """What a call takes, by a few of them."""
        raise NotImplementedError


class InTurn(Clocked):
    """Programs that are called one after the other, each with inputs of its own, and each with what
    the last one gave."""

    def __init__(self, calls: Callable[[int], list[tuple[Callable, tuple]]], begin: Any):
        self.calls, self._begin = calls, begin  # at a context

    def compile(self) -> None:
        self.run(self.calls(0))

    def run(self, calls: list[tuple[Callable, tuple]]) -> Any:
        carry = self._begin
        for program, inputs in calls:
            carry = program(carry, *inputs)
        return jax.block_until_ready(carry)

    def seconds(self, context: int, clock: Clock) -> float:
        calls, times = self.calls(context), []
        while len(times) < MOST_CALLS and sum(times) < BUDGET:
            begun = clock()
            self.run(calls)
            # By the first one's clock, so that several processes make the same calls.
            times.append(processes.first_says(clock() - begun))
        # What processors keep of it differs from call to call, in a run as well.
        return statistics.median(times)


class Timed(Clocked):
    """A small part of a step, which a program repeats; or, where it reads what would stay in a
    processor's cache, does once after `before`.

    `step(carry, *inputs)` gives the next carry; `inputs` are those at a context.
    """

    def __init__(
        self, jit: Callable, step: Callable, carry: Any, inputs: Callable[[int], tuple],
        before: Clocked | None = None,
    ):  # fmt: skip
        def repeat(count, carry, inputs):
            def body(index, carry):
                # Else XLA would compute before the loop what is the same in each turn.
                _, held = lax.optimization_barrier((index, inputs))
                return step(carry, *held)

            return lax.fori_loop(jnp.int32(0), count, body, carry)

        places = jax.tree.map(lambda x: x.sharding, carry)
        self._program = jit(repeat, donate_argnums=(1,), out_shardings=places)
        self._carry, self._inputs, self._before = carry, inputs, before

    def compile(self) -> None:
        lowered = self._program.lower(np.int32(1), self._carry, self._inputs(0))
        self._program = lowered.compile()

    def seconds(self, context: int, clock: Clock) -> float:
        inputs = self._inputs(context)

        def call(count: int) -> float:
            begun = clock()
            self._carry = self._program(np.int32(count), self._carry, inputs)
            jax.block_until_ready(self._carry)
            # By the first one's clock, so that several processes make the same calls.
            return processes.first_says((clock() - begun) / count)

        call(1)
        times: list[float] = []
        if self._before is not None:
            while len(times) < MOST_CALLS:
                self._before.seconds(context, clock)
                times.append(call(1))
            return statistics.median(times)
        count = min(max(int(CALL_SECONDS / max(call(1), 1e-9)), 1), MOST_REPEATS)
        while len(times) < MOST_CALLS and count * sum(times) < BUDGET:
            times.append(call(count))
        return min(times)


def context_bucket(longest: int) -> int:
    """The length that stands for runs of so many tokens: few, so that few tables are measured."""
    far = SMALLEST_FAR
    while far < min(longest, LARGEST_FAR):
        far *= FAR_STEP
    return far


def device_in(params: Params) -> tuple[str, str]:
    """Platform and kind of the device where weights lie, or would."""
    leaf = jax.tree.leaves(params)[0]
    placed = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    device = next(iter(placed.device_set if placed is not None else jax.devices()))
    return device.platform, device.device_kind


def compile_all(parts: Iterable[Clocked]) -> None:
    """Side by side, as XLA leaves the other threads alone while it compiles. Several processes run
    what they compile together, so they do it in one order."""
    with ThreadPoolExecutor(1 if processes.are_several() else None) as pool:
        list(pool.map(lambda part: part.compile(), parts))


class Parts:
    """The parts of a step: a model's own weights, on buffers of its shapes that hold zeros."""

    def __init__(self, params: Params, cfg: ModelConfig, batch: int, longest: int):
        self._params, self._with_drafter = params, cfg
        cfg = dataclasses.replace(cfg, drafter=None)  # it reads more layers than some parts have
        self._cfg, self._batch, self._mesh = cfg, batch, mesh_of(params)
        self._weights = params.model
        platform, _ = device_in(params)
        self._on_cpu = on_cpu = platform == "cpu"
        self.rows = ROWS_OF_CPU if on_cpu else ROWS_OF_GPU
        options = compiler_options(platform, cfg.dtype)
        self._jit = functools.partial(jax.jit, compiler_options=options)

        leaves = jax.tree.leaves(params.model.layers[0])
        weights, nbytes = sum(x.size for x in leaves), sum(x.nbytes for x in leaves)
        program_bytes = PROGRAM_BYTES if on_cpu else PROGRAM_BYTES_OF_GPU
        most = min(PROGRAM_LAYERS, -(-program_bytes // nbytes))
        self._of_program = next(n for n in range(most, 0, -1) if cfg.num_layers % n == 0)
        programs = -(-MOST_WEIGHTS // (weights * self._of_program))
        self.layers = min(programs * self._of_program, cfg.num_layers)
        self._few = dataclasses.replace(cfg, num_layers=self._of_program)

        far = context_bucket(longest)
        while far > SMALLEST_FAR and cache_bytes(self._few, batch, far) > CACHE_BYTES:
            far //= 2
        self.contexts = min(NEAR, far // 2), far
        # Programs have caches of their own, as far as there is room; then those of the first again.
        own = max(CACHE_BYTES // cache_bytes(self._few, batch, far), 1) * self._of_program
        cached = dataclasses.replace(cfg, num_layers=min(own, self.layers))
        self._cache = init_cache(cached, batch, far, self._mesh)

    def _placed(self, tree: Any) -> Any:
        """On every device of a mesh."""
        if self._mesh is None:
            return tree
        return jax.device_put(tree, everywhere(self._mesh))

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return self._placed(jnp.zeros((self._batch, *shape), dtype))

    def _lengths(self, context: int) -> jax.Array:
        return self._zeros((), jnp.int32) + jnp.int32(context)

    @functools.cached_property
    def _int8(self) -> ModelWeights:
        """Rounded when a part begins, beside the compiling of others."""
        few = dataclasses.replace(self._cfg, num_layers=self.layers)
        return int8_weights(self._first, few, as_int8)

    @property
    def _first(self) -> ModelWeights:
        return self._weights.replace(layers=self._weights.layers[: self.layers])

    def passes(self, rows: int, *, in_int8: bool = False) -> list[Share]:
        """What adds up to a pass of N rows: the layers in turn, and the choice of one token.

        In one part, where no layer is left out; then nothing stays in a cache that does not stay
        there in a step.
        """
        end = self._choosing(1, in_int8)
        if self.layers == self._cfg.num_layers:
            return [Share(self._in_turn(rows, in_int8, end))]
        times = self._cfg.num_layers / self.layers
        return [Share(self._in_turn(rows, in_int8), times), Share(end)]

    def _hidden(self, rows: int) -> jax.Array:
        return self._zeros((rows, self._cfg.embed_dim), self._cfg.dtype)

    def _in_turn(self, rows: int, in_int8: bool, end: InTurn | None = None) -> InTurn:
        n = self._of_program
        program = self._jit(functools.partial(_layers, cfg=self._few))

        def calls(context: int):
            weights = self._int8 if in_int8 else self._first
            some = [
                weights.replace(layers=weights.layers[i : i + n], embed=None, unembed=None)
                for i in range(0, self.layers, n)
            ]
            caches = [
                self._cache.replace(
                    k=self._cache.k[i : i + n],
                    v=self._cache.v[i : i + n],
                    length=self._lengths(context),
                )
                for i in range(0, len(self._cache.k), n)
            ]
            turns = zip(some, itertools.cycle(caches), strict=False)
            found: list[tuple[Callable, tuple]] = [(program, inputs) for inputs in turns]
            return found if end is None else [*found, (_first_row, ()), *end.calls(context)]

        hidden = self._hidden(rows)
        return InTurn(calls, (hidden, hidden[:, :1]))

    def tokens(self, rows: int, *, in_int8: bool = False) -> Share:
        """From the last layer's output to the tokens of a pass, with their noise."""
        return Share(self._choosing(rows, in_int8))

    @functools.cache  # noqa: B019, as long as the table is made
    def _choosing(self, rows: int, in_int8: bool) -> InTurn:
        program = self._jit(functools.partial(_choose_tokens, cfg=self._cfg))
        seeds = self._zeros((), jnp.uint32)

        def calls(context: int):
            weights = self._int8 if in_int8 else self._weights
            return [(program, (weights.replace(layers=()), seeds))]

        return InTurn(calls, self._hidden(rows))

    def choice(self) -> Share:
        """The partial cache, chosen anew in all layers."""
        slots, layers = min(SLOTS, self.contexts[0] // 2), min(len(self._cache.k), CHOICE_LAYERS)
        cfg = dataclasses.replace(self._cfg, num_layers=layers)
        draft = init_draft_cache(cfg, self._batch, slots, mesh=self._mesh)
        draft = self._placed(draft.replace(k=(), v=())).replace(k=draft.k, v=draft.v)

        def inputs(context: int):
            k, v = self._cache.k[:layers], self._cache.v[:layers]
            return (self._cache.replace(k=k, v=v, length=self._lengths(context)),)

        part = Timed(self._jit, _choose_anew, draft, inputs)
        return Share(part, self._cfg.num_layers / layers)

    def chain(self, pass_before: Clocked) -> Share:
        """Drafts of the one-layer drafter in a row, with its window full: what it reads before
        them, and what it learns there, included."""
        cfg = self._with_drafter
        memory, state = before_a_chain(cfg, self._batch, self._mesh)
        memory = self._placed(jax.tree.map(jnp.copy, memory))  # to be donated
        step = functools.partial(after_a_chain, cfg=cfg)
        # A GPU's cache holds less than a drafter, and one call would be the host's time.
        before = pass_before if self._on_cpu else None
        weights = self._weights.replace(layers=(), unembed=None)
        # The noise of a step is there: the choice of tokens counts it.
        noise = self._zeros((CHAIN, cfg.vocab_size), accumulation_dtype(cfg.dtype))
        inputs = Params(weights, drafter=self._params.drafter), state, noise
        return Share(Timed(self._jit, step, memory, lambda context: inputs, before))


def before_a_chain(cfg: ModelConfig, batch: int, mesh: Any) -> tuple[LayerMemory, DecodeState]:
    """The one-layer drafter with its window full, and what else it drafts from: nothing that no
    draft reads."""
    lengths = np.full(batch, 2 * READ, np.int32)
    asked = GenerationConfig(do_sample=True, top_p=USUAL_TOP_P)
    state = init_state(
        np.zeros((batch, 2 * READ), np.int32), lengths, max_length=lengths + CHAIN,
        cfg=DecodeConfig(cfg, Autoregressive()), capacity=4 * CHAIN, mesh=mesh,
        sampling=sampling_values(asked, (), cfg.vocab_size, cfg.dtype),
    )  # fmt: skip
    memory = init_layer_memory(cfg, batch, CHAIN, CHAIN + 1, adapt=can_adapt(cfg))
    assert cfg.drafter is not None
    full = jnp.full_like(memory.held, cfg.drafter.window - READ)
    memory = memory.replace(held=full, next=full, fresh=jnp.full_like(full, READ))
    return memory, state.replace(kv=state.kv.replace(k=(), v=()))


def after_a_chain(
    memory: LayerMemory, params: Params, state: DecodeState, noise: jax.Array, *, cfg: ModelConfig
) -> LayerMemory:
    """The memory after a chain of drafts, as it was but for what they wrote."""
    always: Any = lambda depth, ranked: jnp.bool_(True)  # noqa: E731
    after, ranked, _ = draft_chain(cfg, params, state, memory, noise, CHAIN, CHILDREN, always)
    # It reads as much the next time. XLA would leave out what nobody reads: the last draft.
    held, _ = lax.optimization_barrier((memory.held, [one.tokens for one in ranked]))
    return after.replace(held=held, next=held)


def _layers(carry, weights: ModelWeights, cache: KVCache, *, cfg: ModelConfig):
    """All rows, and the first alone: to take it out by itself would be one more program."""
    hidden, _ = carry
    rows = hidden.shape[1]
    positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)
    causal = jnp.tril(jnp.ones((rows, rows), bool))
    layers = range(cfg.num_layers)
    hidden = run_layers(weights, cache, hidden, positions, causal, layers, cfg=cfg).hidden
    return hidden, hidden[:, :1]


def _first_row(carry):
    return carry[1]


def _choose_tokens(hidden, weights: ModelWeights, seeds, *, cfg: ModelConfig):
    B, T = hidden.shape[:2]
    known = jnp.arange(min(T, DEEPEST), dtype=jnp.int32)
    positions = jnp.broadcast_to(known, (B, known.shape[0]))
    keys = row_keys(seeds, seeds)
    noise = position_noise(keys, positions, cfg.vocab_size, accumulation_dtype(cfg.dtype))
    logits = unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg)
    # As of a run that samples; one that does not takes a little less for each row.
    logits = jnp.where(nucleus(logits, USUAL_TOP_P), logits, -jnp.inf)
    return best(logits + noise[:, jnp.arange(T) % known.shape[0]])


def _choose_anew(draft: DraftCache, kv: KVCache) -> DraftCache:
    draft = draft.replace(seen=jnp.zeros_like(draft.seen), length=jnp.zeros_like(draft.length) - 1)
    return refresh_draft_cache(draft, kv, num_sinks=1, max_rows=1)
