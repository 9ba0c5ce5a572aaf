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
from tsjax.model.cache import Attended, KVCache, init_cache

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

    def committed(self, length, parts=1):
        """The whole cache at these lengths, with NaN beyond them; dealt out to parts."""
        beyond = (np.arange(S) >= np.asarray(length)[:, None])[:, None, :, None]
        k, v = (
            tuple(jnp.asarray(np.where(beyond, np.nan, layer)) for layer in array)
            for array in (self.keys, self.values)
        )
        if parts > 1:
            k, v = (tuple(_dealt_out(layer, parts) for layer in layers) for layers in (k, v))
        return KVCache(k=k, v=v, length=jnp.asarray(length, jnp.int32), parts=parts)


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


@functools.partial(jax.jit, static_argnames=("num_sinks", "max_rows", "most_new", "once", "block"))
def refresh(
    draft, kv, query, num_sinks=SINKS, max_rows=MAX_ROWS, most_new=None, once=False, block=None
):
    """`block` slots of the whole cache are looked at together when all are chosen."""
    draft = poison(draft).replace(query=tuple(query))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", block or xla.BLOCK)
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


def run(steps, seed=0, share=None, parts=1, block=None, **sizes):
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
        kv = text.committed(length, parts) if plain else text.lacking(orders)
        draft = jax.device_get(refresh(before, kv, query, block=block, **sizes))
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


@pytest.mark.parametrize("parts", [5, 32])
def test_refreshes_from_a_cache_that_is_dealt_out(parts):
    """By the same rule; with 32 parts each has fewer slots than are chosen."""
    rng = np.random.default_rng(parts)
    commits = [[40, 17, 3], *rng.integers(0, MAX_ROWS + 2, (20, B)).tolist()]
    assert sum(run(commits, parts=parts)) >= B


def test_refreshes_in_x64():
    with jax.enable_x64(True):
        assert sum(run([[50, 7, 0], *[[2, 3, 5]] * 10])) >= B


def test_choices_after_n_new_tokens():
    """The fewer it takes, the more choices; never fewer than the sinks make necessary."""
    commits = [[2] * B] * (S // 2)
    counts = [sum(run(commits, most_new=n)) for n in (1, 8, M - SINKS, None)]
    assert counts[0] > counts[1] > counts[2] == counts[3]


@pytest.mark.parametrize("step", [1, 3, MAX_ROWS])
def test_one_token_to_several_per_step(step):
    """From the empty cache through several choices."""
    assert sum(run([[step] * B] * (S // step))) >= 2 * B


@pytest.mark.parametrize("prompt", [1, M - MAX_ROWS + 1, M, M + 1])
def test_prompts_of_about_the_budget(prompt):
    assert sum(run([[prompt, prompt + 1, 0], *[[2, 3, prompt]] * 12])) >= B - 1


@pytest.mark.parametrize("block", [1, M + 1, S - 1])
def test_choices_from_several_blocks(block):
    """In plain XLA. Blocks have at least M slots, and the last one may overlap."""
    assert sum(run([[40, 20, 83], *[[5, 3, 1]] * 12], block=block)) >= B


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


@pytest.mark.parametrize("num_sinks, max_rows", [(0, 1), (M - MAX_ROWS, MAX_ROWS)])
def test_other_sinks_and_steps(num_sinks, max_rows):
    commits = np.random.default_rng(0).integers(0, max_rows + 1, (40, B)).tolist()
    assert sum(run([[30, 4, 0], *commits], num_sinks=num_sinks, max_rows=max_rows)) >= B


def test_a_draft_cache_as_large_as_the_whole_one_holds_everything():
    """Up to the last tokens: as in a short run, where the budget is larger than the capacity."""
    capacity, draft = 23, init_draft_cache(CFG, 1, 23)
    kv, rng = init_cache(CFG, 1, capacity), np.random.default_rng(0)
    v = tuple(jnp.asarray(rng.standard_normal(array.shape), np.float32) for array in kv.v)
    for length in (2, 7, 8, 8, 13, 17, 18):  # MAX_ROWS more are left
        kv = kv.replace(v=v, length=jnp.asarray([length], jnp.int32))
        draft = refresh(draft, kv, draft.query)
        assert draft.length.tolist() == draft.seen.tolist() == [length]
        for layer in range(LAYERS):
            np.testing.assert_array_equal(draft.v[layer][:, :, :length], v[layer][:, :, :length])


def test_the_room_for_drafts_is_never_used_for_committed_tokens():
    draft, text = init_draft_cache(CFG, B, M, room=3), Text(5)
    for length in (5, 9, 30, 34, 60):
        draft = refresh(draft, text.committed([length] * B), text.queries())
        assert np.asarray(draft.length).tolist() == [min(length, M)] * B
        assert draft.capacity == M and draft.k[0].shape[2] == M + 3
        for index in np.ndindex(LAYERS, B, K):
            positions = read_positions(draft, text, *index)
            assert len(set(positions)) == min(length, M) and max(positions) < length


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


@pytest.mark.parametrize(("back", "expected"), [(0, [3, 2, 2]), (2, [4, 1, 2])])
def test_a_layer_grows_until_its_own_tokens_no_longer_fit(back, expected):
    """Prompts of 16, 4 and 60 tokens, half of them in the second layer, and 15 steps of 2.

    The first row is chosen at the prompt, when its first layer overflows (step 3) and when its
    second does: in step 7, or with all tokens back in step 4, and once more in step 13. The second
    grows up to step 9 in both layers, and the second layer a step longer where tokens stay away.
    The third begins with more than fits.
    """
    steps = [[(16, 0), (4, 0), (60, 0)], *[[(2, back)] * B] * 15]
    assert run(steps, seed=1, share=0.5) == expected


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
    rounding = 1e-6  # of what all tokens amount to
    for found, rest, (_, seen) in zip(
        jax.jit(summarize_rest)(draft), expected, attended, strict=True
    ):
        for (b, n), wanted in zip(np.ndindex(B, K * G), rest, strict=True):
            if wanted is None:
                assert found.log_total[b, n] < -1e29 and not np.any(found.mean[b, n])
                continue
            error = 4 * rounding / np.exp(wanted[1] - seen.log_total[b, n])
            np.testing.assert_allclose(found.mean[b, n], wanted[0], rtol=0, atol=error)
            np.testing.assert_allclose(found.log_total[b, n], wanted[1], rtol=0, atol=error)


def test_before_the_first_step_there_is_no_rest():
    draft = init_draft_cache(CFG, B, M, with_rest=True).replace(length=jnp.asarray([0, 3, M]))
    for mean, log_total in summarize_rest(draft):
        assert not np.any(mean) and (np.asarray(log_total) < -1e29).all()
