# SPDX-License-Identifier: Apache-2.0
"""The draft cache against its rule.

The values in the cache say which layer, row, head and position they belong to, so a test can read
what the draft cache holds. Keys and queries are small integers that rank all positions differently
for every layer, row and head: importance is exact, and no two positions are equal.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from pallas_kernels import Summary
from pallas_kernels.best_slots import xla
from tsjax.methods import partial_cache
from tsjax.methods.partial_cache import init_draft_cache, refresh_draft_cache, summarize_rest
from tsjax.model.cache import Attended, KVCache

pytestmark = pytest.mark.usefixtures("strict_promotion")

# --- the rule ---------------------------------------------------------------------------------

B, K, S = 3, 2, 96
M, SINKS, MAX_ROWS = 20, 3, 5
CFG = tiny_config(num_kv_heads=K, head_dim=4)
LAYERS = CFG.num_layers


class Held:
    """The rule of DraftCache for the layers of one row: which positions are in which slots.

    Attributes:
      slots: of each layer and kv head, positions.
      known: of each layer, how many it had when this was last brought up to date.
      end: where the last new tokens that overwrote others begin.
    """

    def __init__(self, num_sinks=SINKS, max_rows=MAX_ROWS, most_new=None, once=False):
        self.num_sinks, self.max_rows, self.once = num_sinks, max_rows, once
        self.lowest = max(num_sinks, M - (M if most_new is None else most_new))
        self.slots = {index: [] for index in np.ndindex(LAYERS, K)}
        self.known, self.seen, self.end, self.choices = [0] * LAYERS, 0, 0, 0

    def refresh(self, orders, importance):
        """`orders`: of each layer the positions that it has; the new ones are the last."""
        committed, known = len(orders[0]) - self.seen, self.known
        if not committed:
            return
        self.seen, self.known = len(orders[0]), list(map(len, orders))
        end = self.end - committed
        if self.once and end < self.lowest:
            end = M - committed
        if all(self._slides(*layer, committed, end) for layer in zip(known, orders, strict=True)):
            for (layer, _), slots in self.slots.items():
                order = orders[layer]
                if known[layer] <= M:
                    assert sorted(slots) == sorted(order[: known[layer]])
                    slots += order[known[layer] :]
                else:
                    new = order[-committed:]
                    slots[end : end + committed] = new[::-1] if self.once else new
            self.end = min(self.seen, M) if max(known) <= M else end
            return
        self.choices, self.end = self.choices + 1, min(self.seen, M)
        for (layer, head), slots in self.slots.items():
            order, sinks = orders[layer], self.num_sinks
            best = sorted(order[sinks:], key=lambda p: -importance[layer, head][p])  # noqa: B023
            slots[:] = [*order[:sinks], *best][:M]

    def _slides(self, known, order, committed, end):
        if known <= M:
            return len(order) <= M and len(order) - known <= self.max_rows
        return committed <= self.max_rows and end >= self.lowest


class Text:
    """The keys and values of S tokens, and queries."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        shape = (LAYERS, B, K)
        # Two rankings of the positions, and two dimensions that no query looks at.
        ranks = self.rng.permuted(np.broadcast_to(np.arange(S), (*shape, 2, S)), axis=-1)
        noise = self.rng.standard_normal((*shape, S, 2))
        self.keys = np.concatenate([np.swapaxes(ranks, -1, -2), noise], -1).astype(np.float32)
        index = np.meshgrid(*map(np.arange, (*shape, S)), indexing="ij")
        self.values = np.stack(index, -1).astype(np.float32)  # layer, row, head, position

    def queries(self):
        """[LAYERS, B, K, H], each of which looks at the rankings in another way."""
        weights = np.asarray([[1, 128], [128, 1], [-1, 128], [128, -1], [-128, 1], [1, -128]])
        chosen = weights[self.rng.integers(0, len(weights), (LAYERS, B, K))]
        return np.concatenate([chosen, np.zeros_like(chosen)], -1).astype(np.float32)

    def lacking(self, orders):
        """A whole cache whose layer has the positions orders[layer][b] of row b, in this order."""
        count = np.asarray([[len(order) for order in of_rows] for of_rows in orders])  # [L, B]
        length = count.max(axis=0)
        k, v = (tuple(map(self._in_order, array, orders)) for array in (self.keys, self.values))
        absent = jnp.asarray(length - count, jnp.int32)
        return KVCache(k=k, v=v, length=jnp.asarray(length, jnp.int32), absent=absent)

    def _in_order(self, layer, orders):
        rows = np.full_like(layer, np.nan)
        for b, order in enumerate(orders):
            rows[b, :, : len(order)] = layer[b][:, order]
        return jnp.asarray(rows)

    def dealt_out(self, orders, parts):
        """A whole cache whose layers lack nothing, in parts."""
        kv = self.lacking(orders)
        k, v = (tuple(_dealt_out(layer, parts) for layer in layers) for layers in (kv.k, kv.v))
        return KVCache(k=k, v=v, length=kv.length, parts=parts)


