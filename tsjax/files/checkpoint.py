# SPDX-License-Identifier: Apache-2.0
"""A model in memory and on disk: load, save, and the tsjax checkpoint format.

A tsjax checkpoint is a folder with

    tsjax.json     format version, ModelConfig, end-of-text ids
    params/        the arrays, written by orbax, each under its path in Params
    tokenizer and generation_config files, copied from where the model came from

Knows devices and folders. Does not know HuggingFace's names (huggingface.py) or how to generate.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsjax.base.checks import check, check_int, check_known, refuse_unknown
from tsjax.base.errors import BadType, BadValue
from tsjax.base.habits import LOADING
from tsjax.base.input_files import parsing, read_json
from tsjax.base.line_writer import told_as
from tsjax.base.model_config import CACHES, DTYPES, WEIGHTS, ModelConfig
from tsjax.base.telling import Progress, doing
from tsjax.files import huggingface, lora, tensor_names, weight_files
from tsjax.files.adapters import add_words, open_heads
from tsjax.files.checkpoint_folders import DESCRIPTION, copy_companions, new_folder
from tsjax.files.config_files import read_stop_ids
from tsjax.files.drafter_files import FoundDrafter, open_drafter
from tsjax.files.model_in_memory import Model, named_arrays
from tsjax.files.stored_arrays import list_arrays, read_arrays
from tsjax.files.tensor_names import Entry
from tsjax.model.param_spec import ParamSpec
from tsjax.model.params import declare_params, inputs_first, is_spec, join, placement
from tsjax.model.sharding import held_here, placed, usable_mesh

FORMAT_VERSION = 2
SEPARATE_INPUTS_FIRST = 1  # the version of separate q, k, v, gate and up, each [inputs, outputs]
ARRAYS = "params"


def load(
    path: str | os.PathLike,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    weights: str | None = None,
    cache: str | None = None,
    heads: str | os.PathLike | None = None,
    drafter: str | os.PathLike | None = None,
    adapter: str | os.PathLike | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    on_tensor: Callable[[str, int], object] | None = None,
    progress: bool | Callable[[Progress], object] = False,
    **others: Any,
) -> Model:
    """Loads a HuggingFace folder (safetensors), a hub id, a GGUF file or a tsjax checkpoint.

    Args:
      path: the folder or file, or organisation/name on the hub. Of a GGUF in parts any of them.
      dtype: one of config.DTYPES, in words ("bf16" too) or as jax, NumPy or torch have it; None and
        "auto" keep the checkpoint's own, and of GGUF it is then bfloat16.
      mesh: places every array as sharding.py says; None puts them on the default device.
      weights: how the matrices are held. "float": in `dtype`; "int8" and "int4": rounded in groups
        of 32 inputs, at 4 bits all but the vocabulary's, which has 8; "stored": as the blocks of a
        GGUF file are, with the same numbers. None: as a tsjax checkpoint has them, else "float".
        Norms, biases, the embedding's rows, heads and drafters stay in `dtype`.
      cache: how keys and values of the text are held. "same": in `dtype`. "int8": in eight bits,
        with a power of two for each token and kv head, which rounds them for all methods alike.
        None: as a tsjax checkpoint has it, else "same".
      heads: a folder or file with draft heads, TokenSwift's or Medusa's, which replace those of the
        checkpoint; a hub id of a folder.
      drafter: a folder with a one-layer drafter, which replaces that of the checkpoint; a hub id of
        a folder, or EMBEDDED for that of the embedded model.
      adapter: a folder or hub id with a low-rank adapter of PEFT (LoRA), which is added to the
        matrices while they are read; there is nothing of it in the model.
      revision, cache_dir, token, local_files_only: for a hub id, as huggingface_hub takes them;
        `revision` is the model's alone.
      allow_pickle: reads pickled torch weights (needs torch) where there are no safetensors.
      on_tensor: called with the path and the bytes of every array read from HuggingFace files.
      progress: True tells on stderr what takes long; a function gets each `Progress`.
    """
    for name in others:
        if name in LOADING:
            raise BadType(f"unknown argument {name!r}: {LOADING[name]}")
    refuse_unknown([*others], LOAD_NAMES, "argument")
    mesh, dtype = usable_mesh(mesh), dtype_named(dtype)
    if dtype is not None:
        check_dtype(dtype)
    check_known(weights, "weights", WEIGHTS)
    check_known(cache, "cache", CACHES)
    hub = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    with told_as(progress), doing("loading"):
        of_model = {**hub, "revision": revision}
        folder = weight_files.find_folder(path, allow_pickle=allow_pickle, hub=of_model)
        how: dict[str, Any] = {"allow_pickle": allow_pickle, "hub": hub}
        attached = _Attached(
            None if heads is None else open_heads(heads, **how),
            None if drafter is None else functools.partial(open_drafter, drafter, **how),
            None if adapter is None else lora.open_adapter(adapter, hub),
        )
        model = _loaded(folder, dtype, mesh, weights, attached, allow_pickle, on_tensor)
        return model.replace(cfg=model.cfg.with_cache(cache))


LOAD_NAMES = tuple(inspect.signature(load).parameters)[:-1]
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "auto": None}


def dtype_named(dtype: Any) -> Any:
    """The name of a type that may come from jax, NumPy or torch; what is no type as it is."""
    if dtype is None:
        return None
    if isinstance(dtype, str):
        return _SHORT.get(dtype, dtype)
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype


class _Attached(NamedTuple):
    """What comes with a model from other places; None for what does not."""

    heads: weight_files.Weights | None
    drafter: Callable[..., FoundDrafter] | None  # of the model's settings and its embedding
    adapter: lora.Adapter | None


def _loaded(
    folder: str, dtype: str | None, mesh: jax.sharding.Mesh | None, weights: str | None,
    attached: _Attached, allow_pickle: bool, on_tensor: Callable | None,
) -> Model:  # fmt: skip
    arrays: dict[str, jax.Array] = {}
    # Of several processes each reads its own.
    part = None
    if mesh is not None and jax.process_count() > 1:
        part = lambda spec: held_here(spec.shape, placement(spec, mesh))  # noqa: E731

    def place(tensors, cfg: ModelConfig, total: int) -> None:
        count, specs = 0, {entry.path: entry.spec for entry in tensor_names.entries(cfg)}
        with doing("loading", total, "bytes") as work:
            for entry, found in tensors:
                named = tensor_names.arrays_of(entry.path, found)
                for name, array in named.items():
                    arrays[name] = placed(array, placement(specs[name], mesh))
                nbytes = sum(array.nbytes for array in named.values())
                work.done(count := count + nbytes)
                if on_tensor is not None:
                    on_tensor(entry.path, nbytes)

    heads, adapter = attached.heads, attached.adapter
    if is_tsjax(folder):
        cfg, stop_ids = read_description(folder)
        cfg = dataclasses.replace(cfg, dtype=dtype or cfg.dtype)
        check_dtype(cfg.dtype)
        wanted = _weights_of_saved(cfg, weights, folder)
        where, version = os.path.join(folder, ARRAYS), read_version(folder)
        if wanted == cfg and adapter is None:
            found = _read(where, cfg, mesh, version)
            with doing("loading", _bytes_of(cfg), "bytes"):  # all at once, so nothing is counted
                arrays |= {entry.path: array for entry, array in found}
        else:
            wide = _read(where, cfg, None, version, by_layer=True)
            if adapter is not None:
                lora.check_adapter(adapter, cfg, weights, folder)
                wide = lora.add_to_arrays(wide, adapter)
            cfg = wanted
            place(tensor_names.rounded_arrays(cfg, wide), cfg, _bytes_of(cfg))
    else:
        cfg, stored = huggingface.open_checkpoint(folder, dtype=dtype, allow_pickle=allow_pickle)
        check_dtype(cfg.dtype)
        if adapter is not None:
            lora.check_adapter(adapter, cfg, weights, folder)
            stored = lora.with_adapter(stored, adapter)
        cfg = tensor_names.with_weights(cfg, weights, stored, folder)
        stop_ids = read_stop_ids(folder)
        own = cfg.with_heads(0) if heads else cfg
        place(huggingface.read_model(own, stored, part=part), own, _bytes_of(own))
    if heads:
        cfg = huggingface.with_heads_of(cfg, heads)
        heads_alone = _bytes_of(cfg) - _bytes_of(cfg.with_heads(0))
        place(huggingface.read_heads(cfg, heads, part=part), cfg, heads_alone)
    if attached.drafter is not None:
        found = attached.drafter(cfg, embed=arrays["model.embed"])
        cfg = dataclasses.replace(cfg, drafter=found.shape)
        drafter_alone = _bytes_of(cfg) - _bytes_of(dataclasses.replace(cfg, drafter=None))
        place(huggingface.read_drafter(cfg, found.tensors, part=part), cfg, drafter_alone)
        add_words(arrays, cfg, found.words, mesh)
    return assembled(arrays, cfg, stop_ids, folder)


def assembled(
    arrays: Mapping[str, jax.Array], cfg: ModelConfig, stop_ids: tuple[int, ...], path: str | None
) -> Model:
    """A model of arrays by their paths in Params."""
    treedef = jax.tree.structure(declare_params(cfg), is_leaf=is_spec)
    params = treedef.unflatten(arrays[entry.path] for entry in tensor_names.entries(cfg))
    return Model(params, cfg=cfg, stop_ids=stop_ids, path=path)


def _weights_of_saved(cfg: ModelConfig, weights: str | None, folder: str) -> ModelConfig:
    """A tsjax checkpoint's settings with its matrices held as they are wanted."""
    if weights is None or (weights == "stored" and cfg.is_narrow):
        return cfg
    wanted = tensor_names.with_weights(cfg.as_wide, weights, {}, folder)
    if cfg.is_narrow and wanted != cfg:
        holds = f"{folder!r} holds narrow weights, and the wide ones are lost"
        raise BadValue(f"weights={weights!r} is not valid: {holds}; leave it out")
    return wanted


