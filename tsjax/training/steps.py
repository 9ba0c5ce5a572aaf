# SPDX-License-Identifier: Apache-2.0
"""The steps of a training run, and how it goes on from its folder.

Knows what all trainings have in common: a history of records, checkpoints, an interrupt. Does not
know what is trained: that is a `Training`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.input_files import parsing
from tsjax.base.model_config import CHAINED
from tsjax.host import processes
from tsjax.host.interrupt import Interrupt
from tsjax.host.progress import progress_bar
from tsjax.training import saved
from tsjax.training.saved import Record

# Settings that runs saved by an older tsjax do not name.
DEFAULTS_OF_OLD_RUNS = {"head_kind": CHAINED, "loss_decay": 1.0}


class Training(Protocol):
    """Attributes:
    total: steps; None where a time says when it is over.
    steps: that were taken.
    is_whole: whether no step was torn apart by an exception after it had given its arrays away.
    """

    @property
    def total(self) -> int | None: ...

    @property
    def steps(self) -> int: ...

    @property
    def is_whole(self) -> bool: ...

    def is_over(self, history: list[Record]) -> bool: ...

    def step(self, interrupt: Interrupt) -> Record | None:
        """The next step; None, and nothing changed, if it is interrupted."""
        ...

    def figures(self, record: Record) -> str:
        """What the progress bar says after a step."""
        ...

    def arrays(self) -> dict[str, jax.Array]:
        """Everything a step changes, by name."""
        ...

    def restore(self, arrays: Mapping[str, jax.Array], steps: int) -> None: ...

    def trained_model(self) -> Any: ...


def take_steps(
    run: Training, history: list[Record], saving: saved.RunFolder, save_every: int,
    interrupt: Interrupt, progress: bool, on_step: Callable[[Record], object] | None,
) -> None:  # fmt: skip
    """The steps that are missing in `history`, until it is over or interrupted."""
    try:
        with progress_bar(progress, run.total, "step", initial=len(history)) as bar:
            while not run.is_over(history):
                record = run.step(interrupt)
                if record is None:
                    break
                history.append(record)
                bar.set_postfix_str(run.figures(record), refresh=False)
                bar.update()
                saving.note(record)
                if on_step is not None:
                    on_step(record)
                if len(history) % save_every == 0 and not run.is_over(history):
                    saving.save(run, history)
    except BaseException:  # on_step fails, a second Ctrl-C comes, another process has ended
        if run.is_whole and run.steps == len(history) > 0:  # what was made is saved
            saving.save(run, history, alone=processes.are_several())
        raise
    if history:
        saving.save(run, history)


def restored(
    run: Training,
    checkpoint: str,
    identity: Mapping[str, Any],
    fingerprint_of_format_1: Callable[[], str] | None = None,
) -> list[Record]:
    """Gives the run the arrays of a checkpoint; returns the history up to there."""
    document = saved.read_document(checkpoint)
    if document["format"] == saved.OLD_FINGERPRINT and fingerprint_of_format_1 is not None:
        what = "is of an older tsjax: only the model's norms and some of its rows were compared"
        warnings.warn(f"{checkpoint!r} {what}", stacklevel=3)
        identity = {**identity, "model": fingerprint_of_format_1()}
    with parsing(checkpoint, " is damaged"):
        wrong = _differences(document, identity)
        history = [_checked_record(*numbered) for numbered in enumerate(document["history"], 1)]
        whole = len(history) == document["step"]
    if wrong or not whole:
        what = "was made with " + "; ".join(wrong) if wrong else "has an incomplete history"
        raise BadValue(f"resume=True is not valid: the run in {checkpoint!r} {what}")
    arrays = saved.read_state(checkpoint, run.arrays(), document["format"])
    run.restore(arrays, len(history))
    return history


def _checked_record(step: int, record: Record) -> Record:
    check(record["step"] == step, "history", record["step"], f"the record of step {step}")
    name = "head_losses" if "head_losses" in record else "losses"  # of drafts in a row
    for value in record[name]:
        check(isinstance(value, float | int), name, value, "a number")
    return record


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    before = {**DEFAULTS_OF_OLD_RUNS, **then["settings"]}
    wrong = [
        f"{name}={before.get(name)!r}, now {value!r}"
        for name, value in now["settings"].items()
        if before.get(name) != value
    ]
    if then["model"] != now["model"]:
        wrong.append("another model (or type)")
    if then["data"] != now["data"]:
        wrong.append("other data")
    return wrong
