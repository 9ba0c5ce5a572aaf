# SPDX-License-Identifier: Apache-2.0
"""Draft heads in files: the names that their tensors have in each published layout.

Knows names. What it finds it hands on under the names of the table in huggingface.py; heads are
counted there, as published config files name wrong numbers. Does not know shapes or file formats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tsjax.base.checks import check, one_of
from tsjax.base.errors import BadValue, NotSupported
from tsjax.base.model_config import CHAINED, OWN_VOCABULARY, PARALLEL, ModelConfig
from tsjax.files.weight_files import StoredTensor, Weights

# The layouts of Medusa's heads: its own code's, and vLLM's.
LAYOUTS = MEDUSA, VLLM = "medusa", "vllm"
MEDUSA_FILE, VLLM_FILE = "medusa_lm_head.safetensors", "model.safetensors"
MEDUSA_PICKLE = "medusa_lm_head.pt"

_TOKENSWIFT = re.compile(r"(?:model\.)?medusa_layers\.(?P<head>\d+)\.(?P<rest>.+)")
_PREFIX = r"(?P<prefix>medusa_heads?\.)?"
# Of a parallel head: its residual blocks, and its vocabulary matrix, which in Medusa's own layout
# comes after the last of them.
_BLOCKS = (
    re.compile(_PREFIX + r"(?P<head>\d+)\.(?P<block>\d+)\.linear\.(?P<rest>weight|bias)"),
    re.compile(_PREFIX + r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<rest>weight|bias)"),
)
_MATRICES = (
    re.compile(_PREFIX + r"(?P<head>\d+)\.1\.weight"),
    re.compile(_PREFIX + r"lm_heads\.(?P<head>\d+)\.weight"),
)
_TOKEN_MAP = re.compile(_PREFIX + r"token_map")


class FoundHeads(NamedTuple):
    """Draft heads among the tensors of a checkpoint, or of a file of their own.

    Attributes:
      kind: one of config.HEAD_KINDS.
      count: how many different numbers they have; who reads them sees whether these are 0, 1, 2 ...
      names: of all tensors that belong to heads.
      tensors: by their names in the table of huggingface.py; others of a file of heads alone as
        they are.
    """

    kind: str
    count: int
    names: frozenset[str]
    tensors: Weights


def find_heads(weights: Weights, *, beside_model: bool = False) -> FoundHeads | None:
    """The draft heads; None where there are none.

    Args:
      beside_model: the checkpoint has a model too, whose tensors may have any other names. Parallel
        heads have `medusa_head.` or `medusa_heads.` before their names there.
    """
    chained, parallel = _chained(weights), _parallel(weights, beside_model)
    if chained and parallel:
        some = " and ".join(min(found.names) for found in (chained, parallel))
        raise BadValue(f"there are two kinds of draft heads in one place: {some}")
    return chained or parallel


def _chained(weights: Weights) -> FoundHeads | None:
    matches = {name: match for name in weights if (match := _TOKENSWIFT.fullmatch(name))}
    tensors = {
        f"model.medusa_layers.{match['head']}.{match['rest']}": weights[name]
        for name, match in matches.items()
    }
    count = len({match["head"] for match in matches.values()})
    return FoundHeads(CHAINED, count, frozenset(matches), tensors) if count else None


def _parallel(weights: Weights, beside_model: bool) -> FoundHeads | None:
    blocks, matrices = _matching(weights, _BLOCKS), _matching(weights, _MATRICES)
    prefixed = {n: m for n, m in blocks.items() if m["prefix"]}
    if prefixed or beside_model:
        blocks = prefixed
        matrices = {name: match for name, match in matrices.items() if match["prefix"]}
    if not blocks:
        return None
    if any(_TOKEN_MAP.fullmatch(name) for name in weights):
        raise NotSupported(
            f"{next(iter(weights.values())).file!r} has a token_map: heads that guess among a part "
            "of the vocabulary are not supported"
        )
    deeper = [name for name, match in blocks.items() if int(match["block"]) > 0]
    if deeper:
        raise NotSupported(
            f"{weights[deeper[0]]}: heads of several residual blocks are not supported, as "
            "published code does not agree on whether these share their weights; heads of one are"
        )
    tensors: dict[str, StoredTensor] = {}
    for name, match in (*blocks.items(), *matrices.items()):
        rest = f"0.linear.{match['rest']}" if name in blocks else "1.weight"
        key = f"medusa_head.{match['head']}.{rest}"
        if key in tensors:
            raise BadValue(f"{weights[name]} is there again, as {tensors[key]}")
        tensors[key] = weights[name]
    for name, match in blocks.items():
        bias = f"medusa_head.{match['head']}.0.linear.bias"
        if ".layers." in name and bias not in tensors:  # of heads that were trained without
            tensors[bias] = _zeros(bias, weights[name])
    # Others are refused where tensors are read; vLLM's files may have a copy of the model's matrix.
    known = {*blocks, *matrices, "lm_head.weight"}
    others = [name for name in weights if name not in known]
    if prefixed:
        others = [name for name in others if name.startswith(("medusa_head.", "medusa_heads."))]
    tensors |= {name: weights[name] for name in others}
    kind = OWN_VOCABULARY if matrices else PARALLEL
    count = len({match["head"] for match in blocks.values()})
    return FoundHeads(kind, count, frozenset({*blocks, *matrices}), tensors)


def _matching(weights: Weights, patterns: Sequence[re.Pattern]) -> dict[str, re.Match]:
    pairs = ((name, pattern.fullmatch(name)) for name in weights for pattern in patterns)
    return {name: match for name, match in pairs if match}


def _zeros(name: str, like: StoredTensor) -> StoredTensor:
    dtype = jnp.dtype(like.dtype)

    def rows(start: int, stop: int, columns: slice | None = None) -> np.ndarray:
        return np.zeros(stop - start, dtype)

    return dataclasses.replace(like, name=name, shape=like.shape[:1], rows=rows)


def named_in(layout: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Heads under the table's names -> those of a file of their own; TokenSwift's keep theirs."""
    check(layout in LAYOUTS, "layout", layout, one_of(LAYOUTS))
    found = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("medusa_head.")
        if layout == VLLM and name != key:
            head, rest = name.split(".", 1)
            names = {"0.linear.weight": f"blocks.{head}.layers.0.weight"}
            names |= {"0.linear.bias": f"blocks.{head}.layers.0.bias"}
            name = names.get(rest, f"lm_heads.{head}.weight")
        found[name] = tensor
    return found


def head_config(layout: str, cfg: ModelConfig) -> dict[str, Any]:
    """The config.json that the code of that layout looks for beside parallel heads."""
    if layout == MEDUSA:
        return {"medusa_num_heads": cfg.num_draft_heads, "medusa_num_layers": 1}
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": cfg.embed_dim,
        "vocab_size": cfg.vocab_size,
        "num_heads": cfg.num_draft_heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": cfg.head_kind == PARALLEL,
    }
