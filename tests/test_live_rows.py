# SPDX-License-Identifier: Apache-2.0
"""Rows that nobody wants: to leave them out changes no bit of the others."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MIXED_COSTS, fresh_state, prefilled, tiny_model
from kernel_cases import make_heads, make_inputs, make_norm, make_rest, place
from test_verification import BATCH, VOCAB, WIDTH, random_tree, verified

import pallas_kernels as kernels
import tsjax
from pallas_kernels import Ranks, Summary, native
from tsjax.decoding.programs import programs
from tsjax.methods.devices import leaves_out_rows
from tsjax.steps import DecodeConfig

pytestmark = pytest.mark.skipif(
    not native.serves("float32", head_dim=8), reason="only the kernels in C++ leave rows out"
)
EPS = 1e-5


def product(rng, B, T, dtype):
    rows = jnp.asarray(rng.standard_normal((B, T, 37)), dtype)
    return kernels.product, (rows, jnp.asarray(rng.standard_normal((50, 37)), dtype))


def int8_product(rng, B, T, dtype):
    rows = jnp.asarray(rng.standard_normal((B, T, 37)), dtype)
    weights = jnp.asarray(rng.integers(-127, 128, (50, 37)), jnp.int8)
    scales = jnp.asarray(rng.uniform(0.5, 2, 50), jnp.float32)
    return functools.partial(kernels.product, scales=scales), (rows, weights)


def rms_norm(rng, B, T, dtype):
    rows, _, weight = make_norm(rng, (B, T, 40), dtype)
    return functools.partial(kernels.rms_norm, eps=EPS), (rows, weight)


def add_rms_norm(rng, B, T, dtype):
    return functools.partial(kernels.add_rms_norm, eps=EPS), make_norm(rng, (B, T, 40), dtype)


def rotary_heads(rng, B, T, dtype):
    kernel = functools.partial(kernels.rotary_heads, dtype=dtype)
    return kernel, make_heads(rng, B, T, 2, 3, 16, dtype)


def gated(rng, B, T, dtype):
    opened = jnp.asarray(rng.standard_normal((B, T, 37, 2)), jnp.float32)
    return functools.partial(kernels.gated, dtype=dtype), (opened,)


def tree_attention(rng, B, T, dtype):
    inputs = make_inputs(rng, B=B, T=T, K=2, G=7, S=150, H=16, dtype=dtype)
    rest = Summary(*make_rest(rng, inputs)) if rng.random() < 0.5 else None
    slots, rows = rng.integers(0, 9, (B, 150)), rng.integers(0, 12, (B, T))
    ranks = Ranks(*(jnp.asarray(x, jnp.int32) for x in (slots, rows)))
    attention = functools.partial(
        kernels.tree_attention, ranks=ranks if rng.random() < 0.5 else None, rest=rest,
        with_log_totals=True,
    )  # fmt: skip
    return attention, inputs


OPERATIONS = (
    product, int8_product, rms_norm, add_rms_norm, rotary_heads, gated, tree_attention
)  # fmt: skip
of_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.__name__)


def check_live(found, wanted, live):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        for b, count in enumerate(np.asarray(live)):
            np.testing.assert_array_equal(one[b, :count], other[b, :count])
            assert not one[b, count:].any()  # zeros: nothing that a later sum could stumble over


@of_operation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 9), (2, 1)])
def test_the_rows_that_are_wanted_have_the_bits_they_had(operation, dtype, shape, rng):
    kernel, arrays = operation(rng, *shape, dtype)
    wanted = kernel(*arrays)
    for live in (rng.integers(0, shape[1] + 1, shape[0]), np.zeros(shape[0], int)):
        live = jnp.asarray(live, jnp.int32)
        check_live(kernel(*arrays, live=live), wanted, live)


@of_operation
def test_under_vmap_and_on_a_mesh(operation, rng):
    kernel, arrays = operation(rng, 4, 5, "float32")
    live = jnp.asarray([2, 5, 0, 1], jnp.int32)
    wanted = kernel(*arrays)
    of_rows = [array.ndim > 2 or array.shape == (4,) for array in arrays]
    pairs = list(zip(arrays, of_rows, strict=True))
    placed = [place(x, "data") if rows else place(x) for x, rows in pairs]
    call = jax.jit(lambda live, *arrays: kernel(*arrays, live=live))
    check_live(call(place(live, "data"), *placed), wanted, live)
    if operation is tree_attention:
        return  # `rest` and `ranks` stand in the function, not among its arguments
    in_pairs = [x.reshape(2, 2, *x.shape[1:]) if rows else x for x, rows in pairs]
    axes = [0 if rows else None for rows in of_rows]
    found = jax.vmap(call, (0, *axes))(live.reshape(2, 2), *in_pairs)
    whole = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), found)
    check_live(whole, wanted, live)


@pytest.mark.parametrize(
    ("live", "rows"),
    [(np.ones(3, np.int32), (2, 3, 4)), (np.ones(2), (2, 3, 4)), (np.ones(2, np.int32), (2, 4))],
)
def test_counts_that_do_not_fit_are_refused(live, rows):
    with pytest.raises(ValueError, match=r"live of shape .* is not valid: \(2,\) of int32"):
        kernels.rms_norm(np.ones(rows, "f"), np.ones(4, "f"), EPS, live=jnp.asarray(live))


@pytest.mark.parametrize("widths", [(), (1, 5, 12)])
def test_a_step_that_leaves_out_rows_decides_as_one_that_does_not(widths, rng):
    """Its targets, keys and values, wherever something is drafted; rows that have ended aside."""

    class Widths(tsjax.methods.Autoregressive):
        def sizes(self, model):
            return super().sizes(model)._replace(width=WIDTH, depth=4, narrower=widths)

    history = [rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 6).tolist()]
    model = tiny_model(vocab_size=VOCAB)
    cfg = DecodeConfig(model.cfg, Widths())
    state = prefilled(model.params, fresh_state(model, history), cfg=DecodeConfig(model.cfg))
    tree = random_tree(rng, [text[-1] for text in history], 6)
    filled = np.arange(WIDTH) < np.asarray(tree.reach)[:, None]
    assert 1 < filled.sum() < BATCH * WIDTH
    found, wanted = (
        verified(
            model.params, state, tree,
            cfg=DecodeConfig(model.cfg, cfg.method, leaves_out_rows=leaves_out),
        )
        for leaves_out in (True, False)
    )  # fmt: skip
    arrays = ([one.target, *one.rows.k, *one.rows.v] for one in (found, wanted))
    for one, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[filled], np.asarray(other)[filled])


def test_a_program_of_several_widths_has_its_layers_once():
    """Where rows are left out; elsewhere once for each width."""
    model = tiny_model()
    method = tsjax.LikelyTree(width=16, pass_widths=(1, 4, 8), costs=MIXED_COSTS)
    state = fresh_state(model, [[1, 2, 3]], method=method)

    def attentions(leaves_out: bool) -> int:
        cfg = DecodeConfig(model.cfg, method, leaves_out_rows=leaves_out)
        decode = programs("cpu", model.cfg.dtype).decode
        text = decode.lower(model.params, state, jnp.int32(8), cfg=cfg).compile().as_text()
        return len(re.findall(r'custom_call_target="tsjax_tree_attention_', text))

    assert attentions(True) == model.cfg.num_layers
    assert attentions(False) == 4 * model.cfg.num_layers


def test_generate_knows_which_kernels_leave_out_rows(monkeypatch):
    cfg = tiny_model().cfg
    assert leaves_out_rows("cpu", cfg) and not leaves_out_rows("gpu", cfg)
    assert not leaves_out_rows("cpu", dataclasses.replace(cfg, dtype="float64"))
    monkeypatch.setattr(native.build, "_library", None)
    assert not leaves_out_rows("cpu", cfg)
