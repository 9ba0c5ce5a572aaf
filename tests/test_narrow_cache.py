# SPDX-License-Identifier: Apache-2.0
"""cache="int8": keys and values of the text in eight bits, with the tokens of plain decoding.

The judge is plain decoding with the same cache, and of that a decoder without any cache whose keys
and values are rounded where they are made. Runs are in float64, as in test_method_contract.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROMPTS, SIZES, fresh_state, looping_model, prefilled, tiny_config, tiny_model
from kernel_cases import define_both, make_inputs, with_wide_caches
from kernel_programs import kernel_names, lower_for_cuda

import tsjax
from pallas_kernels import (
    NarrowRows,
    Ranks,
    cache_scores,
    narrowed,
    native,
    tree_attention,
    widened,
)  # fmt: skip
from tsjax.base.errors import BadValue
from tsjax.base.model_config import CACHES
from tsjax.decoding.config import DecodeConfig
from tsjax.files.fingerprint import model_fingerprint
from tsjax.model.cache import cache_bytes, init_cache, keys_in_cache, write_rows
from tsjax.model.logits import logits
from tsjax.model.passes import run_rows
from tsjax.model.transformer import key_powers

SETTINGS = dict(max_new_tokens=40, do_sample=True, temperature=0.8, seed=7)
METHODS = {
    "ngram": tsjax.NGram(num_ngrams=4, ngram_size=3, ngram_slots=5, suffix_length=6),
    "tokenswift": tsjax.TokenSwift(
        tree=(2, 2, 1), draft_passes=2, draft_budget=20, num_sinks=3, draft_refresh=5,
        draft_rest=True, num_ngrams=2, ngram_size=3,
    ),
    "likely_tree": tsjax.LikelyTree(
        width=8, draft_passes=2, heads=True, places=2, draft_budget=20, num_sinks=3,
        draft_refresh=None,
    ),
    "magicdec": tsjax.methods.MagicDec(
        draft_choice="snapkv", draft_passes=2, draft_budget=36, num_sinks=1
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def narrow_model(**changes) -> tsjax.Model:
    return looping_model(**{"dtype": "float64", "cache": "int8", "num_draft_heads": 2, **changes})


def texts(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


@functools.cache
def plain() -> list[list[int]]:
    return texts(tsjax.generate(narrow_model(), PROMPTS, **SETTINGS, **SIZES))


# --- what it holds ---------------------------------------------------------------------------


def test_the_cache_takes_a_byte_for_a_number_and_one_for_a_row():
    cfg = tiny_config(cache="int8", dtype="bfloat16")
    cache = init_cache(cfg, 3, 40)
    of_layer = 3 * cfg.num_kv_heads * 40 * (cfg.head_dim + 1)
    assert cache_bytes(cfg, 3, 40) == 2 * cfg.num_layers * of_layer
    assert sum(x.nbytes for x in (*cache.k, *cache.v)) == cache_bytes(cfg, 3, 40)
    assert {x.dtype for x in jax.tree.leaves((cache.k, cache.v))} == {jnp.dtype(jnp.int8)}
    assert cache.capacity == 40
    for held in ("int8", "same"):
        keys = keys_in_cache(tiny_config(cache=held), 3, 40)
        assert keys == cfg.num_layers * cfg.num_kv_heads * 3 * 40


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_are_written_as_those_of_a_wide_cache(parts):
    rng, wide, narrow = np.random.default_rng(3), tiny_config(), tiny_config(cache="int8")
    shape = (2, 5, wide.num_kv_heads, wide.head_dim)
    k, v = (
        [widened(narrowed(jnp.asarray(rng.normal(size=shape), jnp.float32)), jnp.float32)] * 2
        for _ in "kv"
    )
    start = jnp.asarray([7, 2], jnp.int32)

    def written(cfg):
        cache = init_cache(cfg, 2 * parts, 24 // parts)
        cache = cache.replace(parts=parts, length=jnp.zeros(2, jnp.int32))
        return write_rows(cache, k, v, start, after=k[0])

    found, wanted = written(narrow), written(wide)
    for ours, theirs in zip((*found.k, *found.v), (*wanted.k, *wanted.v), strict=True):
        assert isinstance(ours, NarrowRows)
        np.testing.assert_array_equal(widened(ours, jnp.float32), theirs)


def test_the_cache_of_a_prefilled_text_is_that_of_its_rounded_rows():
    """To the bit those that a pass hands back, and that its rows see of one another."""
    model = narrow_model()
    cfg, text = DecodeConfig(model.cfg), [PROMPTS[0] * 3]
    state = prefilled(model.params, fresh_state(model, text), cfg=cfg)
    length = int(state.kv.length[0])
    tokens, positions = np.asarray(text)[:, :length], np.arange(length, dtype=np.int32)[None]
    causal, nothing = np.tril(np.ones((length, length), bool)), init_cache(model.cfg, 1, 8)
    rows = run_rows(model.params.model, nothing, tokens, positions, causal, cfg=model.cfg)
    for stored, made in zip((*state.kv.k, *state.kv.v), (*rows.k, *rows.v), strict=True):
        held = np.swapaxes(widened(stored, jnp.float64)[:, :, :length], 1, 2)
        np.testing.assert_array_equal(held, made)


# --- what reads it ---------------------------------------------------------------------------

NATIVE = pytest.mark.skipif(not native.on_host(), reason="no compiler, or it is switched off")
KINDS = ("xla", pytest.param("native", marks=NATIVE))


def attention_case(dtype: str, *, S: int, T: int, G: int = 3, H: int = 16):
    q, k, v, length, *fresh, mask = make_inputs(
        np.random.default_rng(0), B=2, S=S, T=T, K=2, G=G, H=H, length=[S - 3, S // 2 + 1],
        dtype=dtype,
    )  # fmt: skip
    fresh = (widened(narrowed(rows), dtype) for rows in fresh)
    return q, narrowed(k), narrowed(v), jnp.asarray(length), *fresh, jnp.asarray(mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("S, T", [(24, 1), (700, 5), (1500, 40)])
def test_attention_reads_narrow_rows(kind, dtype, S, T):
    q, k, v, *others = attention_case(dtype, S=S, T=T)
    read = functools.partial(tree_attention, implementation=kind, with_log_totals=True)
    found, logs = jax.jit(read)(q, k, v, *others)
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    wanted, _ = define_both(*with_wide_caches((q, k, v, *others), "float64"))
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance)
    # And to the bit as the same numbers in a wide cache.
    same, same_logs = jax.jit(read)(q, widened(k, dtype), widened(v, dtype), *others)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(same, np.float32))
    np.testing.assert_array_equal(logs, same_logs)


@NATIVE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T, G, H", [(1, 1, 64), (1, 3, 96), (1, 7, 128), (3, 3, 40), (5, 2, 64)])
@pytest.mark.parametrize("beyond", ["nothing", "keys", "values", "queries"])
def test_powers_of_two_may_come_later(dtype, T, G, H, beyond):
    """The kernels multiply numbers and then those, but for blocks where that might show."""
    S = 300
    q, k, v, *others = attention_case(dtype, S=S, T=T, G=G, H=H)
    if beyond == "queries":  # so small that their products with numbers are no normal floats
        q = jnp.where(jnp.arange(H) % 3 == 0, q, q * 2.0**-120).astype(dtype)
        k = k._replace(exponents=k.exponents.at[:, :, 70:90].set(110))
    if beyond == "keys":
        k = k._replace(exponents=k.exponents.at[:, 1, 70:90].set(-120).at[:, :, 3].set(60))
    if beyond == "values":
        v = v._replace(exponents=v.exponents.at[:, :, 70:90].set(-120).at[:, 0, 3].set(-128))
    slots, rows = np.arange(2 * S) % S, S - 2 - np.arange(2 * T)
    seen = Ranks(*(jnp.asarray(x.reshape(2, -1), jnp.int32) for x in (slots, rows)))
    read = functools.partial(tree_attention, implementation="native", with_log_totals=True)
    for ranks in (None, seen):
        found = jax.jit(read)(q, k, v, *others, ranks=ranks)
        wanted = jax.jit(read)(q, widened(k, dtype), widened(v, dtype), *others, ranks=ranks)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))
    score = jax.jit(functools.partial(cache_scores, implementation="native"))
    found, wanted = (score(q[:, 0], x, others[0]) for x in (k, widened(k, dtype)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["dot", "softmax"])
def test_scores_read_narrow_rows(kind, dtype, mode):
    q, k, _, length, *_ = attention_case(dtype, S=1300, T=1)
    read = jax.jit(functools.partial(cache_scores, mode=mode, implementation=kind))
    found, wanted = read(q[:, 0], k, length), read(q[:, 0], widened(k, dtype), length)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_numbers_is_seen_by_who_sees_it(kind):
    q, k, v, length, *others = attention_case("float32", S=200, T=2)
    broken = v._replace(exponents=v.exponents.at[0, 1, 150].set(-128))
    found = tree_attention(q, k, broken, length, *others, implementation=kind)
    heads = np.isnan(np.asarray(found)).any(axis=(1, 3))
    np.testing.assert_array_equal(heads, [[False] * 3 + [True] * 3, [False] * 6])
    unseen = v._replace(exponents=v.exponents.at[:, :, 198:].set(-128))
    found = tree_attention(q, k, unseen, length, *others, implementation=kind)
    assert np.all(np.isfinite(np.asarray(found)))


def test_a_gpu_reads_them_by_its_kernels():
    """No wide copy of a cache is made; test_narrow_triton.py has the kernels' numbers."""
    q, k, v, *others = attention_case("float32", S=700, T=5)
    scored = q[:, 0], k, others[0]
    for read, inputs in ((tree_attention, (q, k, v, *others)), (cache_scores, scored)):
        program = lower_for_cuda(read, *inputs).as_text()
        assert kernel_names(program) and "x700x16xf32" not in program


