# SPDX-License-Identifier: Apache-2.0
"""Presets: the paper's values, shapes of the right size, and the command line's flags for them."""

import json

import helpers
import hf_fixtures
import jax
import numpy as np
import pytest

import tsjax
from tsjax.__main__ import main
from tsjax.files.presets import model_preset_names, preset_names
from tsjax.model.params import declare_params, is_spec

# TokenSwift, Table 10: top-p, min-p, theta.
TABLE_10 = {
    "llama3.1-8b": (1.0, 0.1, 1.2),
    "llama2-7b-yarn-128k": (0.9, 0.0, 1.15),
    "qwen2.5-1.5b": (0.9, 0.0, 1.15),
    "qwen2.5-7b": (1.0, 0.05, 1.15),
    "qwen2.5-14b": (1.0, 0.05, 1.13),
}
BILLIONS = {  # of parameters, as their makers state them
    "llama2-7b-yarn-128k": 6.74, "llama3.1-8b": 8.03, "llama3.1-70b": 70.6, "llama3.2-1b": 1.24,
    "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8,
    "deepseek-r1-distill-qwen-32b": 32.8, "qwq-32b": 32.8,
}  # fmt: skip


def test_every_preset_has_the_papers_values():
    assert set(preset_names()) == set(TABLE_10)
    for name, (top_p, min_p, theta) in TABLE_10.items():
        config, method = tsjax.preset(name)
        assert (config.top_p, config.min_p, config.repetition_penalty) == (top_p, min_p, theta)
        assert config.do_sample and config.temperature == 1.0
        assert config.repetition_window == 1024
        assert method.tree == (1, 3, 3, 3) and method.num_ngrams == 20 and method.ngram_size == 4
        assert (method.draft_budget, method.num_sinks) == (4096, 16)
        with_heads = tsjax.model_preset(name).to_dict() | {"num_draft_heads": 3}
        decode = tsjax.steps.DecodeConfig(tsjax.ModelConfig.from_dict(with_heads), method)
        assert (decode.sizes.depth, decode.sizes.width) == (4, 101)


def test_shapes_have_the_size_of_their_models():
    assert set(model_preset_names()) == set(BILLIONS)
    for name, billions in BILLIONS.items():
        cfg = tsjax.model_preset(name)
        specs = jax.tree.leaves(declare_params(cfg), is_leaf=is_spec)
        count = sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in specs)
        assert round(count / 1e9, 2) == pytest.approx(billions, rel=0.005), name
        assert cfg.dtype == "bfloat16" and cfg.max_positions >= 40960


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match="preset='gpt2' is not valid: one of llama3.1-8b, "):
        tsjax.preset("gpt2")
    with pytest.raises(ValueError, match="model_preset=7 is not valid: one of llama2-7b"):
        tsjax.model_preset(7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("presets") / "hf"
    hf_fixtures.make(folder, vocab_size=len(helpers.TOKENS), max_position_embeddings=2048)
    helpers.save_tokenizer(folder)
    return str(folder)


def document(capsys, *argv: str) -> dict:
    assert main(["generate", *argv, "--json", "--max-new-tokens", "12"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.wide
def test_the_preset_sets_sampling_and_method_and_flags_override_it(checkpoint, capsys):
    given = (checkpoint, "the", "--preset", "qwen2.5-1.5b")
    swift = document(capsys, *given)
    assert swift["stats"]["draft_positions"] == 4  # TokenSwift without heads, n-grams of four
    plain = document(capsys, *given, "--method", "autoregressive")
    assert plain["stats"]["draft_positions"] == 0
    assert plain["tokens"] == swift["tokens"]
    config, _ = tsjax.preset("qwen2.5-1.5b")
    again = tsjax.generate(tsjax.load(checkpoint), "the", config=config, max_new_tokens=12)
    assert again.tokens[0].tolist() == plain["tokens"][0]
    other = document(capsys, *given, "--method", "autoregressive", "--seed", "5")
    assert other["tokens"] != plain["tokens"]


def test_prefill_options(checkpoint, capsys):
    lazy = ("--prefill", "lazy", "--prefill-options", "keep={1:0.5}")
    found = document(capsys, checkpoint, "the", *lazy, "revive=never")
    computed = found["stats"]["prompt_computed"]
    assert len(computed) == 2 and computed[0] == 1 and computed[1] < 1
    assert document(capsys, checkpoint, "the")["stats"]["prompt_computed"] == []


NGRAM = "--method", "ngram", "--method-options"
SWIFT = "--method", "tokenswift", "--method-options"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefill", "some"], "invalid choice: 'some'"),
        (["--prefill-options", "window=2"], "window=2 is not valid without --prefill lazy"),
        (["--prefill", "lazy", "--prefill-options", "share=2"], "unknown option of LazyPrefill"),
        (["--prefill", "lazy", "--prefill-options", "window"], "'window' is not valid: NAME"),
        (["--prefill", "lazy", "--prefill-options", "keep={1:2}"], "the share 2 after layer 1"),
        (["--method-options", "tree=(1,)"], "option of Auto 'tree'"),
        (["--draft-model", "x", "--method-options", "tree=1"], "option of DraftModel 'tree'"),
        ([*NGRAM, "tree=(1,)"], "unknown option of NGram 'tree'"),
        ([*NGRAM, "num_ngrams=x"], "num_ngrams='x' is not valid"),
        ([*SWIFT, "draft_from=verified_state"], "draft_from='verified_state' needs draft heads"),
        (["--preset", "gpt2"], "invalid choice: 'gpt2'"),
    ],
)
def test_wrong_options_are_one_line(checkpoint, argv, message, capsys):
    try:
        code = main(["generate", checkpoint, "the", *argv])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and len(error.splitlines()) == 1
