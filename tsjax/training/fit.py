# SPDX-License-Identifier: Apache-2.0
"""fit(): one training, from its first step or its last checkpoint to its result.

Knows what all trainings have in common: arrays that a step replaces, a history of records, a
folder, an interrupt. Does not know what is trained: that is a `Training`.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tsjax.base.checks import check, check_type, refuse_unknown
from tsjax.base.errors import BadValue
from tsjax.base.input_files import parsing
from tsjax.base.model_config import CHAINED, ModelConfig
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.interrupt import Interrupt, check_on_interrupt
from tsjax.host.progress import progress_bar
from tsjax.model.params import Params
from tsjax.training import saved
from tsjax.training.places import on_each_device
from tsjax.training.saved import Record

# Settings that runs saved by an older tsjax do not name.
DEFAULTS_OF_OLD_RUNS = {"head_kind": CHAINED, "loss_decay": 1.0}


class State(NamedTuple):
    """What a step replaces, in one assignment: a signal in between finds all of it or nothing."""

    weights: Any
    moments: Any
    steps: int  # that were taken


class Training(abc.ABC):
    """What is trained beside a model: its arrays, a step, an evaluation.

    Attributes:
      name: of the trained weights in a checkpoint.
      told_in_result: whether the result says what the evaluation found.
      total: steps that it is to take; None where a time says when it is over.
    """

    name: str
    told_in_result = False
    total: int | None

    def __init__(self, model: Model, cfg: ModelConfig, params: Params):
        """`cfg`: with what is trained. `params`: the model's, without it."""
        self.model, self.cfg, self._params = model, cfg, params

    def begin_with(self, weights: Any, optimiser: Any) -> None:
        weights = on_each_device(weights, self._params)
        self.state = State(weights, on_each_device(optimiser.init(weights), self._params), 0)

    @property
    @abc.abstractmethod
    def is_over(self) -> bool: ...

    @abc.abstractmethod
    def step(self, interrupt: Interrupt) -> Record | None:
        """The next step; None, and nothing changed, if it is interrupted."""

    @abc.abstractmethod
    def figures(self, record: Record) -> str:
        """What the progress bar says after a step."""

    @abc.abstractmethod
    def evaluate(self, over: bool) -> Any:
        """What is found on held-out text; nothing where the training is not over."""

    @abc.abstractmethod
    def trained_model(self) -> Model: ...

    def _tree(self) -> dict[str, Any]:
        return {self.name: self.state.weights, "adam": self.state.moments}

    def arrays(self) -> dict[str, jax.Array]:
        """Everything a step changes, by name."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._tree())
        return {
            jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves
        }

    def restore(self, arrays: Mapping[str, jax.Array], history: Sequence[Record]) -> None:
        leaves = [arrays[name] for name in self.arrays()]
        tree = jax.tree.unflatten(jax.tree.structure(self._tree()), leaves)
        self.state = State(tree[self.name], tree["adam"], len(history))

    @property
    def is_whole(self) -> bool:
        """Whether no step was torn apart by an exception after it had given its arrays away."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._tree()))


def check_call(
    model: Any, on_interrupt: str, changes: Mapping[str, Any], known: Sequence[str]
) -> None:
    check_on_interrupt(on_interrupt)
    check_type(model, Model, "model", "what tsjax.load returns")
    processes.check_shared(model.params)
    refuse_unknown(list(changes), known, "argument")


def fit(
    make: Callable[[Interrupt], Training], saving: saved.RunFolder, checkpoint: str | None,
    result: Callable[..., Any], *, save_every: int, progress: bool,
    on_step: Callable[[Record], object] | None, on_interrupt: str,
    fingerprint_of_format_1: Callable[[], str] | None = None,
) -> Any:  # fmt: skip
    """Trains what `make` makes, from the checkpoint on if there is one, until it is over or
    interrupted; saves it, evaluates it and hands its `result` what a TrainedHeads has."""
    interrupt = Interrupt()
    with interrupt:
        run, history = make(interrupt), []
        if checkpoint is not None:
            history = restored(run, checkpoint, saving.identity, fingerprint_of_format_1)
        saving.begin(history)
        _take_steps(run, history, saving, save_every, interrupt, progress, on_step)
        finished = run.is_over
        evaluation = run.evaluate(finished)
        interrupt.meet()
    if evaluation and run.told_in_result:
        saving.save(run, history)
    saving.finish(history, evaluation)
    reason = "interrupted" if not finished else "steps" if run.total is not None else "time"
    trained = result(
        model=run.trained_model(), history=history, evaluation=evaluation, finish_reason=reason,
        problems=tuple(saving.problems), unsaved=saving.unsaved,
    )  # fmt: skip
    interrupt.finish(trained, on_interrupt)
    return trained


def _take_steps(
    run: Training, history: list[Record], saving: saved.RunFolder, save_every: int,
    interrupt: Interrupt, progress: bool, on_step: Callable[[Record], object] | None,
) -> None:  # fmt: skip
    """The steps that are missing in `history`, until it is over or interrupted."""
    try:
        with progress_bar(progress, run.total, "step", initial=len(history)) as bar:
            while not run.is_over:
                record = run.step(interrupt)
                if record is None:
                    break
                history.append(record)
                bar.set_postfix_str(run.figures(record), refresh=False)
                bar.update()
                saving.note(record)
                if on_step is not None:
                    on_step(record)
                if len(history) % save_every == 0 and not run.is_over:
                    saving.save(run, history)
    except BaseException:  # on_step fails, a second Ctrl-C comes, another process has ended
        if run.is_whole and run.state.steps == len(history) > 0:  # what was made is saved
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
        warnings.warn(f"{checkpoint!r} {what}", stacklevel=4)
        identity = {**identity, "model": fingerprint_of_format_1()}
    with parsing(checkpoint, " is damaged"):
        wrong = _differences(document, identity)
        history = [_checked_record(*numbered) for numbered in enumerate(document["history"], 1)]
        whole = len(history) == document["step"]
    if wrong or not whole:
        what = "was made with " + "; ".join(wrong) if wrong else "has an incomplete history"
        raise BadValue(f"resume=True is not valid: the run in {checkpoint!r} {what}")
    run.restore(saved.read_state(checkpoint, run.arrays(), document["format"]), history)
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
