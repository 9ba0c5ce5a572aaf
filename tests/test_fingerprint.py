# SPDX-License-Identifier: Apache-2.0
"""Two models have one fingerprint where they say the same, however they are stored."""

import hashlib
import json
import re

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import packed, tiny_model, unpacked

import tsjax
from tsjax.files import fingerprint
from tsjax.files.fingerprint import model_fingerprint, sampled_points

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
BIASES = tuple(f"{name}_bias" for name in MATRICES)
WITH_ALL = dict(qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)


@pytest.fixture(scope="module")
def model():
    """Every optional tensor, and random numbers in all of them."""
    made = tiny_model(**WITH_ALL)
    leaves, tree = jax.tree.flatten(made.params)
    rng = np.random.default_rng(1)
    noise = [0.1 * rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    return made.replace(params=jax.tree.unflatten(tree, map(jnp.add, leaves, noise)))


def with_layer(model, name, function):
    """The model with one tensor of its last layer changed by a function of a NumPy array.

    Of a matrix that is [outputs, inputs].
    """
    *others, last = model.params.model.layers
    joined = unpacked(last)
    array = before = np.array(joined[name] if name in joined else getattr(last, name))
    if name in MATRICES:
        array = before.reshape((-1, before.shape[-1]) if name in joined else (len(before), -1))
    changed = function(array.copy()).reshape(before.shape)
    if name in joined:
        return with_weights(model, layers=(*others, packed(last, **{name: changed})))
    return with_weights(model, layers=(*others, last.replace(**{name: jnp.asarray(changed)})))


def with_weights(model, **arrays):
    """The model with `embed`, `unembed`, `final_norm` or `layers` replaced."""
    weights = model.params.model.replace(**arrays)
    return model.replace(params=model.params.replace(model=weights))


def swapped(array, axis, left, right):
    order = np.arange(array.shape[axis])
    order[[left, right]] = right, left
    return np.take(array, order, axis)


def changed_at(array, index):
    array[index] += 0.01
    return array


def low_rank(array):
    rng = np.random.default_rng(2)
    rows, columns = array.shape
    update = rng.standard_normal((rows, 1)) @ rng.standard_normal((1, columns))
    return array + 1e-3 * update.astype(array.dtype)


# --- what it sees -------------------------------------------------------------------------------


def differ(one, *others) -> bool:
    return all(model_fingerprint(other) != model_fingerprint(one) for other in others)


CHANGES = {
    "doubled": lambda a: 2 * a,
    "low rank": low_rank,
    "two outputs": lambda a: swapped(a, 0, 1, -1),
    "two inputs": lambda a: swapped(a, -1, 2, -2),
    "an output": lambda a: changed_at(a, 3),
    "an input": lambda a: changed_at(a, (..., 4)),
}


@pytest.mark.parametrize("name", [*MATRICES, *BIASES, "attn_norm", "mlp_norm", "q_norm", "k_norm"])
def test_each_change_of_a_matrix_and_each_number_of_a_vector_is_seen(model, name):
    vector = {"a number": lambda a: changed_at(a, (..., -2))}
    for what, change in (CHANGES if name in MATRICES else vector).items():
        assert differ(model, with_layer(model, name, change)), what


def test_tokens_of_the_vocabulary_and_exchanged_tensors_are_seen(model):
    weights = model.params.model
    for name in ("embed", "unembed"):
        changed = changed_at(np.array(getattr(weights, name)), 7)
        assert differ(model, with_weights(model, **{name: jnp.asarray(changed)}))
    first, last = weights.layers
    parts = unpacked(last)
    exchanged = (last, first), (first, packed(last, k=parts["v"], v=parts["k"]))
    assert differ(model, *(with_weights(model, layers=layers) for layers in exchanged))
    square = tiny_model(mlp_dim=32)
    assert differ(square, with_layer(square, "gate", np.transpose))


def test_settings_that_choose_tokens_are_seen():
    rope = tsjax.steps.RopeConfig(theta=500000.0)
    linear = tsjax.steps.RopeConfig(kind="linear", factor=2.0)
    changes = ({"norm_eps": 1e-6}, {"rope": rope}, {"rope": linear}, {"dtype": "bfloat16"})
    assert differ(tiny_model(), *(tiny_model(**change) for change in changes))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 4), (4, 6), (48, 48), (97, 10), (10, 97)])
def test_each_row_and_each_column_has_a_point(shape):
    rows, columns = sampled_points(*shape)
    assert set(rows.tolist()) == set(range(shape[0]))
    assert set(columns.tolist()) == set(range(shape[1]))
    assert len(rows) == len(columns) == max(shape)
    if min(shape) > 4:  # neighbours are far from one another, in both directions
        assert abs(np.diff(columns)).min() > 1


# --- what it does not see -----------------------------------------------------------------------


def test_what_changes_no_token_is_not_seen():
    plain = model_fingerprint(tiny_model())
    for change in (
        {"num_draft_heads": 2, "head_accuracy": (0.5, 0.4)},
        {"num_draft_heads": 2, "head_kind": "parallel_own_vocabulary"},
        {"max_positions": 64},
        {"family": "mistral"},
    ):
        assert model_fingerprint(tiny_model(**change)) == plain


def test_a_mesh_has_the_same():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    placed = tiny_model(mesh=mesh, **WITH_ALL)
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed.params))
    assert model_fingerprint(placed) == model_fingerprint(tiny_model(**WITH_ALL))


def test_it_is_that_of_the_huggingface_tensors(tmp_path):
    """Computed here from the files alone, then from the model, converted and on its way back."""
    settings = {"attention_bias": True, "mlp_bias": True, "rope_theta": 500000.0}
    theirs = hf_fixtures.tensors(hf_fixtures.config(**settings))
    hf_fixtures.make(tmp_path / "hf", **settings)
    model = tsjax.load(tmp_path / "hf")
    # What chooses tokens and is not as by default.
    names = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    names += ("mlp_dim", "norm_eps", "qkv_bias", "out_bias", "mlp_bias")
    said = {name: getattr(model.cfg, name) for name in names} | {"rope": {"theta": 500000.0}}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(theirs):
        tensor = np.asarray(theirs[name])
        digest.update(name.encode())
        if tensor.ndim == 2:
            tensor = tensor[sampled_points(*tensor.shape)]
        digest.update(tensor.tobytes())
    assert model_fingerprint(model) == digest.hexdigest()[:16]
    tsjax.save(model, tmp_path / "converted")
    assert model_fingerprint(tsjax.load(tmp_path / "converted")) == digest.hexdigest()[:16]


def test_it_stays_what_it_was():
    """Files hold it: another rule needs another format of theirs."""
    assert model_fingerprint(tiny_model()) == "99c19b8175a93d3a"
    assert model_fingerprint(tiny_model(dtype="bfloat16", **WITH_ALL)) == "e66f379fbae10fb8"


# --- what it costs ------------------------------------------------------------------------------


def test_no_matrix_is_copied_or_gathered():
    mesh = jax.make_mesh((1, 4), ("data", "model"))
    for model in (tiny_model(mlp_dim=512), tiny_model(mlp_dim=512, mesh=mesh)):
        matrix = model.params.model.layers[0].down  # [32, 512], its columns on four devices
        compiled = fingerprint._take.lower(matrix, sampled_points(32, 512)).compile()
        assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
        assert compiled.memory_analysis().temp_size_in_bytes < matrix.nbytes / 4
