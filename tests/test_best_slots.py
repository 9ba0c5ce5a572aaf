# SPDX-License-Identifier: Apache-2.0
"""The slots with the highest scores, against a sort in plain Python."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import place

from pallas_kernels import best_slots, native
from pallas_kernels.best_slots import reference, xla

HAS_COMPILER = native.status(try_now=True).state == "ready"
NAMES = ["xla", *(["native"] if HAS_COMPILER else [])]


def oracle(scores, length, count, first):
    """Of one row: those that have to be there, in order."""
    known = [slot for slot in range(length) if scores[slot] > -np.inf]
    begun = [slot for slot in known if slot < first]
    return (begun + sorted(known[len(begun) :], key=lambda slot: -scores[slot]))[:count]


def check(found, scores, length, count, first):
    found = np.asarray(found)
    assert found.dtype == np.int32 and found.shape == (*scores.shape[:2], count)
    assert (found >= 0).all() and (found < scores.shape[2]).all()
    for b, k in np.ndindex(scores.shape[:2]):
        wanted = oracle(scores[b, k], length[b], count, first)
        assert found[b, k, : len(wanted)].tolist() == wanted


VALUES = st.one_of(
    # XLA takes numbers below the normal ones for zero.
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -np.inf]),  # equal ones, and none
)
# Shape, how many are asked for, and how many come first: each is compiled, so there are few.
SETTINGS = [
    ((1, 1, 1), 1, 2), ((2, 3, 15), 15, 0), ((1, 2, 33), 7, 3), ((3, 1, 60), 1, 61),
    ((2, 1, 48), 20, 30), ((1, 2, 60), 59, 1),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@hypothesis.settings(max_examples=30)
@hypothesis.given(data=st.data(), setting=st.sampled_from(SETTINGS))
def test_the_best_by_score_then_by_position(name, data, setting):
    shape, count, first = setting
    scores = data.draw(hnp.arrays(np.float32, shape, elements=VALUES))
    length = data.draw(hnp.arrays(np.int32, shape[0], elements=st.integers(0, shape[2])))
    beyond = np.arange(shape[2]) >= length[:, None, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", 16)
        given = np.where(beyond, np.float32(np.nan), scores)  # there may be anything
        found = best_slots(given, length, count=count, first=first, implementation=name)
    check(found, scores, length, count, first)
    found = reference.best_slots(scores, length, count=count, first=first)
    check(found, scores, length, count, first)


@pytest.mark.kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_many_slots(name, size, rng):
    """More than are sorted together, also where all lie near one another or are equal."""
    scores = (size * rng.standard_normal((2, 2, 40_000))).astype(np.float32)
    scores[0, 1] = np.float32(size) + scores[0, 1] * np.float32(1e-3)
    scores[1, 1] = size
    length = np.asarray([40_000, 33_333], np.int32)
    found = best_slots(scores, length, count=512, first=16, implementation=name)
    check(found, scores, length, 512, 16)


@pytest.mark.kernels
@pytest.mark.parametrize("name", NAMES)
def test_on_a_mesh_and_mapped(name, rng):
    scores = rng.standard_normal((2, 4, 300)).astype(np.float32)
    length = np.asarray([300, 120], np.int32)
    find = jax.jit(functools.partial(best_slots, count=20, first=2, implementation=name))
    check(find(place(scores, "data", "model"), length), scores, length, 20, 2)
    mapped = jax.vmap(find)(scores[:, None], length[:, None])
    check(mapped[:, 0], scores, length, 20, 2)


def test_other_types_are_xla_s():
    with jax.enable_x64(True):
        scores = jnp.asarray([[[0.5, 0.25, 0.75]]], jnp.float64)
        assert best_slots(scores, jnp.asarray([3]), count=2)[0, 0].tolist() == [2, 0]
        if HAS_COMPILER:
            with pytest.raises(NotImplementedError, match="float64: only float32"):
                best_slots(scores, jnp.asarray([3]), count=2, implementation="native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": np.zeros((2, 5), np.float32)}, r"scores \(2, 5\)"),
        ({"length": np.zeros(3, np.int32)}, r"length \(3,\)"),
        ({"length": np.asarray([1, 6])}, r"length=\[1, 6\] is not valid: from 0 to the 5"),
        ({"count": 6}, "count=6 is not valid: from 1 to the 5 slots"),
        ({"first": -1}, "first=-1 is not valid: 0 or more"),
        ({"implementation": "sort"}, "implementation='sort' is not valid"),
    ],
)
def test_what_is_refused(changes, message):
    good = dict(scores=np.zeros((2, 1, 5), np.float32), length=np.asarray([5, 5]), count=2)
    given = good | changes
    with pytest.raises(ValueError, match=message):
        best_slots(given.pop("scores"), given.pop("length"), **given)
