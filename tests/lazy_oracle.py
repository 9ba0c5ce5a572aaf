# SPDX-License-Identifier: Apache-2.0
"""LazyLLM in NumPy and float64, with sets and dictionaries: slow, and shares no code with tsjax.

One prompt, token by token as the paper tells it: the prompt's last token goes through the layers
with the others, sets are Python sets, and everything missing is revived at once. Tokens of a prefix
go through all layers first, and no cut is about them.
"""

from __future__ import annotations

import fractions
import math
from collections import Counter

import jax
import numpy as np
from helpers import oracle_norm, oracle_unembed, unpacked

import tsjax


class LazyOracle:
    """`sets`: per stage, the prompt tokens that the last step saw."""

    def __init__(self, model, prompt: list[int], lazy: tsjax.LazyPrefill, prefix: int = 0):
        self.model, self.cfg, self.lazy, self.n = model, model.cfg, lazy, len(prompt)
        self.prefix = set(range(prefix))
        self.weights = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params.model)
        cuts = [layer for layer, _ in lazy.keep]
        ends = [*cuts, self.cfg.num_layers]
        self.stages = [range(a, b) for a, b in zip([0, *cuts], ends, strict=True)]
        self.keys = [{} for _ in range(self.cfg.num_layers)]
        self.values = [{} for _ in range(self.cfg.num_layers)]
        self.aux = {}  # position -> (stages done, hidden)
        self.made = 0
        self.logits = self._prefill(prompt)

    def step(self, token: int) -> np.ndarray:
        """The logits after one more token."""
        position = self.n + self.made
        self.made += 1
        due = (self.made - 1) % self.lazy.tokens_between_choices == 0
        if due and self.lazy.revive == "background":
            self._revive_some()
        x, scores = self.weights.embed[[token]], {}
        for stage, layers in enumerate(self.stages):
            if stage and due and self.lazy.revive == "on_demand":
                kept = self._choose(stage, scores, last_counts=False)
                missing = sorted(i for i in kept if i not in self.keys[layers.start])
                self._run_stage(stage, missing, seen=kept)
                self.sets[stage] = kept
            if stage and due and self.lazy.revive == "in_batches":
                self._revive_asked_for(stage, scores)
            if stage and self.lazy.revive in ("background", "in_batches"):
                self.sets[stage] = {i for i in range(self.n) if i in self.keys[layers.start]}
            generated = set(range(self.n, position))
            x, scores = self._layers(layers, [position], x, self.sets[stage] | generated)
        self.logits = self._unembed(x[0])
        return self.logits

    def complete(self) -> None:
        """Whatever some layers lack of the prompt goes through them, in its order."""
        for stage, layers in enumerate(self.stages):
            missing = sorted(set(range(self.n)) - set(self.keys[layers.start]))
            self._run_stage(stage, missing, seen=set(range(self.n)))

    def _prefill(self, prompt) -> np.ndarray:
        n, everything = self.n, set(range(self.n))
        self.sets = [everything]
        self.aux = {i: (0, self.weights.embed[token]) for i, token in enumerate(prompt)}
        for stage in range(len(self.stages)):
            self._run_stage(stage, sorted(self.prefix), seen=self.prefix)
        scores = {}
        for stage in range(len(self.stages)):
            if stage:
                self.sets.append(self._choose(stage, scores, last_counts=True))
            new = sorted(self.sets[stage] - self.prefix)
            scores = self._run_stage(stage, new, seen=self.sets[stage])
        return self._unembed(self.aux[n - 1][1])

    def _run_stage(self, stage: int, positions: list[int], seen: set[int]):
        if not positions:
            return None
        assert all(self.aux[i][0] == stage for i in positions)
        x = np.stack([self.aux[i][1] for i in positions])
        x, scores = self._layers(self.stages[stage], positions, x, seen)
        self.aux.update((i, (stage + 1, row)) for i, row in zip(positions, x, strict=True))
        return scores

    def _revive_some(self):
        behind = [i for i in range(self.n) if self.aux[i][0] < len(self.stages)]
        first = behind[: self.lazy.revive_rows]
        for stage in range(1, len(self.stages)):
            have = set(self.keys[self.stages[stage].start])
            rows = [i for i in first if self.aux[i][0] == stage]
            self._run_stage(stage, rows, seen=have | set(rows))

    def _revive_asked_for(self, stage: int, scores):
        have = {i for i in range(self.n) if i in self.keys[self.stages[stage].start]}
        kept = self._choose(stage, scores, last_counts=False)
        value = self._compared_by(scores, sorted(self.sets[stage - 1] - self.prefix))
        missing = sorted(kept - have, key=lambda i: (-value[i], i))
        rows = sorted(missing[: self.lazy.revive_rows])
        self._run_stage(stage, rows, seen=have | set(rows))

    def _compared_by(self, scores, before: list[int]) -> dict[int, float]:
        lazy, value = self.lazy, {i: scores.get(i, 0.0) for i in before}
        if lazy.pool > 1:
            half = lazy.pool // 2
            near = range(-half, half + 1)
            value = {i: max(value.get(i + d, 0.0) for d in near) for i in before}
        if (lazy.block or 1) > 1:
            blocks = Counter()
            for i in before:
                blocks[i // (lazy.block or 1)] += value[i]
            value = {i: blocks[i // (lazy.block or 1)] for i in before}
        return value

    def _choose(self, stage: int, scores, *, last_counts: bool) -> set[int]:
        lazy, n, new = self.lazy, self.n, self.n - len(self.prefix)
        share = fractions.Fraction(str(dict(lazy.keep)[self.stages[stage].start]))
        count = max(math.ceil(share * new), min(lazy.at_least or 0, new))
        before = sorted(self.sets[stage - 1] - self.prefix)
        value = self._compared_by(scores, before)
        always = {i for i in before if i < lazy.sinks or i >= n - lazy.recent}
        if last_counts:
            always |= {i for i in before if i >= n - (lazy.window or 1)}
        order = sorted(before, key=lambda i: (i not in always, -value[i], i))
        return self.prefix | set(order[: max(count, len(always))])

    def _layers(self, layers: range, positions: list[int], x, seen: set[int]):
        """The rows' output, and the attention from the last ones to each position."""
        cfg, totals = self.cfg, Counter()
        for index in layers:
            layer, weights = self.weights.layers[index], []
            h = oracle_norm(x, layer.attn_norm, cfg.norm_eps)
            parts = unpacked(layer)
            q, k, v = (np.einsum("td,nhd->tnh", h, parts[name]) for name in "qkv")
            for row, i in enumerate(positions):
                assert i not in self.keys[index]
                self.keys[index][i] = self._rotate(k[row], i)
                self.values[index][i] = v[row]
            mixed = np.zeros((len(positions), cfg.embed_dim))
            for row, i in enumerate(positions):
                others = sorted(j for j in seen | {i} if j <= i and j in self.keys[index])
                query, share = self._rotate(q[row], i), np.zeros(len(others))
                for head in range(cfg.num_heads):
                    group = head // cfg.group_size
                    keys = np.stack([self.keys[index][j][group] for j in others])
                    values = np.stack([self.values[index][j][group] for j in others])
                    score = keys @ query[head] / math.sqrt(cfg.head_dim)
                    weight = np.exp(score - score.max())
                    weight /= weight.sum()
                    share += weight / cfg.num_heads
                    mixed[row] += weight @ values @ layer.o[:, head].T
                weights.append(dict(zip(others, share, strict=True)))
            x = x + mixed
            h = oracle_norm(x, layer.mlp_norm, cfg.norm_eps)
            gate, up = h @ parts["gate"].T, h @ parts["up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
            if index in layers[-self.lazy.score_layers :]:
                # Of the prompt's last tokens in a prefill; a new token comes alone.
                for row in weights[-(self.lazy.window or 1) :]:
                    totals.update(row)
        return x, totals

    def _rotate(self, x, position: int):  # [heads, H]
        H, turned = self.cfg.head_dim, np.empty_like(x)
        for pair in range(H // 2):
            angle = position * self.cfg.rope.theta ** (-2 * pair / H)
            a, b = x[..., pair], x[..., pair + H // 2]
            turned[..., pair] = a * np.cos(angle) - b * np.sin(angle)
            turned[..., pair + H // 2] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    def _unembed(self, hidden):
        normed = oracle_norm(hidden, self.weights.final_norm, self.cfg.norm_eps)
        return oracle_unembed(self.model, normed)
