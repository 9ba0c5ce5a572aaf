# SPDX-License-Identifier: Apache-2.0
"""The steps of training a one-layer drafter: its arrays, and what is done with them.

Knows the model, the stream of texts and compiled programs. Does not know where texts come from, or
what a run's folder is.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.model_config import ModelConfig, OneLayer, RopeConfig
from tsjax.base.telling import doing
from tsjax.base.training_config import DrafterTraining
from tsjax.base.typing import accumulation_dtype
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.costs import costs_of
from tsjax.host.interrupt import Interrupt
from tsjax.model.drafter import DrafterWeights, declare_drafter
from tsjax.model.param_spec import ParamSpec
from tsjax.model.params import is_spec
from tsjax.model.transformer import unembedding_rows
from tsjax.training import drafter_loss, least_squares
from tsjax.training.batches import ROW_TOKENS, most_frequent_tokens
from tsjax.training.drafter_evaluation import evaluated, expected_speedup
from tsjax.training.fit import State, Training
from tsjax.training.own_text import OwnText
from tsjax.training.places import on_each_device
from tsjax.training.saved import Record
from tsjax.training.tapped_texts import TappedTexts

# Tokens that the first weights are fitted to: all where what the model computes is kept, as it is
# needed anyway; else at most so many. What a state becomes is fitted to the last of them.
FITTED_TOKENS, FITTED_STATES = 262_144, 65_536
EVALUATED_TOKENS = 16_384  # of held-out text, while it trains
PRICED_CONTEXT = 1024  # tokens of the run whose speed is told
# Of a drafter: its MLP is the model's by so much; its words' rows are about as large as its layer,
# in whole thousands, as each draft reads both.
NARROWER_MLP, MOST_WORDS, WORDS_STEP = 2, 8192, 1024


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
    # A copy in any type: steps give up the arrays that they replace.
    return weights.replace(layer=layer, out_norm=jnp.array(model.final_norm, dtype))


@functools.partial(jax.jit, static_argnames=("settings", "cfg"))
def _gradient(weights, frozen, model, pieces, starts, *, settings, cfg):
    def loss(weights):
        whole = _whole(weights, frozen, cfg)
        return drafter_loss.objective(whole, model, pieces, starts, settings=settings, cfg=cfg)

    return jax.grad(loss, has_aux=True)(weights)


def _whole(weights: DrafterWeights, frozen: Mapping[str, Any], cfg: ModelConfig) -> DrafterWeights:
    """The drafter in the model's type, as a step takes it."""
    weights = jax.tree.map(lambda x: x.astype(cfg.dtype), weights)
    return weights.replace(**frozen)


class Elapsed:
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