def _dealt_out(layer, parts):
    """As parts.py says: row p * B + b has the tokens p, p + parts, ... of text b."""
    missing = -S % parts
    layer = jnp.pad(layer, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=jnp.nan)
    return jnp.concatenate([layer[:, :, part::parts] for part in range(parts)])


def poison(draft):
    """NaN in the slots beyond the rows of each layer."""
    slots = jnp.arange(draft.k[0].shape[2], dtype=jnp.int32)[None]
    k, v = (
        tuple(
            jnp.where((slots < draft.rows_in(layer)[:, None])[:, None, :, None], array, jnp.nan)
            for layer, array in enumerate(arrays)
        )
        for arrays in (draft.k, draft.v)
    )
    return draft.replace(k=k, v=v)


@functools.partial(
    jax.jit, static_argnames=("num_sinks", "max_rows", "most_new", "once", "block", "at_once")
)
def refresh(
    draft, kv, query, num_sinks=SINKS, max_rows=MAX_ROWS, most_new=None, once=False, block=None,
    at_once=False,
):  # fmt: skip
    """`block` slots of the whole cache are looked at together when all are chosen. Rows slide one
    by one, or `at_once` as on a GPU."""
    draft = poison(draft).replace(query=tuple(query))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", block or xla.BLOCK)
        if at_once:
            patch.setattr(partial_cache, "for_each_row", lambda _, write, *arrays: write(*arrays))
        return refresh_draft_cache(
            draft, kv, num_sinks=num_sinks, max_rows=max_rows, most_new=most_new, once=once
        )


def read_positions(draft, text, layer, b, head):
    """The position in each slot; a slot holds the key and the value of the same token."""
    length = int(draft.rows_in(layer)[b])
    values = np.asarray(draft.v[layer][b, head, :length])
    positions = values[:, 3].astype(int)
    np.testing.assert_array_equal(values, text.values[layer, b, head, positions])
    keys = np.asarray(draft.k[layer][b, head, :length])
    np.testing.assert_array_equal(keys, text.keys[layer, b, head, positions])
    return positions.tolist()


def run(steps, seed=0, share=None, parts=1, block=None, at_once=False, **sizes):
    """Refreshes with the rule alongside; how often each row chose.

    steps[step][b] says how many tokens a row commits, the first step its prompt. With a `share`
    layers lack tokens: each but the first has that share of the prompt, and steps[step][b] says too
    how many come back before.
    """
    text, rng, plain = Text(seed), np.random.default_rng(seed), share is None
    sizes = dict(num_sinks=SINKS, max_rows=MAX_ROWS) | sizes
    draft = init_draft_cache(CFG, B, M)
    draft = draft if plain else draft.with_absent()
    rules = [Held(**sizes) for _ in range(B)]
    orders, missing = ([[[] for _ in range(B)] for _ in range(LAYERS)] for _ in range(2))
    for number, step in enumerate(steps):
        for b, moved in enumerate(step):
            commit, back = (moved, 0) if plain else moved
            length = len(orders[0][b])
            # As a finished row, one without room commits nothing.
            new = range(length, length + commit * (length + commit + sizes["max_rows"] <= S))
            for layer in range(LAYERS):
                order, lost = orders[layer][b], missing[layer][b]
                if number == 0 and layer and not plain:
                    lost += rng.permutation(new)[round(share * len(new)) :].tolist()
                    order += sorted({*new} - {*lost})
                    continue
                order += sorted(lost[:back])
                del lost[:back]
                order += new
        before, query, length = draft, text.queries(), [len(order) for order in orders[0]]
        kv = text.dealt_out(orders, parts) if plain else text.lacking(orders)
        draft = jax.device_get(refresh(before, kv, query, block=block, at_once=at_once, **sizes))
        np.testing.assert_array_equal(draft.query, query)
        for b, rule in enumerate(rules):
            is_new = length[b] > rule.seen
            importance = np.einsum("lksh,lkh->lks", text.keys[:, b], query[:, b])
            rule.refresh([order[b] for order in orders], importance)
            assert (draft.seen[b], draft.length[b]) == (rule.seen, min(rule.seen, M))
            assert draft.seen.dtype == draft.length.dtype == draft.newest.dtype == np.int32
            assert draft.newest[b] == rule.end
            for (layer, head), slots in rule.slots.items():
                found = read_positions(draft, text, layer, b, head)
                assert sorted(found) == sorted(slots)
                if not is_new:
                    assert found == read_positions(before, text, layer, b, head)
    return [rule.choices for rule in rules]


