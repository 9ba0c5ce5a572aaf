# SPDX-License-Identifier: Apache-2.0
"""A damaged file is one clear error that names it; what does not need the file goes on without it.

Single damages, each with what must be said about it. file_fuzz.py makes many, chosen by a seed.
"""

import json
import re
import subprocess
import sys
import warnings

import file_fuzz
import helpers
import numpy as np
import pytest
from hf_fixtures import change, change_tensors, make, weights
from safetensors.numpy import save_file

import tsjax
import tsjax_convert
import tsjax_convert.__main__
from tsjax.__main__ import main
from tsjax.base.errors import BadValue, NotSupported
from tsjax.base.input_files import parsing, read_json
from tsjax.files import tensor_names
from tsjax.files.checkpoint import load, save
from tsjax.files.tokenizer import encode, load_tokenizer
from tsjax.host.prompts import tokenizer_of

# --- any file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "RecursionError"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 levels"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"a": ' + "9" * 400 + "}", "an integer of 400 digits"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    ],
    ids=range(7),
)
def test_json_that_cannot_be_parsed(content, message, tmp_path):
    file = tmp_path / "x.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"x.json' is not valid JSON: .*{message}") as error:
        read_json(file)
    assert type(error.value) is BadValue


class Panic(BaseException):
    """Rust's do not derive from Exception."""


def test_whatever_a_parser_raises_becomes_one_error_but_what_is_not_about_the_file_passes():
    for error in (TypeError("x"), Exception("x"), RecursionError(), Panic("x")):
        with pytest.raises(ValueError, match=f"'a.json' is damaged: {type(error).__name__}"):
            with parsing("a.json", " is damaged"):
                raise error
    for error in (KeyboardInterrupt(), SystemExit(3), ImportError("torch")):
        with pytest.raises(type(error)), parsing("a.json", " is damaged"):
            raise error


KINDS_OF_FILES = {"pipe": "a named pipe", "device": "a device", "folder": "a folder"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", "pipe"),
        ("generation_config.json", "device"),
        ("model.safetensors", "folder"),
        ("model.safetensors", "pipe"),
        ("tokenizer.json", "device"),
    ],
)
def test_only_files_are_opened(name, kind, tmp_path):
    make(tmp_path)
    helpers.save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    said = f"{name}' is {KINDS_OF_FILES[kind]}; it must be a file"
    with file_fuzz.replaced(tmp_path / name, kind), pytest.raises(ValueError, match=said):
        _ = load(tmp_path).tokenizer


# --- the tokenizer ---------------------------------------------------------------------------


@pytest.fixture
def talker(tmp_path):
    """A model with a tokenizer, and the file to damage."""
    helpers.save_tokenizer(tmp_path)
    return helpers.tiny_model(path=str(tmp_path)), tmp_path / "tokenizer.json"


def test_a_tokenizer_is_shared_until_it_is_replaced(talker):
    model, file = talker
    assert model.tokenizer is model.tokenizer is model.replace(stop_ids=()).tokenizer
    old = encode(model.tokenizer, "the").tolist()
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["▁the"], vocabulary["▁a"] = vocabulary["▁a"], vocabulary["▁the"]
    file.write_text(json.dumps(content))
    fresh = model.replace(stop_ids=())
    assert encode(fresh.tokenizer, "the").tolist() != old
    assert encode(model.tokenizer, "the").tolist() == old  # that of the weights it was loaded with


def test_token_ids_need_no_tokenizer(talker):
    model, file = talker
    prompt, expected = [1, 5, 7], tsjax.generate(model, [1, 5, 7], max_new_tokens=3)
    for content in ("", "[]", "[" * 100_000, '{"model": 3}', '{"added_tokens": {"a": 1}}'):
        file.write_text(content)
        with pytest.raises(ValueError, match="a tokenizer that cannot be loaded") as error:
            _ = model.replace(stop_ids=()).tokenizer
        assert repr(str(file.parent)) in str(error.value) and "token ids work" in str(error.value)
    model = model.replace(stop_ids=())
    result = tsjax.generate(model, prompt, max_new_tokens=3)
    assert result.tokens[0].tolist() == expected.tokens[0].tolist()
    with pytest.raises(ValueError, match="a tokenizer that cannot be loaded"):
        _ = result.text
    with pytest.warns(UserWarning, match="without text: .*a tokenizer that cannot be") as warned:
        chunks = list(tsjax.stream(model, prompt, max_new_tokens=3))
    assert len(warned) == 1 and all(chunk.text is None for chunk in chunks)
    assert [t for chunk in chunks for t in chunk.tokens[0]] == result.tokens[0].tolist()
    for words, settings in (("the", {}), (prompt, {"stop_strings": "a"})):
        with pytest.raises(ValueError, match="a tokenizer that cannot be loaded"):
            tsjax.generate(model, words, max_new_tokens=3, **settings)


