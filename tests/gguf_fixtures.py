# SPDX-License-Identifier: Apache-2.0
"""Small GGUF files, written by the gguf package from checkpoints of hf_fixtures, and what their
quantised tensors mean; none of the code under test writes them."""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import hf_fixtures
import numpy as np
from gguf import GGMLQuantizationType as Types

# Rows of whole blocks of 32, and heads enough for a wrong order of them to show.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The first halves of the heads' rows between their second halves, as Llama's q and k lie."""
    first, second = np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1)
    return np.stack([first, second], axis=2).reshape(rows.shape)


# Where blocks of 256 have their scales, as the package does not write them.
SCALES = {Types.Q2_K: (80, 82), Types.Q3_K: (108,), Types.Q4_K: (0, 2), Types.Q5_K: (0, 2)}
SCALES[Types.Q6_K] = (208,)


def blocks(array: np.ndarray, kind: Types) -> np.ndarray:
    """An array as bytes of a type; of blocks of 256 any, with small scales, and always the same."""
    if kind not in SCALES:
        return gguf.quants.quantize(array, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*array.shape[:-1], array.shape[-1] // 256, size)
    rng = np.random.default_rng(zlib.crc32(array.tobytes()))
    found = rng.integers(0, 256, shape, np.uint8)
    for place in SCALES[kind]:
        scales = rng.uniform(1e-4, 2e-4, shape[:-1]).astype(np.float16)
        found[..., place : place + 2] = scales[..., None].view(np.uint8)
    return found.reshape(*array.shape[:-1], -1)


def stored(array: np.ndarray, kind: Types) -> np.ndarray:
    """What of an array in float32 the file holds: the numbers that the type has."""
    if array.ndim == 1 or kind == Types.F32:
        return array
    return gguf.quants.dequantize(blocks(array, kind), kind)


def make(
    path: Path, family: str = "llama", kind: Types | Callable[[str], Types] = Types.F32,
    fields=(), extra=(), parts: int = 1, tokenizer: Path | None = None, **changes,
) -> Path:  # fmt: skip
    """A GGUF file, and beside it the HuggingFace folder that it must be read as (`path` without its
    ending). `kind` may say of each tensor another one by HuggingFace's name; `fields` are settings
    of its own, `extra` tensors."""
    kind_of = kind if callable(kind) else lambda name: kind
    raw = hf_fixtures.config(family, **{**SIZES, **changes})
    content = hf_fixtures.tensors(raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = -(-len(content) // parts) if parts > 1 else 0
    written = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(None, written, split_max_tensors=limit)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw.get("rope_theta", 10000.0))
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    for name, value in dict(fields).items():
        add(writer, name.replace("ARCH", written), value)
    if tokenizer is not None:
        add_tokenizer(writer, json.loads((tokenizer / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[written.upper()], raw["num_hidden_layers"])
    for name, array in content.items():
        split = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        in_pairs = split if written == "llama" else None
        their_name = names.get_name(name, (".weight", ".bias"))
        put(writer, their_name, array, kind_of(name), in_pairs)
    for name, array in dict(extra).items():
        writer.add_tensor(name, array)
    finish(writer, path)
    read_as = {name: stored(array, kind_of(name)) for name, array in content.items()}
    hf_fixtures.write(path.with_suffix(""), raw, read_as)
    return path


def finish(writer: gguf.GGUFWriter, path: Path) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Types, heads: int | None = None
) -> None:
    """With `heads` its rows lie in pairs."""

    def turned(rows: np.ndarray) -> np.ndarray:
        return paired(rows, heads) if heads else rows

    if array.ndim == 1 or kind == Types.F32:
        writer.add_tensor(name, turned(array))
    elif kind == Types.F16:
        writer.add_tensor(name, turned(array.astype(np.float16)))
    else:
        writer.add_tensor(name, turned(blocks(array, kind)), raw_dtype=kind)


def add(writer: gguf.GGUFWriter, name: str, value) -> None:
    kinds = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    kinds[type(value)](name, value)


def add_tokenizer(writer: gguf.GGUFWriter, document: dict) -> None:
    """The content of a tokenizer.json, as llama.cpp's converter names it."""
    model, added = document["model"], {one["id"]: one for one in document["added_tokens"]}
    vocab = {**model["vocab"], **{one["content"]: index for index, one in added.items()}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert [vocab[token] for token in tokens] == [*range(len(tokens))]
    pad = [f"[PAD{index}]" for index in range(len(tokens), SIZES["vocab_size"])]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * len(pad)
    for index, one in added.items():
        special = gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED
        kinds[index] = special
    by_bytes = not model.get("byte_fallback")
    for token, index in vocab.items():
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kinds[index] = gguf.TokenType.BYTE
    writer.add_tokenizer_model("gpt2" if by_bytes else "llama")
    writer.add_token_list([*tokens, *pad])
    writer.add_token_types(kinds)
    merges = [one if isinstance(one, list) else one.split(" ") for one in model["merges"]]
    if by_bytes:
        writer.add_token_merges([" ".join(one) for one in merges])
    else:  # the first merge has the best score
        scores = {"".join(one): -float(rank) for rank, one in reversed([*enumerate(merges)])}
        writer.add_token_scores([scores.get(token, -1e6) for token in [*tokens, *pad]])
