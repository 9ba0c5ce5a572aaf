# SPDX-License-Identifier: Apache-2.0
"""LazyLLM against a slow oracle of sets, against the full prefill, and against itself.

Sizes that must not matter (chunks, buckets, batches, methods) are varied against one result.
"""

import dataclasses
import functools
import signal
from types import SimpleNamespace

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import FUSED_AS_FOR_USERS, IN_PLACE, looping_model, operations, tiny_model
from helpers import PROMPTS as SHORT_PROMPTS
from lazy_oracle import LazyOracle

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.reading import prefill, read_part
from tsjax.decoding.start import init_state
from tsjax.decoding.state import Verdict
from tsjax.decoding.step import commit
from tsjax.decoding.verification import accept
from tsjax.host import run as host_run
from tsjax.host.asking import make_request
from tsjax.host.interrupt import Interrupt
from tsjax.host.reading import kept_prefix
from tsjax.host.run import start_run
from tsjax.lazy import revival
from tsjax.lazy.choice import best_tokens
from tsjax.lazy.revival import run_root
from tsjax.lazy.stages import note_committed
from tsjax.model import control_flow
from tsjax.model.transformer import final_norm, unembed

CUTS = {1: 0.7, 2: 0.49, 3: 0.343}
LAYERS = 4
CAPACITY, STEPS = 160, 8
MANY = dict(keep={2: 0.7, 3: 0.4}, window=4, pool=3, score_layers=2, sinks=2, recent=3)
OPTIONS = {  # and sizes, which must not matter
    "paper": (dict(keep=CUTS, revive="on_demand", revive_rows=5), dict(width=1, capacity=256)),
    "in batches, options": (dict(MANY, revive_rows=2, choose_every=3), dict(prompt_capacity=80)),
    "background": (
        dict(keep=CUTS, revive="background", choose_every=2, revive_rows=7),
        dict(width=64),
    ),
}
WIDE_OPTIONS = {
    "almost nothing": (dict(keep={1: 0.02, 3: 0.02}, revive="on_demand", revive_rows=8), {}),
    "options": (dict(MANY, revive="on_demand", revive_rows=8), {}),
    "in batches, always": (dict(keep={1: 0.5, 2: 0.2}, choose_every=1, revive_rows=20), {}),
    "no revival, options": (dict(MANY, keep=CUTS, revive="never", recent=9), {}),
    "blocks": (dict(keep=CUTS, block=4, at_least=23, revive_rows=6, choose_every=3), {}),
}


def some_wide(names, wide):
    return [*names, *(pytest.param(name, marks=pytest.mark.wide) for name in wide)]


@functools.cache
def model(dtype: str = "float64", num_layers: int = LAYERS, **changes) -> tsjax.Model:
    return tiny_model(num_layers=num_layers, dtype=dtype, **changes)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length).tolist() for length in lengths]


PROMPTS = prompts_of(53, 37, 5)
# For `generate`, which compiles a program for each stage: three layers, and passes of one width.
# The cuts are those of keep="paper", so that many tests share their programs.
SHORT_CUTS = {1: 0.49, 2: 0.343}
SIZES = dict(capacity=CAPACITY, prefill_width=64)


def small(dtype: str = "float32", **changes) -> tsjax.Model:
    return model(dtype, num_layers=3, **changes)


