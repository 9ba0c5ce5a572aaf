# SPDX-License-Identifier: Apache-2.0
"""A one-layer drafter in files: a folder of config.json and of weights.

Knows tsjax's own layout and the two of EAGLE-3's heads: that of its authors, and that of vLLM's
speculators. Of these it knows the names of tensors, and what a config says of the drafter's shape;
what would compute something else is refused. Tensors go on under the names of the table in
huggingface.py, which knows shapes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.checks import check, check_type
from tsjax.base.errors import BadValue, NoSuchFile, NotSupported
from tsjax.base.input_files import parsing, read_json
from tsjax.base.model_config import DTYPES, ModelConfig, OneLayer, RopeConfig
from tsjax.files.config_files import model_config
from tsjax.files.weight_files import (
    EMBEDDED,
    StoredTensor,
    Weights,
    find_folder,
    open_weights,
    write_safetensors,
)
from tsjax.files.whole_files import write_text

DRAFTER_CONFIG, DRAFTER_FILE = "config.json", "model.safetensors"
OF_EMBEDDED = "drafter"  # its folder in that of the embedded model
OWN_SHAPE = "tsjax_drafter"  # in the config: what it says of a drafter that tsjax has trained
PREFIX = "drafter."  # of the tensors in the table
WORD_NUMBERS = "d2t"  # of each word, how far its token's number lies above its own
MATRIX = "lm_head.weight"  # absent where the words' rows are the model's own
EMBEDDINGS = "embed_tokens.weight"  # in published files: a copy of the model's

# In the config of vLLM's speculators: which kind one is, and the settings of its layer.
KIND, LAYER = "speculators_model_type", "transformer_layer_config"
LAYER_NAMES = "layers.0.", "midlayer."  # begin the names of the layer's tensors, either of them
TELLING = "midlayer.hidden_norm.weight"  # no other kind of drafter has it
NOT_READ = "t2d", "verifier_norm.weight", "verifier_lm_head.weight"  # of use to training alone
TAPS = "eagle_aux_hidden_state_layer_ids"
WIDEST_WINDOW = 2048  # at most: they were trained on texts about as long
# Settings of which one value is what `draft_rows` computes; files say nothing where they mean it.
_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "use_mtp_layernorm"), False),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias"), False),
    **dict.fromkeys(("use_aux_hidden_state", "use_last_layernorm", "is_causal"), True),
    "use_input_layernorm_in_first_layer": True,
    "logit_scale": 1,
}


class FoundDrafter(NamedTuple):
    """Attributes:
    shape: of the drafter.
    words: which tokens it can say.
    tensors: by their names in the table; the words' matrix may be missing.
    """

    shape: OneLayer
    words: np.ndarray
    tensors: Weights


def open_drafter(
    path: str | os.PathLike,
    cfg: ModelConfig,
    *,
    embed: jax.Array | None = None,
    allow_pickle: bool = False,
    hub: Mapping[str, Any] | None = None,
) -> FoundDrafter:
    """The drafter in a folder, for a model of that shape. Of its weights nothing is read yet, but
    embeddings in the file are compared with `embed`, the model's; without it they are refused."""
    folder = find_folder(path, allow_pickle=allow_pickle, argument="drafter", hub=hub)
    if os.fspath(path) == EMBEDDED:
        folder = os.path.join(folder, OF_EMBEDDED)
    wrong = f"drafter={os.fspath(path)!r} is not valid"
    file = os.path.join(folder, DRAFTER_CONFIG)
    if not os.path.exists(file):
        raise NoSuchFile(
            f"{wrong}: the folder has no {DRAFTER_CONFIG}; tsjax train-drafter makes one"
        )
    raw, weights = read_json(file), dict(open_weights(folder, allow_pickle=allow_pickle))
    if OWN_SHAPE in raw:
        with parsing(file, " is damaged", argument="drafter"):
            shape = _shape(raw[OWN_SHAPE])
        with parsing(file, " does not fit", argument="drafter"):
            _check_model(raw, cfg)
    else:
        weights = _in_table(weights)
        if TELLING not in weights:
            raise BadValue(
                f"{wrong}: {DRAFTER_CONFIG} says nothing of a one-layer drafter ({OWN_SHAPE}), and "
                f"the weights are no head of EAGLE-3, which has {TELLING}"
            )
        with parsing(file, " does not fit", argument="drafter"):
            shape = _published_shape(raw, cfg)
        if MATRIX not in weights and shape.words != cfg.vocab_size:
            raise BadValue(f"{wrong}: it lacks {MATRIX}, of its {shape.words} words")
        if EMBEDDINGS in weights:
            _check_embeddings(weights.pop(EMBEDDINGS), embed, wrong)
    words = _words(weights, shape.words, cfg.vocab_size, wrong)
    tensors = {PREFIX + name: tensor for name, tensor in weights.items() if name != WORD_NUMBERS}
    return FoundDrafter(shape, words, tensors)


def _in_table(weights: Weights) -> dict[str, StoredTensor]:
    """Tensors of a published head by their names in the table, without those that are not read."""
    read = {name: tensor for name, tensor in weights.items() if name not in NOT_READ}
    return {name.replace(*LAYER_NAMES): tensor for name, tensor in read.items()}


