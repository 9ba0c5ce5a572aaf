# SPDX-License-Identifier: Apache-2.0
"""Damages files of every kind and reads them: `python tests/file_fuzz.py FOLDER SEED COUNT`.

A case is one damage to one file, chosen by the seed. Reading either succeeds or raises one of few
errors that name the file; whatever else happens is a failure, printed with all others as JSON, with
the memory that the process took at most. A process of its own: memory, and what libraries print
while they fail, belong to nobody else.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import gguf_fixtures
import helpers
import hf_fixtures
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import tsjax
from tsjax.base.errors import BadValue, NoSuchFile, NotSupported
from tsjax.base.input_files import read_text
from tsjax.files import checkpoint
from tsjax.files.tokenizer import Detokenizer, encode, load_tokenizer
from tsjax.host import resuming
from tsjax.training import corpus
from tsjax.training import saved as saved_training
from tsjax.training.fit import restored

# What a damaged file may end in.
OURS = (BadValue, NotSupported, NoSuchFile)
DEEP, LONG = "@deep@", "@long@"
VALUES = [
    None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, 10**299, 0.5, -0.0, 1e308, 1e999, -1e999,
    float("nan"), "", "x", "../x", "0", "\ud800", "\0", "é" * 300, [], [[]], {}, [None], ["x"], [1],
    {"x": 1}, [1] * 5000, {"type": "x"}, DEEP, LONG,
]  # fmt: skip


class Kind:
    """A kind of file: where an intact folder is, which of its files are damaged, who reads them."""

    def __init__(self, folder: Path, files, read):
        self.folder, self.read = folder, read
        self.files = [file for file in files if (folder / file).is_file()]


def files_in(folder: Path):
    return [path.relative_to(folder) for path in folder.rglob("*")]


def data_of_training(text: Path, hf: Path) -> Kind:
    text.mkdir()
    np.save(text / "ids.npy", np.arange(48, dtype=np.int32).reshape(2, 24) % 40)
    np.arange(48, dtype=np.uint16).tofile(text / "ids.bin")
    (text / "book.txt").write_text("the hat in a tin " * 20)

    def read(folder, file):
        corpus.read_training_corpus(
            folder / file, sequence_length=8, vocab_size=400, data_dtype="uint16",
            tokenizer=lambda: load_tokenizer(str(hf)),
        )  # fmt: skip
        if file.endswith(".txt"):
            read_text(folder / file)

    return Kind(text, ["ids.npy", "ids.bin", "book.txt"], read)


def run_of_training(kept: Path) -> Kind:
    like = {"heads.0": jnp.zeros((40, 40)), "adam": jnp.ones(7)}
    identity = {"model": "m", "data": "d", "settings": {"num_heads": 1}}
    history = [{"step": 1, "head_losses": [1.0]}, {"step": 2, "head_losses": [0.5]}]
    arrays = {name: np.asarray(array) for name, array in like.items()}
    saved_training.write_checkpoint(str(kept), 2, arrays, {**identity, "history": history})
    saved = Path(saved_training.latest(str(kept)) or "")
    run = SimpleNamespace(arrays=lambda: like, restore=lambda arrays, steps: None)

    def restore(folder, file):
        restored(run, str(folder), identity)  # pyright: ignore

    return Kind(saved, files_in(saved), restore)


def kinds(place: Path) -> dict[str, Kind]:
    hf, ts, sharded = place / "hf", place / "ts", place / "sharded"
    hf_fixtures.make(hf, rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 30})
    helpers.save_tokenizer(hf)
    (hf / "generation_config.json").write_text(
        '{"eos_token_id": [2, 3], "do_sample": true, "temperature": 0.5, "top_k": 5}'
    )
    hf_fixtures.make(sharded, shards=3)
    checkpoint.save(checkpoint.load(hf_fixtures.make(place / "heads", heads=2)), ts)

    def load(folder, file, **options):
        return tsjax.load(folder, **options)

    def load_tokenizer_of(folder, file):
        tokenizer = load_tokenizer(str(folder))
        ids = encode(tokenizer, "the hat in a tin é")
        writer = Detokenizer(tokenizer, ids)
        writer.push([3, 4, 5])
        writer.flush()

    def load_with_heads(folder, file):
        cfg = tsjax.load(hf, heads=folder).cfg
        assert cfg.num_draft_heads <= 2

    adapter = place / "adapter"
    adapter.mkdir()
    content = hf_fixtures.tensors(hf_fixtures.config(), heads=2)
    save_file({k: v for k, v in content.items() if "medusa" in k}, adapter / "heads.safetensors")

    model, runs = helpers.tiny_model(), place / "runs"
    runs.mkdir()
    tsjax.generate(model, [[1, 2], [3]], max_new_tokens=3, save_to=runs / "run.json")

    texts = place / "texts"
    texts.mkdir()
    tsjax.read(model, [1, 2, 3, 4]).save(texts / "prefix.safetensors")

    def load_prefix(folder, file):
        tsjax.read(model, prefix=folder / file)

    def resume(folder, file):
        # A setting that is well-formed and does not fit the model is refused as an argument is.
        resuming.resumed_run(model, folder / file, None, {})

    def load_with_settings(folder, file):
        tsjax.load(folder)
        tsjax.GenerationConfig.from_hf(folder)

    own = gguf_fixtures.make(
        place / "gguf" / "m.gguf", kind=gguf_fixtures.Types.Q8_0, tokenizer=hf,
        fields={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
    )  # fmt: skip

    def load_gguf(folder, file):
        model = tsjax.load(folder / file)
        with contextlib.suppress(NoSuchFile):  # the name of its field is damaged: there is none
            load_tokenizer_of(model.path, file)

    tokenizer_files = ["tokenizer.json"] * 4 + ["tokenizer_config.json"]
    found = {
        "config": Kind(hf, ["config.json"] * 3, load),
        "generation config": Kind(hf, ["generation_config.json"], load_with_settings),
        "weights": Kind(hf, ["model.safetensors"] * 2, load),
        "gguf": Kind(own.parent, [own.name] * 3, load_gguf),
        "tokenizer": Kind(hf, tokenizer_files, load_tokenizer_of),
        "index": Kind(sharded, ["model.safetensors.index.json"] * 2, load),
        "shards": Kind(sharded, ["model-00002-of-00003.safetensors"], load),
        "adapter": Kind(adapter, ["heads.safetensors"], load_with_heads),
        "description": Kind(ts, ["tsjax.json"] * 2, load),
        "arrays": Kind(ts, ["params" / path for path in files_in(ts / "params")], load),
        "run": Kind(runs, ["run.json"] * 2, resume),
        "prefix": Kind(texts, ["prefix.safetensors"], load_prefix),
        "data": data_of_training(place / "data", hf),
        "training": run_of_training(place / "kept"),
    }
    return found


# --- damages ---------------------------------------------------------------------------------


def changed_json(rng: random.Random, text: str) -> str:
    """One value of a document, at any depth, is replaced, removed, doubled or moved."""
    root = {"": json.loads(text)}
    places = []  # (container, key) of every value

    def walk(container):
        for key in container if isinstance(container, dict) else range(len(container)):
            places.append((container, key))
            if isinstance(container[key], dict | list):
                walk(container[key])

    walk(root)
    # Few values are near the top, and they matter most.
    container, key = rng.choice(rng.choice([places, places[:60]]))
    action = rng.choice(["replace", "replace", "replace", "delete", "move", "rename", "double"])
    value = rng.choice(VALUES)
    if action == "move":
        value = container[key]
        container, key = rng.choice(places)
    if action == "double":
        value = [container[key]] * 2
    if action in ("delete", "rename") and isinstance(container, dict) and key != "":
        moved = container.pop(key)
        if action == "rename":
            names = ["x", "\ud800", key + "x", key[:-1], "999999999", key + "9" * 20]
            container[rng.choice(names)] = moved
    else:
        container[key] = value
    try:
        text = json.dumps(root[""])
    except ValueError:  # a value was moved into itself
        text = "{}"
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.replace(f'"{LONG}"', "9" * 5000)


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    action = rng.choice(["truncate", "empty", "flip", "flip", "insert", "zero", "json", "json"])
    if action == "truncate":
        return content[: rng.randrange(len(content) + 1)]
    if action == "empty":
        return b""
    if action == "json":
        header = 8 if content[8:9] == b"{" else 0  # that of safetensors
        with contextlib.suppress(UnicodeDecodeError, json.JSONDecodeError):
            end = header + struct.unpack("<Q", content[:8])[0] if header else len(content)
            text = changed_json(rng, content[header:end].decode("utf-8"))
            text = text.encode("utf-8", "surrogatepass")
            return (struct.pack("<Q", len(text)) if header else b"") + text + content[end:]
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 4, 64])):
        if not changed:
            break
        # The first bytes of a file say what the rest is.
        place = rng.randrange(rng.choice([len(changed), min(len(changed), 64)]))
        if action == "insert":
            changed[place:place] = rng.choice([b"\xff", b"\0" * 8, b"[", b'"', b"9" * 30])
        elif action == "zero":
            changed[place : place + 16] = bytes(len(changed[place : place + 16]))
        else:
            changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


@contextlib.contextmanager
def pipe(path: Path):
    """A named pipe that never makes a reader wait."""
    os.mkfifo(path)

    def feed():
        with contextlib.suppress(OSError):
            while path.exists():
                os.close(os.open(path, os.O_WRONLY))

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        yield
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()
        feeder.join()
        os.close(reader)


@contextlib.contextmanager
def replaced(file: Path, kind: str):
    """By what is no file: a folder, a device, a pipe."""
    file.unlink()
    if kind == "folder":
        file.mkdir()
    if kind == "device":
        file.symlink_to("/dev/zero")
    with pipe(file) if kind == "pipe" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def damaged(rng: random.Random, file: Path, others: list[Path]):
    action = rng.choice(["bytes"] * 12 + ["remove", "folder", "pipe", "device", "swap"])
    if action == "bytes":
        file.write_bytes(changed_bytes(rng, file.read_bytes()))
    elif action == "swap":
        shutil.copyfile(rng.choice(others), file)
    with replaced(file, action) if action not in ("bytes", "swap") else contextlib.nullcontext():
        yield action


# --- cases -----------------------------------------------------------------------------------


def problem_of(read, copy: Path) -> tuple[bool, str | None]:
    """Whether a damaged folder is refused, and what is wrong about how it is."""
    try:
        read()
    except BaseException as error:
        if type(error) not in OURS or str(copy) not in str(error):
            return True, "".join(traceback.format_exception(error))[-2000:]
        if len(str(error)) > 20_000:
            return True, f"{len(str(error))} characters: {str(error)[:500]}"
        return True, None
    return False, None


def fuzz(place: Path, seed: int, count: int) -> dict:
    found = kinds(place)
    others = [kind.folder / file for kind in found.values() for file in kind.files]
    for name, kind in found.items():  # intact, each can be read
        for file in kind.files:
            try:
                kind.read(kind.folder, str(file))
            except Exception as error:
                raise RuntimeError(f"{name}: {file} is refused as it is") from error
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failures, refused = [], 0
    names = sorted(found)
    for case in range(count):
        rng = random.Random(f"{seed} {case}")
        name = names[case % len(names)]
        kind = found[name]
        file = rng.choice(kind.files)
        copy = place / f"case{case}"
        shutil.copytree(kind.folder, copy)
        with damaged(rng, copy / file, others) as action:
            is_refused, problem = problem_of(lambda: kind.read(copy, str(file)), copy)  # noqa: B023
        refused += is_refused
        if problem is not None:
            failures.append({"case": case, "what": f"{action} {name} {file}", "error": problem})
        shutil.rmtree(copy)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"failures": failures, "refused": refused, "megabytes": (after - before) // 1024}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # values that are not finite, for one
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
