# SPDX-License-Identifier: Apache-2.0
"""config.json: what is read, what is refused, and that transformers reads what is written."""

import dataclasses
import json
import math

import pytest
from hf_fixtures import BIASED, FAMILIES, LLAMA3, YARN, config, make

import tsjax
from tsjax.base.model_config import RopeConfig
from tsjax.files.config_files import config_to_hf, model_config, read_stop_ids
from tsjax.files.weight_files import find_folder

LOG4 = math.log(4)
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("llama", {"head_dim": 16}, {"head_dim": 16}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
        ("llama", {"torch_dtype": ..., "dtype": "float16"}, {"dtype": "float16"}),
        ("llama", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ("llama", {"medusa_heads": 3}, {"num_draft_heads": 3}),
        ("llama", {"architectures": ..., "layer_types": ["full_attention"] * 2}, {}),
        ("qwen2", {}, {"qkv_bias": True, "out_bias": False, "tie_embeddings": True}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, {}),
        ("qwen3", {}, {"qk_norm": True, "head_dim": 16, "qkv_bias": False}),
        ("mistral", {"sliding_window": 128}, {"qkv_bias": False}),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 4096}, {}),
        ("mistral", {"attention_bias": True}, {"qkv_bias": False}),  # as transformers: no such flag
    ],
)
def test_family_flags(family, changes, expected):
    cfg = model_config(config(family, **changes))
    usual = dict(vocab_size=48, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=40, norm_eps=1e-5)
    assert {name: getattr(cfg, name) for name in usual | expected} == usual | expected


def rope(kind: str = "default", theta: float = 5e5, **values) -> RopeConfig:
    return RopeConfig(kind=kind, theta=theta, **values)


