# SPDX-License-Identifier: Apache-2.0
"""Ways to read a prompt: what a setting says, and families whose settings are chosen.

A setting is a dict that a JSON document holds: a family, its cuts, and what else the family varies.
For a target, how many times fewer operations a prompt is to take, each shape of a family gets the
largest shares that meet it, and the first BUDGET shapes that can meet it are its candidates. Shapes
begin with the latest cuts, so earlier ones are tried where late ones do not suffice, and every
family has the same budget. A family's place is empty where none of its shapes meets a target.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import tsjax
from tsjax.host.lookups import lookups_of
from tsjax.lazy.settings import (
    AUTO_AT_LEAST,
    AUTO_BLOCK,
    AUTO_WINDOW,
    Cuts,
    kept,
    paper_cuts,
    prompt_flops,
)

TARGETS = (1.6, 2.2, 3.2)  # times fewer operations
BUDGET = 2  # candidates of a family for each of them
LEAST_SHARE = 0.02
FINENESS = 1000  # steps in which shares are solved
BLOCKS = (32, 64)  # tokens
WINDOW: dict[str, Any] = {"window": 8, "pool": 7, "recent": 8}  # FastKV's

Setting = dict[str, Any]


class Rival(NamedTuple):
    """A way to read a prompt: how it is computed, and what is made of it before."""

    prefill: Any = "full"
    compress: Callable[[tsjax.Model, np.ndarray], np.ndarray] | None = None
    compress_layers: int = 0  # that read the whole prompt for it
    compress_share: float = 1.0  # of the prompt that is left
    reader: tsjax.ModelConfig | None = None  # whose layers these are, if another model's

    @property
    def cuts(self) -> Cuts:
        return self.prefill.cuts if isinstance(self.prefill, tsjax.LazyPrefill) else ()

    @property
    def revive(self) -> str | None:
        return self.prefill.revive if isinstance(self.prefill, tsjax.LazyPrefill) else None


FULL = Rival()


def compressed(
    share: float, layers: int, chooser: tsjax.Model | None = None, **settings: Any
) -> Rival:
    """A shorter prompt; a `chooser` is another model than the one that reads it."""

    def compress(model: tsjax.Model, prompt: np.ndarray) -> np.ndarray:
        return tsjax.compress_prompt(chooser or model, prompt, share, **settings)

    return Rival("full", compress, layers, share, chooser and chooser.cfg)


def dropped(share: float, draw: int) -> Rival:
    keep = {0: share}
    return Rival(tsjax.LazyPrefill(keep=keep, revive="never", scores="random", seed=draw))


def operations(cfg: tsjax.ModelConfig, rival: Rival, tokens: int) -> float:
    """How many times fewer than those of the full prefill."""
    reader = rival.reader or cfg
    before, layers = 0.0, rival.compress_layers
    if layers:  # after which no token goes on
        before = prompt_flops(
            reader, tokens, ((layers, 0.0),) if layers < reader.num_layers else ()
        )
    left = kept(rival.compress_share, tokens)
    return prompt_flops(cfg, tokens) / (before + prompt_flops(cfg, left, rival.cuts))


def at(layers: int, part: float) -> int:
    """The last layer of this part of the model."""
    return max(1, round(part * layers))


# --- families ---------------------------------------------------------------------------------


class Shape(NamedTuple):
    """(layer, power) of each cut: with a number r from 0 to 1, r to the power goes on after it."""

    powers: tuple[tuple[int, float], ...]
    more: tuple[tuple[str, Any], ...] = ()  # what else the family varies

    def setting(self, family: str, target: float | None, r: float) -> Setting:
        cuts = [[layer, max(LEAST_SHARE, round(r**power, 4))] for layer, power in self.powers]
        return {"family": family, "target": target, "cuts": cuts, **dict(self.more)}


class Asked(NamedTuple):
    """Whom a family's settings are for."""

    model: tsjax.Model
    small: tsjax.Model | None  # of the same family of models, and smaller