class Run:
    """A prompt decoded step by step, with the logits of each step."""

    def __init__(self, model, cfg, state):
        self.model, self.cfg, self.state = model, cfg, state

    @classmethod
    def of(cls, model, prompts, lazy, *, width=16, capacity=CAPACITY, prompt_capacity=64):
        cfg = tsjax.steps.DecodeConfig(model=model.cfg, prefill=lazy)
        length = np.asarray([len(row) for row in prompts])
        tokens = np.zeros((len(prompts), max(length)), np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        state = init_state(
            tokens, length, cfg=cfg, capacity=capacity, max_length=length + 50,
            prompt_capacity=prompt_capacity,
        )  # fmt: skip
        read = jax.jit(prefill, static_argnames=("width", "cfg"))
        return cls(model, cfg, read(model.params, state, width=width, cfg=cfg))

    @classmethod
    def after_prefix(cls, model, prompts, lazy, prefix: tsjax.Prefix):
        request = make_request(
            model, prompts, None, dict(max_new_tokens=50), prefill=lazy, prefix=prefix,
            prefill_width=16, capacity=CAPACITY,
        )  # fmt: skip
        return cls(model, request.decode, start_run(model, request, Interrupt()))

    def step(self) -> np.ndarray:
        """The logits [B, V] after the root, which the step then decides."""
        self.state, logits = _step(self.model.params, self.state, cfg=self.cfg)
        return np.asarray(logits)

    def sets(self, row: int) -> list[set[int]]:
        n = int(self.state.prompt_length[row])
        return [
            set(np.flatnonzero(chosen[row][:n]).tolist()) for chosen in self.state.prompt.chosen
        ]


@functools.partial(jax.jit, static_argnames=("cfg",))
def _step(params, state, *, cfg):
    """A greedy step of decoding, put together to see its logits."""
    plan = cfg.prefill.plan(cfg.model)
    state, rows = run_root(plan, params, state)
    normed = final_norm(params.model, rows.hidden, cfg=cfg.model)
    logits = unembed(params.model, normed, cfg=cfg.model)
    _, tree = cfg.method.draft(cfg.model, params, state, None)
    verdict = Verdict(target=jnp.argmax(logits, axis=-1).astype(jnp.int32), rows=rows)
    after = commit(state, tree, verdict, accept(tree, verdict.target))
    prompt = note_committed(plan, state, 0, after=after.kv.length)
    return after.replace(prompt=prompt), logits[:, 0]


@pytest.mark.parametrize("name", some_wide(OPTIONS, WIDE_OPTIONS))
def test_sets_and_logits_are_those_of_the_oracle(name):
    options, sizes = (OPTIONS | WIDE_OPTIONS)[name]
    lazy = tsjax.LazyPrefill(**options)
    with jax.enable_x64(True):
        prompts = PROMPTS if max(lazy.kept_anyway.values()) <= 5 else PROMPTS[:2]
        run = Run.of(model(), prompts, lazy, **sizes)
        begun = np.asarray(run.state.prompt.computed).sum((1, 2))
        go_as_oracles(run, [LazyOracle(model(), prompt, lazy) for prompt in prompts])
        prompt = run.state.prompt
        revived = np.asarray(prompt.computed).sum((1, 2)) - begun
        assert revived[0] == 0 and (revived[1:] > 0).all() == (lazy.revive != "never")
        for row, ids in enumerate(prompts):  # each token at most once, each layer with all it has
            computed = np.asarray(prompt.computed)[:, row, : len(ids) - 1]
            assert set(np.unique(computed)) <= {0, 1}
            absent = np.asarray(run.state.kv.absent)[:, row]
            for stage, layers in enumerate(lazy.plan(run.cfg.model).stages):
                assert set(absent[layers]) == {len(ids) - 1 - computed[stage].sum()}


def go_as_oracles(run, oracles):
    revive = oracles[0].lazy.revive
    for _ in range(STEPS):
        logits = run.step()
        for row, oracle in enumerate(oracles):
            np.testing.assert_allclose(logits[row], oracle.logits, rtol=0, atol=1e-9)
            if revive in ("on_demand", "never"):  # else new tokens see all that there is
                assert run.sets(row) == oracle.sets
            root = int(run.state.root[row])
            assert root == np.argmax(oracle.logits)
            oracle.step(root)


@pytest.mark.parametrize("name", some_wide(["paper"], ["in batches, options", "background"]))
def test_after_a_prefix_cuts_choose_among_new_tokens(name):
    lazy = tsjax.LazyPrefill(**OPTIONS[name][0])
    begin = PROMPTS[0][:21]
    prompts = [PROMPTS[0], [*begin, *PROMPTS[1][:17]], [*begin, 3, 1, 4, 1]]
    with jax.enable_x64(True):
        prefix = tsjax.read(model(), [*begin, 60], prefill_width=16, capacity=CAPACITY)
        run = Run.after_prefix(model(), prompts, lazy, prefix)
        go_as_oracles(run, [LazyOracle(model(), prompt, lazy, 21) for prompt in prompts])
    assert not np.asarray(run.state.prompt.computed)[:, :, :21].any()


@pytest.mark.parametrize("name", some_wide(["background"], ["paper", "no revival, options"]))
def test_a_prefix_that_is_kept_is_a_whole_one(name):
    """With all rows in the order of the text; where its end was stopped, with the first ones."""
    lazy = tsjax.LazyPrefill(**(OPTIONS | WIDE_OPTIONS)[name][0])
    prompt, told = [*PROMPTS[0], *PROMPTS[1]], []
    how = dict(max_new_tokens=STEPS, prefill=lazy, prefill_width=16, capacity=CAPACITY)
    with jax.enable_x64(True):
        prefix = tsjax.read(model(), prompt[:10], prefill_width=16, capacity=CAPACITY)
        how["prefix"] = prefix
        oracle = LazyOracle(model(), prompt, lazy, 9)
        result = tsjax.generate(model(), prompt, keep_prefix=True, progress=told.append, **how)
        for token in result.tokens[0][:-1]:
            assert token == np.argmax(oracle.logits)
            oracle.step(token)
        how.pop("max_new_tokens")
        request = make_request(model(), prompt, None, dict(max_new_tokens=STEPS), **how)

        def kept(interrupt):
            *_, news = host_run.run(model(), request, Interrupt())
            return kept_prefix(model(), request, news, interrupt)

        stopped, interrupted = kept(None), kept(InSecondPass())
        assert_rows(stopped, oracle)
        lacking = [i for i in range(len(prompt)) if any(i not in keys for keys in oracle.keys)]
        assert stopped.length == lacking[0] and stopped.is_approximate
        oracle.complete()
        assert_rows(result.prefix, oracle)
        assert_rows(interrupted, oracle)
    # All that is lacking may have come in one pass.
    assert interrupted.length in [*lacking[1:], result.prefix.length]
    assert name != "background" or interrupted.length < len(prompt)
    assert result.prefix.length == len(prompt) + STEPS - 1
    assert any("left out" in one.what and one.done == len(lacking) for one in told)


class InSecondPass(Interrupt):
    """Ctrl-C while the second pass of a completion runs."""

    passes = 0

    def meet(self):
        self.passes += 1
        self._number = signal.SIGINT if self.passes == 2 else None


def assert_rows(prefix, oracle):
    """The first ones of a prefix are those of the oracle, in all layers."""
    for ours, theirs in ((prefix.cache.k, oracle.keys), (prefix.cache.v, oracle.values)):
        for buffer, rows in zip(ours, theirs, strict=True):
            wanted = np.stack([rows[i] for i in range(prefix.length)], axis=1)
            found = np.asarray(buffer)[0, :, : prefix.length]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_what_was_read_lazily_is_in_no_file(tmp_path):
    path = tmp_path / "run.json"
    kept = lazily(max_new_tokens=4, keep_prefix=True)
    longer = [*PROMPTS[0], *kept.tokens[0].tolist(), 5, 6]
    with pytest.raises(ValueError, match="save_to is not valid beside a prefix that a lazy"):
        lazily(longer, max_new_tokens=4, prefix=kept.prefix, save_to=path)
    again = lazily(longer, max_new_tokens=4, prefix=kept.prefix, prefill=None, keep_prefix=True)
    assert again.prefix.is_approximate and again.stats.prefix_tokens == len(PROMPTS[0]) + 3
    lazily(longer, max_new_tokens=4, save_to=path, prefill=None)
    with pytest.raises(ValueError, match="resume_from is not valid beside a prefix that a lazy"):
        tsjax.generate(small(), resume_from=path, max_new_tokens=5, prefix=kept.prefix, **SIZES)


@pytest.mark.parametrize("revive", some_wide(["in_batches"], ["on_demand", "background", "never"]))
def test_after_a_prefix_to_keep_all_is_the_full_prefill(revive):
    """And a prompt with one token after its prefix has nothing to prune."""
    lazy = tsjax.LazyPrefill(keep={1: 1.0, 2: 1.0}, revive=revive, choose_every=4)
    prefix = tsjax.read(small(), PROMPTS[0][:30], **SIZES)
    settings = dict(max_new_tokens=20, prefix=prefix)
    full, result = (lazily(prefill=one, **settings) for one in (None, lazy))
    assert texts(result) == texts(full) and full.stats.prompt_computed == ()
    assert result.stats.prompt_computed == (1.0, 1.0, 1.0)
    one = lazily(PROMPTS[0][:30], prefill=OFTEN, **settings)
    assert one.stats.prompt_computed == () and one.stats.prefix_tokens == 29
    assert texts(one) == texts(lazily(PROMPTS[0][:30], prefill=None, **settings))


@pytest.mark.parametrize("revive", ["in_batches", "background"])
def test_passes_to_spare_change_nothing(revive, monkeypatch):
    """A GPU makes all passes of a revival, whether tokens are left for them or not."""
    lazy = tsjax.LazyPrefill(keep=SHORT_CUTS, revive=revive, choose_every=2, revive_rows=6)
    run, logits = Run.of(small(), PROMPTS, lazy), {}
    monkeypatch.setattr(revival, "PASS_ROWS", 2)
    for platform in ("default", "cuda"):

        def choose(*operands, platform=platform, **branches):
            return branches[platform](*operands)

        chosen = SimpleNamespace(**{**vars(jax.lax), "platform_dependent": choose})
        with monkeypatch.context() as patch:
            patch.setattr(control_flow, "lax", chosen)
            step = jax.jit(lambda state: _step.__wrapped__(run.model.params, state, cfg=run.cfg))
            state, logits[platform] = run.state, []
            for _ in range(STEPS):
                state, found = step(state)
                logits[platform].append(found)
        computed = np.asarray(state.prompt.computed)
        assert computed.max() == 1 and computed.sum() > np.sum(run.state.prompt.computed)
    np.testing.assert_array_equal(*logits.values())


def texts(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


OFTEN = tsjax.LazyPrefill(keep=SHORT_CUTS, choose_every=4)  # several times in a short text


def lazily(prompt=PROMPTS[0], **settings):
    """By the programs for one row that several tests share."""
    settings = dict(prefill=OFTEN, **SIZES) | settings
    return tsjax.generate(small(), prompt, **settings)


@pytest.mark.parametrize("revive", some_wide(["in_batches"], ["background", "never"]))
def test_drafts_change_no_token(revive):
    """In rows that end by a stop token, or by length; each chunk of a stream is part of them."""
    lazy = tsjax.LazyPrefill(keep=SHORT_CUTS, revive=revive, choose_every=5, revive_rows=6)
    settings = dict(max_new_tokens=40, prefill=lazy, do_sample=True, seed=5, eos_token_id=(11,))
    settings |= dict(temperature=0.8, repetition_penalty=1.1, **SIZES)
    prompts = [row * 7 for row in SHORT_PROMPTS]
    with jax.enable_x64(True):
        looping = looping_model(dtype="float64", num_layers=3)
        plain = tsjax.generate(looping, prompts, **settings)
        *_, last = chunks = list(tsjax.stream(looping, prompts, method=AnyTree(), **settings))
    streamed = [
        np.concatenate([chunk.tokens[row] for chunk in chunks]).tolist() for row in range(3)
    ]
    assert streamed == texts(plain) and last.stats.tokens_per_step > 1.1
    first, *rest = plain.stats.prompt_computed
    assert first == 1.0 and all(0.3 < share <= 1 for share in rest)
    # A choice that is due is not passed by.
    assert last.stats.prompt_computed == plain.stats.prompt_computed
    assert revive != "background" or min(rest) > 0.6


@pytest.mark.wide
def test_a_cut_before_the_model():
    lazy = tsjax.LazyPrefill(keep={0: 0.4}, revive="never", scores="random")
    (kept,) = Run.of(small(), PROMPTS, lazy).sets(0)[1:]
    assert len(kept) == 22 and 52 in kept
    other = dataclasses.replace(lazy, seed=1)
    assert Run.of(small(), PROMPTS, other).sets(0)[1] != kept


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.data())
def test_best_tokens(data):
    # XLA may take subnormal ones for zero.
    numbers = st.floats(0, 4, width=32, allow_subnormal=False)
    values = st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1.0, np.inf]) | numbers
    scores = data.draw(hnp.arrays(np.float32, (2, 23), elements=values))
    candidates = data.draw(hnp.arrays(bool, (2, 23)))
    count = data.draw(hnp.arrays(np.int32, 2, elements=st.integers(0, 25)))
    found = np.asarray(best_tokens(jnp.asarray(scores), jnp.asarray(candidates), count))
    for row in range(2):
        order = sorted(np.flatnonzero(candidates[row]), key=lambda i: (-scores[row][i], i))
        assert set(np.flatnonzero(found[row])) == set(order[: count[row]])


