# SPDX-License-Identifier: Apache-2.0
"""Ways to read a prompt: fixed ones by name, and families whose settings are chosen.

A family has shapes: after which layers a prompt is cut, and how steeply the shares fall. For a
target, how many times fewer operations a prompt is to take, each shape gets the largest shares that
meet it, and the first BUDGET shapes that can meet it are its candidates. Shapes begin with the
latest cuts, so early ones are tried where late ones do not suffice, and every family has the same
budget. A family's place is empty where none of its shapes meets a target.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import tsjax
from benchmarks.ttft import SCHEDULES, schedule
from tsjax.errors import BadValue
from tsjax.lazy.settings import Cuts, kept, prompt_flops

TARGETS = (2.2, 2.6, 2.9)  # times fewer operations
BUDGET = 5  # candidates of a family for each of them
LEAST_SHARE = 0.02
FINENESS = 1000  # steps in which shares are solved
DRAWS = 5  # of what is dropped at random


class Rival(NamedTuple):
    """A way to read a prompt: how it is computed, and what is made of it before."""

    prefill: Any = "full"
    compress: Callable[[tsjax.Model, np.ndarray], np.ndarray] | None = None
    compress_layers: int = 0  # that read the whole prompt for it
    compress_share: float = 1.0  # of the prompt that is left

    @property
    def cuts(self) -> Cuts:
        return self.prefill.cuts if isinstance(self.prefill, tsjax.LazyPrefill) else ()

    @property
    def revive(self) -> str | None:
        return self.prefill.revive if isinstance(self.prefill, tsjax.LazyPrefill) else None


FULL = Rival()


def compressed(share: float, layers: int, **settings: Any) -> Rival:
    compress = functools.partial(tsjax.compress_prompt, share=share, **settings)
    return Rival("full", compress, layers, share)


def dropped(share: float, draw: int) -> Rival:
    keep = {0: share}
    return Rival(tsjax.LazyPrefill(keep=keep, revive="never", scores="random", seed=draw))


def operations(cfg: tsjax.ModelConfig, rival: Rival, tokens: int) -> float:
    """How many times fewer than those of the full prefill."""
    whole = prompt_flops(cfg, tokens)
    before = whole * rival.compress_layers / cfg.num_layers
    return whole / (before + prompt_flops(cfg, kept(rival.compress_share, tokens), rival.cuts))


def computed_share(cfg: tsjax.ModelConfig, rival: Rival, stages=()) -> float:
    """The share of a prompt's tokens that was computed, the mean over layers.

    Args:
      stages: what each stage had computed by the end; by default what the cuts let through.
    """
    if not rival.cuts:
        return rival.compress_layers / cfg.num_layers + rival.compress_share
    ends = [0, *(layer for layer, _ in rival.cuts), cfg.num_layers]
    stages = stages or (1.0, *(share for _, share in rival.cuts))
    return float(np.dot(np.diff(ends), stages)) / cfg.num_layers


# --- fixed settings, by name ------------------------------------------------------------------


def at(layers: int, part: float) -> int:
    """The last layer of this part of the model."""
    return max(1, round(part * layers))


def rivals(cfg: tsjax.ModelConfig, seed: int = 0) -> dict[str, Rival]:
    """Settings for models on which nothing is chosen: the paper's schedule and others, its
    ablation, its baselines, and newer methods."""
    layers, found = cfg.num_layers, {"full": FULL}
    for name in SCHEDULES:
        keep = schedule(name, layers)
        found[f"LazyLLM, {name}"] = Rival(tsjax.LazyPrefill(keep=keep, revive="on_demand"))
        found[f"in batches, {name}"] = Rival(tsjax.LazyPrefill(keep=keep))
        found[f"no revival, {name}"] = Rival(tsjax.LazyPrefill(keep=keep, revive="never"))
        found[f"background, {name}"] = Rival(tsjax.LazyPrefill(keep=keep, revive="background"))
    for share in (0.5, 0.3):
        static = tsjax.LazyPrefill(keep={at(layers, 0.25): share}, revive="never")
        found[f"random drop, {share}"] = dropped(share, seed)
        found[f"static, {share}"] = Rival(static)
        found[f"self-information, {share}"] = compressed(share, layers, by="self_information")
        layer = at(layers, 0.4)
        found[f"GemFilter, {share}"] = compressed(share, layer, layer=layer)
    found["FastKV, 0.2"] = Rival(
        tsjax.LazyPrefill(keep={at(layers, 0.47): 0.2}, revive="never", **WINDOW)
    )
    return found


WINDOW: dict[str, Any] = {"window": 8, "pool": 7, "recent": 8}


# --- families ---------------------------------------------------------------------------------


class Shape(NamedTuple):
    """(layer, power) of each cut: with a number r from 0 to 1, r to the power goes on after it."""

    powers: tuple[tuple[int, float], ...]

    def cuts(self, r: float) -> Cuts:
        return tuple((layer, max(LEAST_SHARE, round(r**power, 4))) for layer, power in self.powers)


Ruled = tuple[float | None, Cuts]  # a target, and what a rule says for it


class Family(NamedTuple):
    """Settings of one kind.

    Attributes:
      shapes: of a number of layers, those with the latest cuts first.
      build: from a shape's cuts and the number of a random draw.
      draws: how many draws there are. Sample i has the i-th, over and over.
      falls_short: whether the smallest share stands in where no shape meets a target.
      rule: names the cuts for a prompt of some tokens, by target or for none, so that there is
        nothing to choose.
    """

    shapes: Callable[[int], list[Shape]]
    build: Callable[[Cuts, int], Rival]
    draws: int = 1
    falls_short: bool = False
    rule: Callable[[tsjax.ModelConfig, int, Sequence[float]], list[Ruled]] | None = None


PARTS = ((0.5, 0.7, 0.9), (0.4, 0.6, 0.8), (0.3, 0.6, 0.9), (0.2, 0.4, 0.7), (0.125, 0.25, 0.5))
FALLS = ((1, 2, 3), (1, 4, 8))  # by the same part with each cut, as in the paper, or steeply


def three_cuts(layers: int) -> list[Shape]:
    found = [
        Shape(tuple({at(layers, part): power for part, power in pairs}.items()))
        for parts in PARTS
        for pairs in (tuple(zip(parts, powers, strict=True)) for powers in FALLS)
    ]
    inside = [Shape(tuple(pair for pair in one.powers if pair[0] < layers)) for one in found]
    return [one for one in dict.fromkeys(inside) if one.powers]


def one_cut(layers: int) -> list[Shape]:
    return [Shape(((layer, 1),)) for layer in range(layers - 1, 0, -1)]


def lazily(**settings: Any) -> Callable[[Cuts, int], Rival]:
    return lambda cuts, draw: Rival(tsjax.LazyPrefill(keep=dict(cuts), **settings))


def gem_filter(cuts: Cuts, draw: int) -> Rival:
    ((layer, share),) = cuts
    return compressed(share, layer, layer=layer)


def self_information(cuts: Cuts, draw: int) -> Rival:
    ((layers, share),) = cuts  # all of them read the prompt to choose
    return compressed(share, layers, by="self_information")


def random(cuts: Cuts, draw: int) -> Rival:
    ((_, share),) = cuts
    return dropped(share, draw)


def auto_cuts(cfg: tsjax.ModelConfig, tokens: int, targets: Sequence[float]) -> list[Ruled]:
    """Of keep="auto", for the targets that it does not refuse."""
    found: list[Ruled] = []
    for target in targets:
        with contextlib.suppress(BadValue):
            lazy = tsjax.LazyPrefill(keep="auto", speedup=target)
            found.append((target, lazy.resolved(cfg, tokens).cuts))
    return found


def paper_cuts(cfg: tsjax.ModelConfig, tokens: int, targets: Sequence[float]) -> list[Ruled]:
    return [(None, tsjax.LazyPrefill().resolved(cfg, tokens).cuts)]


FAMILIES = {
    "LazyLLM": Family(three_cuts, lazily(revive="on_demand")),
    "in batches": Family(three_cuts, lazily(revive="in_batches")),
    "no revival": Family(three_cuts, lazily(revive="never")),
    "one cut": Family(one_cut, lazily(revive="on_demand")),
    "auto": Family(one_cut, lazily(), rule=auto_cuts),
    "paper's cuts": Family(three_cuts, lazily(revive="on_demand"), rule=paper_cuts),
    "paper's cuts, in batches": Family(three_cuts, lazily(), rule=paper_cuts),
    "paper's cuts, no revival": Family(three_cuts, lazily(revive="never"), rule=paper_cuts),
    "static": Family(one_cut, lazily(revive="never")),
    "FastKV": Family(one_cut, lazily(revive="never", **WINDOW)),
    "random": Family(lambda layers: [Shape(((0, 1),))], random, DRAWS),
    "GemFilter": Family(one_cut, gem_filter),
    "self-information": Family(
        lambda layers: [Shape(((layers, 1),))], self_information, falls_short=True
    ),
}


def solved(
    cfg: tsjax.ModelConfig, family: Family, shape: Shape, tokens: int, target: float
) -> Cuts | None:
    """A shape's cuts with the largest shares that take 1/target of the operations; None if not
    even the smallest ones do."""

    def misses(step: int) -> bool:
        rival = family.build(shape.cuts(step / FINENESS), 0)
        return operations(cfg, rival, tokens) < target

    meeting = bisect.bisect_left(range(1, FINENESS + 1), True, key=misses)
    return shape.cuts(meeting / FINENESS) if meeting else None


def candidates(
    cfg: tsjax.ModelConfig, family: Family, tokens: int, target: float
) -> list[tuple[Shape, Cuts]]:
    """The first shapes that meet the target, with their cuts for a prompt of this length; none of
    a family with nothing to choose."""
    if family.rule is not None:
        return []
    shapes = family.shapes(cfg.num_layers)
    found = [(one, solved(cfg, family, one, tokens, target)) for one in shapes]
    return [(shape, cuts) for shape, cuts in found if cuts is not None][:BUDGET]