class Family(NamedTuple):
    """Settings of one kind.

    Attributes:
      shapes: those with the latest cuts first; of a family without, the settings are fixed.
      build: from a setting and the number of a random draw.
      chosen_as: another family whose choice it has.
      fixed: the family's only setting, whatever the target.
      targets: those of TARGETS that it is measured at, by their places.
    """

    shapes: Callable[[Asked], list[Shape]]
    build: Callable[[Asked, Setting, int], Rival]
    chosen_as: str | None = None
    fixed: bool = False
    targets: slice = slice(None)


PARTS = ((0.5, 0.7, 0.9), (0.4, 0.6, 0.8), (0.3, 0.6, 0.9), (0.2, 0.4, 0.7), (0.125, 0.25, 0.5))
FALLS = ((1, 2, 3), (1, 4, 8))  # by the same part with each cut, as in the paper, or steeply


def three_cuts(asked: Asked) -> list[Shape]:
    layers = asked.model.cfg.num_layers
    found = [
        {at(layers, part): power for part, power in zip(parts, powers, strict=True)}
        for parts in PARTS
        for powers in FALLS
    ]
    return [Shape(tuple(powers.items())) for powers in found]


def one_cut(asked: Asked) -> list[Shape]:
    return [Shape(((layer, 1),)) for layer in range(asked.model.cfg.num_layers - 1, 0, -1)]


def one_cut_in_blocks(asked: Asked) -> list[Shape]:
    return [one._replace(more=(("block", size),)) for one in one_cut(asked) for size in BLOCKS]


def early_cut(asked: Asked) -> list[Shape]:
    return [Shape(((at(asked.model.cfg.num_layers, 0.25), 1),))]


def of_small(asked: Asked) -> list[Shape]:
    if asked.small is None:
        return []
    layers = asked.small.cfg.num_layers
    return [Shape(((at(layers, part), 1),), (("block", 32),)) for part in (0.9, 0.75, 0.6)]


def lazily(**settings: Any) -> Callable[[Asked, Setting, int], Rival]:
    def build(asked: Asked, setting: Setting, draw: int) -> Rival:
        block = {"block": setting["block"]} if "block" in setting else {}
        return Rival(tsjax.LazyPrefill(keep=keep_of(setting), **block, **settings))

    return build


def keep_of(setting: Setting) -> dict[int, float]:
    return {layer: share for layer, share in setting["cuts"]}


def gem_filter(asked: Asked, setting: Setting, draw: int) -> Rival:
    ((layer, share),) = setting["cuts"]
    return compressed(share, layer, layer=layer)


def chosen_by_small(asked: Asked, setting: Setting, draw: int) -> Rival:
    ((layer, share),) = setting["cuts"]
    assert asked.small is not None
    # Its first block and its last one stay: what a chat begins with, and the question.
    size = setting["block"]
    how = {"pool": 1, "block": size, "sinks": size, "recent": size}
    return compressed(share, layer, asked.small, layer=layer, **how)


def random(asked: Asked, setting: Setting, draw: int) -> Rival:
    ((_, share),) = setting["cuts"]
    return dropped(share, draw)


def self_information(asked: Asked, setting: Setting, draw: int) -> Rival:
    ((layers, share),) = setting["cuts"]  # all of them read the prompt to choose
    return compressed(share, layers, by="self_information")


def by_default(asked: Asked, setting: Setting, draw: int) -> Rival:
    how: dict[str, Any] = {"at_least": AUTO_AT_LEAST, "window": AUTO_WINDOW, "block": AUTO_BLOCK}
    return Rival(tsjax.LazyPrefill(keep=keep_of(setting), **how))


def whole(asked: Asked) -> list[Shape]:
    return [Shape(((asked.model.cfg.num_layers, 1),))]


