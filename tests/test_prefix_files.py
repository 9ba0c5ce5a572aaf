# SPDX-License-Identifier: Apache-2.0
"""Prefixes in files: the same rows and tokens come back, on any mesh; others are refused."""

import dataclasses
import io
import json
import os
import sys

import jax
import numpy as np
import pytest
from helpers import SIZES, TOKENS, looping_model, save_tokenizer, tiny_model
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import tsjax
from tsjax.__main__ import main
from tsjax.base.errors import BadValue, NoSuchFile
from tsjax.host import conversation
from tsjax.model.parts import by_text

HOW = dict(do_sample=True, seed=5, max_new_tokens=12, **SIZES)
PROMPT = (np.arange(80) * 7 % 24).tolist()
TEMPLATE = "{% for m in messages %}{{ m.role + ' ' + m.content + ' in ' }}{% endfor %}"
KINDS = [*({"dtype": name} for name in ("float32", "bfloat16", "float16")), {"cache": "int8"}]


def tokens(model, prompt=PROMPT, **settings):
    return tsjax.generate(model, prompt, **HOW, **settings).tokens[0].tolist()


@pytest.fixture
def file(tmp_path):
    """Of the first 60 tokens."""
    tsjax.read(looping_model(), PROMPT[:60]).save(tmp_path / "text.prefix")
    return tmp_path / "text.prefix"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_file_gives_back_the_same_rows_and_tokens(kind, tmp_path):
    """It is what the safetensors package reads, and holds no slot but those of the text."""
    model, path = looping_model(**kind), tmp_path / "text.prefix"
    prefix = tsjax.read(model, PROMPT[:60])
    prefix.save(path)
    stored = load_file(path)
    assert stored["tokens"].tolist() == PROMPT[:60]
    found = tsjax.read(model, prefix=path)
    assert found.tokens.tolist() == PROMPT[:60] and found.length == prefix.length == 59
    caches = (prefix.cache.k, prefix.cache.v), (found.cache.k, found.cache.v)
    names = [name for name in stored if name not in ("tokens", "checksums")]
    before, after = map(jax.tree.leaves, caches)
    assert len(names) == len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one[:, :, :59], other[:, :, :59])
    ours = np.asarray(jax.tree.leaves(prefix.cache.v[1])[0][0, :, :59])
    last = stored["v.1.numbers" if "cache" in kind else "v.1.rows"]
    np.testing.assert_array_equal(last.view(ours.dtype), ours)
    alone = tokens(model)
    assert tokens(model, prefix=path) == tokens(model, prefix=found) == alone


def test_a_file_says_that_a_lazy_prefill_read_it(tmp_path):
    model, path = looping_model(), tmp_path / "text.prefix"
    whole = tsjax.read(model, PROMPT[:60])
    dataclasses.replace(whole, is_approximate=True).save(path)
    assert tsjax.read(model, prefix=path).is_approximate and not whole.is_approximate


def test_what_a_prompt_shares_with_a_file_is_not_read_again(file, tmp_path):
    model = looping_model()
    for shared in (0, 31, 59, 60):
        prompt = PROMPT[:shared] + [9] * 20
        result = tsjax.generate(model, prompt, prefix=str(file), **HOW)
        assert result.stats.prefix_tokens == min(shared, 59)
        assert result.tokens[0].tolist() == tokens(model, prompt)
    (*_, last) = tsjax.stream(model, PROMPT, prefix=file, **HOW)
    assert last.stats.prefix_tokens == 59
    kept = tsjax.generate(model, PROMPT, prefix=file, keep_prefix=True, **HOW)
    kept.prefix.save(file)  # that of a run, in the place of the one it began with
    prompt = [*PROMPT, *kept.tokens[0].tolist(), 3]
    found = tsjax.generate(model, prompt, prefix=file, **HOW)
    assert found.stats.prefix_tokens >= 91 and found.tokens[0].tolist() == tokens(model, prompt)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
def test_a_mesh_reads_and_writes_the_same_file(shape, file):
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh, alone = jax.make_mesh(shape, ("model", "slots"), devices=devices), looping_model()
    model = looping_model(mesh=mesh)
    prefix, found = tsjax.read(model, PROMPT[:60]), tsjax.read(model, prefix=file)
    for one, other in zip(prefix.cache.k, found.cache.k, strict=True):
        assert set(other.sharding.device_set) == {*devices}
        slots = min(one.shape[2], other.shape[2], 59 // shape[1])
        one, other = (by_text(np.asarray(x), shape[1]) for x in (one, other))
        np.testing.assert_allclose(one[..., :slots, :], other[..., :slots, :], atol=1e-5)
    assert tokens(model, prefix=file) == tokens(alone)
    prefix.save(file)
    assert tokens(alone, prefix=file) == tokens(alone)


def of_format(number):
    """The file as the safetensors package would write it with another description."""

    def change(file):
        with safe_open(file, framework="np") as stored:
            about = json.loads(stored.metadata()["tsjax_prefix"])
        about.update(format=number, tsjax="9.1")
        save_file(load_file(file), file, metadata={"tsjax_prefix": json.dumps(about)})

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda file: file.unlink(), NoSuchFile, "no such file; what tsjax.read returns"),
        (lambda file: (file.unlink(), file.mkdir()), BadValue, "is a folder; it must be a file"),
        (lambda file: file.write_bytes(b""), BadValue, "whole header"),
        (lambda file: file.write_text("Once upon a time"), BadValue, "whole header"),
        (lambda file: save_file({"a": np.ones(3)}, file), BadValue, "without a prefix"),
        (of_format(2), BadValue, "format 2 of tsjax 9.1; this tsjax .* a newer tsjax reads it"),
        (of_format(0), BadValue, "format 0 of tsjax 9.1; .* read the text anew"),
    ],
)
def test_what_is_no_file_of_a_prefix_is_refused(change, error, message, file):
    change(file)
    with pytest.raises(error, match=message):
        tsjax.generate(looping_model(), PROMPT, prefix=file, **HOW)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: looping_model(seed=3), "read by another model: load that of the file"),
        (lambda: looping_model(rope=tsjax.steps.RopeConfig(theta=100.0)), "read by another model"),
        (lambda: looping_model(cache="int8"), r"the model has 'int8': load it with cache='same'"),
        (lambda: looping_model(dtype="bfloat16"), "load it with dtype='float32'"),
        (lambda: tiny_model(num_layers=3), "read by another model"),
    ],
    ids=["weights", "rope", "cache", "dtype", "shape"],
)
def test_a_file_of_another_model_is_refused(model, message, file):
    with pytest.raises(BadValue, match=message):
        tsjax.generate(model(), PROMPT, prefix=file, **HOW)


