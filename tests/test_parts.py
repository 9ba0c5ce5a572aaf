# SPDX-License-Identifier: Apache-2.0
"""Caches that are dealt out to parts, on one device: the rule, token by token.

NumPy arrays say where each token belongs; attention is that to a cache that is not dealt out.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Ranks, tree_attention
from tsjax.model import cache as cache_module
from tsjax.model import parts as rule
from tsjax.model.cache import KVCache, write_rows

pytestmark = pytest.mark.usefixtures("strict_promotion")

B, K, H = 2, 2, 4


def dealt(tokens, parts):
    """[B, K, S, H] as the rule says, token by token; slots that no token has are NaN."""
    slots = -(-tokens.shape[2] // parts)
    found = np.full((parts * len(tokens), tokens.shape[1], slots, tokens.shape[3]), np.nan)
    for b, s in np.ndindex(len(tokens), tokens.shape[2]):
        found[(s % parts) * len(tokens) + b, :, s // parts] = tokens[b, :, s]
    return found.astype(np.float32)


@functools.partial(jax.jit, static_argnames="at_once")
def written(cache, k, v, start, at_once=False):
    """Row by row, or all `at_once` as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cache_module, rule) if at_once else ():
            patch.setattr(module, "for_each_row", lambda _, write, *arrays: write(*arrays))
        return write_rows(cache, (k,), (v,), start, after=jnp.zeros(1))


taken = jax.jit(rule.taken_by_part, static_argnames="parts")


@hypothesis.given(
    st.sampled_from([1, 3, 8]),
    st.sampled_from([12, 17]),
    st.lists(st.tuples(st.sampled_from([1, 8]), *[st.integers(0, 8)] * B), max_size=8),
)
@hypothesis.settings(max_examples=15)
def test_rows_are_written_where_they_belong(parts, capacity, writes):
    """At any place, over what is there, up to the last slot; what comes before them stays."""
    rng, length = np.random.default_rng(0), np.zeros(B, int)
    texts = np.zeros((2, B, K, capacity, H), np.float32)
    empty = jnp.full((parts * B, K, -(-capacity // parts), H), jnp.nan)
    cache = KVCache(k=(empty,), v=(empty,), length=jnp.zeros(B, jnp.int32), parts=parts)
    for rows, *kept in writes:
        start = np.minimum(length, capacity - rows)
        new = rng.standard_normal((2, B, rows, K, H)).astype(np.float32)
        for b in range(B):
            texts[:, b, :, start[b] : start[b] + rows] = np.swapaxes(new[:, b], 1, 2)
        k, v = map(jnp.asarray, new)
        at = jnp.asarray(start, jnp.int32)
        cache, earlier = written(cache, k, v, at), cache
        once = written(earlier, k, v, at, at_once=True)
        np.testing.assert_array_equal(once.k[0], cache.k[0])
        length = start + np.minimum(kept, rows)
        every = np.broadcast_to(np.arange(capacity, dtype=np.int32), (B, K, capacity))
        for text, buffer in zip(texts, (cache.k[0], cache.v[0]), strict=True):
            found = np.asarray(taken(buffer, jnp.asarray(every), parts=parts))
            for b in range(B):
                end = start[b] + rows
                np.testing.assert_array_equal(found[b, :, :end], text[b, :, :end])


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_counts_positions_and_order(parts):
    count = np.arange(17, dtype=np.int32)
    found = np.asarray(rule.counts_by_part(jnp.asarray(count), parts)).reshape(parts, -1)
    for part in range(parts):
        assert found[part].tolist() == [len(range(part, n, parts)) for n in count]
    text = np.arange(parts * 5, dtype=np.float32)
    tokens = np.stack([text, 100 + text])[:, None, :, None]
    by_part = dealt(tokens, parts)[..., 0]
    np.testing.assert_array_equal(rule.in_order(jnp.asarray(by_part), parts), tokens[..., 0])
    np.testing.assert_array_equal(rule.dealt_out(jnp.asarray(tokens[..., 0]), parts), by_part)
    positions = np.asarray(rule.positions_by_part(2 * parts, 5, parts))
    np.testing.assert_array_equal(positions, by_part[:, 0] % 100)


@pytest.mark.parametrize("parts", [2, 3])
def test_attention_is_that_of_the_whole_cache(parts):
    """Ragged rows, of which some parts have nothing yet; what no token has is NaN."""
    rng, S, T, N = np.random.default_rng(parts), 37, 3, 4
    k, v = rng.standard_normal((2, 4, K, S, 8)).astype(np.float32)
    q = rng.standard_normal((4, T, N, 8)).astype(np.float32)
    k_new, v_new = rng.standard_normal((2, 4, T, K, 8)).astype(np.float32)
    mask = np.tril(np.ones((T, T), bool))
    for length in ([0, 1, 2, 37], [3, 36, 17, 5]):
        length = np.asarray(length, np.int32)
        beyond = (np.arange(S) >= length[:, None])[:, None, :, None]
        held = [dealt(np.where(beyond, np.nan, x), parts) for x in (k, v)]
        order = np.stack([rng.permutation(S) for _ in length]).astype(np.int32)
        below = rng.integers(0, S, (4, T)).astype(np.int32)
        for ranks in (None, Ranks(order, below)):
            wanted = tree_attention(
                q, k, v, length, k_new, v_new, mask, ranks=ranks, with_log_totals=True
            )
            found = jax.jit(rule.attention_by_part, static_argnames="parts")(
                q, *held, length, k_new, v_new, mask, parts=parts, ranks=ranks
            )
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
