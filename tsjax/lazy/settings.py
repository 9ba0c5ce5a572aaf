# SPDX-License-Identifier: Apache-2.0
"""LazyLLM's settings: which share of a prompt goes on after which layer, and what that saves.

Knows the schedule, its presets, and the operations that a prompt takes under it. Does not know
arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from tsjax.base.checks import check, check_fields, check_int, one_of
from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig

# What becomes of tokens that a cut left out, and the new tokens from one choice to the next.
CHOOSE_EVERY = {"in_batches": 8, "on_demand": 1, "never": 1, "background": 1}
REVIVE = tuple(CHOOSE_EVERY)
SCORES = ("attention", "random")
PAPER_CUTS, PAPER_SHARE = (0.3, 0.6, 0.9), 0.7  # of the layers; of the tokens that are left
# What keep="auto" keeps where no speed-up is asked for, and the smallest share otherwise; and so
# many tokens in any case: a sixteenth of a short prompt is less than a question and what is around
# it. Of 8,192 tokens both are 512, one pass of a prefill.
AUTO_SHARE, AUTO_LEAST_SHARE, AUTO_AT_LEAST = 1 / 16, 0.02, 512
# An answer that copies asks for what stands around a place, line by line: whole blocks go on and
# come back. What is asked stands in the prompt's last few tokens.
AUTO_BLOCK, AUTO_WINDOW = 32, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazySettings:
    """LazyLLM (arXiv 2407.14057): layers after a cut compute the prompt's important tokens only.

    After each cut, the tokens that the last one attends to most go on to the next layers, with
    their own positions. Unlike every method of decoding, this changes what the model says.

    Attributes:
      keep: the share of the prompt's tokens that goes on after a layer, counted from 1, such as
        {10: 0.7, 20: 0.49, 29: 0.343}; of n tokens, ceil(share * n), the last one always among
        them. After layer 0 means before the model. What a prefix has read stays in all layers:
        shares are of the tokens after it. "paper" cuts three times, after 30, 60 and 90% of the
        layers, to 70% of the tokens that are left. "auto" cuts once, where the model has looked up
        what the prompt's end asks for, to a sixteenth of the tokens, but to 512 if these are more
        (`at_least`). Which layer that is, a few prompts say that the model reads once, for seconds.
      speedup: with keep="auto", how many times fewer operations the prompt is to take: it then cuts
        as late as 2% of the tokens still meet it, but not before that layer, and keeps the largest
        share that meets it there.
      revive: what becomes of the others. "in_batches": with each choice, all cuts are made anew by
        the attention of the newest token, and of the tokens that are missing then, the
        `revive_rows` that it attends to most are computed from where they were left. New tokens see
        all that there is. "on_demand", the paper's rule: with each choice all cuts are made anew,
        all that is missing is computed, and new tokens see the chosen ones alone. "never": the
        first choice stays. "background": with each choice, `revive_rows` of the missing ones are
        computed in every layer that lacks some, from the front on, until the cache is complete; new
        tokens see all that there is. No token is computed twice in a layer.
      choose_every: from the first new token on, new tokens from one choice to the next; None is
        8 "in_batches" and else 1, the paper's. What a token sees depends on its place alone, so
        all methods return the same tokens; a step that finds several of them ends where the next
        choice is due.
      revive_rows: tokens that are computed at once; "in_batches" and in the "background" not more
        come back with a choice.
      scores: "attention", or "random" (by `seed`), to compare with.
      window: how many of the prompt's last tokens attend; their weights are added up. They always
        go on. None is 8 with keep="auto", and else 1.
      pool: each token has the largest score of this many tokens around it; an odd number. Random
        scores are not pooled.
      block: tokens go on in blocks of so many, those with the largest sums of scores; of the last
        one that is chosen, as many as are left of the share. With 1 each token goes on by itself;
        None is 32 with keep="auto", and else 1.
      score_layers: layers before the cut whose scores are added up, as far as their stage has them.
      at_least: so many tokens go on in any case, or all of a prompt that has no more; None is 512
        with keep="auto", and else 0.
      sinks, recent: how many of the first and of the last tokens of the prompt always go on.
    """

    keep: Mapping[int, float] | Literal["paper", "auto"] = "auto"
    speedup: float | None = None
    revive: Literal["in_batches", "on_demand", "never", "background"] = "in_batches"
    choose_every: int | None = None
    revive_rows: int = 64
    scores: Literal["attention", "random"] = "attention"
    window: int | None = None
    pool: int = 1
    block: int | None = None
    score_layers: int = 1
    at_least: int | None = None
    sinks: int = 0
    recent: int = 0
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.keep, Mapping):
            object.__setattr__(self, "keep", tuple(self.keep.items()))
        if not isinstance(self.keep, str):
            object.__setattr__(self, "keep", _checked_cuts(self.keep))
        known = not isinstance(self.keep, str) or self.keep in PRESETS
        check(known, "keep", self.keep, KEEP_WANTED)
        if self.speedup is not None:
            check(self.keep == "auto", "speedup", self.speedup, "left out unless keep='auto'")
            enough = _is_number(self.speedup) and self.speedup >= 1
            check(enough, "speedup", self.speedup, "a number of at least 1")
        for name, known in (("revive", REVIVE), ("scores", SCORES)):
            check(getattr(self, name) in known, name, getattr(self, name), one_of(known))
        check_fields(self, may_be_0=("sinks", "recent", "seed"))
        for name, least in (("choose_every", 1), ("window", 1), ("block", 1), ("at_least", 0)):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, least)
        check(self.pool % 2 == 1, "pool", self.pool, "an odd number")
        if self.scores == "random":
            wanted = "'never' or 'background' beside scores='random', which no token asks for"
            asks = self.revive in ("in_batches", "on_demand")
            check(not asks, "revive", self.revive, wanted)

    @property
    def cuts(self) -> Cuts:
        """(after which layer, which share goes on), first to last; where `keep` names them."""
        assert not isinstance(self.keep, str), "resolved() names the cuts"
        return cast(Cuts, self.keep)

    @property
    def tokens_between_choices(self) -> int:
        """`choose_every`, or what it is where nothing is said."""
        return self.choose_every or CHOOSE_EVERY[self.revive]

    @property
    def least(self) -> int:
        """`at_least`, or what it is where nothing is said."""
        return self._said("at_least", AUTO_AT_LEAST, 0)

    @property
    def last_tokens(self) -> int:
        """`window`, or what it is where nothing is said."""
        return self._said("window", AUTO_WINDOW, 1)

    @property
    def block_tokens(self) -> int:
        """`block`, or what it is where nothing is said."""
        return self._said("block", AUTO_BLOCK, 1)

    @property
    def kept_anyway(self) -> dict[str, int]:
        """How many tokens of a prompt always go on, by the names of their settings."""
        return {"window": self.last_tokens, "sinks": self.sinks, "recent": self.recent}

    def _said(self, name: str, auto: int, otherwise: int) -> int:
        said = getattr(self, name)
        return said if said is not None else auto if self.keep == "auto" else otherwise

    def resolved(self, cfg: ModelConfig, prompt_tokens: int, looks_up: int | None = None) -> Self:
        """The same with its cuts named, for a model and the longest prompt it is to read.

        Args:
          looks_up: with keep="auto", the layer after which the model has looked up what it is
            asked for. `generate` measures it.
        """
        keep: Any = self.keep
        cuts = not isinstance(keep, str) or cfg.num_layers > 1
        check(cuts, "keep", keep, "the model has no two layers to cut between")
        if keep == "paper":
            keep = paper_cuts(cfg.num_layers)
        elif keep == "auto":
            wanted = f"a layer from 1 to {cfg.num_layers - 1}, as keep='auto' does not measure here"
            known = looks_up is not None and 1 <= looks_up < cfg.num_layers
            check(known, "looks_up", looks_up, wanted)
            keep = auto_cuts(cfg, prompt_tokens, cast(int, looks_up), self.speedup)
        rows, keep = min(self.revive_rows, prompt_tokens), dict(cast(Cuts, keep))
        return dataclasses.replace(
            self, keep=keep, speedup=None, revive_rows=rows,
            choose_every=self.tokens_between_choices, at_least=self.least,
            window=self.last_tokens, block=self.block_tokens,
        )  # fmt: skip


PRESETS = ("paper", "auto")
KEEP_WANTED = "'paper', 'auto', or shares by layer such as {10: 0.7, 20: 0.49, 29: 0.343}"
Cuts = tuple[tuple[int, float], ...]  # after which layer, and which share goes on


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_cuts(keep: Any) -> Cuts:
    is_pairs = isinstance(keep, tuple) and len(keep) > 0
    is_pairs = is_pairs and all(isinstance(pair, tuple) and len(pair) == 2 for pair in keep)
    check(is_pairs, "keep", keep, KEEP_WANTED)
    shown = dict(keep)

    def check_cut(condition: bool, wanted: str) -> None:
        check(condition, "keep", shown, wanted)

    for layer, share in keep:
        is_layer = isinstance(layer, int) and _is_number(layer) and layer >= 0
        check_cut(is_layer, f"{layer!r} is no layer: whole numbers from 0 on")
        is_share = _is_number(share) and 0 < share <= 1
        check_cut(is_share, f"the share {share!r} after layer {layer} is not in (0, 1]")
        is_some = round(share * 10**DECIMALS) > 0
        check_cut(is_some, f"shares have {DECIMALS} decimals, so {share!r} would be none")
    check(len(shown) == len(keep), "keep", keep, "each layer once")
    keep = tuple(sorted(keep))
    for (before, more), (layer, share) in zip(keep, keep[1:], strict=False):
        whole = f"shares are of the whole prompt, so {share} after layer {layer} cannot be more"
        check_cut(share <= more, f"{whole} than {more} after layer {before}")
    return tuple((layer, round(float(share), DECIMALS)) for layer, share in keep)


DECIMALS = 4  # of a share, so that counts are exact in whole numbers
LONGEST_PROMPT = (2**31 - 1) // 10**DECIMALS - 1  # of which they are still int32


def kept(share: float, tokens):
    """ceil(share * tokens), exactly; for an int or int32, at most LONGEST_PROMPT."""
    parts = round(share * 10**DECIMALS)
    return -(-tokens * parts // 10**DECIMALS)


def paper_cuts(num_layers: int) -> Cuts:
    """Three cuts after 30, 60 and 90% of the layers, each to 70% of what is left."""
    layers = [max(1, int(part * num_layers + 1e-9)) for part in PAPER_CUTS]
    cuts = {layer: round(PAPER_SHARE**i, DECIMALS) for i, layer in enumerate(layers, start=1)}
    return tuple(cuts.items())


def prompt_flops(cfg: ModelConfig, tokens: int, cuts: Cuts = ()) -> float:
    """Multiplications and additions of a prompt's layers: products with weights, and attention.

    A token that goes no further gets keys and values alone in the last layer before the first cut,
    and all do in the model's last one.
    """
    heads, kv_heads = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    of_keys, of_others = 2 * kv_heads * cfg.embed_dim, (2 * heads + 3 * cfg.mlp_dim) * cfg.embed_dim
    shares, first = dict(cuts), cuts[0][0] if cuts else 0
    total, here = 0.0, kept(shares.get(0, 1.0), tokens)
    for layer in range(1, cfg.num_layers + 1):
        after = kept(shares[layer], tokens) if layer in shares else here
        others = 0 if layer == cfg.num_layers else after if layer == first else here
        # A token attends to half of the others on average: scores, and values by their weights.
        total += 2.0 * here * of_keys + others * (2.0 * of_others + 2.0 * heads * here)
        here = after
    return total


def auto_cuts(cfg: ModelConfig, tokens: int, earliest: int, speedup: float | None) -> Cuts:
    """One cut, not before the `earliest` layer: there to AUTO_SHARE, or as late as the smallest
    share takes 1/speedup of the operations, with the largest share in hundredths that does."""
    if speedup is None:
        return ((earliest, AUTO_SHARE),)
    whole = prompt_flops(cfg, tokens)

    def gain(layer: int, hundredths: int) -> float:
        return whole / prompt_flops(cfg, tokens, ((layer, hundredths / 100),))

    least = round(100 * AUTO_LEAST_SHARE)
    for layer in range(cfg.num_layers - 1, earliest - 1, -1):
        if gain(layer, least) < speedup:
            continue
        # Hundredths, for few different ones, as each is another program.
        shares = range(100, least - 1, -1)
        most = next(hundredths for hundredths in shares if gain(layer, hundredths) >= speedup)
        return ((layer, most / 100),)
    raise BadValue(
        f"speedup={speedup!r} is not valid: keep='auto' reaches at most "
        f"{math.floor(gain(earliest, least) * 100) / 100} with {cfg.num_layers} layers and a "
        f"prompt of {tokens} tokens, as this model looks things up in its layer {earliest} and is "
        "not cut before; for more, name the cuts by keep, and look at what that loses"
    )
