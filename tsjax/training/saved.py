# SPDX-License-Identifier: Apache-2.0
"""A training run saved in a folder, so that it can go on after a kill.

    checkpoint/step-00000050/   the newest complete one: arrays (orbax) and run.json
    heads.safetensors           the heads, as an adapter
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

from tsjax.config import check
from tsjax.errors import AlreadyThere, BadValue, NoSuchFile
from tsjax.files import stored_arrays
from tsjax.files.checkpoint import Model, write_heads
from tsjax.files.whole_files import final_name, replacing, write_text
from tsjax.host.saving import Writing, check_writable, path_of
from tsjax.input_files import listed, parsing, read_json

FORMAT = 3
# 2 had the heads' matrices as [inputs, outputs]; 1 also had another fingerprint of the model.
OLD_FORMATS = OLD_FINGERPRINT, INPUTS_FIRST = 1, 2
CHECKPOINTS, ARRAYS, DOCUMENT = "checkpoint", "arrays", "run.json"
METRICS, SUMMARY, PLOT = "metrics.jsonl", "summary.json", "loss.png"
HEADS = "heads.safetensors"
FILES = {CHECKPOINTS, METRICS, SUMMARY, PLOT, HEADS}
_STEP = re.compile(r"step-(\d{8})")

Record = dict[str, Any]


class Saving(Writing):
    """Writes a run's folder, if it has one."""

    def __init__(self, folder: str | None, identity: Mapping[str, Any]):
        super().__init__(stacklevel=5)
        self._folder, self._identity = folder, identity

    def _write(self, what: str, write: Callable[..., object], *args: Any) -> bool:
        if self._folder is None:
            return True
        return self.attempt(f"{what} in {self._folder!r}", write, self._folder, *args)

    def begin(self, history: Sequence[Record]) -> None:
        self._write("metrics", write_metrics, history)

    def note(self, record: Record) -> None:
        self._write("metrics", append_metrics, record)

    def save(self, run: Any, history: list[Record]) -> None:
        if self._folder is None:
            return
        arrays, trained = run.arrays(), run.trained_model()
        document = {**self._identity, "history": history}
        written = self._write("checkpoint", write_checkpoint, len(history), arrays, document)
        written &= self._write("heads", _write_heads, trained)
        self.unsaved = not written

    def finish(self, history: list[Record], evaluation: list[Record]) -> None:
        self.begin(history)
        last = history[-1] if history else None
        summary = {"steps": len(history), "last": last, "evaluation": evaluation}
        self._write("summary", _write_summary, {**self._identity, **summary})
        try:
            if history:
                self._write("plot", _plot_losses, history)
        except ImportError:
            self.problems.append("no plot of the losses: pip install 'tsjax[plot]'")


def check_folder(save_to: Any, resume: bool) -> str | None:
    """The folder of a run, made if there is none; refused if it could not be the run's."""
    if save_to is None:
        check(not resume, "resume", resume, "save_to names the folder of the run")
        return None
    folder = path_of(save_to, "a folder")
    wrong = f"save_to={folder!r} is not valid"
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"{wrong}: a folder, not a file")
    newest = latest(folder)
    if resume and newest is None:
        raise NoSuchFile(f"{wrong} with resume: it has no {CHECKPOINTS}/step-*")
    if not resume and newest is not None:
        remedy = "pass resume=True (--resume) to go on with it, or choose another folder"
        raise AlreadyThere(f"{wrong}: it holds a run; {remedy}")
    found = os.listdir(folder) if os.path.isdir(folder) else []
    others = set(map(final_name, found)) - FILES  # a kill may leave what was being written
    if others:
        raise AlreadyThere(f"{wrong}: it has {min(others)!r}; choose a folder of its own")
    check_writable(folder, folder, "a folder that can be written", make=True)
    return folder


def latest(folder: str) -> str | None:
    """The newest checkpoint of a run, None if there is none."""
    place = os.path.join(folder, CHECKPOINTS)
    names = os.listdir(place) if os.path.isdir(place) else []
    steps = sorted(name for name in names if _STEP.fullmatch(name))
    return os.path.join(place, steps[-1]) if steps else None