FIRST_TWO, MIDDLE = slice(0, 2), slice(1, 2)
FAMILIES = {
    "no revival": Family(three_cuts, lazily(revive="never"), targets=FIRST_TWO),
    "LazyLLM": Family(three_cuts, lazily(revive="on_demand"), "no revival", targets=FIRST_TWO),
    "in batches": Family(three_cuts, lazily(revive="in_batches"), "no revival", targets=FIRST_TWO),
    "one cut, tokens": Family(one_cut, lazily(revive="never")),
    "one cut, blocks": Family(one_cut_in_blocks, lazily(revive="never")),
    "FastKV": Family(one_cut, lazily(revive="never", **WINDOW), targets=MIDDLE),
    "static": Family(early_cut, lazily(revive="never"), targets=MIDDLE),
    "random": Family(lambda _: [Shape(((0, 1),))], random, targets=MIDDLE),
    "GemFilter": Family(one_cut, gem_filter),
    "small model": Family(of_small, chosen_by_small),
    "self-information": Family(whole, self_information, fixed=True),
    "paper's cuts": Family(three_cuts, lazily(revive="on_demand"), fixed=True),
    "default": Family(one_cut, by_default, fixed=True),
}
HALF = 0.5  # of a prompt that self-information leaves


def fixed_setting(name: str, asked: Asked, tokens: int) -> Setting:
    if name == "self-information":
        return whole(asked)[0].setting(name, None, HALF)
    cfg = asked.model.cfg
    if name == "paper's cuts":
        lazy = tsjax.LazyPrefill(keep="paper").resolved(cfg, tokens)
    else:
        lazy = tsjax.LazyPrefill().resolved(cfg, tokens, lookups_of(asked.model).layer)
    return {"family": name, "target": None, "cuts": [list(pair) for pair in lazy.cuts]}


def rival_of(asked: Asked, setting: Setting, draw: int = 0) -> Rival:
    if setting["family"] == "full":
        return FULL
    return FAMILIES[setting["family"]].build(asked, setting, draw)


def solved(asked: Asked, family: str, shape: Shape, tokens: int, target: float) -> Setting | None:
    """A shape's setting with the largest shares that take 1/target of the operations; None if not
    even the smallest ones do."""

    def misses(step: int) -> bool:
        setting = shape.setting(family, target, step / FINENESS)
        return operations(asked.model.cfg, rival_of(asked, setting), tokens) < target

    meeting = bisect.bisect_left(range(1, FINENESS + 1), True, key=misses)
    return shape.setting(family, target, meeting / FINENESS) if meeting else None


def candidates(asked: Asked, name: str, tokens: int, target: float) -> list[Setting]:
    """The first shapes that meet the target, for a prompt of this length; none of a family with
    nothing to choose."""
    family = FAMILIES[name]
    if family.fixed or family.chosen_as:
        return []
    found = (solved(asked, name, shape, tokens, target) for shape in family.shapes(asked))
    return list(itertools.islice((one for one in found if one is not None), BUDGET))


def rivals(model_layers: int, seed: int = 0) -> dict[str, Rival]:
    """Settings for models on which nothing is chosen, by name: the paper's schedule with and
    without revival, its baselines, and newer methods."""
    layers, paper = model_layers, paper_cuts(model_layers)
    found = {"full": FULL}
    revivals: dict[str, Any] = {
        "LazyLLM": "on_demand",
        "in batches": "in_batches",
        "no revival": "never",
    }
    for name, revive in revivals.items():
        found[name] = Rival(tsjax.LazyPrefill(keep=dict(paper), revive=revive))
    for share in (0.5, 0.3):
        static = tsjax.LazyPrefill(keep={at(layers, 0.25): share}, revive="never")
        found[f"random drop, {share}"] = dropped(share, seed)
        found[f"static, {share}"] = Rival(static)
        found[f"self-information, {share}"] = compressed(share, layers, by="self_information")
        layer = at(layers, 0.4)
        found[f"GemFilter, {share}"] = compressed(share, layer, layer=layer)
    late = {at(layers, 0.5): 0.1}
    for name, block in (("tokens", 1), ("blocks", 32)):
        found[f"one cut, {name}"] = Rival(tsjax.LazyPrefill(keep=late, revive="never", block=block))
    found["FastKV"] = Rival(tsjax.LazyPrefill(keep=late, revive="never", **WINDOW))
    return found
