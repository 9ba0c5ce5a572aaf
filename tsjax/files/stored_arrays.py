# SPDX-License-Identifier: Apache-2.0
"""Named arrays in a folder, as orbax writes them: lists and reads them.

Knows that orbax reads many arrays at a time. After an error in one, the others print pages of
tracebacks, so what can be checked before is checked before, one file at a time. Damage is one
error. Does not know what the arrays are.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tsjax.base.errors import BadValue
from tsjax.base.input_files import filtered_log, parsing, read_json, require_file

_DATABASE = "state"  # orbax's folder of all arrays, an OCDBT database of tensorstore


def list_arrays(path: str) -> Mapping[str, Any]:
    """What is there: something with a shape and a type under each name."""
    from orbax.checkpoint import v1 as ocp

    with parsing(path, " is damaged" if os.path.isdir(path) else " is missing or damaged"):
        for folder, _, names in os.walk(path):
            for name in names:
                require_file(os.path.join(folder, name))
        database = os.path.join(path, _DATABASE)
        for pattern in ("_METADATA", "_sharding", "array_metadatas/*"):
            for file in glob.glob(os.path.join(glob.escape(database), pattern)):
                found = read_json(file)
                if pattern == "array_metadatas/*":
                    _check_types(file, found)
        _check_database(database)
        with _quiet(), in_this_process():
            found = ocp.metadata(path).metadata
        if found is None:  # orbax found its files but could not read them
            raise BadValue("it does not list its arrays")
        return {name: array for name, array in found.items() if hasattr(array, "shape")}


def read_arrays(path: str, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays with the types and places that are asked for, some or all of those that
    list_arrays found."""
    from orbax.checkpoint import v1 as ocp

    context = in_this_process()
    context.pytree.loading.partial_load = True
    with _quiet(), context, parsing(path, " is damaged"):
        try:
            return ocp.load(path, dict(abstract))
        except Exception as error:
            # A plain Exception, whose cause says what happened in the first of many lines.
            text = [*str(error.__cause__ or error).splitlines(), repr(error)]
        gc.collect()  # ends the other readers, which the error kept, while nothing is printed
        raise BadValue(text[0])


def _check_types(file: str, found: Any) -> None:
    """Whether the list of types has what orbax looks for; it looks while it reads arrays."""
    try:
        for entry in found.get("array_metadatas", []):
            array = entry["array_metadata"]
            _ = array["param_name"], tuple(array["write_shape"]), tuple(array["chunk_shape"])
    except (AttributeError, KeyError, TypeError):
        raise BadValue(f"{file!r} does not list arrays with their shapes") from None


def _check_database(folder: str) -> None:
    """Whether the database can be read and its files are as long as it says."""
    import tensorstore

    base = tensorstore.KvStore.open({"driver": "file", "path": os.path.join(folder, "")}).result()
    # "kind:folder:file:start:length"; the newest version is the last one.
    versions = tensorstore.ocdbt.dump(base).result()["versions"]
    nodes = [versions[-1]["root"]["location"]]
    while nodes:
        for entry in tensorstore.ocdbt.dump(base, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                _, place, name, start, length = entry["indirect_value"].split(":")
                file = os.path.join(folder, place, name)
                size, end = os.path.getsize(file), int(start) + int(length)
                if size < end:
                    raise BadValue(f"{file!r} has {size} bytes; its arrays end at {end}")


def in_this_process() -> Any:
    """A context of orbax in which no process waits for another, whichever does what, and when."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    if jax.process_count() > 1:
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
    return context


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps libraries from adding pages to an error that is raised anyway."""

    def nothing(record: object) -> bool:
        return False

    hook, sys.unraisablehook = sys.unraisablehook, nothing
    try:
        with filtered_log("absl", nothing), filtered_log("asyncio", nothing):
            yield
    finally:
        sys.unraisablehook = hook