def write_checkpoint(
    folder: str, step: int, arrays: Mapping[str, jax.Array], document: Mapping[str, Any]
) -> None:
    """Writes the checkpoint of a step, then removes older ones.

    An OSError leaves the checkpoint that was there before. A step that has one keeps it: the run
    would write the same again, and meanwhile there would be none.
    """
    place = os.path.join(folder, CHECKPOINTS)
    target = os.path.join(place, f"step-{step:08d}")
    os.makedirs(place, exist_ok=True)
    for name in os.listdir(place):  # of a process that was killed while it wrote
        if name.startswith(".writing-"):
            shutil.rmtree(os.path.join(place, name))
    if not os.path.isdir(target):
        _write_whole(target, arrays, {"format": FORMAT, "step": step, **document})
    for name in os.listdir(place):
        if _STEP.fullmatch(name) and name != os.path.basename(target):
            shutil.rmtree(os.path.join(place, name))


def _write_whole(target: str, arrays: Mapping[str, jax.Array], content: Mapping[str, Any]) -> None:
    from orbax.checkpoint import v1 as ocp

    fresh = os.path.join(os.path.dirname(target), f".writing-{os.getpid()}")
    try:
        os.mkdir(fresh)
        try:
            ocp.save(os.path.join(fresh, ARRAYS), dict(arrays))
        except Exception as error:
            # A full disk is a ValueError here, or a plain Exception whose cause says what happened.
            if not isinstance(error, OSError | ValueError) and type(error) is not Exception:
                raise
            raise OSError(_reason(error)) from error
        write_text(os.path.join(fresh, DOCUMENT), json.dumps(content))
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_document(checkpoint: str) -> dict[str, Any]:
    with parsing(checkpoint, " is damaged"):
        document = read_json(os.path.join(checkpoint, DOCUMENT))
        if document["format"] not in (*OLD_FORMATS, FORMAT):
            raise BadValue(f"format {document['format']!r}")
        return document


def read_arrays(
    checkpoint: str, like: Mapping[str, jax.Array], format: int
) -> dict[str, jax.Array]:
    """The arrays of a checkpoint with the shapes, types and places of those in `like`."""
    path = os.path.join(checkpoint, ARRAYS)
    with parsing(checkpoint, " is damaged"):
        stored = stored_arrays.list_arrays(path)
        shapes = {name: tuple(array.shape) for name, array in stored.items()}
        wrong = [name for name, array in like.items() if shapes.get(name) != array.shape]
        if wrong:
            raise BadValue(f"it does not hold, as they were, {', '.join(listed(wrong))}")
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in like.items()
        }
        arrays = stored_arrays.read_arrays(path, abstract)
    if format in OLD_FORMATS:  # heads and what the optimiser keeps of them
        turned = {name: x.T for name, x in arrays.items() if name.endswith(".linear")}
        arrays |= {name: jax.device_put(x, like[name].sharding) for name, x in turned.items()}
    return arrays


def _reason(error: Exception) -> str:
    """What orbax says, without the many lines that follow."""
    lines = str(error.__cause__ or error).splitlines()
    return lines[0] if lines else type(error).__name__


def write_metrics(folder: str, history: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    write_text(os.path.join(folder, METRICS), lines)


def append_metrics(folder: str, record: Mapping[str, Any]) -> None:
    with open(os.path.join(folder, METRICS), "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _write_heads(folder: str, trained: Model) -> None:
    write_heads(trained, os.path.join(folder, HEADS))


def _write_summary(folder: str, summary: Mapping[str, Any]) -> None:
    write_text(os.path.join(folder, SUMMARY), json.dumps(summary, indent=2) + "\n")


def _plot_losses(folder: str, history: Sequence[Mapping[str, Any]]) -> None:
    """The heads' losses over the steps, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = [record["step"] for record in history]
    for head in range(len(history[0]["head_losses"])):
        losses = [record["head_losses"][head] for record in history]
        axes.plot(steps, losses, label=f"head {head + 1}")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title="Draft heads")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(os.path.join(folder, PLOT)) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