def _published_shape(raw: Mapping[str, Any], cfg: ModelConfig) -> OneLayer:
    """The shape of a published head, by its config."""
    of_vllm = KIND in raw
    layer: Any = raw.get(LAYER) if of_vllm else raw
    nested: Any = raw.get("eagle_config") or {}
    check(raw.get(KIND, "eagle3") == "eagle3", KIND, raw.get(KIND), "'eagle3'; no other is read")
    for name, value in ((LAYER, layer), ("eagle_config", nested)):
        check_type(value, dict, name, "an object")
    settings = {**nested, **layer, **raw}
    _refuse_other_kinds(settings, cfg)
    residual = settings.get("norm_before_residual", None if of_vllm else False)
    both = "true or false; where it is absent, vLLM and speculators mean different values"
    check(isinstance(residual, bool), "norm_before_residual", residual, both)
    # In other respects it is a layer of Llama, whatever family of models it was made for.
    names = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    of_layer = model_config({**layer, **names}, dtype=cfg.dtype)
    _check_model(_model_sizes(of_layer), cfg)
    eps = f"{cfg.norm_eps}, as the model has it"
    check(of_layer.norm_eps == cfg.norm_eps, "rms_norm_eps", of_layer.norm_eps, eps)
    return OneLayer(
        mlp_dim=of_layer.mlp_dim,
        words=raw.get("draft_vocab_size") or cfg.vocab_size,
        taps=_taps(raw, nested, cfg.num_layers),
        window=min(of_layer.max_positions, WIDEST_WINDOW),
        rope=of_layer.rope,
        token_in_state=False,
        norm_before_residual=residual,
    )


def _refuse_other_kinds(settings: Mapping[str, Any], cfg: ModelConfig) -> None:
    only = {**_ONLY, "target_hidden_size": cfg.embed_dim}
    asked = [
        f"{name}={settings[name]!r} (only {value!r})"
        for name, value in only.items()
        if settings.get(name) not in (None, value)
    ]
    if asked:
        raise NotSupported(f"it asks for what tsjax's drafter does not have: {', '.join(asked)}")


def _taps(raw: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """After how many layers it reads, as vLLM counts; where a config is silent, EAGLE-3's own."""
    given, wanted = raw.get(TAPS), "a list of numbers of layers, each larger than the one before"
    if given is None:
        if nested.get(TAPS) is not None:
            raise NotSupported(
                f"{TAPS}={nested[TAPS]!r} in eagle_config, which published code counts in two "
                f"ways; write it at the top of {DRAFTER_CONFIG}: how many layers come before each"
            )
        given = [2, layers // 2, layers - 3]
        wanted += f"; {DRAFTER_CONFIG} has to say it for a model of {layers} layers"
    check(isinstance(given, list) and given == sorted({*given}), TAPS, given, wanted)
    return tuple(given)


def _check_embeddings(stored: StoredTensor, embed: jax.Array | None, wrong: str) -> None:
    """Refuses embeddings that differ from the model's by more than rounding to another type."""
    same = embed is not None and stored.shape == embed.shape and stored.dtype in DTYPES
    for at in stored.blocks() if same else ():
        assert embed is not None
        theirs = stored.rows(at.start, at.stop).astype(np.float32)
        ours = embed[at].astype(jnp.float32)
        same = same and bool(jnp.allclose(ours, theirs, rtol=2**-8, atol=1e-6))
    if not same:
        raise NotSupported(f"{wrong}: {stored} is not the model's, which tsjax's drafter reads")


def _shape(fields: Mapping[str, Any]) -> OneLayer:
    return OneLayer(**{**fields, "rope": RopeConfig(**fields["rope"])})


def _check_model(raw: Mapping[str, Any], cfg: ModelConfig) -> None:
    """Refuses a drafter of another model's sizes, by the names of HuggingFace."""
    for name, value in _model_sizes(cfg).items():
        check(raw[name] == value, name, raw[name], f"{value}, as the model has it")


def _model_sizes(cfg: ModelConfig) -> dict[str, int]:
    return {
        "hidden_size": cfg.embed_dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
    }


def _words(weights: Weights, count: int, vocab_size: int, wrong: str) -> np.ndarray:
    stored = weights.get(WORD_NUMBERS)
    if stored is None and count == vocab_size:
        return np.arange(count, dtype=np.int32)
    if stored is None or stored.shape != (count,):
        found = "nothing" if stored is None else f"shape {stored.shape}"
        raise BadValue(
            f"{wrong}: {WORD_NUMBERS} should have one number for each of {count} words: {found}"
        )
    words = _read_integers(stored) + np.arange(count)
    good = words.min() >= 0 and words.max() < vocab_size and len(np.unique(words)) == count
    if not good:
        raise BadValue(
            f"{wrong}: {WORD_NUMBERS} does not name {count} of the model's {vocab_size} tokens"
        )
    return words.astype(np.int32)


def _read_integers(stored: StoredTensor) -> np.ndarray:
    import safetensors

    file, name = stored.file, stored.name
    if not file.endswith(".safetensors"):
        return stored.rows(0, *stored.shape).astype(np.int64)
    with parsing(file, f": {name} cannot be read"), safetensors.safe_open(file, "np") as handle:
        return np.asarray(handle.get_tensor(name)).astype(np.int64)


def write_drafter(
    folder: str, cfg: ModelConfig, tensors: Mapping[str, np.ndarray], words: np.ndarray
) -> None:
    """Writes or replaces a drafter; `tensors` by their names in the table."""
    assert cfg.drafter is not None
    os.makedirs(folder, exist_ok=True)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    named[WORD_NUMBERS] = words.astype(np.int64) - np.arange(len(words))
    write_safetensors(os.path.join(folder, DRAFTER_FILE), named)
    document = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_model_sizes(cfg),
        "intermediate_size": cfg.drafter.mlp_dim,
        "draft_vocab_size": cfg.drafter.words,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.drafter.rope.theta,
        "torch_dtype": cfg.dtype,
        OWN_SHAPE: dataclasses.asdict(cfg.drafter),
    }
    write_text(os.path.join(folder, DRAFTER_CONFIG), json.dumps(document, indent=2) + "\n")
