# SPDX-License-Identifier: Apache-2.0
"""32-bit and 16-bit models while jax has 64-bit types switched on: nothing becomes wider.

A program that imports tsjax may need them for something else. That a step of each method keeps its
types is in test_method_contract.py; here are lazy prefills, training and checkpoints.
"""

import jax
import numpy as np
import pytest
from helpers import SIZES, looping_model, tiny_model

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.start import init_state

PROMPT = list(range(1, 24))
# Two levels of passes, and after them two of heads.
EVERYTHING = tsjax.TokenSwift(
    tree=(2, 2, 1, 1), draft_passes=2, draft_budget=64, num_sinks=4, suffix_length=8,
    suffix_alone=8, draft_rest=True, pass_widths=(4,),
)  # fmt: skip


@pytest.mark.wide
def test_a_lazy_prefill():
    lazy = tsjax.LazyPrefill(keep={1: 0.5}, choose_every=2, revive_rows=4)
    how = dict(prefill=lazy, max_new_tokens=4, **SIZES)
    with jax.enable_x64(True):
        found = tsjax.generate(looping_model(), PROMPT, **how).tokens[0]
    wanted = tsjax.generate(looping_model(), PROMPT, **how).tokens[0]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training(dtype):
    model = tiny_model(dtype=dtype)
    data = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (8, 16))
    settings = tsjax.training.HeadTraining(
        num_heads=2, steps=2, batch_size=4, micro_batch=2, sequence_length=16, warmup_steps=1
    )

    def run():
        trained = tsjax.training.train_heads(model, data, settings=settings, held_out=0.25)
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
        types = (getattr(value.aval, "dtype", None) for value in equation.outvars)
        found |= {str(x) for x in types if x and jax.numpy.issubdtype(x, np.floating)}
        inside = jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
        for inner in inside:
            if hasattr(inner, "eqns"):
                real_types(getattr(inner, "jaxpr", inner), found)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_number_of_a_step_is_wider(dtype):
    model = tiny_model(dtype=dtype, num_draft_heads=2)
    cfg = tsjax.steps.DecodeConfig(model.cfg, EVERYTHING)
    with jax.enable_x64(True):
        state = init_state(
            np.ones((1, 16), np.int32), np.asarray([16]), cfg=cfg, capacity=256,
            max_length=np.asarray([100]),
        )  # fmt: skip
        traced = programs("cpu", dtype).decode.trace(model.params, state, 3, cfg=cfg)
    assert not {"int64", "float64"} & {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert real_types(traced.jaxpr.jaxpr, set()) == {"float32", dtype}