def test_without_a_vocabulary_there_is_no_tokenizer(talker):
    model, file = talker
    file.unlink()  # tokenizer_config.json alone would be a tokenizer without tokens
    with pytest.raises(FileNotFoundError, match="no tokenizer could be loaded from .*pass token"):
        load_tokenizer(str(file.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer_of(model) is None


# --- config.json -----------------------------------------------------------------------------

FIELDS = [
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "torch_dtype", "rope_theta", "rope_scaling",
    "attention_bias", "tie_word_embeddings", "layer_types", "medusa_heads", "medusa_head_accuracy",
]  # fmt: skip
# What no field may be, and what they may not be beside numbers.
WRONG = [[["x"]], {"x": {"y": 1}}, 10**12, "x", -1, float("nan"), float("inf")]
NOT_NUMBERS = [True, "7", [8], {"x": 8}]


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_values_name_file_and_field(field, tmp_path):
    make(tmp_path)
    intact = json.loads((tmp_path / "config.json").read_text())
    numeric = isinstance(intact.get(field), int | float) or field == "head_dim"
    wrong = WRONG if field not in ("rms_norm_eps", "rope_theta") else [*WRONG[:2], *WRONG[3:]]
    for value in [*wrong, *(NOT_NUMBERS if numeric else ())]:
        (tmp_path / "config.json").write_text(json.dumps(intact | {field: value}))
        with pytest.raises((ValueError, NotImplementedError)) as error:
            load(tmp_path)
        assert type(error.value) in (BadValue, NotSupported)
        assert str(tmp_path / "config.json") in str(error.value)
        assert re.sub("^torch_|^medusa_|_scaling$", "", field) in str(error.value)


# --- counts, lists and values ----------------------------------------------------------------


@pytest.fixture
def declared(monkeypatch):
    """Declaring more than there can be is an error here, where it would take all memory."""
    entries = tensor_names.entries

    def few(cfg):
        assert max(cfg.num_layers, cfg.num_draft_heads) < 1000
        return entries(cfg)

    monkeypatch.setattr(tensor_names, "entries", few)


def test_counts_are_compared_with_the_files(tmp_path, declared):
    for name in ("num_hidden_layers", "medusa_heads"):
        change(make(tmp_path / name) / "config.json", **{name: 10**9})
        with pytest.raises(ValueError, match=f"json': {name}=10+ is not valid: there are 21"):
            load(tmp_path / name)
    save(load(make(tmp_path / "hf")), tmp_path / "ts")
    intact = json.loads((tmp_path / "ts" / "tsjax.json").read_text())["model"]
    for name in ("num_layers", "num_draft_heads"):
        change(tmp_path / "ts" / "tsjax.json", model=intact | {name: 10**9})
        with pytest.raises(ValueError, match=f"{name}=10+ is not valid: there are 15 tensors"):
            load(tmp_path / "ts")


def test_a_tensor_as_large_as_the_config_says_is_not_made(tmp_path):
    sizes = dict(vocab_size=2**31 - 1, hidden_size=2**31 - 4, head_dim=2**31 - 4)
    change(make(tmp_path) / "config.json", **sizes)
    with pytest.raises(ValueError, match=r"the config asks for \[2147483647, 2147483644\]"):
        load(tmp_path)


def test_long_lists_of_problems_are_cut(tmp_path):
    content = weights(make(tmp_path))
    save_file({f"x{k}": v for k, v in content.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    assert len(str(error.value).splitlines()) == 22
    assert str(error.value).endswith("... and 22 more")


def test_all_values_that_are_not_finite_are_one_warning(tmp_path):
    content = weights(make(tmp_path))
    for array in content.values():
        array.flat[0] = np.nan
    change_tensors(tmp_path, content)
    for read in (
        lambda: load(tmp_path),
        lambda: tsjax_convert.to_hf(tmp_path, tmp_path / "out", max_shard_size=10_000),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            read()
        assert len(warned) == 1
        assert re.search(r"model.embed_tokens.weight in .*and 1 more", str(warned[0].message))


# --- the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 100_000),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": [1], "b": 3}}'),
    ],
    ids=range(3),
)
def test_commands_end_with_one_line(file, content, tmp_path, capsys):
    folder, out = make(tmp_path / "hf"), str(tmp_path / "out")
    if "index" in file:
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(content)
    training = ["--data", str(tmp_path / "x.txt"), "--save-to", out]
    for command, *arguments in (
        (main, "generate", str(folder), "--ids", "1,2"),
        (main, "train-heads", str(folder), *training),
        (tsjax_convert.__main__.main, str(folder), out),
    ):
        code = command(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert code == 2 and ": error: " in line and str(folder / file) in line
    assert not (tmp_path / "out").exists()


# --- by chance -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (0, 65),
        pytest.param(5, 400, marks=pytest.mark.wide),
        *(pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in range(1, 5)),
    ],
)
def test_damages_chosen_by_a_seed(seed, count, tmp_path):
    command = [sys.executable, file_fuzz.__file__, str(tmp_path), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])  # libraries print, too
    assert not found["failures"], "\n\n".join(
        f"{f['case']}: {f['what']}\n{f['error']}" for f in found["failures"][:10]
    )
    assert found["refused"] > count / 2
    assert found["megabytes"] < 500
