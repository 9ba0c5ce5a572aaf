# SPDX-License-Identifier: Apache-2.0
"""Whole runs of 32-bit and 16-bit models while jax has 64-bit types switched on.

A program that imports tsjax may need them for something else. Nothing of a run becomes wider.
"""

import jax
import numpy as np
import pytest
from helpers import tiny_model

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.start import init_state

DTYPES = ["float32", "bfloat16"]
PROMPT = list(range(1, 41))
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
METHODS = {
    "autoregressive": tsjax.Autoregressive(),
    "ngram": tsjax.NGram(suffix_length=8),
    "everything": EVERYTHING,
}
LAZY = {
    "on_demand": tsjax.LazyPrefill(keep={1: 0.5}, revive="on_demand"),
    "in_batches": tsjax.LazyPrefill(keep={1: 0.5}, choose_every=2, revive_rows=4),
    "never": tsjax.LazyPrefill(keep={1: 0.5}, revive="never", scores="random"),
    "background": tsjax.LazyPrefill(keep={1: 0.5}, revive="background"),
}


@pytest.fixture(scope="module", params=DTYPES)
def model(request):
    return tiny_model(dtype=request.param, num_draft_heads=2)


def same_in_x64(model, run, reference=None):
    """Float32 twice. Wider indices make other programs, which round bfloat16 otherwise."""
    with jax.enable_x64(True):
        found = run()
    if model.cfg.dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, found, (reference or run)())


@pytest.mark.parametrize("method", METHODS)
def test_generate(model, method):
    """Without 64-bit types plain decoding is enough: every method says the same."""

    def run(method):
        return tsjax.generate(model, PROMPT, method=method, max_new_tokens=8, **SAMPLED).tokens

    same_in_x64(model, lambda: run(METHODS[method]), lambda: run("autoregressive"))


@pytest.mark.parametrize("lazy", LAZY)
def test_lazy_prefill(model, lazy):
    same_in_x64(
        model, lambda: tsjax.generate(model, PROMPT, prefill=LAZY[lazy], max_new_tokens=4).tokens
    )


def test_stream(model):
    def run():
        chunks = tsjax.stream(model, PROMPT, max_new_tokens=6)
        return [np.concatenate([chunk.tokens[0] for chunk in chunks])]

    same_in_x64(model, run)


def test_training(model):
    data = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (8, 16))
    settings = tsjax.HeadTraining(
        num_heads=2, steps=2, batch_size=4, micro_batch=2, sequence_length=16, warmup_steps=1
    )

    def run():
        trained = tsjax.train_heads(model, data, settings=settings, held_out=0.25)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(trained.model.params.heads)} == {
            model.cfg.dtype
        }
        return [record["loss"] for record in trained.history]

    wanted = run()
    with jax.enable_x64(True):
        np.testing.assert_allclose(run(), wanted, rtol=1e-6)


def test_a_checkpoint_keeps_its_type(model, tmp_path):
    with jax.enable_x64(True):
        tsjax.save(model, tmp_path / "copy")
        loaded = tsjax.load(tmp_path / "copy")
        logits = tsjax.forward(loaded, [PROMPT])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {model.cfg.dtype}
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


@pytest.mark.parametrize("method", ["autoregressive", "everything"])
def test_no_number_of_a_step_is_wider(model, method):
    cfg = tsjax.DecodeConfig(model.cfg, METHODS[method])
    with jax.enable_x64(True):
        state = init_state(
            np.ones((1, 16), np.int32), np.asarray([16]), cfg=cfg, capacity=256,
            max_length=np.asarray([100]),
        )  # fmt: skip
        traced = programs("cpu", model.cfg.dtype).decode.trace(model.params, state, 3, cfg=cfg)
    assert not {"int64", "float64"} & {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    found = real_types(traced.jaxpr.jaxpr, set())
    assert found == {"float32", model.cfg.dtype}