# --- refreshes --------------------------------------------------------------------------------

# A prompt, and then what steps commit; more than MAX_ROWS at once is a reason to choose again.
commits_strategy = st.tuples(
    st.tuples(*[st.integers(0, 40)] * B),
    st.lists(
        st.tuples(*[st.sampled_from([0, 1, 1, 2, 3, MAX_ROWS, MAX_ROWS, MAX_ROWS + 2])] * B),
        max_size=16,
    ),
).map(lambda draft: [draft[0], *draft[1]])


@hypothesis.given(commits_strategy, st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=30)
def test_refreshes(commits, seed):
    run(commits, seed)


RANDOM = np.random.default_rng(0).integers(0, MAX_ROWS + 1, (30, B)).tolist()
CASES = {  # what is committed, and how it is chosen
    "dealt out to 5 parts": ([[40, 17, 3], *RANDOM], dict(parts=5)),
    "parts with fewer slots than are chosen": ([[40, 17, 3], *RANDOM], dict(parts=32)),
    "slot by slot": ([[40, 20, 83], *[[5, 3, 1]] * 12], dict(block=1)),
    "blocks that overlap": ([[40, 20, 83], *[[5, 3, 1]] * 12], dict(block=M + 1)),
    "no sinks": ([[30, 4, 0], *[[1, 0, 1]] * 40], dict(num_sinks=0, max_rows=1)),
    "many sinks": ([[30, 4, 0], *RANDOM], dict(num_sinks=M - MAX_ROWS)),
    "once": ([[22, 17, 3], *RANDOM], dict(once=True)),
    "as on a GPU": ([[22, 17, 3], *RANDOM], dict(at_once=True)),
    "as on a GPU, once": ([[22, 17, 3], *RANDOM], dict(once=True, at_once=True)),
    "as on a GPU, in parts": ([[40, 17, 3], *RANDOM], dict(parts=5, at_once=True)),
    "about the budget": ([[M - 1, M, M + 1], *[[2, 3, MAX_ROWS]] * 12], {}),
    "nearly the budget": ([[M - MAX_ROWS, M - MAX_ROWS + 1, 0], *[[2, 3, M]] * 12], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_refreshes_of_one_kind(name):
    commits, how = CASES[name]
    with jax.enable_x64(name == "about the budget"):
        assert sum(run(commits, **how)) >= B - 1


def test_choices_after_n_new_tokens():
    """The fewer it takes, the more choices; never fewer than the sinks make necessary."""
    commits = [[2] * B] * (S // 2)
    counts = [sum(run(commits, most_new=n)) for n in (1, 8, M - SINKS, None)]
    assert counts[0] > counts[1] > counts[2] == counts[3]


@pytest.mark.parametrize("step", [1, 3, MAX_ROWS])
def test_one_token_to_several_per_step(step):
    """From the empty cache through several choices."""
    assert sum(run([[step] * B] * (S // step))) >= 2 * B


WAYS = {"by_layer": partial_cache.slots_by_layer, "at_once": partial_cache.slots_at_once}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots, count, num_sinks", [(96, 20, 3), (33, 33, 0), (7, 5, 9)])
def test_important_slots(way, slots, count, num_sinks):
    """On a CPU and on a GPU: sinks, then by score, equal ones by position, as far as there are."""
    find = jax.jit(functools.partial(WAYS[way], count=count, num_sinks=num_sinks))

    def check(seed):
        rng = np.random.default_rng(seed)
        length = rng.integers(1, slots + 1)
        scores = 10 * rng.standard_normal((3, 1, 2, slots))
        scores = np.where(rng.random(scores.shape) < 0.3 * (seed % 4), np.round(scores, -1), scores)
        scores = (scores + 0.0).astype(np.float32)  # no negative zeros
        scores[..., length:] = -np.inf  # no key
        found = find(tuple(map(jnp.asarray, scores)), jnp.full(1, length, jnp.int32))
        for index in np.ndindex(3, 1, 2):
            row, known = scores[index], min(count, length)
            best = [*range(min(num_sinks, length))]
            best += sorted(range(len(best), length), key=lambda i: -row[i])  # noqa: B023
            assert np.asarray(found[index[0]])[index[1:]][:known].tolist() == best[:known]

    for seed in range(20):
        check(seed)


# --- layers that lack tokens --------------------------------------------------------------------


def lacking_steps(commits, backs):
    """A prompt, and then what steps commit and what comes back before."""
    commit, back = st.sampled_from(commits), st.sampled_from(backs)
    prompt = st.tuples(st.integers(0, 50), st.just(0))
    return st.tuples(
        st.tuples(*[prompt] * B), st.lists(st.tuples(*[st.tuples(commit, back)] * B), max_size=14)
    ).map(lambda drawn: [drawn[0], *drawn[1]])


LACKING = {
    "default": {},
    "once": dict(once=True),
    "chosen often": dict(most_new=6),
    "no sinks": dict(num_sinks=0),
}


@pytest.mark.parametrize("name", LACKING)
@hypothesis.given(
    lacking_steps([0, 1, 1, 2, 3, MAX_ROWS, MAX_ROWS + 2], [0, 0, 0, 1, 2, 9]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 0.6, 1.0]),
)
@hypothesis.settings(max_examples=20)
def test_refreshes_where_layers_lack_tokens(name, steps, seed, share):
    run(steps, seed, share, **LACKING[name])


# --- the rest ---------------------------------------------------------------------------------


def attend(query, keys, values):
    """Mean and log total of one query, in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum(), scores.max() + np.log(weights.sum())


def test_the_rest_is_what_is_not_in_the_draft_cache():
    rng, G, H, lengths, held = np.random.default_rng(3), 3, 8, [40, 25, 12], [10, 24, 12]
    cfg = tiny_config(num_kv_heads=K, num_heads=K * G, head_dim=H)
    draft = init_draft_cache(cfg, B, 24, room=2, with_rest=True)
    buffers = {name: [np.full(x.shape, np.nan, np.float32) for x in draft.k] for name in "kv"}
    attended, expected = [], []
    for layer in range(cfg.num_layers):
        query = 2 * rng.standard_normal((B, K * G, H)).astype(np.float32)
        all_seen, rest = [], []
        for b, n in np.ndindex(B, K * G):
            head = n // G
            if n % G == 0:
                k, v = rng.standard_normal((2, lengths[b], H)).astype(np.float32)
                here = rng.permutation(lengths[b])[: held[b]]
                elsewhere = np.setdiff1d(np.arange(lengths[b]), here)
                buffers["k"][layer][b, head, : held[b]] = k[here]
                buffers["v"][layer][b, head, : held[b]] = v[here]
            all_seen.append(attend(query[b, n], k, v))
            some = len(elsewhere) > 0
            rest.append(attend(query[b, n], k[elsewhere], v[elsewhere]) if some else None)
        mean, log_total = (np.stack(x).astype(np.float32) for x in zip(*all_seen, strict=True))
        mean, log_total = mean.reshape(query.shape), log_total.reshape(query.shape[:2])
        attended.append(Attended(query, Summary(mean, log_total)))
        expected.append(rest)
    k, v = map(tuple, buffers.values())
    length = jnp.asarray(held, jnp.int32)
    draft = draft.replace(k=k, v=v, length=length, attended=tuple(attended))
    found_by_layer, rounding = jax.jit(summarize_rest)(draft), 1e-6  # of what all tokens amount to
    for found, rest, (_, seen) in zip(found_by_layer, expected, attended, strict=True):
        for (b, n), wanted in zip(np.ndindex(B, K * G), rest, strict=True):
            if wanted is None:
                assert found.log_total[b, n] < -1e29 and not np.any(found.mean[b, n])
                continue
            error = 4 * rounding / np.exp(wanted[1] - seen.log_total[b, n])
            np.testing.assert_allclose(found.mean[b, n], wanted[0], rtol=0, atol=error)
            np.testing.assert_allclose(found.log_total[b, n], wanted[1], rtol=0, atol=error)