def _bytes_of(cfg: ModelConfig) -> int:
    specs = jax.tree.leaves(declare_params(cfg), is_leaf=is_spec)
    return sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs)


def save(model: Model, path: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Writes a tsjax checkpoint. Interrupted at any moment, it leaves no half-written folder."""
    refuse_several("save")
    with new_folder(path, overwrite=overwrite) as folder:
        _save_arrays(model, os.path.join(folder, ARRAYS))
        description = {
            "format_version": FORMAT_VERSION,
            "tsjax_version": tsjax_version(),
            "model": model.cfg.to_dict(),
            "stop_ids": list(model.stop_ids),
        }
        with open(os.path.join(folder, DESCRIPTION), "w", encoding="utf-8") as file:
            json.dump(description, file, indent=2)
        copy_companions(model.path, folder)


def refuse_several(call: str) -> None:
    """What writes a checkpoint runs in one process."""
    count = jax.process_count()
    alone = "call it in a process by itself, without jax.distributed.initialize()"
    if count > 1:
        raise BadValue(f"{call} is not valid among {count} processes: {alone}")


def is_tsjax(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, DESCRIPTION))


def read_description(folder: str) -> tuple[ModelConfig, tuple[int, ...]]:
    """The settings and the stop ids in a tsjax checkpoint."""
    path = os.path.join(folder, DESCRIPTION)
    raw = read_json(path)
    read_version(folder)
    with parsing(path, " is damaged"):
        cfg = ModelConfig.from_dict(raw["model"])
        stop_ids = tuple(raw["stop_ids"])
        for token in stop_ids:
            check_int(token, "stop_ids", 0)
    return cfg, stop_ids


def read_config(
    path: str | os.PathLike, weights: str | None = None, cache: str | None = None
) -> ModelConfig:
    """The settings of a checkpoint with its numbers held so, as for `load`, draft heads counted;
    no array is read."""
    folder = weight_files.find_folder(path)
    if is_tsjax(folder):
        cfg = read_description(folder)[0].with_cache(cache)
        return _weights_of_saved(cfg, weights, folder)
    cfg, stored = huggingface.open_checkpoint(folder)
    return tensor_names.with_weights(cfg.with_cache(cache), weights, stored, folder)


def read_version(folder: str) -> int:
    """The format of a tsjax checkpoint, one that is read here."""
    path = os.path.join(folder, DESCRIPTION)
    version = read_json(path).get("format_version")
    if version not in (SEPARATE_INPUTS_FIRST, FORMAT_VERSION):
        wanted = f"this tsjax reads {SEPARATE_INPUTS_FIRST} and {FORMAT_VERSION}"
        raise BadValue(f"{path!r} has format_version={version!r}; {wanted}")
    return version


def check_dtype(dtype: str) -> None:
    check(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise BadValue(
            "dtype='float64' is not valid here: set JAX_ENABLE_X64=1, or "
            'jax.config.update("jax_enable_x64", True) before the first array is made'
        )


def tsjax_version() -> str:
    try:
        return importlib.metadata.version("tsjax")
    except importlib.metadata.PackageNotFoundError:
        return "from a checkout"


def _save_arrays(model: Model, path: str) -> None:
    from orbax.checkpoint import v1 as ocp

    named = named_arrays(model)
    arrays = {entry.path: leaf for entry, leaf in named}
    _check_arrays("params", {entry.path: entry.spec for entry, _ in named}, arrays)
    context = ocp.Context()
    # Weights hardly compress, and compressing keeps a second copy of everything in memory.
    context.array.saving.use_compression = False
    with context:
        ocp.save(path, arrays)


def _read(
    path: str, cfg: ModelConfig, mesh, version: int, by_layer: bool = False
) -> Iterator[tuple[Entry, jax.Array]]:
    """Checks what a tsjax checkpoint has; its arrays are read by and by, all at once or those of
    one layer after another."""
    stored = list_arrays(path)
    with parsing(path, " does not fit the config"):  # before anything is declared
        huggingface.check_counts(cfg, len(stored), ("num_layers", "num_draft_heads"))
    named, is_old = tensor_names.entries(cfg), version == SEPARATE_INPUTS_FIRST
    _check_arrays(path, _specs_of(named, is_old), stored)
    layers = itertools.groupby(named, key=lambda entry: entry.path.rpartition(".")[0])
    groups = ([*some] for _, some in layers) if by_layer else [named]
    return itertools.chain.from_iterable(_read_some(path, some, is_old, mesh) for some in groups)


def _read_some(
    path: str, some: list[Entry], is_old: bool, mesh
) -> Iterator[tuple[Entry, jax.Array]]:
    device = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    abstract = {
        name: jax.ShapeDtypeStruct(
            spec.shape, jnp.dtype(spec.dtype), sharding=placement(spec, mesh) or device
        )
        for name, spec in _specs_of(some, is_old).items()
    }
    arrays = read_arrays(path, abstract)
    for name, leaf in abstract.items():
        if arrays[name].dtype != leaf.dtype:
            raise BadValue(
                f"{path!r} was not read as {leaf.dtype}: enable x64 with JAX_ENABLE_X64=1 or "
                "jax.config.update; the context manager does not reach the threads that read"
            )
    for entry in some:
        if is_old:  # the parts of one array at a time lie in memory twice
            joined = join(entry.spec, [arrays.pop(name) for name in _parts(entry)])
            arrays[entry.path] = jax.device_put(joined, placement(entry.spec, mesh))
        yield entry, arrays.pop(entry.path)


# The names of what lies together now.
_PARTS = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}


def _parts(entry: Entry) -> dict[str, ParamSpec]:
    """What a checkpoint of format SEPARATE_INPUTS_FIRST has for an array."""
    before, name = entry.path.rsplit(".", 1)
    names = [f"{before}.{part}" for part in _PARTS.get(name, (name,))]
    return dict(zip(names, inputs_first(entry.spec), strict=True))


def _specs_of(some: list[Entry], is_old: bool) -> dict[str, ParamSpec]:
    """What a checkpoint has for them, by the names there."""
    if is_old:
        return {name: spec for entry in some for name, spec in _parts(entry).items()}
    return {entry.path: entry.spec for entry in some}


def _check_arrays(where: str, specs: Mapping[str, ParamSpec], found: Mapping[str, Any]) -> None:
    """Lists every difference between the declaration and the arrays that are there."""
    declared = {path: spec.shape for path, spec in specs.items()}
    problems = [f"missing: {path}" for path in sorted(declared.keys() - found.keys())]
    problems += [f"not part of this model: {path}" for path in sorted(found.keys() - declared)]
    for path, shape in declared.items():
        stored = tuple(found[path].shape) if path in found else shape
        if stored != shape:
            asked = f"the config asks for {list(shape)}"
            problems.append(f"{path} has shape {list(stored)}; {asked}")
    weight_files.raise_all(problems, f"{where!r} does not fit the config")