def test_a_state_that_could_not_hold_the_prefill_is_refused():
    cfg = tsjax.steps.DecodeConfig(model=small().cfg, prefill=tsjax.LazyPrefill(keep=SHORT_CUTS))
    never = tsjax.LazyPrefill(keep=SHORT_CUTS, revive="never")

    def begun(cfg=cfg, capacity=CAPACITY, **more):
        settings = dict(cfg=cfg, capacity=capacity, max_length=[60], **more)
        return init_state(np.ones((1, 53), np.int32), np.asarray([53]), **settings)

    for settings, message in (
        (dict(prompt_capacity=52), "prompt_capacity=52 .* at least the 53 tokens"),
        (dict(prompt_capacity=300), "prompt_capacity=300 .* at most the capacity 160"),
        (dict(length=np.asarray([50])), "length=.*a run begins after its prompt"),
        (dict(capacity=64), "capacity=64 is not valid: at least 65 slots, .* what it revives"),
    ):
        with pytest.raises(ValueError, match=message):
            begun(**settings)
    cfg = dataclasses.replace(cfg, prefill=never)
    with pytest.raises(ValueError, match="width=50 is not valid: passes through up to 53 prompt"):
        prefill(small().params, begun(cfg, capacity=60), width=50, cfg=cfg)


