# SPDX-License-Identifier: Apache-2.0
"""Drafters in files: published heads of EAGLE-3 compute what a slow NumPy layer computes, and what
would compute something else is refused."""

import dataclasses
import functools
import json
import os

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle_hidden
from hf_fixtures import assert_same_models

import tsjax
from tsjax.costs import Costs, Line
from tsjax.files.adapters import write_drafter_of
from tsjax.files.drafter_files import OF_EMBEDDED, open_drafter
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.huggingface import read_drafter
from tsjax.files.weight_files import embedded_folder
from tsjax.model.cache import init_cache
from tsjax.model.drafter import draft_rows, fused, words_logits
from tsjax.model.passes import run_rows

LAYERS, D, V = 8, hf_fixtures.SIZES["hidden_size"], hf_fixtures.SIZES["vocab_size"]
HEADS, KV_HEADS, F, EPS = 4, 2, 56, 1e-5
H = D // HEADS
SAYS = np.sort(np.random.default_rng(1).choice(V, 20, replace=False))  # tokens: the words

# As the config files of each layout have it.
SIZES = {
    "hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": EPS,
    "max_position_embeddings": 300, "hidden_act": "silu", "model_type": "llama",
}  # fmt: skip
EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"], **SIZES, "draft_vocab_size": len(SAYS),
    "tie_word_embeddings": False, "torch_dtype": "float16", "pad_token_id": 0,
}  # fmt: skip
TAPS = "eagle_aux_hidden_state_layer_ids"
VLLM = {
    "architectures": ["Eagle3Speculator"], "draft_vocab_size": len(SAYS), TAPS: [0, 3, LAYERS],
    "fc_norm": False, "norm_before_fc": False, "norm_before_residual": True, "norm_output": False,
    "speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        **SIZES, "head_dim": H, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}  # fmt: skip
LAYOUTS = {"eagle": EAGLE, "vllm": VLLM}


def published(layout: str, taps: int = 3) -> dict[str, np.ndarray]:
    """Tensors as the published files have them."""
    rng = np.random.default_rng(7)
    shapes = {
        "fc.weight": (D, taps * D),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (HEADS * H, 2 * D),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * H, 2 * D),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * H, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, HEADS * H),
        "midlayer.mlp.gate_proj.weight": (F, D),
        "midlayer.mlp.up_proj.weight": (F, D),
        "midlayer.mlp.down_proj.weight": (D, F),
        "norm.weight": (D,),
        "lm_head.weight": (len(SAYS), D),
    }
    tensors = {name: 0.3 * rng.standard_normal(s, np.float32) for name, s in shapes.items()}
    tensors |= {name: 1 + array for name, array in tensors.items() if "norm" in name}
    tensors["d2t"] = SAYS - np.arange(len(SAYS))
    tensors["t2d"] = np.isin(np.arange(V), SAYS)
    names = {"midlayer.": "layers.0."} if layout == "vllm" else {}
    return {renamed(name, names): array for name, array in tensors.items()}


def renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def slow_logits(tensors, config, embed, taps, tokens, deep: int) -> np.ndarray:
    """The logits of every row in float64, one row after the other, as arXiv 2503.01840 has it.

    The first rows take the fused taps of their positions, further ones what came out before.
    """
    w = {renamed(n, {"layers.0.": ""}): np.asarray(a, np.float64) for n, a in tensors.items()}
    w = {renamed(name, {"midlayer.": "", ".weight": ""}): array for name, array in w.items()}
    layer = config.get("transformer_layer_config", config)
    theta = layer.get("rope_parameters", {}).get("rope_theta", 10000.0)

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x) + EPS) * w[name]

    def heads(x, position=None):
        x = x.reshape(-1, H)
        if position is None:
            return x
        angle = position * theta ** (-np.arange(0, H, 2) / H)
        a, b = x[:, : H // 2], x[:, H // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    keys, values, logits, state = [], [], [], np.zeros(D)
    for position in range(len(taps) + deep - 1):
        if position < len(taps):
            state = w["fc"] @ np.concatenate(taps[position])
        normed = norm(state, "hidden_norm")
        token = norm(embed[tokens[position + 1]], "input_layernorm")
        both = np.concatenate([token, normed])
        q = heads(w["self_attn.q_proj"] @ both, position)
        keys.append(heads(w["self_attn.k_proj"] @ both, position))
        values.append(heads(w["self_attn.v_proj"] @ both))
        mixed = []
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = np.exp([q[head] @ k[shared] / np.sqrt(H) for k in keys])
            mixed.append(sum(s * v[shared] for s, v in zip(scores, values, strict=True)))
            mixed[-1] /= scores.sum()
        x = normed if config.get("norm_before_residual") else state
        x = x + w["self_attn.o_proj"] @ np.concatenate(mixed)
        h = norm(x, "post_attention_layernorm")
        gate, up = w["mlp.gate_proj"] @ h, w["mlp.up_proj"] @ h
        state = x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
        logits.append(w["lm_head"] @ norm(state, "norm"))
    return np.stack(logits)


def slow_taps(model, tokens, after) -> np.ndarray:
    """What there is after so many layers, in float64: [T, n, D]."""
    weights, found = model.params.model, []
    for count in after:
        part = weights.replace(layers=weights.layers[:count])
        part = tsjax.Model(model.params.replace(model=part), cfg=model.cfg)
        found.append(oracle_hidden(part, tokens))
    return np.stack(found, axis=1)


def fast_logits(model, taps, tokens, deep: int):
    """The same by tsjax's functions: the rows of the taps at once, then one at a time."""
    cfg, weights, count = model.cfg, model.params.drafter, taps.shape[1]

    def run(weights, embed, taps):
        seen = []

        def attend(q, k, v):
            seen.append((k, v))
            keys, values = (jnp.concatenate(part, axis=1) for part in zip(*seen, strict=True))
            rows = jnp.arange(keys.shape[1])
            mask = rows[-q.shape[1] :, None] >= rows
            return jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])

        following = embed[jnp.asarray(tokens)[None, 1:]]
        states, found = fused(weights, taps, cfg=cfg), []
        for depth in range(deep):
            at = slice(0, count) if depth == 0 else slice(count + depth - 1, count + depth)
            positions = jnp.arange(at.start, at.stop, dtype=jnp.int32)[None]
            states = states if depth == 0 else states[:, -1:]
            states, _, _ = draft_rows(weights, states, following[:, at], positions, attend, cfg=cfg)
            found.append(words_logits(weights, states, cfg=cfg)[0])
        return jnp.concatenate(found)

    return jax.jit(run)(weights, model.params.model.embed, taps)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hf_fixtures.make(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(base):
    return tsjax.load(base)


def head(folder, layout, config=None, tensors=None):
    """A published head, with changes; of ... removes."""
    raw = {k: v for k, v in {**LAYOUTS[layout], **(config or {})}.items() if v is not ...}
    content = {**published(layout), **(tensors or {})}
    return hf_fixtures.write(folder, raw, {k: v for k, v in content.items() if v is not ...})


def parts(model):
    """The shape and the weights of its drafter."""
    shape, weights = model.cfg.drafter, model.params.drafter
    assert shape is not None and weights is not None
    return shape, weights


@pytest.mark.parametrize(
    ("layout", "config", "after"),
    [("eagle", EAGLE, (2, LAYERS // 2, LAYERS - 3)), ("vllm", VLLM, (0, 3, LAYERS))],
)
def test_published_heads_compute_what_was_published(layout, config, after, base, model, tmp_path):
    loaded = tsjax.load(base, drafter=head(tmp_path / "head", layout))
    shape, weights = parts(loaded)
    assert shape.taps == after and shape.window == 300
    np.testing.assert_array_equal(weights.words, SAYS)
    tokens, count, deep = np.random.default_rng(3).integers(0, V, 10).tolist(), 7, 3

    causal = jnp.tril(jnp.ones((count, count), bool))
    text, positions = jnp.asarray([tokens[:count]]), jnp.arange(count, dtype=jnp.int32)[None]
    cache = init_cache(loaded.cfg, 1, count)
    run = jax.jit(functools.partial(run_rows, cfg=loaded.cfg, taps=after))
    rows = run(loaded.params.model, cache, text, positions, causal)
    found = fast_logits(loaded, jnp.stack(rows.taps, axis=2), tokens, deep)

    embed = np.asarray(model.params.model.embed, np.float64)
    taps = slow_taps(model, tokens[:count], after)
    expected = slow_logits(published(layout), config, embed, taps, tokens, deep)
    assert found.shape == expected.shape == (count + deep - 1, len(SAYS))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_goes_on_in_tsjaxs_own_files(layout, base, model, tmp_path):
    loaded = tsjax.load(base, drafter=head(tmp_path / "head", layout))
    write_drafter_of(loaded, str(tmp_path / "own"))
    assert_same_models(tsjax.load(base, drafter=tmp_path / "own"), loaded)
    tsjax.save(loaded, tmp_path / "ts")
    assert_same_models(tsjax.load(tmp_path / "ts"), loaded)
    # It changes no token, and can be replaced.
    assert model_fingerprint(loaded) == model_fingerprint(model)
    other = head(tmp_path / "other", layout, tensors={"norm.weight": np.full(D, 2, np.float32)})
    _, replaced = parts(tsjax.load(tmp_path / "ts", drafter=other))
    assert float(replaced.out_norm[0]) == 2


def test_heads_of_the_whole_vocabulary_need_no_words(base, model, tmp_path):
    absent = dict.fromkeys(("d2t", "t2d", "lm_head.weight"), ...)
    folder = head(tmp_path, "eagle", {"draft_vocab_size": V}, absent)
    loaded = tsjax.load(base, drafter=folder)
    _, drafter = parts(loaded)
    np.testing.assert_array_equal(drafter.words, np.arange(V))
    np.testing.assert_array_equal(drafter.unembed, model.params.model.unembed)
    write_drafter_of(loaded, str(tmp_path / "own"))
    assert "lm_head.weight" not in hf_fixtures.weights(tmp_path / "own")


def test_embeddings_in_the_file_have_to_be_the_models(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tsjax.files.weight_files._BLOCK_BYTES", 10 * 4 * D)
    embed = np.asarray(model.params.model.embed)
    rounded = head(tmp_path, "vllm", tensors={"embed_tokens.weight": embed.astype(np.float16)})
    found = open_drafter(rounded, model.cfg, embed=model.params.model.embed)
    assert found.shape.words == len(SAYS)
    changed = embed.copy()
    changed[0, D - 1] += 0.1
    for content in (changed, embed[:-1]):
        folder = head(tmp_path, "vllm", tensors={"embed_tokens.weight": content})
        with pytest.raises(NotImplementedError, match=r"embed_tokens.weight in .* not the model's"):
            open_drafter(folder, model.cfg, embed=model.params.model.embed)
    with pytest.raises(NotImplementedError, match="not the model's"):
        open_drafter(rounded, model.cfg)


def test_pickled_heads(base, model, tmp_path):
    torch = pytest.importorskip("torch")
    _, expected = parts(tsjax.load(base, drafter=head(tmp_path, "eagle")))
    (tmp_path / "model.safetensors").unlink()
    content = {name: torch.from_numpy(array) for name, array in published("eagle").items()}
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        open_drafter(tmp_path, model.cfg)
    found = open_drafter(tmp_path, model.cfg, allow_pickle=True)
    np.testing.assert_array_equal(found.words, SAYS)
    cfg = dataclasses.replace(model.cfg, drafter=found.shape)
    arrays = {entry.path: array for entry, array in read_drafter(cfg, found.tensors)}
    np.testing.assert_array_equal(arrays["drafter.fuse"], expected.fuse)
    np.testing.assert_array_equal(arrays["drafter.layer.qkv"], expected.layer.qkv)


def of_layer(**changes):
    layer = {**VLLM["transformer_layer_config"], **changes}
    return {"transformer_layer_config": {k: v for k, v in layer.items() if v is not ...}}


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("layout", "config", "tensors", "message"),
    [
        # Of another model.
        ("eagle", {"hidden_size": 64}, {}, "hidden_size=64 is not valid: 32, as the model has it"),
        ("eagle", {"num_attention_heads": 8}, {}, "num_attention_heads=8 is not valid: 4, as"),
        ("eagle", {"num_key_value_heads": 4}, {}, "num_key_value_heads=4 is not valid: 2, as"),
        ("vllm", of_layer(head_dim=16), {}, "head_dim=16 is not valid: 8, as the model has it"),
        ("vllm", of_layer(vocab_size=40), {}, "vocab_size=40 is not valid: 48, as the model has"),
        ("eagle", {"rms_norm_eps": 1e-6}, {}, "rms_norm_eps=1e-06 is not valid: 1e-05, as the mod"),
        ("eagle", {}, {"fc.weight": zeros(D, 2 * D)}, r"fc.weight in .* \[32, 64\].* \[32, 96\]"),
        # Of other arithmetic.
        ("vllm", of_layer(attention_bias=True), {}, r"attention_bias=True \(only False\)"),
        ("eagle", {"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope type 'dynamic'"),
        ("eagle", {"eagle_config": {"is_causal": False}}, {}, r"is_causal=False \(only True\)"),
        ("vllm", {"norm_before_residual": ...}, {}, "norm_before_residual=None is not valid: true"),
        ("vllm", {"speculators_model_type": "peagle"}, {}, "speculators_model_type='peagle'"),
        ("vllm", {"transformer_layer_config": ...}, {}, "transformer_layer_config=None"),
        ("eagle", {}, {"midlayer.self_attn.q_proj.bias": zeros(D)}, "not part of .*q_proj.bias"),
        ("vllm", {}, {"layers.0.self_attn.q_norm.weight": zeros(H)}, "not part of .*q_norm.weight"),
        ("eagle", {}, {"midlayer.hidden_norm.weight": ...}, "are no head of EAGLE-3, which has"),
        # Layers that it reads.
        ("vllm", {TAPS: [3, 2, 4]}, {}, r"=\[3, 2, 4\] is not valid: .* larger than the one befo"),
        ("vllm", {TAPS: [2, 3, 9]}, {}, r"taps=\(2, 3, 9\) is not valid: at most the model's"),
        ("vllm", {TAPS: [2, 4]}, {}, r"fc.weight in .* \[32, 96\].* \[32, 64\]"),
        ("eagle", {"eagle_config": {TAPS: [1, 3, 4]}}, {}, r"=\[1, 3, 4\] in eagle_config, which"),
        # Words.
        ("eagle", {}, {"d2t": ...}, "d2t should have one number for each of 20 words: nothing"),
        ("eagle", {"draft_vocab_size": 21}, {}, r"d2t should have .* 21 words: shape \(20,\)"),
        ("eagle", {}, {"d2t": SAYS + V}, "d2t does not name 20 of the model's 48 tokens"),
        ("eagle", {}, {"lm_head.weight": ...}, "it lacks lm_head.weight, of its 20 words"),
    ],
)
def test_heads_that_do_not_fit_are_refused(layout, config, tensors, message, base, tmp_path):
    folder = head(tmp_path, layout, config, tensors)
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        tsjax.load(base, drafter=folder)
    assert isinstance(error.value, tsjax.TsjaxError)


OTHERS = dict(
    num_hidden_layers=2, norm_before_fc=True, fc_norm=True, norm_output=True, attention_bias=True,
    use_mtp_layernorm=True, qkv_bias=True, mlp_bias=True, use_aux_hidden_state=False,
    use_last_layernorm=False, use_input_layernorm_in_first_layer=False, is_causal=False,
    logit_scale=2.0, target_hidden_size=2 * D,
)  # fmt: skip


def test_all_settings_of_other_arithmetic_are_named(model, tmp_path):
    with pytest.raises(NotImplementedError) as error:
        open_drafter(head(tmp_path, "eagle", OTHERS), model.cfg)
    for name, value in OTHERS.items():
        assert f"{name}={value!r} (only " in str(error.value)


def test_small_models_have_to_say_which_layers_are_read(tmp_path):
    small = hf_fixtures.make(tmp_path / "small", num_hidden_layers=5)
    folder = head(tmp_path / "head", "eagle")
    with pytest.raises(ValueError, match=r"\[2, 2, 2\] is not valid: .* model of 5 layers"):
        tsjax.load(small, drafter=folder)
    hf_fixtures.change(folder / "config.json", **{TAPS: [1, 2, 5]})
    assert parts(tsjax.load(small, drafter=folder))[0].taps == (1, 2, 5)


def test_tsjaxs_own_files_have_to_fit_too(base, tmp_path):
    loaded = tsjax.load(base, drafter=head(tmp_path / "head", "vllm"))
    write_drafter_of(loaded, str(tmp_path / "own"))
    file = tmp_path / "own" / "config.json"
    good = json.loads(file.read_text())
    own = good["tsjax_drafter"]
    before = {name: value for name, value in own.items() if name != "norm_before_residual"}
    file.write_text(json.dumps({**good, "tsjax_drafter": before}))
    shape, _ = parts(tsjax.load(base, drafter=tmp_path / "own"))
    assert not shape.norm_before_residual
    for change, message in (
        ({"head_dim": 16}, "head_dim=16 is not valid: 8, as the model has it"),
        ({"tsjax_drafter": {**own, "taps": [LAYERS + 1]}}, "at most the model's num_layers=8"),
        ({"tsjax_drafter": {**own, "heads": 3}}, "is damaged: .*'heads'"),
        ({"tsjax_drafter": {**own, "token_in_state": True}}, "missing in .*: drafter.tap_norms"),
    ):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=message):
            tsjax.load(base, drafter=tmp_path / "own")


def test_the_embedded_model_has_one():
    """Of at most 1 MB; without what the text says, and without learning, it finds tokens."""
    folder = os.path.join(embedded_folder(), OF_EMBEDDED)
    assert sum(file.stat().st_size for file in os.scandir(folder)) <= 10**6
    model = tsjax.load(tsjax.EMBEDDED, dtype="float32", drafter=tsjax.EMBEDDED)
    row = Line(1.0)
    free = Costs(((1, row), (8, row)), 0.0, row, row, 0.0, 0.0, "measured", any_rows=True)
    tree = tsjax.LikelyTree(width=5, pass_widths=(), places=0, drafter=4, adapt=False, costs=free)
    config = tsjax.GenerationConfig(
        max_new_tokens=120, min_new_tokens=120, do_sample=True, temperature=0.8
    )
    found = tsjax.generate(model, "Once upon a time", config=config, method=tree)
    assert found.stats.tokens_per_step > 1.2
