# SPDX-License-Identifier: Apache-2.0
"""GGUF: a model in one file, or in numbered parts, with settings, quantised tensors and tokenizer.

A file is a header (version, counts, settings by name, the tensors' names, shapes, types and places)
and the tensors' bytes. The header is read here, each length checked against the file before it is
believed. What comes out is what a HuggingFace folder would say: the content of a config.json, and
tensors under its names. Does not know types of numbers (gguf_numbers.py) or tokenizers
(gguf_tokenizer.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from tsjax.base.errors import BadValue, NoSuchFile, NotSupported
from tsjax.base.input_files import listed, parsing, require_file
from tsjax.files.gguf_numbers import kind_of_code, out_of_pairs, stored_tensor
from tsjax.files.weight_files import GGUF, StoredTensor, Weights, version_of

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9  # of values; the others have a fixed size
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # of the tensors' bytes, where the file does not say
_MOST_AXES = 4

# llama.cpp's name of each tensor, and HuggingFace's. Shapes are the same, axes in another order.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"  # what Llama 3.1 divides the frequencies of its rotation by

# Architectures by llama.cpp's names, which are those of HuggingFace's families; a Mistral is mostly
# written as a "llama". Rows of q and k of these two lie there as pairs of the rotation.
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_IN_PAIRS = ("llama", "mistral")
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# What Llama 3.1 and 3.2 were trained with; the file has the factors that follow from it.
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


class Header:
    """What a GGUF file says before its tensors.

    Attributes:
      file, version: which file, and which of its contents.
      fields: the settings by their names.
      tensors: by llama.cpp's names.
    """

    def __init__(self, file: str):
        require_file(file)
        self.file = file
        with parsing(file, " cannot be read as GGUF"), open(file, "rb") as stored:
            self.version = version_of(stored)
            if not self.version.size:
                raise BadValue("it is empty")
            with mmap.mmap(stored.fileno(), 0, access=mmap.ACCESS_READ) as content:
                reader = _Reader(content)
                self.fields, infos = reader.fields_and_tensors()
                begin, size = reader.data_begins(self.fields), len(content)
            self.tensors = {info.name: self._stored(info, begin, size) for info in infos}

    def _stored(self, info: _Info, begin: int, size: int) -> StoredTensor:
        kind = kind_of_code(info.code)
        *rows, columns = info.shape
        if columns % kind.block:
            whole = f"whole blocks of {kind.block}"
            raise BadValue(f"{info.name} has {columns} columns of type {kind.name}, not {whole}")
        row_bytes = columns // kind.block * kind.block_bytes
        place, nbytes = begin + info.offset, math.prod(rows) * row_bytes
        if place + nbytes > size:
            raise BadValue(f"{info.name} ends {place + nbytes - size} bytes behind the file")
        where = self.file, info.name, self.version, place
        return stored_tensor(*where, info.shape, row_bytes, kind)


@dataclasses.dataclass(frozen=True)
class _Info:
    """A tensor as the header describes it, its axes in NumPy's order."""

    name: str
    shape: tuple[int, ...]
    code: int
    offset: int


