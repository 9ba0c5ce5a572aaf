# SPDX-License-Identifier: Apache-2.0
"""Training of a small model with tsjax's own forward pass: AdamW, cosine, random windows.

Knows the schedule, the updates and its own checkpoints. Does not know text or HuggingFace.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tsjax
from tsjax.base.checks import check
from tsjax.files.whole_files import replacing
from tsjax.model.params import init_params, is_spec
from tsjax.model.transformer import ModelWeights, declare_model
from tsjax.training.saved import METRICS, append_metrics, write_metrics

from .loss import drop_units, token_losses
from .rows import Order, Windows, cut_rows
from .texts import Stream

SMALL = tsjax.ModelConfig(
    vocab_size=4096,
    embed_dim=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=704,
    # The slowest of the rotary embedding's angles turns once in 35,000 positions, so that windows
    # with gaps have shown all of them long before this.
    max_positions=131_072,
    norm_eps=1e-5,
    rope=tsjax.steps.RopeConfig(theta=10_000.0),
    tie_embeddings=True,
)
FORMAT = 2  # of what is in STATE
STATE = "state.msgpack"  # in a work folder, beside METRICS


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train. `minutes` or `steps` says how long: the schedule follows it."""

    minutes: float | None = None
    steps: int | None = None
    length: int = 512
    final_length: int = 2048
    final_part: float = 0.1  # of the run, with rows of final_length
    batch: int = 8192  # tokens of one update
    micro: int = 1024  # tokens of one forward pass, at least one row
    learning_rate: float = 5e-3
    warmup: float = 0.02  # part of the run
    weight_decay: float = 0.1
    dropout: float = 0.0  # of units, drawn for each micro-batch
    gaps: float = 0.3  # part of the rows
    dtype: str = "float32"  # of the forward and backward pass
    evals: int = 15
    chunk: int = 1  # updates in one call of the device
    seed: int = 0

    def __post_init__(self):
        check(
            (self.minutes is None) != (self.steps is None),
            "minutes",
            self.minutes,
            f"either minutes or steps; steps={self.steps}",
        )
        for name in ("length", "final_length", "batch", "micro", "evals", "chunk"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "a positive number")
        for name in ("minutes", "steps", "learning_rate"):
            value = getattr(self, name)
            check(value is None or value > 0, name, value, "a positive number")
        for name in ("final_part", "warmup", "dropout", "gaps"):
            value = getattr(self, name)
            check(0 <= value < 1, name, value, "at least 0 and less than 1")
        longest = max(self.length, self.final_length)
        check(self.batch >= longest, "batch", self.batch, f"at least a row of {longest} tokens")

    def rows(self, length: int) -> tuple[int, int]:
        """Micro-batches of an update, and rows of a micro-batch."""
        rows = max(1, min(self.micro, self.batch) // length)
        return max(1, self.batch // (rows * length)), rows


def scheduled(progress, warmup: float):
    """The learning rate's factor when this part of the run is done: linear up, cosine down."""
    progress = np.minimum(progress, 1.0)
    rising = progress / max(warmup, 1e-9)
    falling = 0.5 + 0.5 * np.cos(np.pi * (progress - warmup) / (1 - warmup))
    return np.clip(np.where(progress < warmup, rising, falling), 0.0, 1.0)


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """Updates for a learning rate of 1: Muon for the layers' matrices, AdamW for all else.

    Both move a weight by about the same, so one learning rate serves both.
    """
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            learning_rate=1.0,
            weight_decay=settings.weight_decay,
            adam_b2=0.98,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_matrices,
        ),
    )


def apart(weights: ModelWeights, cfg: tsjax.ModelConfig) -> ModelWeights:
    """Each matrix by itself, as Muon takes them: a tuple for those that lie together."""

    def split(spec, leaf):
        ends = np.cumsum(spec.parts)[:-1]
        return tuple(jnp.split(leaf, ends, axis=1)) if spec.parts else leaf

    return jax.tree.map(split, declare_model(cfg), weights, is_leaf=is_spec)


