# SPDX-License-Identifier: Apache-2.0
"""What a step costs, read in its compiled program: no copy of a buffer, no work that grows with the
capacity, one program for all values, nothing asked of the host.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import FUSED_AS_FOR_USERS, IN_PLACE, entry_computation, operations, tiny_model
from test_verification import VOCAB, fresh_state

import tsjax
from pallas_kernels.best_slots.xla import BLOCK
from tsjax.decoding.programs import programs

COST_METHODS = {
    "prefill": tsjax.methods.Autoregressive(),
    "plain": tsjax.methods.Autoregressive(),
    "ngram": tsjax.NGram(num_ngrams=4, pass_widths=(1, 9)),
    "partial_cache": tsjax.TokenSwift(tree=(2, 2), draft_budget=500, num_ngrams=4),
    "verified_state": tsjax.TokenSwift(
        tree=(2, 2), draft_from="verified_state", num_ngrams=4, suffix_length=0
    ),
}
DEFAULT = ("prefill", "plain", "partial_cache")
NAMES = [pytest.param(x, marks=() if x in DEFAULT else pytest.mark.wide) for x in COST_METHODS]


@functools.cache
def compiled(
    name: str, *, capacity: int, batch: int = 1, dtype: str = "float32", cache: str = "same"
):
    """The program of the loop over steps, or of a pass of a prefill, and the state it takes."""
    model = tiny_model(num_draft_heads=2, dtype=dtype, cache=cache)
    method = COST_METHODS[name]
    state = fresh_state(model, [[1, 2, 3]] * batch, method=method, capacity=capacity)
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    run, number = programs("cpu", dtype), jnp.int32(8)
    if name == "prefill":
        how = dict(part=0, width=16, cfg=cfg)
        lowered = run.read_part.lower(model.params, state, number, **how)
    else:
        lowered = run.decode.lower(model.params, state, number, cfg=cfg)
    return lowered.compile(FUSED_AS_FOR_USERS), state


def scores_bytes(state) -> int:
    """A score for every slot and kv head, which the choice of a draft cache needs: thrice, for the
    loop that fills it and for two layers. With 128 dimensions a head one is 0.8% of a layer.
    """
    B, K, S, _ = state.kv.k[0].shape
    return 3 * 4 * B * K * S if partial_cache(state) is not None else 0


def partial_cache(state):
    return getattr(state.memory, "cache", None)


def ngram_places(state) -> list:
    table = getattr(state.memory, "ngrams", state.memory)
    return [table.places] if table else []


@pytest.mark.parametrize(
    ("name", "batch", "dtype", "held"),
    [
        ("prefill", 1, "float32", "same"),
        ("plain", 3, "float32", "same"),
        ("partial_cache", 3, "bfloat16", "same"),
        ("partial_cache", 3, "bfloat16", "int8"),
        pytest.param("prefill", 3, "bfloat16", "same", marks=pytest.mark.wide),
        pytest.param("plain", 3, "bfloat16", "same", marks=pytest.mark.wide),
        pytest.param("ngram", 1, "float32", "same", marks=pytest.mark.wide),
        pytest.param("partial_cache", 1, "float32", "same", marks=pytest.mark.wide),
    ],
)
def test_no_step_copies_a_buffer(name, batch, dtype, held):
    # Blocks and rows are a fixed amount of scratch memory; the cache has to be large beside it.
    executable, state = compiled(name, capacity=262144, batch=batch, dtype=dtype, cache=held)
    memory = executable.memory_analysis()
    cache = sum(buffer.nbytes for buffer in state.kv.k + state.kv.v)
    assert memory.temp_size_in_bytes <= 0.05 * cache + scores_bytes(state)
    buffers = [state.tokens, *ngram_places(state)]
    donated = cache + sum(buffer.nbytes for buffer in buffers)
    cache = partial_cache(state)
    if cache is not None:
        donated += sum(buffer.nbytes for buffer in cache.k + cache.v)
    assert memory.alias_size_in_bytes >= donated

    for buffer in jax.tree.leaves(state.kv.k[0]):  # of narrow rows the exponents too
        found = operations(executable, buffer)
        assert found and set(found) <= IN_PLACE
        # Each fusion of that shape is one of the writes, wrapped.
        assert found.count("fusion") <= found.count("dynamic-update-slice")
    for buffer in buffers:
        assert set(operations(executable, buffer)) <= IN_PLACE | {"scatter"}
    if cache is not None:
        # Where it is chosen again, what was gathered is selected for the rows that need it, and
        # widened if the whole one is narrow.
        found, widening = operations(executable, cache.k[0]), {"convert", "multiply"}
        chosen = {"select", "broadcast"} | (widening if held == "int8" else set())
        assert found and set(found) <= IN_PLACE | chosen


SMALL = 2 * BLOCK  # a capacity that is larger than any block


@pytest.mark.parametrize("name", NAMES)
def test_work_does_not_grow_with_the_capacity(name):
    """Neither the work of a pass through each loop nor a loop's fixed number of passes does.

    Writing a few tokens in place counts as reading and writing that whole buffer of 4 bytes per
    slot, once or twice, and so does looking a few up; a single layer's keys would be 64. The
    exception is the choice of a draft cache, which scores all slots: once in many steps.
    """
    small, large = SMALL, 262144
    work = []
    for capacity in (small, large):
        executable, state = compiled(name, capacity=capacity)
        cost = executable.cost_analysis()
        passes = re.findall(r'"known_trip_count":\{"n":"(\d+)"', executable.as_text())
        scratch = executable.memory_analysis().temp_size_in_bytes - scores_bytes(state)
        work.append((cost["flops"], sorted(passes), scratch, cost["bytes accessed"]))
    assert work[0][:2] == work[1][:2] and work[0][0] > 0
    if name == "partial_cache":
        assert work[1][2] <= work[0][2]
    else:
        assert work[1][2] == work[0][2]
        assert work[1][3] - work[0][3] <= (40 if ngram_places(state) else 0) * (large - small)


@pytest.mark.parametrize("name", [name for name in NAMES if "prefill" not in name.values])
def test_steps_ask_the_host_nothing(name):
    """All that a step reads and writes is on the device; the host only starts the loop."""
    executable, state = compiled(name, capacity=SMALL)  # compiled by the test before
    params, steps = tiny_model(num_draft_heads=2).params, jnp.int32(8)
    state = jax.tree.map(jnp.copy, state)  # it is donated
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(executable(params, state, steps))
    assert int(state.stats.steps[0]) == 8


def test_a_narrow_pass_does_not_compute_the_wide_one():
    """Neither runs before it is known how many nodes there are."""
    model = tiny_model(vocab_size=VOCAB)
    method = tsjax.NGram(num_ngrams=0, suffix_length=6, pass_widths=(1,))
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, [[1, 2, 3]], method=method)
    step = jax.jit(functools.partial(tsjax.steps.decode_step, cfg=cfg))
    text = step.lower(model.params, state).compile().as_text()
    assert "/mlp/" in text and "/mlp/" not in entry_computation(text)