class _Reader:
    """Reads values one after the other; what does not fit into the file is an error."""

    def __init__(self, content: mmap.mmap):
        self._content, self._at = content, 0

    def fields_and_tensors(self) -> tuple[dict[str, Any], list[_Info]]:
        if self._bytes(4) != b"GGUF":
            raise BadValue("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            wanted = f"this tsjax reads {' and '.join(map(str, _VERSIONS))}, little-endian"
            raise NotSupported(f"version {version}; {wanted}")
        tensors, count = self._number("Q"), self._number("Q")
        self._fits(tensors, 24)
        self._fits(count, 13)
        fields, infos = {}, []
        for _ in range(count):
            name = self._string()
            if name in fields:
                raise BadValue(f"{name} is there twice")
            fields[name] = self._value(self._number("I"))
        for _ in range(tensors):
            name, axes = self._string(), self._number("I")
            if not 1 <= axes <= _MOST_AXES:
                raise BadValue(f"{name:.80} has {axes} axes")
            shape = tuple(self._number("Q") for _ in range(axes))[::-1]
            if not all(shape):
                raise BadValue(f"{name:.80} has shape {list(shape)}")
            infos.append(_Info(name, shape, self._number("I"), self._number("Q")))
        twice = {info.name for info in infos}
        if len(twice) < len(infos):
            raise BadValue("a tensor is there twice")
        return fields, infos

    def data_begins(self, fields: Mapping[str, Any]) -> int:
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise BadValue(f"general.alignment={alignment!r:.80}: an integer, at least 1")
        return -(-self._at // alignment) * alignment

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _FIXED:
            return self._number(_FIXED[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth:
            raise BadValue(f"a value of type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind in _FIXED:
            code = "<" + _FIXED[kind]
            found = np.frombuffer(self._bytes(count * struct.calcsize(code)), np.dtype(code))
            return found.tolist()
        self._fits(count, 8)
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `_string` of each; there are hundreds of thousands in a vocabulary."""
        content, at, found = self._content, self._at, []
        size, length_of = len(content), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size or at + 8 + (length := length_of(content, at)[0]) > size:
                raise BadValue("it is cut off, or a length in it is wrong")
            begin, at = at + 8, at + 8 + length
            found.append(content[begin:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return found

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))
        return value

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "surrogateescape")

    def _bytes(self, count: int) -> bytes:
        self._fits(count, 1)
        begin, self._at = self._at, self._at + count
        return self._content[begin : self._at]

    def _fits(self, count: int, least: int) -> None:
        """Refuses more things of so many bytes than there is room for."""
        if count * least > len(self._content) - self._at:
            raise BadValue("it is cut off, or a length in it is wrong")


# --- what HuggingFace would say --------------------------------------------------------------


def is_gguf(path: str | os.PathLike) -> bool:
    return os.fspath(path).endswith(GGUF) and not os.path.isdir(path)


def read_headers(path: str) -> list[Header]:
    """Of the file, or of all of its parts, the first one first."""
    match = _PART.fullmatch(path)
    if match is None:
        files = [path]
    else:
        count = int(match["count"])
        files = [f"{match['name']}-{n:05d}-of-{count:05d}{GGUF}" for n in range(1, count + 1)]
        absent = [repr(file) for file in files if not os.path.exists(file)]
        if absent or not files:
            missing = ", ".join(listed(absent))
            raise NoSuchFile(f"{path!r} is one of {count} parts: missing {missing}")
    headers = [*_headers(tuple((file, _stamp(file)) for file in files))]
    parts = headers[0].fields.get("split.count", 1)
    if parts not in (0, len(headers)):
        wanted = f"it is one of {parts} parts, NAME-00001-of-{parts:05d}.gguf and so on"
        raise BadValue(f"{headers[0].file!r} is not whole: {wanted}")
    return headers


@functools.lru_cache(maxsize=1)
def _headers(files: tuple[tuple[str, Any], ...]) -> tuple[Header, ...]:
    """Weights, tokenizer and stop tokens of a model are asked for one after the other; its header
    takes longer to read than a tokenizer to make."""
    return tuple(Header(file) for file, _ in files)


def _stamp(file: str) -> Any:
    """Another one when the file has changed."""
    with contextlib.suppress(OSError):  # which Header tells of
        facts = os.stat(file)
        return facts.st_ino, facts.st_size, facts.st_mtime_ns
    return None


def open_gguf(path: str) -> tuple[dict[str, Any], Weights]:
    """What the file would have as a config.json, and its tensors under HuggingFace's names."""
    headers = read_headers(path)
    fields, tensors = headers[0].fields, {}
    for header in headers:
        twice = header.tensors.keys() & tensors
        if twice:
            raise BadValue(f"{header.file!r} holds {min(twice)} again")
        tensors |= header.tensors
    with parsing(path, " holds a model that tsjax cannot read"):
        raw = _config(fields, tensors)
        split = {}
        if raw["model_type"] in _IN_PAIRS:
            split = {".attn_q.": raw["num_attention_heads"], ".attn_k.": raw["num_key_value_heads"]}
        weights = {}
        for name, stored in tensors.items():
            for part, heads in split.items():
                if part in name and stored.shape[0] % (2 * heads) == 0:  # others are refused
                    stored = out_of_pairs(stored, heads)
            weights[_their_name(name)] = stored
        weights.pop(_FREQUENCIES, None)
    return raw, weights


def _their_name(name: str) -> str:
    """HuggingFace's; of what no such model has, its own."""
    stem, _, ending = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    general = f"blk.{{i}}.{match[2]}" if match else stem
    known = _NAMES.get(general)
    if known is None:
        return name
    return f"{known.replace('{i}', match[1] if match else '')}.{ending}"


def _config(fields: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        known = f"is not supported; supported: {', '.join(_ARCHITECTURES)}"
        raise NotSupported(f"general.architecture={kind!r:.80} {known}")

    def said(name: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{name}", default)
        if isinstance(value, list):
            raise NotSupported(f"{kind}.{name} differs between layers")
        return _shortest(value)

    if said("expert_count", 0):
        raise NotSupported(f"{kind}.expert_count={said('expert_count')}: experts")
    missing = [f"{kind}.{name}" for name in _SIZES if said(name) is None]
    missing += ["token_embd.weight"] * ("token_embd.weight" not in tensors)
    if missing:
        raise BadValue(f"it lacks {', '.join(missing)}")
    raw = {theirs: said(name) for name, theirs in _SIZES.items()}
    heads = raw["num_attention_heads"]
    head_dim = said("attention.key_length")
    if head_dim is None and isinstance(heads, int) and heads > 0:
        head_dim = raw["hidden_size"] // heads
    values = said("attention.value_length", head_dim)
    if values != head_dim:
        raise NotSupported(f"{kind}.attention.value_length={values}, and keys of {head_dim}")
    turned = said("rope.dimension_count", head_dim)
    biased = "blk.0.attn_q.bias" in tensors
    of_family = {
        "llama": {"attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in tensors},
        "mistral": {"sliding_window": said("attention.sliding_window")},
        "qwen2": {},
        "qwen3": {"attention_bias": biased},
    }
    if kind != "mistral" and said("attention.sliding_window"):
        of_family[kind]["layer_types"] = ["sliding_attention"]  # refused by that name
    raw |= {
        "model_type": kind,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": said("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "rope_theta": said("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(said, tensors),
        "partial_rotary_factor": None if turned == head_dim else turned / head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        **of_family[kind],
    }
    return raw


def _shortest(value: Any) -> Any:
    """A number in 32 bits as the shortest decimal that means it: 1e-5, and not 9.99999975e-06."""
    if isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _rope_scaling(said: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, Any] | None:
    kind, factor = said("rope.scaling.type"), said("rope.scaling.factor")
    if kind is None and said("rope.scale_linear"):  # of older files
        kind, factor = "linear", said("rope.scale_linear")
    if _FREQUENCIES in tensors:
        if kind not in (None, "none"):
            raise NotSupported(f"{_FREQUENCIES} beside rope.scaling.type={kind!r}")
        return _llama3_scaling(said, tensors[_FREQUENCIES])
    if kind in (None, "none") or (kind == "linear" and factor == 1):
        return None
    length = said("rope.scaling.original_context_length")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for name, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            value = said(f"rope.scaling.{name}")
            found |= {} if value is None else {theirs: value}
        found |= {} if length is None else {"original_max_position_embeddings": length}
        weight = said("rope.scaling.attn_factor")
        if weight is not None and factor:  # llama.cpp multiplies YaRN's own with it
            found["attention_factor"] = weight * (0.1 * math.log(factor) + 1.0)
    return found


def _llama3_scaling(said: Any, stored: StoredTensor) -> dict[str, Any]:
    """The settings whose factors the file has; it does not say them."""
    factors = np.asarray(stored.rows(0, stored.shape[0]), np.float64)
    base, half = said("rope.freq_base", 10000.0), len(factors)
    found = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    waves = 2 * math.pi * base ** (np.arange(half) / half)
    length, low, high = (found[name] for name in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ))  # fmt: skip
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / found["factor"] + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise NotSupported(f"{_FREQUENCIES}: factors other than those of Llama 3.1 and 3.2")
    return found