def together(weights: ModelWeights, cfg: tsjax.ModelConfig) -> ModelWeights:
    """The inverse of `apart`."""

    def joined(spec, leaf):
        return jnp.concatenate(leaf, axis=1) if spec.parts else leaf

    return jax.tree.map(joined, declare_model(cfg), weights, is_leaf=is_spec)


def _matrices(weights: ModelWeights) -> ModelWeights:
    """For Muon: which axes of each weight, `apart`, are the inputs and outputs of its matrix."""

    def matrix(leaf, inputs: int):
        outputs = leaf.ndim - inputs
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(outputs, leaf.ndim)), tuple(range(outputs))
        )

    def layer(one):
        inputs = {"qkv": 1, "o": 2, "gate_up": 1, "down": 1}
        matrices = {
            name: jax.tree.map(functools.partial(matrix, inputs=count), getattr(one, name))
            for name, count in inputs.items()
        }
        return jax.tree.map(lambda leaf: None, one).replace(**matrices)

    none = jax.tree.map(lambda leaf: None, weights)
    return none.replace(layers=tuple(map(layer, weights.layers)))


def first_weights(cfg: tsjax.ModelConfig, seed: int) -> ModelWeights:
    """As `init_params`; what is added to the residual stream begins smaller."""
    weights = init_params(cfg, seed).model
    scale = (2 * cfg.num_layers) ** -0.5
    layers = tuple(
        layer.replace(o=layer.o * scale, down=layer.down * scale) for layer in weights.layers
    )
    return weights.replace(layers=layers)


@functools.partial(
    jax.jit, static_argnames=("cfg", "settings", "length", "bos"), donate_argnums=(0, 1)
)
def run_updates(weights, moments, stream, windows, rates, key, *, cfg, settings, length, bos):
    """One update per entry of `rates` [chunk]; `windows` hold [chunk, micro-batches, rows].

    Returns:
      weights, moments, and the mean loss and gradient norm of each update.
    """
    working = dataclasses.replace(cfg, dtype=settings.dtype)

    def loss_of(weights, windows, key):
        weights = jax.tree.map(lambda w: w.astype(settings.dtype), weights)
        if settings.dropout:
            weights = drop_units(weights, settings.dropout, key)
        rows = cut_rows(stream, windows, length, bos)
        return jnp.mean(token_losses(weights, *rows, working))

    def update(carry, inputs):
        weights, moments = carry
        windows, rate, key = inputs

        def add(total, inputs):
            found = jax.value_and_grad(loss_of)(weights, *inputs)
            return jax.tree.map(jnp.add, total, found), None

        micros = windows.start.shape[0]
        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
        total, _ = lax.scan(add, nothing, (windows, jax.random.split(key, micros)))
        loss, gradient = jax.tree.map(lambda a: a / micros, total)
        separate = apart(gradient, cfg), moments, apart(weights, cfg)
        changes, moments = optimizer(settings).update(*separate)
        changes = together(changes, cfg)
        weights = jax.tree.map(lambda w, c: w + rate * c, weights, changes)
        return (weights, moments), (loss, optax.tree.norm(gradient))

    keys = jax.random.split(key, len(rates))
    (weights, moments), logged = lax.scan(update, (weights, moments), (windows, rates, keys))
    return weights, moments, logged


@functools.partial(jax.jit, static_argnames=("cfg", "length", "dtype", "bos"))
def held_out_loss(weights, stream, windows, *, cfg, length, dtype, bos):
    """Mean loss over windows [n, rows]."""
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)

    def add(total, windows):
        rows = cut_rows(stream, windows, length, bos)
        return total + jnp.mean(token_losses(weights, *rows, dataclasses.replace(cfg, dtype=dtype)))

    total, _ = lax.scan(lambda t, w: (add(t, w), None), jnp.zeros(()), windows)
    return total / windows.start.shape[0]


