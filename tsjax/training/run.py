# SPDX-License-Identifier: Apache-2.0
"""train_heads(): the host side of training draft heads.

Knows data, checkpoints, progress and interrupts. Does not know how a loss is computed: it feeds
micro-batches to the pure functions of loss.py.

The n-th sequence of a run is a function of seed and n, and a checkpoint holds all arrays of the
optimiser, so a run that is resumed goes through the same numbers as one that never stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from tsjax.base.checks import check, check_int
from tsjax.base.telling import doing
from tsjax.base.training_config import HeadTraining
from tsjax.files.adapters import write_heads
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import fingerprint_of_first_rows, model_fingerprint
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.memory import main_memory
from tsjax.training import loss, saved
from tsjax.training.corpus import (
    Order,
    TrainingCorpus,
    predictions_from_counts,
    read_training_corpus,
)
from tsjax.training.fit import State, Training, check_call, fit
from tsjax.training.loss import TOP, cast_heads
from tsjax.training.places import on_each_device, parts_of_data, shared_out
from tsjax.training.saved import Record

SETTING_NAMES = tuple(field.name for field in dataclasses.fields(HeadTraining))
# What follows the data where nobody says how many steps, and how often these then see it.
SIZED_BY_DATA, MOST_PASSES = ("steps", "warmup_steps", "batch_size", "micro_batch"), 50


@dataclasses.dataclass(frozen=True)
class TrainedHeads:
    """What `train_heads` returns.

    Attributes:
      model: the model with its new heads, in the model's type.
      history: one record per step: step (from 1), learning_rate, loss (the sum of head_losses, each
        by its weight),
        head_losses, top1, top2, top3 (share of labels among the 1, 2, 3 most probable tokens),
        gradient_norm, seconds.
      evaluation: one record per head on the held-out sequences; the first, head 0, is the model
        itself and its next token. Empty without held-out data.
      finish_reason: "steps" or "interrupted".
      problems: what could not be written, and why.
      unsaved: whether `save_to` lacks the last checkpoint or the heads.
    """

    model: Model
    history: list[Record]
    evaluation: list[Record]
    finish_reason: str
    settings: HeadTraining
    skipped: tuple[str, ...]
    problems: tuple[str, ...]
    unsaved: bool


def train_heads(
    model: Model,
    data: Any,
    *,
    settings: HeadTraining | None = None,
    held_out: Any = None,
    whole_books: bool = False,
    data_dtype: str | None = None,
    cache_hidden: bool = False,
    save_to: str | os.PathLike | None = None,
    save_every: int = 50,
    resume: bool = False,
    progress: bool = False,
    on_step: Callable[[Record], object] | None = None,
    on_interrupt: str = "raise",
    **changes: Any,
) -> TrainedHeads:
    """Trains new draft heads for a model, which itself stays as it is: TokenSwift's, or Medusa's
    with head_kind="parallel".

    Args:
      model: from `tsjax.load`; on a mesh it is used as it lies there. Heads it has are not used.
      data: text files, folders of them, .npy or .bin files of token ids, or an array of ids. By
        default the first `sequence_length` tokens of every text; shorter texts are left out.
      settings: a HeadTraining; `changes` (its fields: steps, learning_rate, batch_size,
        sequence_length, seed, ...) override it one by one. The default is the recipe for heads of
        the kind, `HeadTraining.of_kind(head_kind)`, with fewer steps for little data: see its
        `steps`.
      held_out: what to evaluate on at the end: a fraction of the data's documents, or files.
      whole_books: take all sequences of a text, not only the first.
      data_dtype: type of the ids in .bin files.
      cache_hidden: compute the model's hidden states once and keep them in host memory: faster
        when the same sequences come several times.
      save_to: a folder for checkpoints (every `save_every` steps and at the end), metrics, a plot
        of the losses, and the heads as an adapter that `tsjax.load(path, heads=save_to)` takes.
      resume: go on with the run in `save_to`, with the same numbers as if it had never stopped.
      progress: show a progress bar with losses and accuracies on stderr.
      on_step: called with the record of every step.
      on_interrupt: what follows when Ctrl-C or SIGTERM has ended the run after the last complete
        step and it is saved: "raise" raises tsjax.Interrupted, whose `result` is the TrainedHeads;
        "return" returns them. A second Ctrl-C raises KeyboardInterrupt at once.

    Raises:
      Interrupted: see on_interrupt, and `generate`.
    """
    check_call(model, on_interrupt, changes, SETTING_NAMES)
    fits_data = settings is None and "steps" not in changes
    settings = head_settings(settings, changes)
    check_int(save_every, "save_every", 1)
    _check_length(model, settings)
    if not fits_data:
        _check_passes(model, settings)
    # Before the folder is looked at, in which the first one may still be writing.
    processes.check_same("train_heads", settings, save_to is None, resume, cache_hidden)
    folder = saved.check_folder(save_to, resume, saved.FILES_OF_HEADS)
    checkpoint = saved.latest(folder) if folder is not None and resume else None
    # Before the data is read, which may take long.
    before = None if checkpoint is None else saved.read_settings(checkpoint)
    read = functools.partial(
        read_training_corpus, sequence_length=settings.sequence_length,
        vocab_size=model.cfg.vocab_size, tokenizer=lambda: model.tokenizer,
        whole_books=whole_books, data_dtype=data_dtype,
    )  # fmt: skip
    with doing("reading the texts"):
        train, held = read(data), None
        if isinstance(held_out, float | int):
            train, held = train.split(held_out, settings.seed)
        elif held_out is not None:
            held = read(held_out, argument="held_out")
    if fits_data:
        fitted = before or _fitted_to(len(train), parts_of_data(model.params), settings, changes)
        fitted = {name: fitted[name] for name in SIZED_BY_DATA if name in fitted}
        settings = dataclasses.replace(settings, **{**fitted, **changes})
        _check_passes(model, settings)
    identity = {"model": model_fingerprint(model), "data": train.fingerprint,
                "settings": dataclasses.asdict(settings)}  # fmt: skip
    processes.check_same("train_heads", identity, checkpoint and os.path.basename(checkpoint))
    return fit(
        lambda interrupt: _Run(model, settings, train, held, cache_hidden),
        saved.RunFolder(
            folder, identity, lambda place, one: write_heads(one, os.path.join(place, saved.HEADS))
        ),
        checkpoint,
        functools.partial(TrainedHeads, settings=settings, skipped=train.skipped),
        fingerprint_of_format_1=functools.partial(fingerprint_of_first_rows, model),
        save_every=save_every, progress=progress, on_step=on_step, on_interrupt=on_interrupt,
    )  # fmt: skip


def head_settings(settings: HeadTraining | None, changes: Mapping[str, Any]) -> HeadTraining:
    """With changes; where there are none yet, the recipe for heads of the kind."""
    if settings is None:
        settings = HeadTraining.of_kind(changes.get("head_kind", HeadTraining.head_kind))
    return dataclasses.replace(settings, **changes)


def _check_passes(model: Model, settings: HeadTraining) -> None:
    parts = parts_of_data(model.params)
    micro, batch = settings.micro_batch * parts, settings.batch_size
    wanted = f"a multiple of the {micro} sequences of a pass (micro_batch={settings.micro_batch}"
    wanted += f" on each of {parts} parts of the mesh)" if parts > 1 else ")"
    check(batch % micro == 0, "batch_size", batch, wanted)


def _check_length(model: Model, settings: HeadTraining) -> None:
    length, limit = settings.sequence_length, model.cfg.max_positions
    wanted = f"at most the {limit} positions that the model was made for"
    check(length <= limit, "sequence_length", length, wanted)


def _fitted_to(
    sequences: int, parts: int, settings: HeadTraining, changes: Mapping[str, Any]
) -> dict[str, int]:
    """SIZED_BY_DATA, but for what `changes` say: no step takes a sequence twice, and all steps take
    MOST_PASSES over the data at most. Much data changes nothing; of little data a step takes a
    power of two, which a mesh of other parts can share out as well."""
    micro, batch = settings.micro_batch, settings.batch_size

    def whole(count: int) -> int:
        return 1 << (count.bit_length() - 1) if sequences < settings.batch_size else count

    if "batch_size" not in changes:
        micro = changes.get("micro_batch", whole(max(1, min(micro, sequences // parts))))
        batch = whole(max(1, min(batch, sequences) // (micro * parts))) * micro * parts
    steps = min(settings.steps, -(-MOST_PASSES * sequences // batch))
    warmup = changes.get("warmup_steps", min(settings.warmup_steps, steps // 4))
    return dict(zip(SIZED_BY_DATA, (max(steps, warmup + 1), warmup, batch, micro), strict=True))


@functools.cache
def training_programs() -> SimpleNamespace:
    """`add_gradients`, `update` and `measure_heads`, compiled."""
    static, given = ("cfg", "chunk_tokens"), ("heads", "moments")
    return SimpleNamespace(
        add_gradients=jax.jit(
            loss.add_gradients, static_argnames=(*static, "loss_decay"), donate_argnames="total"
        ),
        update=jax.jit(loss.update, static_argnames="settings", donate_argnames=given),
        measure_heads=jax.jit(loss.measure_heads, static_argnames=static),
    )


class _Run(Training):
    """The arrays of a run and what is done with them."""

    name = "heads"

    def __init__(
        self, model: Model, settings: HeadTraining, train: TrainingCorpus,
        held: TrainingCorpus | None, cached: bool,
    ):  # fmt: skip
        cfg = model.cfg.with_heads(settings.num_heads, settings.head_kind)
        super().__init__(model, cfg, model.params.replace(heads=()))
        self.settings, self.train, self.held, self.total = settings, train, held, settings.steps
        self.micro = settings.micro_batch * parts_of_data(model.params)  # sequences of a pass
        self.order, self.rates = Order(len(train), settings.seed), loss.learning_rates(settings)
        heads = loss.init_heads(cfg, settings, self._params.model)
        self.begin_with(heads, loss.optimiser(settings))
        self._static = {"cfg": cfg, "chunk_tokens": settings.chunk_tokens}
        self._cache = self._compute_hidden() if cached else None

    @property
    def is_over(self) -> bool:
        return self.state.steps == self.total

    def figures(self, record: Record) -> str:
        """What the progress bar says after a step."""
        heads = zip(*(record[f"top{k + 1}"] for k in range(TOP)), strict=True)
        tops = " ".join("/".join(f"{100 * share:.0f}" for share in head) for head in heads)
        return f"loss {record['loss']:.3f}, top-1/2/3 % {tops}"

    def _hidden(self, tokens: jax.Array) -> jax.Array:
        run = programs_of(self.model).hidden_states
        return run(self._params, tokens, cfg=self.cfg.with_heads(0))

    def _compute_hidden(self) -> np.ndarray:
        """The hidden states of all sequences, always in the same batches."""
        total, length = len(self.train), self.settings.sequence_length
        dtype = jax.numpy.dtype(self.cfg.dtype)
        needed = total * length * self.cfg.embed_dim * dtype.itemsize
        memory = processes.least(main_memory() or 2**62)
        wanted = (
            f"the hidden states of {total} sequences take {needed / 1e9:.1f} GB, this machine has "
            f"{memory / 1e9:.1f} GB; leave it out"
        )
        check(needed < 0.8 * memory, "cache_hidden", True, wanted)
        hidden = np.empty((total, length, self.cfg.embed_dim), dtype)
        with doing("computing hidden states", total, "sequences") as work:
            for first in range(0, total, self.micro):
                work.done(first)
                numbers = [number % total for number in range(first, first + self.micro)]
                fresh = self._hidden(shared_out(self.train.sequences(numbers), self._params))
                hidden[numbers] = processes.on_host(fresh)
        return hidden

    def step(self, interrupt: Interrupt) -> Record | None:
        """The next step; None, and nothing changed, if it is interrupted."""
        began, settings = time.perf_counter(), self.settings
        heads, moments, steps = self.state
        total = on_each_device(loss.zero_gradients(heads), self._params)
        first = steps * settings.batch_size
        for start in range(first, first + settings.batch_size, self.micro):
            if interrupt.requested:
                return None
            numbers = self.order.numbers(start, self.micro)
            tokens = shared_out(self.train.sequences(numbers), self._params)
            if self._cache is None:
                hidden = self._hidden(tokens)
            else:
                hidden = shared_out(self._cache[numbers], self._params)
            total = training_programs().add_gradients(
                heads, self._params.model, hidden, tokens, total, **self._static,
                loss_decay=settings.loss_decay,
            )  # fmt: skip
            jax.block_until_ready(total.metrics)  # so that signals are seen, and buffers are freed
            interrupt.meet()
        metrics = processes.on_host(total.metrics)
        heads, moments, norm = training_programs().update(heads, moments, total, settings=settings)
        self.state = State(heads, moments, steps + 1)
        labels = np.asarray(settings.labels, np.float64) * settings.batch_size
        losses = (metrics.loss / labels).tolist()
        return {
            "step": steps + 1,
            "learning_rate": float(np.asarray(self.rates(steps))),
            "loss": math.fsum(map(operator.mul, settings.loss_weights, losses)),
            "head_losses": losses,
            **_shares(metrics.hits, labels),
            "gradient_norm": float(processes.on_host(norm)),
            "seconds": time.perf_counter() - began,
        }

    def evaluate(self, over: bool) -> list[Record]:
        held_out = self.held
        if held_out is None or not over:
            return []
        count, vocab = self.settings.num_heads + 1, self.cfg.vocab_size
        losses, hits = np.zeros(count), np.zeros((count, TOP), np.int64)
        with doing("evaluating", len(held_out), "sequences") as work:
            for first in range(0, len(held_out), self.micro):
                work.done(first)
                numbers = range(first, min(first + self.micro, len(held_out)))
                tokens = shared_out(held_out.sequences(numbers), self._params)
                measured = training_programs().measure_heads(
                    self.state.weights, self._params.model, self._hidden(tokens), tokens,
                    **self._static,
                )  # fmt: skip
                metrics = processes.on_host(measured)
                losses += np.asarray(metrics.loss, np.float64)
                hits += np.asarray(metrics.hits)
        records = []
        for head in range(count):
            labels = len(held_out) * (self.settings.sequence_length - 1 - head)
            record = {
                "head": head,
                "loss": float(losses[head] / labels),
                **_shares(hits[head], labels),
            }
            free = predictions_from_counts(
                self.train, held_out, distance=head + 1, vocab_size=vocab, top=min(TOP, vocab)
            )
            records.append(record | {name: shares.tolist() for name, shares in free.items()})
        return records

    def trained_model(self) -> Model:
        params = self._params.replace(heads=cast_heads(self.state.weights, self.cfg))
        return self.model.replace(params=params, cfg=self.cfg)


def _shares(hits: np.ndarray, labels) -> dict[str, Any]:
    """top1, top2 ...: hits [..., TOP] as shares of the labels."""
    shares = np.asarray(hits, np.float64).T / labels
    return {f"top{k + 1}": shares[k].tolist() for k in range(TOP)}
