# SPDX-License-Identifier: Apache-2.0
"""Measures what the parts of a step take on the device where a model lies.

Knows the parts, small programs that repeat each of them, and a clock. Does not know what is chosen
by the seconds. A few layers stand for all: they compile in a fraction of the time of the whole
model. One alone would not do: what it reads would stay in a processor's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsjax.config import OWN_VOCABULARY, ModelConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Autoregressive
from tsjax.decoding.noise import position_noise, row_keys
from tsjax.decoding.programs import compiler_options
from tsjax.decoding.sampling import best
from tsjax.decoding.start import init_state
from tsjax.decoding.state import DecodeState, Verdict
from tsjax.decoding.step import commit
from tsjax.decoding.verification import accept
from tsjax.host import processes
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.methods.history import NgramTable, enter_few, init_table, longest_suffix, most_frequent
from tsjax.methods.ngram import NGram
from tsjax.methods.partial_cache import DraftCache, init_draft_cache, refresh_draft_cache
from tsjax.model.cache import KVCache, cache_bytes, init_cache
from tsjax.model.int8 import as_int8
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_layers
from tsjax.model.sharding import everywhere, mesh_of
from tsjax.model.transformer import ModelWeights, final_norm, int8_weights, unembed
from tsjax.typing import accumulation_dtype

FEW, MANY = 8, 64  # rows of the passes that are measured beside those of one
DEAR = 2.0  # where a few rows take so many times as long as one, many rows are not measured
DEEPEST = 8  # positions whose noise is made in a step
SLOTS = 512  # of the partial cache
NEAR, FAR, LEAST_FAR = 512, 32_768, 1024  # contexts; the far one is nearer where caches are large
LAYERS = 3  # that stand for all
CACHE_BYTES = 2**28  # of these
# A part is repeated in one call for that long, where it does not take longer by itself, and called
# so often or until its budget is spent; all parts in turn, in so many rounds.
CALL_SECONDS, MOST_REPEATS, MOST_CALLS, BUDGET = 0.02, 64, 3, 0.07
REPETITIONS = 2

Clock = Callable[[], float]


def measure(
    params: Params, cfg: ModelConfig, batch: int, clock: Clock = time.perf_counter
) -> Costs:
    """The table of seconds for runs of `batch` rows."""
    parts = Parts(params, cfg, batch)
    one, few, choice, suffix, ngrams, end = found = (
        parts.layer(1),
        parts.layer(FEW),
        parts.choice(),
        parts.suffix(),
        parts.ngrams(),
        parts.end_step(),
    )
    tokens = {rows: parts.tokens(rows) for rows in (1, FEW)}
    in_int8 = parts.layer(1, in_int8=True), parts.tokens(1, in_int8=True)
    compile_all([*found, *tokens.values(), *in_int8])

    near, far = parts.contexts
    at_both = (one, few, choice, suffix, in_int8[0])
    at_one = (*tokens.values(), in_int8[1], ngrams, end)
    seconds = fastest(
        [*itertools.product(at_both, (near, far)), *((x, near) for x in at_one)], clock
    )

    def line(part: Timed, times: float = 1.0) -> Line:
        least = [times * seconds[part, context] for context in (near, far)]
        slope = max((least[1] - least[0]) / (far - near), 0.0)
        return Line(max(least[0] - slope * near, 0.0), slope)

    chosen = {rows: seconds[part, near] for rows, part in tokens.items()}
    per_row = max(chosen[FEW] - chosen[1], 0.0) / (FEW - 1)
    passes: list[tuple[int, Line]] = []

    def add_pass(rows: int, part: Timed) -> None:
        layers = line(part, cfg.num_layers / parts.layers)
        new = Line(layers.seconds + chosen[1] + (rows - 1) * per_row, layers.per_token)
        if passes:  # what was disturbed may seem to take less than a narrower pass
            new = Line(*map(max, passes[-1][1], new))
            # Or more than its rows one by one.
            new = Line(*map(min, new, (rows * x for x in passes[0][1])))
        passes.append((rows, new))

    add_pass(1, one)
    add_pass(FEW, few)
    layers, drafted = line(in_int8[0], cfg.num_layers / parts.layers), seconds[in_int8[1], near]
    heads = cfg.num_draft_heads

    def of_heads(first: float) -> float:
        """The candidates of all heads, where those of one state take `first`."""
        if cfg.head_kind == OWN_VOCABULARY:
            return heads * chosen[1]
        return first + heads * per_row if heads else 0.0

    if passes[1][1].at(far) < DEAR * passes[0][1].at(far):
        many = parts.layer(MANY)
        compile_all([many])
        seconds |= fastest([(many, near), (many, far)], clock)
        add_pass(MANY, many)
    return Costs(
        passes=tuple(passes),
        heads=of_heads(chosen[1]),
        choice=line(choice, cfg.num_layers),
        suffix=line(suffix),
        ngrams=seconds[ngrams, near],
        overhead=seconds[end, near],
        origin="measured",
        int8=Int8Costs(
            one_row=Line(layers.seconds + drafted, layers.per_token), heads=of_heads(drafted)
        ),
    )


class Timed:
    """A part of a step, which a program repeats.

    `step(carry, *inputs)` gives the next carry; `inputs` are those at a context.
    """

    def __init__(self, jit: Callable, step: Callable, carry: Any, inputs: Callable[[int], tuple]):
        def repeat(count, carry, inputs):
            def body(index, carry):
                # Else XLA would compute before the loop what is the same in each turn.
                _, held = lax.optimization_barrier((index, inputs))
                return step(carry, *held)

            return lax.fori_loop(jnp.int32(0), count, body, carry)

        places = jax.tree.map(lambda x: x.sharding, carry)
        self._program = jit(repeat, donate_argnums=(1,), out_shardings=places)
        self._carry, self._inputs = carry, inputs

    def compile(self) -> None:
        lowered = self._program.lower(np.int32(1), self._carry, self._inputs(0))
        self._program = lowered.compile()

    def seconds(self, context: int, clock: Clock) -> float:
        """The time of the fastest of a few calls."""
        inputs = self._inputs(context)

        def call(count: int) -> float:
            begun = clock()
            self._carry = self._program(np.int32(count), self._carry, inputs)
            jax.block_until_ready(self._carry)
            # By the first one's clock, so that several processes make the same calls.
            return processes.first_says((clock() - begun) / count)

        call(1)
        count = min(max(int(CALL_SECONDS / max(call(1), 1e-9)), 1), MOST_REPEATS)
        times: list[float] = []
        while len(times) < MOST_CALLS and count * sum(times) < BUDGET:
            times.append(call(count))
        return min(times)


def fastest(jobs: Sequence[tuple[Timed, int]], clock: Clock) -> dict[tuple[Timed, int], float]:
    """The seconds of each part at its context. What disturbs a round need not disturb the next."""
    rounds = [[part.seconds(at, clock) for part, at in jobs] for _ in range(REPETITIONS)]
    return dict(zip(jobs, map(min, zip(*rounds, strict=True)), strict=True))


def compile_all(parts: Iterable[Timed]) -> None:
    """Side by side, as XLA leaves the other threads alone while it compiles."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda part: part.compile(), parts))