@pytest.mark.wide
@pytest.mark.parametrize("revive", ["in_batches", "on_demand", "background"])
def test_a_capacity_with_no_slot_to_spare(revive):
    """Below the prompts' bucket, and just enough for what is revived at a time."""
    lazy = dataclasses.replace(OFTEN, revive=revive, revive_rows=9)
    settings = dict(prefill=lazy, max_new_tokens=12, prefill_width=16)
    # How many are brought in at once changes no token on demand.
    at_once = 64 if revive == "on_demand" else 9
    ample = lazily(max_new_tokens=12, prefill=dataclasses.replace(lazy, revive_rows=at_once))
    tight = tsjax.generate(small(), PROMPTS[0], capacity=53 + 12 + 9, **settings)
    np.testing.assert_array_equal(tight.tokens[0], ample.tokens[0])


# --- the host side ---------------------------------------------------------------------------


@pytest.mark.wide
def test_prompts_of_a_bucket_share_their_programs():
    run = functools.partial(lazily, max_new_tokens=3, capacity=2048, prefill_width=16)
    run(prompts_of(64), do_sample=True)
    compiled = programs("cpu", "float32")
    count = sum(program._cache_size() for program in vars(compiled).values())
    for length in (49, 55, 63):
        run(prompts_of(length), do_sample=True, seed=length)
    assert sum(program._cache_size() for program in vars(compiled).values()) == count


