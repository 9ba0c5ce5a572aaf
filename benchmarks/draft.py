# SPDX-License-Identifier: Apache-2.0
"""What drafting costs: by context, and against the step it serves. Interleaved, medians.

* the draft pass on the partial cache with a context of 1,024 and of 65,536 tokens;
* entering and looking up n-grams, the suffix match and the merging of their paths at 65,536 tokens,
  as a share of the step they are part of and of a step of plain decoding.

The caches hold random numbers, which cost what real ones cost.

    python -m benchmarks draft --out benchmarks/results/cpu
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from benchmarks.capacity import story_model
from tsjax.decoding.sampling import step_noise
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.steps import DecodeConfig, DecodeState, decode_step, init_params, init_state


def caught_up(state: DecodeState, cfg: DecodeConfig) -> DecodeState:
    """The state with a memory that knows all tokens, as after a step in the midst of a run."""
    method, memory = cfg.method, cfg.method.read(cfg.model, None, state.memory, state)
    if getattr(memory, "cache", None) is not None:
        cache, most = memory.cache, cfg.sizes.depth + 1
        cache = method.caught_up(cfg.model, None, cache, state.kv, state.tokens, most)
        memory = memory.replace(cache=cache)
    return state.replace(memory=memory)


def calls(short: int, long: int, budget: int) -> dict[str, Callable[[], object]]:
    """What is timed: the draft pass at two contexts, drafts from history, and whole steps."""
    model = story_model(2 * long, num_draft_heads=3)
    params = init_params(model)
    rng = np.random.default_rng(0)
    capacity = long + 4096

    def state_at(length: int, cfg: DecodeConfig):
        # Words follow Zipf's law, as in text.
        tokens = np.minimum(rng.zipf(1.2, (1, length)), model.vocab_size - 1).astype(np.int32)
        state = init_state(tokens, [length], cfg=cfg, capacity=capacity, max_length=[capacity])
        shape = state.kv.k[0].shape
        noise = jnp.asarray(rng.standard_normal(shape, np.float32))
        fill = tuple(noise for _ in range(model.num_layers))
        state = state.replace(kv=state.kv.replace(k=fill, v=fill))
        return jax.jit(functools.partial(caught_up, cfg=cfg))(state)

    def drafting(cfg):
        def run(params, state):
            noise = step_noise(
                state.row_key, state.length, cfg.sizes.levels, model.vocab_size, state.sampling
            )
            return cfg.method.draft(model, params, state, noise)[1].path

        return jax.jit(run)

    # The draft pass at two contexts.
    partial = DecodeConfig(
        model, tsjax.TokenSwift(draft_budget=budget, num_ngrams=0, suffix_length=0)
    )
    run_partial = drafting(partial)
    partial_states = {n: state_at(n, partial) for n in (short, long)}
    # Drafts from history, and whole steps.
    history = DecodeConfig(model, tsjax.NGram())
    run_history = drafting(history)
    history_state = state_at(long, history)
    plain = DecodeConfig(model)
    plain_state = state_at(long, plain)

    # Five n-grams enter the table, which is donated as in the real loop.
    table = history_state.memory
    history_state = history_state.replace(memory=None)

    @functools.partial(jax.jit, donate_argnames="table")
    def enter_and_draft(params, state, table):
        table = table.replace(entered=table.entered - 5)
        table = history.method.remember(table, state, most=history.sizes.depth + 1)  # as a step
        return run_history(params, state.replace(memory=table)), table

    def with_history(params, state):
        nonlocal table
        path, table = enter_and_draft(params, state, table)
        return path

    @functools.partial(jax.jit, static_argnames="cfg")
    def step(params, state, table, *, cfg):
        # The new state's caches stay inside: what is timed is the work, not the allocation.
        state = state.replace(memory=table)
        new = decode_step(params, state, cfg=cfg)
        return new.length, new.tokens

    def step_with_history(params, state):
        return step(params, state, table, cfg=history)

    def plain_step(params, state):
        return step(params, state, None, cfg=plain)

    return {
        f"draft pass at {short}": functools.partial(run_partial, params, partial_states[short]),
        f"draft pass at {long}": functools.partial(run_partial, params, partial_states[long]),
        "history": functools.partial(with_history, params, history_state),
        "step with history": functools.partial(step_with_history, params, history_state),
        "plain step": functools.partial(plain_step, params, plain_state),
    }


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("draft", __doc__)
    parser.add_argument("--short", type=int, default=1024)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)

    runs = calls(args.short, args.long, args.budget)
    short, long, *_ = runs
    seconds = interleaved(runs, args.rounds).seconds
    ms = {name: summary([1e3 * value for value in values]) for name, values in seconds.items()}
    pairs = {
        "draft pass, long context / short": (long, short),
        "history / its step": ("history", "step with history"),
        "history / plain step": ("history", "plain step"),
    }
    found = {name: ratios(*(seconds[one] for one in pair)) for name, pair in pairs.items()}
    for name, values in ms.items():
        print(f"{name:34}{values['median']:10.3f} ms")
    for name, values in found.items():
        print(f"{name:34}{values['median']:10.3f}")
    document = {
        "short": args.short, "long": args.long, "budget": args.budget, "ms": ms, "ratios": found,
    }  # fmt: skip
    report.write(document, args.out, "draft")