class Parts:
    """The parts of a step, on buffers of a model's shapes that hold zeros."""

    def __init__(self, params: Params, cfg: ModelConfig, batch: int):
        self._cfg, self._batch, self._mesh = cfg, batch, mesh_of(params)
        self.layers = min(LAYERS, cfg.num_layers)
        self._weights, self._one = params.model, dataclasses.replace(cfg, num_layers=1)
        self._few = dataclasses.replace(cfg, num_layers=self.layers)
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        options = compiler_options(device.platform, cfg.dtype)
        self._jit = functools.partial(jax.jit, compiler_options=options)
        far = FAR
        while far > LEAST_FAR and cache_bytes(self._few, batch, far) > CACHE_BYTES:
            far //= 2
        self.contexts = min(NEAR, far // 2), far
        self._cache = init_cache(self._few, batch, far, self._mesh)
        self._tokens = self._zeros((far,), jnp.int32)

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
        return int8_weights(self._first, self._few, as_int8)

    @property
    def _first(self) -> ModelWeights:
        return self._weights.replace(layers=self._weights.layers[: self.layers])

    def layer(self, rows: int, *, in_int8: bool = False) -> Timed:
        """A pass of N rows through the layers that stand for all."""
        weights = self._int8 if in_int8 else self._first
        hidden = self._zeros((rows, self._cfg.embed_dim), self._cfg.dtype)

        def inputs(context: int):
            return weights, self._cache.replace(length=self._lengths(context))

        return Timed(self._jit, functools.partial(_layer, cfg=self._few), hidden, inputs)

    def tokens(self, rows: int, *, in_int8: bool = False) -> Timed:
        """From the last layer's output to the tokens of a pass, with their noise."""
        weights = self._int8 if in_int8 else self._weights
        hidden = self._zeros((rows, self._cfg.embed_dim), self._cfg.dtype)
        seeds = self._zeros((), jnp.uint32)
        inputs = weights, hidden, self._jit(row_keys)(seeds, seeds)
        step = functools.partial(_choose_tokens, cfg=self._cfg)
        return Timed(self._jit, step, self._zeros((rows,), jnp.int32), lambda context: inputs)

    def choice(self) -> Timed:
        """The partial cache of one layer, chosen anew."""
        slots = min(SLOTS, self.contexts[0] // 2)
        draft = init_draft_cache(self._one, self._batch, slots, mesh=self._mesh)
        draft = self._placed(draft.replace(k=(), v=())).replace(k=draft.k, v=draft.v)
        whole = self._cache.replace(k=self._cache.k[:1], v=self._cache.v[:1])

        def inputs(context: int):
            return (whole.replace(length=self._lengths(context)),)

        return Timed(self._jit, _choose_anew, draft, inputs)

    def _text(self, context: int) -> tuple[jax.Array, jax.Array]:
        return self._tokens, self._lengths(context)

    def suffix(self) -> Timed:
        return Timed(self._jit, _find_suffix, self._zeros((), jnp.int32), self._text)

    def ngrams(self) -> Timed:
        method = NGram()
        table = self._placed(init_table(self._batch, self._cfg.vocab_size, method.ngram_slots))
        found = self._zeros((method.num_ngrams, method.ngram_depth), jnp.int32)
        return Timed(self._jit, _find_ngrams, (table, found), self._text)

    def end_step(self) -> Timed:
        """What follows the pass of a plain step."""
        cfg = DecodeConfig(model=self._one)

        def begin():
            tokens = jnp.zeros((self._batch, 8), jnp.int32)
            lengths = jnp.full((2, self._batch), 8, jnp.int32)
            sizes: Any = dict(capacity=128, max_length=10 * lengths[1])
            return init_state(tokens, lengths[0], cfg=cfg, mesh=self._mesh, **sizes)

        state = self._jit(begin)()
        step = functools.partial(_end_step, cfg=self._one)
        return Timed(self._jit, step, state, lambda context: ())


def _layer(hidden, weights: ModelWeights, cache: KVCache, *, cfg: ModelConfig):
    rows = hidden.shape[1]
    positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)
    causal = jnp.tril(jnp.ones((rows, rows), bool))
    layers = range(cfg.num_layers)
    return run_layers(weights, cache, hidden, positions, causal, layers, cfg=cfg).hidden


def _choose_tokens(tokens, weights: ModelWeights, hidden, keys, *, cfg: ModelConfig):
    B, T = tokens.shape
    known = jnp.arange(min(T, DEEPEST), dtype=jnp.int32)
    positions = jnp.broadcast_to(known, (B, known.shape[0]))
    noise = position_noise(keys, positions, cfg.vocab_size, accumulation_dtype(cfg.dtype))
    logits = unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg)
    return best(logits + noise[:, jnp.arange(T) % known.shape[0]])


