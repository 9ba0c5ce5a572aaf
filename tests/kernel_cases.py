# SPDX-License-Identifier: Apache-2.0
"""Inputs of the kernels and what they mean: float64 NumPy that shares no code with them.

Part of the tests that have `pytest.mark.kernels`, so kernels_tested.py reads this file too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.narrow_rows import NarrowRows, widened
from pallas_kernels.typing import accumulation_dtype

# --- tree_attention --------------------------------------------------------------------------


def define_both(q, k_cache, v_cache, length, k_new, v_new, mask, rest=None, visible=None):
    """One query at a time, over the keys it sees and nothing else: values and log totals."""
    q, k_cache, v_cache, k_new, v_new = (
        np.asarray(x, np.float64) for x in (q, k_cache, v_cache, k_new, v_new)
    )
    B, T, N, H = q.shape
    group = N // k_cache.shape[1]
    mask = np.broadcast_to(mask, (B, T, T))
    seen = np.broadcast_to(True if visible is None else visible, (B, T, k_cache.shape[2]))
    out, log_totals = np.empty(q.shape), np.empty(q.shape[:3])
    for b, t, n in np.ndindex(B, T, N):
        head, committed = n // group, np.flatnonzero(seen[b, t, : length[b]])
        keys = np.concatenate([k_cache[b, head, committed], k_new[b, mask[b, t], head]])
        values = np.concatenate([v_cache[b, head, committed], v_new[b, mask[b, t], head]])
        scores = keys @ q[b, t, n] / np.sqrt(H)
        if rest is not None:
            mean, log_total = (np.asarray(x, np.float64) for x in rest)
            scores = np.append(scores, log_total[b, n])
            values = np.concatenate([values, mean[b, n][None]])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ values / weights.sum()
        log_totals[b, t, n] = scores.max() + np.log(weights.sum())
    return out, log_totals


def random_tree(rng, T):
    """Which row sees which, [T, T]: row 0 is the root, each later row hangs on an earlier one."""
    mask = np.eye(T, dtype=bool)
    for row in range(1, T):
        mask[row] |= mask[rng.integers(0, row)]
    return mask


def make_inputs(rng, *, B=1, S=40, T=3, K=2, G=2, H=8, length=None, dtype=jnp.float32):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    length = np.asarray([S] * B if length is None else length, np.int32)
    mask = np.stack([random_tree(rng, T) for _ in range(B)])
    return (
        2 * normal(B, T, K * G, H),
        normal(B, K, S, H),
        normal(B, K, S, H),
        length,
        normal(B, T, K, H),
        normal(B, T, K, H),
        mask,
    )


def make_rest(rng, inputs):
    """A summary of slots elsewhere, from next to nothing to nearly all of the weight."""
    B, _, N, H = inputs[0].shape
    mean = jnp.asarray(rng.standard_normal((B, N, H)), inputs[0].dtype)
    log_total = rng.uniform(-3, 9, (B, N)).astype(np.float32)
    log_total[rng.random((B, N)) < 0.2] = -1e30  # there is nothing elsewhere
    return mean, jnp.asarray(log_total)


def make_ranks(rng, inputs):
    """Of slots and of rows, some of which see no slot; and which row sees which slot."""
    (B, T, *_), S = inputs[0].shape, inputs[1].shape[2]
    slots, rows = rng.integers(0, 9, (B, S)), rng.integers(0, 10, (B, T))
    return tuple(jnp.asarray(one, jnp.int32) for one in (slots, rows)), slots[:, None] < rows[
        ..., None
    ]


def with_wide_caches(inputs, dtype):
    return tuple(widened(x, dtype) if isinstance(x, NarrowRows) else x for x in inputs)


def relative_error(out, expected):
    """The largest error over the largest entry."""
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    assert out.shape == expected.shape
    return np.abs(out - expected).max() / np.abs(expected).max()


def check_near(found, expected, most):
    """Arrays one by one; `most` is the largest relative error of each of them, or of all."""
    each = most if isinstance(most, tuple) else (most,) * len(expected)
    for one, other, largest in zip(found, expected, each, strict=True):
        assert relative_error(one, other) < largest


def poison(array, length, value=np.nan):
    """`value` in the slots of a cache [B, K, S, H] beyond the lengths."""
    beyond = (np.arange(array.shape[2]) >= np.asarray(length)[:, None])[:, None, :, None]
    return jnp.where(beyond, value, array).astype(array.dtype)


# --- cache_scores ----------------------------------------------------------------------------


def make_score_inputs(rng, *, K=2, G=1, S=40, H=8, length=(40, 11), dtype=jnp.float32):
    B = len(length)
    q = jnp.asarray(rng.standard_normal((B, K * G, H)), dtype)
    k_cache = jnp.asarray(rng.standard_normal((B, K, S, H)), dtype)
    return q, k_cache, np.asarray(length, np.int32)


def define_scores(q, k_cache, length, mode, log_totals=None):
    """As `api.cache_scores`; "shares" are the weights before the mean, [B, K, S]."""
    q, k_cache = np.asarray(q, np.float64), np.asarray(k_cache, np.float64)
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    products = np.full((B, N, S), -np.inf)
    weights = np.zeros((B, N, S))
    for b, n in np.ndindex(B, N):
        if length[b]:
            row = k_cache[b, n * K // N, : length[b]] @ q[b, n]
            products[b, n, : length[b]] = row
            row = row / np.sqrt(H)
            total = np.log(np.exp(row - row.max()).sum()) + row.max()
            weights[b, n, : length[b]] = np.exp(
                row - (total if log_totals is None else log_totals[b, n])
            )
    if mode == "softmax":
        return weights.mean(axis=1)
    return (products if mode == "dot" else weights).reshape(B, K, N // K, S).sum(axis=2)


def check_scores(scores, inputs, mode):
    """In the type of the scores: products of bfloat16 are exact in float32."""
    q, k_cache, _ = inputs
    wide = accumulation_dtype(q.dtype)
    scores, expected = np.asarray(scores), define_scores(*inputs, mode)
    assert scores.dtype == wide and scores.shape == expected.shape
    # The largest product, its error, and what that does to a probability of at most 1.
    largest = float(jnp.max(jnp.abs(q)) * jnp.max(jnp.abs(k_cache))) * q.shape[2]
    tolerance = float(jnp.finfo(wide).eps) * largest
    if mode == "dot":
        np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(expected))
        tolerance *= q.shape[1] // k_cache.shape[1]
    else:
        np.testing.assert_array_equal(scores == 0, expected == 0)
        tolerance *= 4 * q.shape[2] ** -0.5
    np.testing.assert_allclose(scores, expected, rtol=0, atol=tolerance)


# --- norms, queries and keys -----------------------------------------------------------------


def make_norm(rng, shape, dtype):
    """Rows, an update in the type of sums, weight."""
    rows, update = (rng.standard_normal(shape) for _ in range(2))
    weight = jnp.asarray(rng.uniform(0.5, 2, shape[-1]), dtype)
    return jnp.asarray(rows, dtype), jnp.asarray(update, jnp.float32), weight


def define_norm(rows, weight, eps):
    rows = np.asarray(rows, float)
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, float)


def make_heads(rng, B, T, K, G, H, dtype, *, wide=True):
    fresh = jnp.asarray(rng.standard_normal((B, T, K, G + 2, H)), "float32" if wide else dtype)
    angles = rng.uniform(0, 6, (B, T, H // 2))
    return fresh, jnp.asarray(np.cos(angles), "float32"), jnp.asarray(np.sin(angles), "float32")


# --- devices ---------------------------------------------------------------------------------


def place(array, *axes):
    """On a mesh of 2 x 2 devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
