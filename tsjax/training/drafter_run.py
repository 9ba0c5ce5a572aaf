# SPDX-License-Identifier: Apache-2.0
"""train_drafter(): the host side of training a one-layer drafter.

Knows the phases, own text first, then steps until a number or a time; checkpoints, progress and
interrupts. Does not know what a step does (drafter_steps.py) or how text is written (own_text.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from tsjax.base.checks import check, check_float, check_int, check_type
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.model_config import OneLayer
from tsjax.base.training_config import DrafterTraining
from tsjax.files.adapters import write_drafter_of
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.host.interrupt import Interrupt
from tsjax.training import saved
from tsjax.training.batches import fingerprint_of
from tsjax.training.drafter_steps import DrafterSteps, Elapsed, shape_for
from tsjax.training.fit import check_call, fit
from tsjax.training.own_text import read_asked, read_own_text, write_own_text
from tsjax.training.saved import Record
from tsjax.training.tapped_texts import check_rows

DRAFTER_SETTINGS = tuple(field.name for field in dataclasses.fields(DrafterTraining))
TEXT = "text"  # the folder of the model's own text in that of a run
OF_WRITING = 0.4  # of the time, what writing text takes where nothing else is asked for
OWN_TOKENS = 2_000_000  # of own text, at most, where nothing else is asked for
HELD_OUT = 20  # one text in so many is not learned from


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    """What `train_drafter` returns.

    Attributes:
      model: the model with its new drafter, in the model's type.
      history: one record per step: step (from 1), learning_rate, loss, losses and overlap of each
        draft in a row (what its distribution has in common with the model's), tokens, seconds,
        elapsed (of the run, the writing included); and after an evaluation "tokens_per_step" of a
        chain, of held-out text, and "speedup", what that is expected to gain on this machine.
      evaluation: on all held-out text: "tokens_per_step" and "right" (how often each draft in a row
        was right when those before were), over all and by kind of text and place in the output;
        and "speedup".
      finish_reason: "steps", "time" or "interrupted".
      problems: what could not be written, and why.
      unsaved: whether `save_to` lacks the last checkpoint or the drafter.
    """

    model: Model
    history: list[Record]
    evaluation: dict[str, Any]
    finish_reason: str
    settings: DrafterTraining
    problems: tuple[str, ...]
    unsaved: bool


def train_drafter(
    model: Model,
    *,
    save_to: str | os.PathLike,
    minutes: float | None = None,
    data: str | os.PathLike | None = None,
    prompts: str | os.PathLike | None = None,
    tokens: int = OWN_TOKENS,
    sampling: GenerationConfig | None = None,
    shape: OneLayer | None = None,
    settings: DrafterTraining | None = None,
    cache_hidden: bool = False,
    evaluate_every: int = 200,
    save_every: int = 100,
    resume: bool = False,
    progress: bool = False,
    on_step: Callable[[Record], object] | None = None,
    on_interrupt: str = "raise",
    **changes: Any,
) -> TrainedDrafter:
    """Trains a new one-layer drafter on text that the model writes; the model stays as it is.

    Args:
      model: from `tsjax.load`; on a mesh it is used as it lies there.
      save_to: a folder for text, checkpoints, metrics and the drafter, which
        `tsjax.load(path, drafter=save_to)` takes. What was ended while it wrote text goes on with
        the same call.
      minutes: until it ends, 0.4 of them at most for writing text; else the settings' steps. The
        evaluation at the end comes on top.
      data: a folder of text that was written before; by default it is in `save_to`.
      prompts: what it is asked: a JSON file like configs/asked.json, or one prompt a line.
      tokens: of text to write, at most.
      sampling: how the text is drawn, as the drafter is to be used; temperature 0.7 by default.
      shape: of the drafter; by default made for the model.
      settings: a DrafterTraining; `changes`, its fields, override it one by one.
      cache_hidden: keep what the model computes for the texts in host memory.
      evaluate_every: steps between evaluations on held-out text.
      resume: go on with the run in `save_to`.
      progress: show a progress bar on stderr.
      on_step: called with the record of every step.
      on_interrupt: as of `train_heads`.
    """
    check_call(model, on_interrupt, changes, DRAFTER_SETTINGS)
    sampling = sampling or GenerationConfig(do_sample=True, temperature=0.7)
    check_type(sampling, GenerationConfig, "sampling", "a tsjax.GenerationConfig")
    settings = _settings(settings, changes, sampling, minutes)
    check_rows(settings.step_tokens, model)
    counts = {"save_every": save_every, "evaluate_every": evaluate_every, "tokens": tokens}
    for name, value in counts.items():
        check_int(value, name, 1)
    asked = read_asked(prompts)
    folder = saved.check_folder(save_to, resume, saved.FILES_OF_DRAFTER)
    assert folder is not None
    checkpoint, source = saved.latest(folder) if resume else None, os.path.join(folder, TEXT)
    clock = Elapsed(minutes and 60 * minutes)
    if data is None and checkpoint is None:
        most = clock.ends and OF_WRITING * clock.ends
        how: dict[str, Any] = {"sampling": sampling, "tokens": tokens, "seconds": most}
        texts = write_own_text(model, source, asked, **how)
    else:  # a training that goes on learns from the text that it began with
        texts = read_own_text(source if data is None else os.fspath(data))
    check(len(texts) > 1, "data", data, "a folder with at least two texts of the model's own")
    shape = shape or shape_for(model.cfg)
    identity = {"model": model_fingerprint(model), "data": fingerprint_of(texts)}
    plain = json.loads(json.dumps(dataclasses.asdict(shape)))  # as a saved run gives it back
    identity |= {"settings": {**dataclasses.asdict(settings), "shape": plain}}

    def make(interrupt: Interrupt) -> DrafterSteps:
        learned = [text for index, text in enumerate(texts) if index % HELD_OUT]
        learning = learned, texts[::HELD_OUT], cache_hidden, evaluate_every
        run = DrafterSteps(model, shape, settings, clock, *learning)
        if checkpoint is None:
            run.fit_first_weights(interrupt)
        return run

    return fit(
        make,
        saved.RunFolder(folder, identity, lambda place, one: write_drafter_of(one, place)),
        checkpoint,
        functools.partial(TrainedDrafter, settings=settings),
        save_every=save_every, progress=progress, on_step=on_step, on_interrupt=on_interrupt,
    )  # fmt: skip


def _settings(
    settings: DrafterTraining | None,
    changes: Mapping[str, Any],
    sampling: GenerationConfig,
    minutes: float | None,
) -> DrafterTraining:
    if settings is None:
        settings = DrafterTraining(temperature=sampling.temperature if sampling.do_sample else 1.0)
    settings = dataclasses.replace(settings, **changes)
    if minutes is None:
        check(
            settings.steps > 0, "steps", settings.steps, "at least 1, or give minutes (--minutes)"
        )
    else:
        check_float(minutes, "minutes", 0.0, 1e6)
        check(settings.steps == 0, "steps", settings.steps, "0 with minutes: one of both")
    return settings