@pytest.mark.wide
@pytest.mark.parametrize("revive", ["in_batches", "on_demand"])
def test_no_step_copies_a_cache(revive):
    tiny = tiny_model()
    lazy = tsjax.LazyPrefill(keep={1: 0.5}, revive=revive, revive_rows=8, window=2)
    cfg = tsjax.steps.DecodeConfig(model=tiny.cfg, prefill=lazy)
    state = init_state(
        np.ones((1, 64), np.int32), np.asarray([64]), cfg=cfg, capacity=65536, max_length=[100],
        prompt_capacity=1024,
    )  # fmt: skip
    run = programs("cpu", "float32")
    lowered = [
        run.decode.lower(tiny.params, state, jnp.int32(2), cfg=cfg),
        run.read_part.lower(tiny.params, state, 0, part=1, width=16, cfg=cfg),
        run.finish_part.lower(tiny.params, state, part=1, cfg=cfg),
        run.read_made.lower(tiny.params, state, 0, width=16, cfg=cfg),
    ]
    cache = sum(buffer.nbytes for buffer in state.kv.k + state.kv.v)
    for program in lowered:
        executable = program.compile(FUSED_AS_FOR_USERS)
        assert executable.memory_analysis().alias_size_in_bytes > cache
        found = operations(executable, state.kv.k[0])
        assert found and set(found) <= IN_PLACE
        assert found.count("fusion") <= found.count("dynamic-update-slice")
        assert "copy" not in operations(executable, state.prompt.order[0])