def _choose_anew(draft: DraftCache, kv: KVCache) -> DraftCache:
    draft = draft.replace(seen=jnp.zeros_like(draft.seen), length=jnp.zeros_like(draft.length) - 1)
    return refresh_draft_cache(draft, kv, num_sinks=1, max_rows=1)


def _find_suffix(_, tokens, length):
    return longest_suffix(tokens, length, NGram().suffix_length)[0][:, 0]


def _find_ngrams(carry: tuple[NgramTable, jax.Array], tokens, length):
    """Enters three n-grams and looks up drafts."""
    table, found = carry
    k, size = found.shape[1], found.shape[2] + 1
    goal = length - size + 1
    table = enter_few(table.replace(entered=goal - 3), tokens, goal, 3)
    return table, most_frequent(table, tokens, tokens[:, 0], k, size)[0]


def _end_step(state: DecodeState, *, cfg: ModelConfig) -> DecodeState:
    nothing: Any = None  # plain decoding drafts without
    _, tree = Autoregressive().draft(cfg, nothing, state, nothing)
    rows = jnp.zeros((*tree.tokens.shape, cfg.num_kv_heads, cfg.head_dim), cfg.dtype)
    verdict = Verdict(target=tree.tokens, rows=Rows(rows, (rows,), (rows,), ()))
    return commit(state, tree, verdict, accept(tree, verdict.target))