class DrafterSteps(Training):
    """The arrays of a run and what is done with them."""

    name, told_in_result = "drafter", True

    def __init__(
        self, model: Model, shape: OneLayer, settings: DrafterTraining, clock: Elapsed,
        learned: Sequence[OwnText], held: Sequence[OwnText], cached: bool, evaluate_every: int,
    ):  # fmt: skip
        cfg = dataclasses.replace(model.cfg, drafter=shape)
        super().__init__(model, cfg, model.params.replace(heads=(), drafter=None))
        self.settings, self._clock, self._every = settings, clock, evaluate_every
        self.total = settings.steps or None
        self.accuracy: tuple[float, ...] = ()
        self._evaluated: Record = {}  # the last record with an evaluation
        how = settings.step_tokens, settings.seed
        self._learned = TappedTexts(model, cfg, learned, *how, cached)
        self._held = TappedTexts(model, cfg, held, *how)
        self._rows = self._learned.rows()
        words = jnp.asarray(most_frequent_tokens(learned, cfg.vocab_size, shape.words))
        rows = unembedding_rows(self._params.model, words)
        self._frozen = on_each_device({"words": words, "unembed": rows}, self._params)
        self._begin_from(first_weights(cfg, self._params.model, settings.seed))

    def _begin_from(self, weights: Any) -> None:
        self.begin_with(weights, drafter_loss.adam(self.settings))

    def fit_first_weights(self, interrupt: Interrupt) -> None:
        """The first weights of taps, token and the last row's state, by least squares."""
        learned, step_tokens = self._learned, self.settings.step_tokens
        steps = learned.steps
        if not learned.cached:
            steps = max(1, min(steps, FITTED_TOKENS // step_tokens))

        def batches():
            with doing("fitting the first weights", steps * step_tokens, "tokens") as work:
                for number, (_, pieces) in zip(range(steps), learned.rows(), strict=False):
                    if interrupt.requested:
                        return
                    yield pieces
                    work.done((number + 1) * step_tokens)

        kept = max(1, FITTED_STATES // step_tokens)
        fitted = least_squares.first_matrices(batches(), self._params.model.embed, kept)
        if fitted is not None:
            wide = accumulation_dtype(self.cfg.dtype)
            named = zip(drafter_loss.FITTED, (x.astype(wide) for x in fitted), strict=True)
            self._begin_from(self.state.weights.replace(**dict(named)))

    @property
    def _share(self) -> float:
        """Of the steps, what is over."""
        if self._clock.ends is None:
            return self.state.steps / self.settings.steps
        return self._clock.share

    @property
    def is_over(self) -> bool:
        return self._share >= 1

    def step(self, interrupt: Interrupt) -> Record | None:
        if interrupt.requested:
            return None
        began, settings, share = self._clock.elapsed, self.settings, self._share
        weights, moments, steps = self.state
        _, pieces = next(self._rows)
        starts = np.arange(ROW_TOKENS // settings.every, dtype=np.int32) * settings.every
        starts += steps % settings.every
        gradient, found = _gradient(
            weights, self._frozen, self._params.model, pieces, starts, settings=settings,
            cfg=self.cfg,
        )  # fmt: skip
        rate = drafter_loss.rate_at(settings, steps, share)
        weights, moments, norm = drafter_loss.adam_step(
            weights, moments, gradient, np.float32(rate), settings=settings
        )
        found, norm = processes.on_host((found, norm))
        self.state = State(weights, moments, steps + 1)
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
            some = self.evaluation(max(1, EVALUATED_TOKENS // settings.step_tokens))
            record |= {name: some[name] for name in ("tokens_per_step", "speedup")}
        record["elapsed"] = self._clock.elapsed
        record["seconds"] = record["elapsed"] - began
        self._clock.note(record)
        return record

    def figures(self, record: Record) -> str:
        overlap = "/".join(f"{100 * share:.0f}" for share in record["overlap"])
        told = f"loss {record['loss']:.3f}, in common {overlap}%"
        self._evaluated = record if "speedup" in record else self._evaluated
        if last := self._evaluated:
            told += f", {last['tokens_per_step']:.2f} tokens a step, {last['speedup']:.2f}x here"
        if self._clock.ends is not None:
            told += f", {max(self._clock.ends - record['elapsed'], 0) / 60:.1f} minutes left"
        return told

    def evaluate(self, over: bool) -> dict[str, Any]:
        """Of all held-out text; the drafter says from then on how often it was right."""
        found = self.evaluation(None) if over else {}
        self.accuracy = tuple(found.get("right", ()))
        return found

    def evaluation(self, steps: int | None) -> dict[str, Any]:
        """On held-out text, or so many steps of it."""
        drafter = _whole(self.state.weights, self._frozen, self.cfg)
        found = evaluated(drafter, self._held, self.settings, steps)
        params = self._params.replace(drafter=drafter)
        costs = costs_of(params, self.cfg, 1, PRICED_CONTEXT)
        return {**found, "speedup": expected_speedup(found["right"], costs, PRICED_CONTEXT)}

    def restore(self, arrays: Mapping[str, jax.Array], history: Sequence[Record]) -> None:
        super().restore(arrays, history)
        self._rows = self._learned.rows(len(history))
        self._clock.go_on(history)

    def trained_model(self) -> Model:
        assert self.cfg.drafter is not None
        drafter = dataclasses.replace(self.cfg.drafter, accuracy=self.accuracy)
        weights = _whole(self.state.weights, self._frozen, self.cfg)
        return self.model.replace(
            params=self._params.replace(heads=self.model.params.heads, drafter=weights),
            cfg=dataclasses.replace(self.cfg, drafter=drafter),
        )