def test_the_layer_before_the_first_cut_computes_keys_and_values_alone():
    """And no MLP, of which a pass of the whole layer would take more than all that is left."""
    with jax.enable_x64(True):
        cfg = model().cfg
        mlp, found = 2 * 16 * 3 * cfg.embed_dim * cfg.mlp_dim, {}
        for layer in (1, 2):
            run = Run.of(model(), PROMPTS, tsjax.LazyPrefill(keep={layer: 0.5}))
            first = jax.jit(read_part, static_argnames=("part", "width", "cfg")).lower(
                run.model.params, run.state, 0, part=0, width=16, cfg=run.cfg
            )
            found[layer] = first.compile().cost_analysis()["flops"] / len(PROMPTS)
    assert found[1] < mlp < found[2]


def test_names():
    lazy = tsjax.LazyPrefill(keep="paper")
    request = make_request(small(), PROMPTS[0], None, dict(max_new_tokens=4), prefill=lazy)
    assert request.decode.prefill is not None and dict(request.decode.prefill.keep) == SHORT_CUTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(prefill="lazily"), "prefill='lazily' is not valid: 'full', 'lazy' or"),
        (dict(prefill=0.5), "prefill=0.5 is not valid"),
        (dict(prefill=tsjax.LazyPrefill(at_least=9)), "keep=.auto. is not valid: named cuts, or"),
        (
            dict(prefill=dataclasses.replace(OFTEN, revive_rows=9), capacity=63, prefill_width=16),
            "at least 64 slots .* or revive_rows=9",
        ),
        (
            dict(prefill=tsjax.LazyPrefill(keep={1: 0.5}, sinks=54)),
            "sinks=54 .* at most the 53 tokens",
        ),
        (
            dict(prefill=tsjax.LazyPrefill(keep={1: 0.5}, window=54)),
            "window=54 .* at most the 53 tokens",
        ),
        (
            dict(prefill=tsjax.LazyPrefill(keep={0: 0.4}, revive="never")),
            "a cut before the first layer needs scores='random'",
        ),
    ],
)
def test_bad_input_is_refused_before_any_compute(settings, message):
    with pytest.raises(ValueError, match=message):
        tsjax.generate(small(), PROMPTS[0], max_new_tokens=2, **settings)