FINETUNED = {"type": "linear", "factor": 2, "finetuned": True}
NONE_ORIGINAL = {**LLAMA3, "original_max_position_embeddings": None}
BOTH = {  # rope_scaling comes before rope_parameters, as in transformers
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_parameters": {"rope_type": "linear", "factor": 5.0},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": ...}, rope(theta=10000.0)),
        ({"rope_scaling": None}, rope()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, rope(theta=7.0)),
        ({"rope_scaling": FINETUNED}, rope("linear", factor=2.0)),
        ({"rope_scaling": LLAMA3}, rope("llama3", factor=8.0, original_max_positions=64)),
        ({"rope_scaling": NONE_ORIGINAL}, rope("llama3", factor=8.0, original_max_positions=128)),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
            rope("llama3", factor=8.0, original_max_positions=16),
        ),
        (BOTH, rope("linear", factor=3.0)),
    ],
)
def test_rope(changes, expected):
    assert model_config(config(**changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * LOG4 + 1),
        ({"factor": None}, 0.1 * LOG4 + 1),  # 128 / 32
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"attention_factor": None, "mscale": 2.0}, 0.1 * LOG4 + 1),  # both or neither
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * LOG4 + 1) / (0.05 * LOG4 + 1)),
    ],
)
def test_yarn_attention_factor(changes, expected):
    rope = model_config(config(rope_scaling={**YARN, **changes})).rope
    assert rope.attention_factor == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "gemma2"}, "'gemma2'.* supported are llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"layer_types": ["sliding_attention"]}, "layer_types.*sliding_attention"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("mistral", {"sliding_window": 64}, 'sliding_window=64 .*"sliding_window": null'),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "window=4096"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "per layer type .full_attention"),
        ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.25"),
        ("llama", {"rope_scaling": {**YARN, "attn_factor": 1.0}}, "attn_factor=1.0"),
        ("llama", {"rope_scaling": {**LLAMA3, "rope_type": "linear"}}, "low_freq_factor=1.0"),
    ],
)
def test_unsupported_is_refused_by_name(family, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        model_config(config(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": ...}, "lacks model_type"),
        ("llama", {"hidden_size": ..., "torch_dtype": ...}, "lacks hidden_size, dtype"),
        ("qwen2", {"num_key_value_heads": ...}, "lacks num_key_value_heads"),
        ("qwen3", {"head_dim": ...}, "lacks head_dim"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads=3"),
        ("llama", {"head_dim": 7}, "head_dim=7"),
        ("llama", {"torch_dtype": "int8"}, "dtype='int8'"),
        ("llama", {"rope_theta": None}, "rope_theta=None"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor=0.5"),
    ],
)
def test_wrong_values_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        model_config(config(family, **changes))


ROUND_TRIPS = [
    ("llama", {**BIASED, "head_dim": 16}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    ("llama", {"rope_scaling": LLAMA3, "torch_dtype": "bfloat16", "medusa_heads": 3}),
    ("llama", {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
    ("qwen2", {"rope_scaling": {**YARN, "factor": None, "truncate": False}}),
    ("qwen3", {"rope_scaling": {**YARN, "beta_fast": 16.0, "attention_factor": 0.3}}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"sliding_window": 500, "rope_theta": 1e6}),
]


@pytest.mark.parametrize(("family", "changes"), ROUND_TRIPS)
def test_a_written_config_is_read_back_and_by_transformers(family, changes, tmp_path):
    from transformers import AutoConfig

    cfg = model_config(config(family, **changes))
    written = json.dumps(config_to_hf(cfg))
    assert model_config(json.loads(written)) == cfg
    (tmp_path / "config.json").write_text(written)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == FAMILIES[family]["architectures"]
    for name, ours in (
        ("hidden_size", cfg.embed_dim), ("num_key_value_heads", cfg.num_kv_heads),
        ("head_dim", cfg.head_dim), ("tie_word_embeddings", cfg.tie_embeddings),
    ):  # fmt: skip
        assert getattr(theirs, name) == ours
    assert getattr(theirs, "sliding_window", None) is None
    assert set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    assert theirs.rope_parameters["rope_theta"] == cfg.rope.theta
    assert theirs.rope_parameters["rope_type"] == cfg.rope.kind
    for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"):
        if name in theirs.rope_parameters:
            assert theirs.rope_parameters[name] == getattr(cfg.rope, name)
    # What transformers 5 saves is read to the same settings again.
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert model_config(again, dtype=cfg.dtype) == cfg


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"family": "qwen2"}, {"family": "gemma"}])
def test_a_model_no_family_has_is_not_written(changes):
    cfg = dataclasses.replace(model_config(config()), **changes)
    with pytest.raises(ValueError, match="ForCausalLM has the shape of this model|family='gemma'"):
        config_to_hf(cfg)


@pytest.mark.parametrize(
    ("generation", "main", "expected"),
    [
        (None, 2, (2,)),
        (None, None, ()),
        ({"eos_token_id": [5, 6]}, 2, (5, 6)),
        ({"eos_token_id": 0}, 2, (0,)),
    ],
)
def test_stop_ids(generation, main, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": main}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_stop_ids(str(tmp_path)) == expected


def test_a_hub_id_is_downloaded(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def download(name, *, allow_patterns, ignore_patterns, **how):
        if name == "no/network":
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        asked.append((name, "*.bin" in allow_patterns, "*.safetensors" in allow_patterns, how))
        return str(tmp_path)

    make(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_folder("org/name") == str(tmp_path)
    assert find_folder("org/name", allow_pickle=True) == str(tmp_path)
    how = dict(revision="v2", cache_dir="somewhere", token="secret", local_files_only=True)
    tsjax.load("org/name", **how)
    pickles = zip((False, True, False), ({}, {}, how), strict=True)
    assert asked == [("org/name", wanted, True, said) for wanted, said in pickles]
    with pytest.raises(FileNotFoundError, match="'no/network'.* no such folder.*outgoing traffic"):
        find_folder("no/network")
    for path in ("/no/such/folder", "name", "a/b/c", "./a"):
        with pytest.raises(FileNotFoundError, match="no such folder, and it is not a hub id"):
            find_folder(path)
    monkeypatch.chdir(tmp_path)  # a folder that is there is not looked up
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_folder("org/name") == str(tmp_path / "org" / "name")