@dataclasses.dataclass
class Progress:
    """What a run knows beside its arrays; it is saved with them."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    length: int = 0  # of the rows of the current phase
    drawn: int = 0  # windows in this phase
    evals: int = 0
    best_step: int = 0
    best_loss: float = math.inf


class Trainer:
    """One run. Everything it needs to go on is in `folder` after every evaluation.

    Attributes:
      on_best: called with the weights whenever the held-out loss is the lowest so far.
    """

    def __init__(
        self,
        cfg: tsjax.ModelConfig,
        settings: Settings,
        train: Stream,
        held_out: Stream,
        folder: Path,
        *,
        on_best: Callable[[ModelWeights], object] = lambda weights: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        longest = max(settings.length, settings.final_length)
        if len(train.tokens) < 2 * longest + 2:
            raise ValueError(
                f"the texts have {len(train.tokens):,} tokens to train on; rows of {longest} need "
                f"at least {2 * longest + 2:,}"
            )
        check(longest <= cfg.max_positions, "length", longest, f"at most {cfg.max_positions}")
        self.cfg, self.settings, self.folder = cfg, settings, folder
        self.train, self.held_out = train, held_out
        self.on_best, self._clock = on_best, clock
        self.weights = first_weights(cfg, settings.seed)
        self.moments = optimizer(settings).init(cast(Any, apart(self.weights, cfg)))
        self.progress = Progress()
        self._stream = jnp.asarray(train.tokens)
        folder.mkdir(parents=True, exist_ok=True)

    # What is left of it: the schedule.

    def part_done(self) -> float:
        done = self.progress
        if self.settings.steps is not None:
            return done.step / self.settings.steps
        return done.seconds / (60 * (self.settings.minutes or 1))

    def _length(self) -> int:
        final = self.part_done() >= 1 - self.settings.final_part
        return self.settings.final_length if final else self.settings.length

    def run(self, stop_at: int | None = None) -> Progress:
        """Trains to the end of the schedule, or until `stop_at` updates are done."""
        done, settings = self.progress, self.settings
        begun = self._clock() - done.seconds
        share = 0.0  # of the schedule, per update
        logged = []
        while self.part_done() < 1 and (stop_at is None or done.step < stop_at):
            compiles = self._length() != done.length
            if compiles:
                done.length, done.drawn = self._length(), 0
            micros, rows = settings.rows(done.length)
            shape = (settings.chunk, micros, rows)
            order = Order(
                self.train, done.length, self.cfg.max_positions, settings.gaps, settings.seed
            )
            order.drawn = done.drawn
            windows = order.take(math.prod(shape))
            windows = jax.tree.map(lambda a, shape=shape: a.reshape(shape), windows)

            part = self.part_done()
            if settings.steps is not None:
                share = 1 / settings.steps
            ahead = np.minimum(part + share * np.arange(settings.chunk), 1.0)
            rates = settings.learning_rate * scheduled(ahead, settings.warmup)
            key = jax.random.fold_in(jax.random.key(settings.seed), done.step)
            self.weights, self.moments, (losses, norms) = run_updates(
                self.weights,
                self.moments,
                self._stream,
                windows,
                rates.astype(np.float32),
                key,
                cfg=self.cfg,
                settings=settings,
                length=done.length,
                bos=self.train.bos,
            )
            losses, norms = np.asarray(losses), np.asarray(norms)
            if not np.isfinite(losses).all():
                raise FloatingPointError(
                    f"the loss is not finite at update {done.step}; a lower learning rate than "
                    f"{settings.learning_rate} may help"
                )
            logged.append((float(losses.mean()), float(norms.max())))
            done.step += settings.chunk
            done.drawn = order.drawn
            done.tokens += math.prod(shape) * done.length
            if compiles:  # it takes a part of the minutes on a CPU, and all of them on a GPU
                begun = self._clock() - done.seconds
            done.seconds = self._clock() - begun
            share = (self.part_done() - part) / settings.chunk
            if self.part_done() * settings.evals >= done.evals + 1 or self.part_done() >= 1:
                self._evaluate(logged, float(rates[-1]))
                logged = []
                done.seconds = self._clock() - begun
                self.save()
        if logged:
            self.save()
        return done

    def _evaluate(self, logged: list[tuple[float, float]], rate: float) -> None:
        done = self.progress
        done.evals = max(done.evals + 1, int(self.part_done() * self.settings.evals))
        loss = self.evaluate(self.weights)
        line = {
            "step": done.step,
            "tokens": done.tokens,
            "epochs": round(done.tokens / len(self.train.tokens), 2),
            "minutes": round(done.seconds / 60, 2),
            "length": done.length,
            "rate": round(rate, 7),
            "loss": round(float(np.mean([loss for loss, _ in logged])), 4),
            "held_out": round(loss, 4),
            "largest_gradient": round(max(norm for _, norm in logged), 3),
            "tokens_per_second": round(done.tokens / max(done.seconds, 1e-9)),
        }
        if loss < done.best_loss:
            done.best_loss, done.best_step = loss, done.step
            self.on_best(self.weights)
        print(json.dumps(line), flush=True)
        append_metrics(str(self.folder), line)

    def evaluate(self, weights: ModelWeights, dtype: str | None = None) -> float:
        """The loss on the held-out text, in rows of one length in every phase."""
        tokens = len(self.held_out.tokens)
        length = min(1024, self.cfg.max_positions, tokens // 2)
        rows = max(1, self.settings.micro // length)
        count = (tokens - 1) // length // rows
        while not count:
            rows //= 2
            count = (tokens - 1) // length // rows
        start = self.held_out.next_start(length * np.arange(count * rows))
        start = np.minimum(start, tokens - length - 1).reshape(count, rows).astype(np.int32)
        none = np.zeros_like(start)
        windows = Windows(start, none + length + 1, none, none)
        loss = held_out_loss(
            weights,
            self.held_out.tokens,
            windows,
            cfg=self.cfg,
            length=length,
            dtype=dtype or self.settings.dtype,
            bos=self.train.bos,
        )
        return float(loss)

    # Its checkpoint.

    def save(self) -> None:
        content = {
            "format": FORMAT,
            "settings": repr((self.cfg, _lasting(self.settings))),
            "progress": dataclasses.asdict(self.progress),
            "arrays": flax.serialization.to_state_dict((self.weights, self.moments)),
        }
        data = flax.serialization.msgpack_serialize(jax.device_get(content))
        with replacing(str(self.folder / STATE)) as fresh:
            Path(fresh).write_bytes(data)

    def restore(self) -> None:
        file = self.folder / STATE
        if not file.exists():
            raise FileNotFoundError(f"--resume: {file} is missing; there is nothing to go on with")
        content = cast(dict[str, Any], flax.serialization.msgpack_restore(file.read_bytes()))
        if content.get("format") != FORMAT:
            raise ValueError(f"--resume: {file} has another layout of the weights; begin anew")
        mine = repr((self.cfg, _lasting(self.settings)))
        if content["settings"] != mine:
            raise ValueError(
                f"--resume: {file} was written with other settings:\n{content['settings']}\n"
                f"instead of\n{mine}"
            )
        self.progress = Progress(**content["progress"])
        lines = map(json.loads, (self.folder / METRICS).read_text("utf-8").splitlines())
        history = [line for line in lines if line["step"] <= self.progress.step]
        write_metrics(str(self.folder), history)
        arrays = flax.serialization.from_state_dict((self.weights, self.moments), content["arrays"])
        self.weights, self.moments = jax.tree.map(jnp.asarray, arrays)


def _lasting(settings: Settings) -> Settings:
    """Without what a continued run may choose anew: how long, and how often to look."""
    if settings.minutes is not None:
        settings = dataclasses.replace(settings, minutes=1.0)
    return dataclasses.replace(settings, evals=1)
