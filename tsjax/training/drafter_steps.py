# SPDX-License-Identifier: Apache-2.0
"""The steps of training a one-layer drafter: its arrays, and what is done with them.

Knows the model, the stream of texts and compiled programs. Does not know where texts come from, or
what a run's folder is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.config import ModelConfig, OneLayer, RopeConfig, check
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.telling import doing
from tsjax.model.drafter import DrafterWeights, declare_drafter, words_rows
from tsjax.model.params import is_spec
from tsjax.model.sharding import everywhere, mesh_of, named_sharding, placed
from tsjax.model.transformer import ParamSpec
from tsjax.training import drafter_loss, least_squares
from tsjax.training.batches import ROW_TOKENS, Stream, StreamRows, most_frequent_tokens
from tsjax.training.own_text import OwnText
from tsjax.training.saved import Record
from tsjax.training_config import DrafterTraining
from tsjax.typing import accumulation_dtype

# Tokens that the first weights are fitted to: all where what the model computes is kept, as it is
# needed anyway; else at most so many. What a state becomes is fitted to the last of them.
FITTED_TOKENS, FITTED_STATES = 262_144, 65_536
EVALUATED_TOKENS = 16_384  # of held-out text, while it trains
# Of a drafter: its MLP is the model's by so much; its words' rows are about as large as its layer,
# in whole thousands, as each draft reads both.
NARROWER_MLP, MOST_WORDS, WORDS_STEP = 2, 8192, 1024
OUTPUT_PLACES = (0, 256, 512, 1024, 2048, 4096)  # where evaluation begins a new row


def shape_for(cfg: ModelConfig) -> OneLayer:
    """A drafter for a model: early, in the middle, and where the model's own logits come from."""
    layers, mlp_dim = cfg.num_layers, max(cfg.embed_dim, cfg.mlp_dim // NARROWER_MLP)
    mlp_dim = -(-mlp_dim // 64) * 64
    vectors = cfg.head_dim * (3 * cfg.num_heads + 4 * cfg.num_kv_heads) + 3 * mlp_dim
    words = max(1, min(MOST_WORDS, vectors) // WORDS_STEP) * WORDS_STEP
    return OneLayer(
        mlp_dim=mlp_dim,
        words=min(words, cfg.vocab_size),
        taps=(layers // 4, layers // 2, layers),
        rope=RopeConfig(theta=10_000.0),
    )


def first_weights(cfg: ModelConfig, model: Any, seed: int) -> DrafterWeights:
    """In the optimiser's type. The layer adds nothing to its state yet; the words' rows and the
    norm before them are the model's."""
    specs = declare_drafter(cfg)
    assert specs is not None
    rng, dtype = np.random.default_rng(seed), accumulation_dtype(cfg.dtype)

    def make(spec: ParamSpec):
        if spec.init != "normal":
            return jnp.ones(spec.shape, dtype)
        return jnp.asarray(rng.normal(scale=0.02, size=spec.shape), dtype)

    specs = specs.replace(unembed=None, words=None)
    weights = jax.tree.map(make, specs, is_leaf=is_spec)
    layer = weights.layer.replace(
        o=jnp.zeros_like(weights.layer.o), down=jnp.zeros_like(weights.layer.down)
    )
    return weights.replace(layer=layer, out_norm=model.final_norm.astype(dtype))


@functools.cache
def drafter_programs() -> SimpleNamespace:
    """What the steps run, compiled."""

    def gradient(weights, frozen, model, pieces, starts, *, settings, cfg):
        def loss(weights):
            whole = _whole(weights, frozen, cfg)
            return drafter_loss.objective(whole, model, pieces, starts, settings=settings, cfg=cfg)

        return jax.grad(loss, has_aux=True)(weights)

    def drafted(weights, frozen, model, pieces, *, settings, cfg):
        whole = _whole(weights, frozen, cfg)
        return drafter_loss.drafted(whole, model, pieces, settings=settings, cfg=cfg)

    static = ("settings", "cfg")
    return SimpleNamespace(
        gradient=jax.jit(gradient, static_argnames=static),
        drafted=jax.jit(drafted, static_argnames=static),
        update=jax.jit(
            drafter_loss.adam_step,
            static_argnames="settings",
            donate_argnames=("weights", "moments"),
        ),
    )


def _whole(weights: DrafterWeights, frozen: Mapping[str, Any], cfg: ModelConfig) -> DrafterWeights:
    """The drafter in the model's type, as a step takes it."""
    weights = jax.tree.map(lambda x: x.astype(cfg.dtype), weights)
    return weights.replace(**frozen)


class Clock:
    """Of a run that may end at a time: what it has taken, without the pauses between its parts.

    Attributes:
      ends: seconds that it takes in all; None where it has a number of steps.
    """

    def __init__(self, ends: float | None):
        self.ends, self._before, self._began = ends, 0.0, time.monotonic()
        self._first: float | None = None  # when its first step began

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._began

    @property
    def share(self) -> float:
        """Of the time for steps, what is over."""
        if self.ends is None or self._first is None:
            return 0.0
        return (self.elapsed - self._first) / max(self.ends - self._first, 1.0)

    def note(self, record: Record) -> None:
        """A step was taken."""
        if self._first is None:
            self._first = record["elapsed"] - record["seconds"]

    def go_on(self, history: Sequence[Record]) -> None:
        """With a run that has taken these steps."""
        self.note(history[0])
        self._before = history[-1]["elapsed"]


class _State(NamedTuple):
    """What a step replaces, in one assignment: a signal in between finds all of it or nothing."""

    weights: Any
    moments: Any
    steps: int


class DrafterSteps:
    """The arrays of a run and what is done with them: a `Training`."""

    def __init__(
        self, model: Model, shape: OneLayer, settings: DrafterTraining, clock: Clock,
        learned: Sequence[OwnText], held: Sequence[OwnText], cached: bool, evaluate_every: int,
    ):  # fmt: skip
        self.model, self.settings, self._every = model, settings, evaluate_every
        self.cfg = dataclasses.replace(model.cfg, drafter=shape)
        self.mesh, self._clock, self._cached = mesh_of(model.params), clock, cached
        self.accuracy: tuple[float, ...] = ()
        parts = parts_of_data(model)
        make = functools.partial(Stream, states=self._states, seed=settings.seed, parts=parts)
        self._learned, self._held = make(learned, cached=cached), make(held)
        self._rows = self._learned.rows(settings.step_tokens // ROW_TOKENS)
        words = most_frequent_tokens(learned, self.cfg.vocab_size, shape.words)
        self._params = model.params.replace(heads=(), drafter=None)
        rows = words_rows(self._params.model, jnp.asarray(words))
        self._frozen = self._everywhere({"words": jnp.asarray(words), "unembed": rows})
        self._begin_with(first_weights(self.cfg, self._params.model, settings.seed))

    def _begin_with(self, weights: DrafterWeights) -> None:
        weights = self._everywhere(weights)
        moments = self._everywhere(drafter_loss.adam(self.settings).init(weights))
        self.state = _State(weights, moments, 0)

    def fit(self, interrupt: Interrupt) -> None:
        """The first weights of taps, token and the last row's state, by least squares."""
        step_tokens, tokens = self.settings.step_tokens, self._learned.tokens
        steps = max(1, (tokens if self._cached else min(FITTED_TOKENS, tokens)) // step_tokens)

        def batches():
            with doing("fitting the first weights", steps * step_tokens, "tokens") as work:
                rows_of_steps = self._learned.rows(step_tokens // ROW_TOKENS)
                for number, rows in zip(range(steps), rows_of_steps, strict=False):
                    if interrupt.requested:
                        return
                    yield self._pieces(rows)
                    work.done((number + 1) * step_tokens)

        kept = max(1, FITTED_STATES // step_tokens)
        fitted = least_squares.first_matrices(batches(), self._params.model.embed, kept)
        if fitted is not None:
            wide = accumulation_dtype(self.cfg.dtype)
            named = zip(drafter_loss.FITTED, (x.astype(wide) for x in fitted), strict=True)
            self._begin_with(self.state.weights.replace(**dict(named)))

    @property
    def total(self) -> int | None:
        return self.settings.steps or None

    @property
    def steps(self) -> int:
        return self.state.steps

    @property
    def _share(self) -> float:
        """Of the steps, what is over."""
        if self._clock.ends is None:
            return self.steps / self.settings.steps
        return self._clock.share

    def is_over(self, history: list[Record]) -> bool:
        return self._share >= 1

    def _everywhere(self, tree):
        """On every device of the mesh, or on the model's one."""
        device = jax.tree.leaves(self._params)[0].sharding
        whole = device if self.mesh is None else everywhere(self.mesh)
        return jax.tree.map(lambda x: jax.device_put(x, whole), tree)

    def _place(self, array: np.ndarray) -> jax.Array:
        """One batch, its texts shared out over the mesh."""
        if self.mesh is None:
            return jax.device_put(array, jax.tree.leaves(self._params)[0].sharding)
        names = ("batch", *(None,) * (array.ndim - 1))
        return placed(array, named_sharding(array.shape, names, self.mesh))

    def _states(self, tokens: np.ndarray) -> np.ndarray:
        """What the model computes for texts: the taps, and the last layer's output."""
        assert self.cfg.drafter is not None
        taps = (*self.cfg.drafter.taps, self.cfg.num_layers)
        states = programs_of(self.model).tapped_states(
            self._params, self._place(tokens), cfg=self.cfg.alone, taps=taps
        )
        return processes.on_host(states)

    def _pieces(self, rows: StreamRows) -> drafter_loss.Pieces:
        states, place = rows.states, self._place
        return drafter_loss.Pieces(
            place(states[:, :, :-1]), place(states[:, :, -1]), place(rows.tokens),
            place(rows.text), place(rows.own),
        )  # fmt: skip

    def step(self, interrupt: Interrupt) -> Record | None:
        if interrupt.requested:
            return None
        began, settings, share = self._clock.elapsed, self.settings, self._share
        weights, moments, steps = self.state
        pieces = self._pieces(next(self._rows))
        starts = np.arange(ROW_TOKENS // settings.every, dtype=np.int32) * settings.every
        starts += steps % settings.every
        programs, static = drafter_programs(), {"settings": settings, "cfg": self.cfg}
        gradient, found = programs.gradient(
            weights, self._frozen, self._params.model, pieces, starts, **static
        )
        rate = drafter_loss.rate_at(settings, steps, share)
        weights, moments, norm = programs.update(
            weights, moments, gradient, np.float32(rate), settings=settings
        )
        found, norm = processes.on_host((found, norm))
        self.state = _State(weights, moments, steps + 1)
        interrupt.meet()
        counted = np.maximum(found.counted, 1)
        losses = (found.loss / counted).tolist()
        weighs = [settings.depth_weight**row for row in range(settings.depth)]
        record: Record = {
            "step": steps + 1,
            "learning_rate": rate,
            "loss": float(np.dot(weighs, losses)),
            "losses": losses,
            "overlap": (found.overlap / counted).tolist(),
            "tokens": int(found.counted[0]),
            "gradient_norm": float(norm),
        }
        if (steps + 1) % self._every == 0:
            record["tokens_per_step"] = self.evaluation(EVALUATED_TOKENS)["tokens_per_step"]
        record["elapsed"] = self._clock.elapsed
        record["seconds"] = record["elapsed"] - began
        self._clock.note(record)
        return record

    def figures(self, record: Record) -> str:
        overlap = "/".join(f"{100 * share:.0f}" for share in record["overlap"])
        told = f"loss {record['loss']:.3f}, in common {overlap}%"
        self._last = record.get("tokens_per_step", getattr(self, "_last", None))
        told += f", {self._last:.2f} tokens a step" if self._last is not None else ""
        if self._clock.ends is not None:
            told += f", {max(self._clock.ends - record['elapsed'], 0) / 60:.1f} minutes left"
        return told

    def last_evaluation(self) -> dict[str, Any]:
        """Of all held-out text; the drafter says from then on how often it was right."""
        found = self.evaluation()
        self.accuracy = tuple(found["right"])
        return found

    def evaluation(self, most: int | None = None) -> dict[str, Any]:
        """On held-out text, or about so many tokens of it."""
        found = collections.defaultdict(lambda: np.zeros(self.settings.depth + 1))
        tokens, step_tokens = self._held.tokens, self.settings.step_tokens
        tokens = tokens if most is None else min(most, tokens)
        steps = max(1, tokens // step_tokens)
        with doing("evaluating", steps * step_tokens, "tokens") as work:
            rows_of_steps = self._held.rows(step_tokens // ROW_TOKENS)
            for number, rows in zip(range(steps), rows_of_steps, strict=False):
                work.done(number * step_tokens)
                self._add_drafted(rows, found)
        every = _told(found.pop("all"))
        return {**every, "by": {name: _told(sums) for name, sums in found.items() if sums[-1]}}

    def _add_drafted(self, rows: StreamRows, found: dict[str, np.ndarray]) -> None:
        """Sums, for all and by kind and place, of how often drafts up to each depth were right."""
        drafted = processes.on_host(
            drafter_programs().drafted(
                self.state.weights, self._frozen, self._params.model, self._pieces(rows),
                settings=self.settings, cfg=self.cfg,
            )
        )  # fmt: skip
        chains = drafted.right.shape[2] + 1
        right = np.concatenate([drafted.right, np.ones((*rows.tokens.shape, 1))], axis=2)
        counted = drafted.counted.reshape(-1)
        right = right.reshape(-1, chains)[counted]
        kind, place = rows.kind.reshape(-1)[counted], rows.place.reshape(-1)[counted] + 2
        found["all"] += right.sum(axis=0)
        for number, name in enumerate(self._held.kinds):
            found[name] += right[kind == number].sum(axis=0)
        for first, end in zip(OUTPUT_PLACES, (*OUTPUT_PLACES[1:], np.inf), strict=True):
            found[f"from {first}"] += right[(place >= first) & (place < end)].sum(axis=0)

    def arrays(self) -> dict[str, jax.Array]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._tree())
        return {
            jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves
        }

    def _tree(self) -> dict[str, Any]:
        return {"drafter": self.state.weights, "adam": self.state.moments}

    def restore(self, arrays: Mapping[str, jax.Array], steps: int) -> None:
        leaves = [arrays[name] for name in self.arrays()]
        tree = jax.tree.unflatten(jax.tree.structure(self._tree()), leaves)
        self.state = _State(tree["drafter"], tree["adam"], steps)
        self._rows = self._learned.rows(self.settings.step_tokens // ROW_TOKENS, steps)

    @property
    def is_whole(self) -> bool:
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._tree()))

    def trained_model(self) -> Model:
        assert self.cfg.drafter is not None
        drafter = dataclasses.replace(self.cfg.drafter, accuracy=self.accuracy)
        weights = _whole(self.state.weights, self._frozen, self.cfg)
        return self.model.replace(
            params=self._params.replace(heads=self.model.params.heads, drafter=weights),
            cfg=dataclasses.replace(self.cfg, drafter=drafter),
        )


def parts_of_data(model: Model) -> int:
    mesh = mesh_of(model.params)
    return mesh.shape.get("data", 1) if mesh is not None else 1


def check_rows(step_tokens: int, model: Model) -> None:
    parts = parts_of_data(model)
    wanted = f"a multiple of {ROW_TOKENS * parts}, {ROW_TOKENS} for each of {parts} parts of a mesh"
    check(step_tokens % (ROW_TOKENS * parts) == 0, "step_tokens", step_tokens, wanted)


def _told(sums: np.ndarray) -> dict[str, Any]:
    """Tokens of a step with a chain of drafts, and how often each was right when those before were;
    from how often all were right up to each depth, and the number of chains."""
    chains = max(float(sums[-1]), 1.0)
    so_far = np.concatenate([[chains], sums[:-1]])
    right = so_far[1:] / np.maximum(so_far[:-1], 1.0)
    return {
        "tokens_per_step": 1 + float(sums[:-1].sum()) / chains,
        "right": right.tolist(),
        "chains": int(sums[-1]),
    }
