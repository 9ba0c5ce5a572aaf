# SPDX-License-Identifier: Apache-2.0
"""A training run saved in a folder, so that it can go on after a kill.

    checkpoint/step-00000050/   the newest complete one: arrays.safetensors and run.json
    heads.safetensors           the heads, as an adapter; of a drafter what drafter_files.py says
    metrics.jsonl               one line per step
    summary.json, loss.png      at the end

Knows the folder's format. What is written appears whole, in the place of what it replaces.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import AlreadyThere, BadValue, NoSuchFile
from tsjax.base.input_files import listed, parsing, read_json, require_file
from tsjax.files import stored_arrays
from tsjax.files.checkpoint import Model
from tsjax.files.drafter_files import DRAFTER_CONFIG, DRAFTER_FILE
from tsjax.files.weight_files import write_safetensors
from tsjax.files.whole_files import (
    check_writable,
    final_name,
    path_of,
    place_of,
    replacing,
    write_text,
)
from tsjax.host import processes
from tsjax.host.saving import Writing
from tsjax.model.sharding import placed

CHECKPOINT_FORMAT = 4
# 3 had a folder of orbax; 2 also the heads' matrices as [inputs, outputs]; 1 also had another
# fingerprint of the model.
OLD_FORMATS = OLD_FINGERPRINT, INPUTS_FIRST, ORBAX = 1, 2, 3
CHECKPOINTS, ARRAYS_FILE, DOCUMENT = "checkpoint", "arrays.safetensors", "run.json"
ORBAX_ARRAYS = "arrays"
METRICS, SUMMARY, PLOT = "metrics.jsonl", "summary.json", "loss.png"
HEADS = "heads.safetensors"
FILES = {CHECKPOINTS, METRICS, SUMMARY, PLOT}
FILES_OF_HEADS, FILES_OF_DRAFTER = FILES | {HEADS}, FILES | {DRAFTER_CONFIG, DRAFTER_FILE, "text"}
_STEP = re.compile(r"step-(\d{8})")

Record = dict[str, Any]


class RunFolder(Writing):
    """Writes a run's folder, if it has one.

    Of several processes the first one does, but for one that is left `alone`.
    """

    def __init__(
        self,
        folder: str | None,
        identity: Mapping[str, Any],
        write_result: Callable[[str, Model], object],
    ):
        super().__init__(stacklevel=6)
        self._folder, self.identity, self._write_result = folder, identity, write_result

    def _write(
        self, what: str, write: Callable[..., object], *args: Any, alone: bool = False
    ) -> bool:
        if self._folder is None or not (alone or processes.is_first()):
            return True
        return self.attempt(f"{what} in {self._folder!r}", write, self._folder, *args)

    def begin(self, history: Sequence[Record]) -> None:
        self._write("metrics", write_metrics, history)

    def note(self, record: Record) -> None:
        self._write("metrics", append_metrics, record)

    def save(self, run: Any, history: list[Record], *, alone: bool = False) -> None:
        if self._folder is None:
            return
        arrays, trained = processes.on_host(run.arrays()), run.trained_model()
        document = {**self.identity, "history": history}
        checkpoint = len(history), arrays, document, alone
        written = self._write("checkpoint", write_checkpoint, *checkpoint, alone=alone)
        written &= self._write("result", self._write_result, trained, alone=alone)
        self.unsaved = not written

    def finish(self, history: list[Record], evaluation: Any) -> None:
        self.begin(history)
        last = history[-1] if history else None
        summary = {"steps": len(history), "last": last, "evaluation": evaluation}
        self._write("summary", _write_summary, {**self.identity, **summary})
        try:
            if history:
                self._write("plot", _plot_losses, history)
        except ImportError:
            self.problems.append("no plot of the losses: pip install 'tsjax[plot]'")
        self.unsaved = bool(processes.first_says(self.unsaved))  # the others wait for that


def check_folder(save_to: Any, resume: bool, files: set[str]) -> str | None:
    """The folder of a run, made if there is none; refused if it could not be the run's, which
    writes these files."""
    if save_to is None:
        check(not resume, "resume", resume, "save_to names the folder of the run")
        return None
    folder = path_of(save_to, "save_to", "a folder")
    wrong = f"save_to={folder!r} is not valid"
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"{wrong}: a folder, which may be new")
    newest = latest(folder)
    if resume and newest is None:
        raise NoSuchFile(f"{wrong} with resume: it has no {CHECKPOINTS}/step-*")
    if not resume and newest is not None:
        remedy = "pass resume=True (--resume) to go on with it, or choose another folder"
        raise AlreadyThere(f"{wrong}: it holds a run; {remedy}")
    found = os.listdir(folder) if os.path.isdir(folder) else []
    others = set(map(final_name, found)) - files  # a kill may leave what was being written
    if others:
        raise AlreadyThere(f"{wrong}: it has {min(others)!r}; choose a folder of its own")
    for name in files - {CHECKPOINTS, "text"}:
        place_of(os.path.join(folder, name), "save_to")
    check_writable(folder, f"{wrong}: a folder that can be written")
    return folder


def latest(folder: str) -> str | None:
    """The newest checkpoint of a run, None if there is none."""
    place = os.path.join(folder, CHECKPOINTS)
    names = os.listdir(place) if os.path.isdir(place) else []
    steps = sorted(name for name in names if _STEP.fullmatch(name))
    return os.path.join(place, steps[-1]) if steps else None


def write_checkpoint(
    folder: str,
    step: int,
    arrays: Mapping[str, np.ndarray],
    document: Mapping[str, Any],
    alone: bool = False,
) -> None:
    """Writes the checkpoint of a step, then removes older ones; where it may not be the only one
    who writes, it removes nothing.

    An OSError leaves the checkpoint that was there before. A step that has one keeps it: the run
    would write the same again, and meanwhile there would be none.
    """
    place = os.path.join(folder, CHECKPOINTS)
    target = os.path.join(place, f"step-{step:08d}")
    os.makedirs(place, exist_ok=True)
    for name in os.listdir(place):  # of a process that was killed while it wrote
        if name.startswith(".writing-") and not alone:
            shutil.rmtree(os.path.join(place, name))
    if not os.path.isdir(target):
        _write_whole(target, arrays, {"format": CHECKPOINT_FORMAT, "step": step, **document})
    for name in os.listdir(place):
        if _STEP.fullmatch(name) and name != os.path.basename(target) and not alone:
            shutil.rmtree(os.path.join(place, name))


def _write_whole(target: str, arrays: Mapping[str, np.ndarray], content: Mapping[str, Any]) -> None:
    fresh = os.path.join(os.path.dirname(target), f".writing-{os.getpid()}")
    try:
        os.mkdir(fresh)
        write_safetensors(os.path.join(fresh, ARRAYS_FILE), arrays)
        write_text(os.path.join(fresh, DOCUMENT), json.dumps(content))
        try:
            os.replace(fresh, target)
        except OSError:
            if not os.path.isdir(target):  # another process was faster
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_document(checkpoint: str) -> dict[str, Any]:
    with parsing(checkpoint, " is damaged"):
        document = read_json(os.path.join(checkpoint, DOCUMENT))
        if document["format"] not in (*OLD_FORMATS, CHECKPOINT_FORMAT):
            raise BadValue(f"format {document['format']!r}")
        return document


def read_settings(checkpoint: str) -> dict[str, Any]:
    """Those of the run, by name."""
    document = read_document(checkpoint)
    with parsing(checkpoint, " is damaged"):
        return dict(document["settings"])


def read_state(checkpoint: str, like: Mapping[str, jax.Array], format: int) -> dict[str, jax.Array]:
    """The arrays of a checkpoint with the shapes, types and places of those in `like`."""
    if format == CHECKPOINT_FORMAT:
        return _read_safetensors(checkpoint, like)
    path = os.path.join(checkpoint, ORBAX_ARRAYS)
    with parsing(checkpoint, " is damaged"):
        stored = stored_arrays.list_arrays(path)
        _check_arrays(stored, like)
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in like.items()
        }
        arrays = stored_arrays.read_arrays(path, abstract)
    if format != ORBAX:  # heads and what the optimiser keeps of them
        turned = {name: x.T for name, x in arrays.items() if name.endswith(".linear")}
        arrays |= {name: jax.device_put(x, like[name].sharding) for name, x in turned.items()}
    return arrays


def _read_safetensors(checkpoint: str, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    import safetensors.numpy

    with parsing(checkpoint, " is damaged"):
        path = os.path.join(checkpoint, ARRAYS_FILE)
        require_file(path)
        stored = safetensors.numpy.load_file(path)
        _check_arrays(stored, like)
        wrong = [name for name, array in like.items() if stored[name].dtype != array.dtype]
        check(not wrong, "types of", wrong, "those of the run")
    return {name: placed(stored[name], array.sharding) for name, array in like.items()}


def _check_arrays(stored: Mapping[str, Any], like: Mapping[str, jax.Array]) -> None:
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    wrong = [name for name, array in like.items() if shapes.get(name) != array.shape]
    if wrong:
        raise BadValue(f"it does not hold, as they were, {', '.join(listed(wrong))}")


def write_metrics(folder: str, history: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    write_text(os.path.join(folder, METRICS), lines)


def append_metrics(folder: str, record: Mapping[str, Any]) -> None:
    with open(os.path.join(folder, METRICS), "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _write_summary(folder: str, summary: Mapping[str, Any]) -> None:
    write_text(os.path.join(folder, SUMMARY), json.dumps(summary, indent=2) + "\n")


def _plot_losses(folder: str, history: Sequence[Mapping[str, Any]]) -> None:
    """The losses of each head, or draft in a row, over the steps, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = [record["step"] for record in history]
    name, what = ("head_losses", "head") if "head_losses" in history[0] else ("losses", "draft")
    for number in range(len(history[0][name])):
        losses = [record[name][number] for record in history]
        axes.plot(steps, losses, label=f"{what} {number + 1}")
    axes.set(xlabel="step", ylabel="loss", title=f"Loss of each {what}")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(os.path.join(folder, PLOT)) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