def test_damage_is_found_wherever_it_is(file):
    """One bit of each array, of the header and of the checksums; and an end that is missing."""
    whole, model = file.read_bytes(), looping_model()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    assert begin + max(ends) == len(whole)
    damaged = "is damaged: the checksum is another one"
    places = {begin + end - 1: damaged for end in ends}  # the last byte of each
    places |= {whole.index(b"fingerprint") + 20: damaged, len(whole) - 4 * len(ends): damaged}
    for place, message in places.items():
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadValue, match=message):
            tsjax.read(model, prefix=file)
    for size in (len(whole) - 1, begin, begin - 1, 9, 3):
        file.write_bytes(whole[:size])
        with pytest.raises(BadValue, match="a file that its save wrote"):
            tsjax.read(model, prefix=file)
    file.write_bytes(whole + b"x")
    with pytest.raises(BadValue, match=f"has {len(whole) + 1:,} bytes where .* {len(whole):,}"):
        tsjax.read(model, prefix=file)


def test_a_file_that_cannot_be_written_whole_is_not_there(file, monkeypatch):
    prefix, whole = tsjax.read(looping_model(), [1, 2, 3]), file.read_bytes()

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        prefix.save(file)
    assert file.read_bytes() == whole and [*file.parent.iterdir()] == [file]


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model for chats."""
    folder = tmp_path_factory.mktemp("model")
    tsjax.save(tiny_model(vocab_size=len(TOKENS)), folder / "m")
    save_tokenizer(folder / "m")
    (folder / "m" / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder / "m")


def done(capsys, *argv) -> dict:
    assert main([*map(str, argv)]) == 0
    said = capsys.readouterr()
    return {**json.loads(said.out or "{}"), "stderr": said.err}


def test_commands_write_and_take_a_file(folder, tmp_path, capsys):
    file, text = tmp_path / "text.prefix", "the tea has a lot of it " * 3
    (tmp_path / "text").write_text(text)
    how = "--max-new-tokens", 6, "--json"
    said = done(capsys, "read", folder, "--prompt-file", tmp_path / "text", "--save-to", file)
    assert f"; {file}: 0." in said["stderr"]
    alone, found = (
        done(capsys, "generate", folder, text + "in the hat", *how, *more)
        for more in ((), ("--prefix", file))
    )
    assert found["tokens"] == alone["tokens"]
    assert alone["stats"]["prefix_tokens"] == 0 and found["stats"]["prefix_tokens"] > 20
    before = file.read_bytes()
    more = "--prefix", file, "--save-to", file  # goes on with it, and replaces it
    done(capsys, "read", folder, text + "in the hat", *more)
    assert file.read_bytes()[-4:] != before[-4:]


def test_a_chat_goes_on_from_a_file(folder, tmp_path, capsys, monkeypatch):
    file, system = tmp_path / "text.prefix", ("--system", "the tea has a lot of it " * 3)
    done(capsys, "read", folder, *system, "--save-to", file)
    counts, run = [], conversation.result_of
    for more in ((), ("--prefix", file)):
        made = []
        monkeypatch.setattr(
            conversation, "result_of", lambda *of, made=made: made.append(run(*of)) or made[-1]
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO("the tea\n/new\nthe hat\n/quit\n"))
        how = "--max-new-tokens", "4", "--no-do-sample", *map(str, more)
        assert main(["chat", folder, *system, *how]) == 0
        counts.append([result.stats.prefix_tokens for result in made])
    answers = capsys.readouterr().out.splitlines()
    assert answers[:2] == answers[2:] and counts[0] == [0, 0] and min(counts[1]) > 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("read", "x", "a", "--ids", "1", "--save-to", "f"), "give the text once"),
        (("read", "x", "--save-to", "f"), "give the text once"),
        (("read", "x", "a", "--save-to", "."), "not a folder"),
        (("read", "x", "a", "--save-to", "f", "--prefix", "none"), "no such file"),
        (("generate", "x", "a", "--prefix", "none"), "no such file"),
        (("chat", "x", "--prefix", "none"), "no such file"),
    ],
)
def test_a_command_refuses_before_the_model_is_read(flags, message, capsys):
    assert main([*flags]) == 2
    assert message in capsys.readouterr().err
