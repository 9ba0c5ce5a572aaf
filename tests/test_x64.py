# SPDX-License-Identifier: Apache-2.0
"""32-bit and 16-bit models while jax has 64-bit types switched on: nothing becomes wider.

A program that imports tsjax may need them for something else. That a step of each method keeps its
types is in test_method_contract.py; here are whole runs, prefills, training and checkpoints.
"""

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import SIZES, looping_model, tiny_model

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.start import init_state

PROMPT = list(range(1, 24))
SAMPLED = {
    "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
    "epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "min_tokens_to_keep": 2,
    "repetition_penalty": 1.2, "repetition_window": 16, "min_new_tokens": 3, "eos_token_id": 0,
}  # fmt: skip
# Two levels of passes, and after them two of heads.
EVERYTHING = tsjax.TokenSwift(
    tree=(2, 2, 1, 1), draft_passes=2, draft_budget=64, num_sinks=4, suffix_length=8,
    suffix_alone=8, draft_rest=True, pass_widths=(4,),
)  # fmt: skip
LAZY = {
    "in_batches": tsjax.LazyPrefill(keep={1: 0.5}, choose_every=2, revive_rows=4),
    "on_demand": tsjax.LazyPrefill(keep={1: 0.5}, revive="on_demand"),
    "never": tsjax.LazyPrefill(keep={1: 0.5}, revive="never", scores="random"),
    "background": tsjax.LazyPrefill(keep={1: 0.5}, revive="background"),
}


def same_in_x64(dtype, run):
    """Float32 twice. Wider indices make other programs, which round bfloat16 otherwise."""
    with jax.enable_x64(True):
        found = run()
    if dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, found, run())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
def test_a_stream(dtype):
    model = looping_model(dtype=dtype)

    def run():
        how = dict(method=AnyTree(), max_new_tokens=16, **SAMPLED, **SIZES)
        chunks = list(tsjax.stream(model, PROMPT, **how))
        return [np.concatenate([chunk.tokens[0] for chunk in chunks])]

    same_in_x64(dtype, run)


@pytest.mark.parametrize(
    ("dtype", "lazy"),
    [
        ("float32", "in_batches"),
        *(pytest.param("float32", name, marks=pytest.mark.wide) for name in [*LAZY][1:]),
        *(pytest.param("bfloat16", name, marks=pytest.mark.wide) for name in LAZY),
    ],
)
def test_a_lazy_prefill(dtype, lazy):
    how = dict(prefill=LAZY[lazy], max_new_tokens=4, **SIZES)
    model = looping_model(dtype=dtype)
    same_in_x64(dtype, lambda: tsjax.generate(model, PROMPT, **how).tokens)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training(dtype):
    model = tiny_model(dtype=dtype)
    data = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (8, 16))
    settings = tsjax.HeadTraining(
        num_heads=2, steps=2, batch_size=4, micro_batch=2, sequence_length=16, warmup_steps=1
    )

    def run():
        trained = tsjax.train_heads(model, data, settings=settings, held_out=0.25)
        assert {str(x.dtype) for x in jax.tree.leaves(trained.model.params.heads)} == {dtype}
        return [record["loss"] for record in trained.history]

    wanted = run()
    with jax.enable_x64(True):
        np.testing.assert_allclose(run(), wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_keeps_its_type(dtype, tmp_path):
    with jax.enable_x64(True):
        tsjax.save(tiny_model(dtype=dtype), tmp_path / "copy")
        loaded = tsjax.load(tmp_path / "copy")
        logits = tsjax.forward(loaded, [PROMPT])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {dtype}
    assert logits.dtype == np.float32


def real_types(jaxpr, found):
    """The floating types of all values in a program, those of its branches and loops included."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            dtype = getattr(value.aval, "dtype", None)
            if dtype is not None and jax.numpy.issubdtype(dtype, np.floating):
                found.add(str(dtype))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                real_types(getattr(inner, "jaxpr", inner), found)
    return found


def _is_jaxpr(x):
    return hasattr(x, "eqns")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_number_of_a_step_is_wider(dtype):
    model = tiny_model(dtype=dtype, num_draft_heads=2)
    cfg = tsjax.DecodeConfig(model.cfg, EVERYTHING)
    with jax.enable_x64(True):
        state = init_state(
            np.ones((1, 16), np.int32), np.asarray([16]), cfg=cfg, capacity=256,
            max_length=np.asarray([100]),
        )  # fmt: skip
        traced = programs("cpu", dtype).decode.trace(model.params, state, 3, cfg=cfg)
    assert not {"int64", "float64"} & {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert real_types(traced.jaxpr.jaxpr, set()) == {"float32", dtype}