def test_narrow_rows_of_other_shapes_or_types_are_refused():
    q, k, v, *others = attention_case("float32", S=24, T=1)
    for wrong in (
        k._replace(exponents=k.exponents[..., 0]),
        k._replace(exponents=k.exponents.astype(jnp.int32)),
    ):
        with pytest.raises(ValueError, match="k_cache of narrow rows"):
            tree_attention(q, wrong, v, *others)


# --- the same tokens -------------------------------------------------------------------------


def test_a_pass_over_all_and_steps_by_one_say_the_same():
    """What a row sees beside it in a pass is what it sees in the cache later."""
    model, (prompt, *_) = narrow_model(), PROMPTS
    text = np.asarray([[*prompt, *plain()[0]]])
    at_once, by_one = (
        logits(model.params, text, cfg=model.cfg, width=width) for width in (text.shape[1], 1)
    )
    np.testing.assert_allclose(at_once, by_one, atol=1e-9)
    wide = logits(model.params, text, cfg=looping_model(dtype="float64").cfg.alone)
    assert np.max(np.abs(np.asarray(wide) - np.asarray(by_one))) > 1e-6  # it does round


def test_a_large_bias_of_keys_does_no_harm():
    """As in Qwen2.5, whose queries make little of it: the keys' other numbers keep their bits."""
    model = looping_model(dtype="float64", qkv_bias=True, num_draft_heads=0)
    layers, pair = [], np.asarray([1, 1 + model.cfg.head_dim // 2])
    for layer in model.params.model.layers:
        bias = layer.qkv_bias.at[:, -2, pair[0]].set(300.0)
        matrix = (6 * layer.qkv).at[:, :-2, pair].multiply(1e-3)
        layers.append(layer.replace(qkv_bias=bias, qkv=matrix))
    params = model.params.replace(model=model.params.model.replace(layers=tuple(layers)))
    text = np.asarray([PROMPTS[0] * 4])
    wide, narrow = (
        np.asarray(logits(params, text, cfg=model.cfg.with_cache(cache))) for cache in CACHES
    )
    assert 1e-6 < np.std(narrow - wide) < 0.03 * np.std(wide)


def test_powers_of_keys_are_those_of_pairs():
    powers = np.asarray(key_powers(jnp.asarray([[0.0, 300.0, -3.9, 4.0], [0.1, 2.0, -9.0, 1e-3]])))
    np.testing.assert_array_equal(powers, [[8, 512, 8, 512], [16, 8, 16, 8]])


# TokenSwift's with n-grams is a row in test_method_contract.py.
@pytest.mark.parametrize(
    ("method", "rows", "mesh"),
    [
        ("likely_tree", 3, ()), ("magicdec", 3, ()), ("magicdec", 3, (1, 2, 2)),
        pytest.param("magicdec", 1, (), marks=pytest.mark.wide),
        pytest.param("likely_tree", 1, (), marks=pytest.mark.wide),
        pytest.param("tokenswift", 3, (1, 2), marks=pytest.mark.wide),
        pytest.param("tokenswift", 3, (1, 2, 2), marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_the_tokens_are_those_of_plain_decoding(method, rows, mesh):
    """By any method, of a text alone, and on a mesh."""
    placed = jax.make_mesh(mesh, ("data", "model", "slots")[: len(mesh)]) if mesh else None
    model, settings = narrow_model(mesh=placed), SETTINGS | SIZES
    found = tsjax.generate(model, PROMPTS[:rows], method=METHODS[method], **settings)
    assert texts(found) == plain()[:rows] and found.stats.accepted > 0


def test_where_rounding_changes_the_text_it_does_so_for_all_methods():
    settings = {**SETTINGS, "max_new_tokens": 30, "do_sample": False, "temperature": 1.0}

    def text(cache, method="autoregressive"):
        model = tiny_model(dtype="float64", cache=cache, num_draft_heads=2)
        return texts(tsjax.generate(model, PROMPTS, method=method, **settings, **SIZES))

    assert text("int8") != text("same")
    assert text("int8", METHODS["magicdec"]) == text("int8")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.wide), "bfloat16"])
def test_with_the_cpu_kernels_narrow_types_have_their_tokens_too(dtype):
    """There a row has the same bits in any pass, so it is rounded to the same numbers."""
    model, settings = narrow_model(dtype=dtype), {**SETTINGS, "max_new_tokens": 24}
    plainly = tsjax.generate(model, PROMPTS, **settings, **SIZES)
    drafted = tsjax.generate(model, PROMPTS, method=METHODS["likely_tree"], **settings, **SIZES)
    assert texts(drafted) == texts(plainly)


def test_a_saved_run_goes_on_with_the_same_cache_only(tmp_path):
    model, path = narrow_model(), tmp_path / "run.json"
    begin = {**SETTINGS, **SIZES, "max_new_tokens": 9, "save_to": path}
    tsjax.generate(model, PROMPTS, **begin)
    method = METHODS["likely_tree"]
    rest = tsjax.generate(model, resume_from=path, max_new_tokens=40, method=method, **SIZES)
    assert texts(rest) == plain()
    with pytest.raises(BadValue, match="cache='int8'"):
        tsjax.generate(narrow_model(cache="same"), resume_from=path, max_new_tokens=40)


def test_a_prefix_serves_runs_with_the_same_cache_only():
    model, (prompt, *_) = narrow_model(), PROMPTS
    prefix = tsjax.read(model, prompt[:5])
    assert prefix.nbytes == cache_bytes(model.cfg, 1, prefix.cache.capacity)
    found = tsjax.generate(model, prompt, prefix=prefix, **SETTINGS, **SIZES)
    assert texts(found) == plain()[:1]
    other = model.replace(cfg=narrow_model(cache="same").cfg)
    with pytest.raises(BadValue, match="cache='same'"):
        tsjax.generate(other, prompt, prefix=prefix, **SETTINGS, **SIZES)


def test_answers_to_one_prompt_share_what_it_read():
    settings = {**SETTINGS, "num_return_sequences": 3}
    model, (prompt, *_) = narrow_model(), PROMPTS
    plainly = tsjax.generate(model, prompt, **settings, **SIZES)
    drafted = tsjax.generate(model, prompt, method=METHODS["ngram"], **settings, **SIZES)
    assert texts(drafted) == texts(plainly)


def test_a_lazily_read_prompt_goes_on_as_plainly():
    model, prompt = narrow_model(), [3, 1, 4, 1, 5, 9, 2, 6] * 4
    lazy = tsjax.LazyPrefill(keep={1: 0.5})
    both = [
        texts(tsjax.generate(model, prompt, method=method, prefill=lazy, **SETTINGS))
        for method in (tsjax.methods.Autoregressive(), METHODS["magicdec"])
    ]
    assert both[0] == both[1]


# --- the setting -----------------------------------------------------------------------------


def test_load_sets_it_and_files_keep_it(tmp_path):
    model = tiny_model()
    tsjax.save(model, tmp_path / "wide")
    narrow = tsjax.load(tmp_path / "wide", cache="int8")
    assert narrow.cfg.cache == "int8" and tsjax.load(tmp_path / "wide").cfg == model.cfg
    tsjax.save(narrow, tmp_path / "narrow")
    assert tsjax.load(tmp_path / "narrow").cfg == narrow.cfg
    assert tsjax.load(tmp_path / "narrow", cache="same").cfg == model.cfg
    with pytest.raises(BadValue, match="cache='int4'"):
        tsjax.load(tmp_path / "wide", cache="int4")


def test_it_is_part_of_the_fingerprint():
    model = tiny_model()
    narrow = model.replace(cfg=tiny_config(cache="int8"))
    assert model_fingerprint(model) != model_fingerprint(narrow)
    assert "cache" not in model.cfg.to_dict() and narrow.cfg.to_dict()["cache"] == "int8"
    assert tsjax.ModelConfig.from_dict(narrow.cfg.to_dict()) == narrow.cfg
