# SPDX-License-Identifier: Apache-2.0
"""The types in the signatures of array code: that they are there, are checked, and cost nothing."""

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import shape_checks
from helpers import tiny_config

import tsjax
from tsjax.decoding.tree import merge_paths
from tsjax.methods.partial_cache import init_draft_cache, summarize_rest
from tsjax.model.cache import init_cache, write_rows
from tsjax.model.heads import run_heads
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed

jaxtyping = pytest.importorskip("jaxtyping")
beartype = pytest.importorskip("beartype")

APIS = ["pallas_kernels.cache_scores.api", "pallas_kernels.tree_attention.api"]


def functions_of(name: str):
    """The functions, methods and properties that a module defines."""
    module = importlib.import_module(name)
    for owner in (module, *filter(inspect.isclass, vars(module).values())):
        if getattr(owner, "__module__", name) != name:
            continue
        for thing in vars(owner).values():
            function = thing.fget if isinstance(thing, property) else thing
            if inspect.isfunction(function) and function.__module__ == name:
                # dataclass and NamedTuple write functions too.
                if not function.__name__.startswith("__") and "replace" != function.__name__:
                    yield function


def test_every_signature_is_complete_and_means_something():
    """jaxtyping leaves out what it cannot evaluate, without a word."""
    for module in (*shape_checks.MODULES, *APIS):
        functions = list(functions_of(module))
        assert functions, module
        for function in functions:
            named = {*inspect.signature(function).parameters} - {"self", "cls"}
            hints = typing.get_type_hints(inspect.unwrap(function))
            assert {*named, "return"} <= hints.keys(), (module, function.__qualname__)


def test_no_field_of_a_state_is_an_array_of_any_shape():
    for path in Path(tsjax.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = map(ast.unparse, getattr(node, "bases", []))
            if isinstance(node, ast.ClassDef) and any("PyTree" in base for base in bases):
                fields = (
                    ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)
                )
                assert not [one for one in fields if "jax.Array" in one], (path, node.name)


def test_a_wrong_shape_is_refused():
    root = jnp.asarray([3, 4], jnp.int32)
    paths, lengths = jnp.ones((2, 5, 3), jnp.int32), jnp.ones((2, 5), jnp.int32)
    assert merge_paths(root, paths, lengths, [0] * 5, width=16).tokens.shape == (2, 16)
    with pytest.raises(jaxtyping.TypeCheckError, match="'lengths'"):
        merge_paths(root, paths, lengths.T, [0] * 5, width=16)
    with pytest.raises(jaxtyping.TypeCheckError, match="'paths'"):
        merge_paths(root, paths.astype(jnp.float32), lengths, [0] * 5, width=16)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_pass_joins_no_types_or_ranks_unsaid(dtype):
    """The modules of a pass, which no test reaches but through those of a step."""
    with jax.enable_x64(dtype == "float64"):
        flags = dict.fromkeys(("qkv_bias", "qk_norm", "tie_embeddings"), dtype != "float64")
        cfg = tiny_config(dtype=dtype, num_draft_heads=2, **flags)
        logits, normed, cache, rest = jax.jit(lambda params: run_pass(params, cfg))(
            tsjax.steps.init_params(cfg)
        )
        assert logits.dtype == ("float32" if dtype == "bfloat16" else dtype)
        assert {x.dtype for x in (normed, *cache.k, *(one.mean for one in rest))} == {
            jnp.dtype(dtype)
        }


def run_pass(params, cfg):
    """Three rows, through whatever a pass of the model and its heads goes through."""
    tokens, begin = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32), jnp.zeros((2,), jnp.int32)
    positions = begin[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    causal, cache = jnp.tril(jnp.ones((3, 3), bool)), init_cache(cfg, 2, 8)
    rows = run_rows(params.model, cache, tokens, positions, causal, cfg=cfg, with_attended=True)
    cache = write_rows(cache, rows.k, rows.v, begin, after=rows.hidden)
    normed = run_heads(params.heads, params.model, rows.hidden[:, -1], cfg=cfg)
    logits = unembed(params.model, final_norm(params.model, rows.hidden, cfg=cfg), cfg=cfg)
    attended = jax.tree.map(lambda x: x[:, -1], rows.attended)
    draft = init_draft_cache(cfg, 2, 4, with_rest=True).replace(attended=attended)
    return logits, normed, cache, summarize_rest(draft)


@pytest.mark.wide
def test_without_jaxtyping_the_names_are_stand_ins():
    code = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("jaxtyping", "beartype"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import typing, tsjax
from tsjax.decoding import tree
from tsjax.base.typing import Array, Float
assert Float[Array, "B T"] == Array
assert typing.get_type_hints(tree.merge_paths)["root"] == Array
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
