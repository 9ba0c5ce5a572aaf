# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/ as SVG.

python -m tools.figures            writes docs/images/{step,tree,partial_cache}.svg
python -m tools.figures --check    exits with 1 if that would change step.svg or tree.svg

The trees, masks and walks are those that tsjax computes for one small example. The partial cache is
that of the embedded model, layer 4, on a text of its own. (This one may differ a little between
machines, as floating-point sums do.) Knows how things look. Does not know how anything is decided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from tsjax.decoding.tree import NO_NODE, DraftTree, merge_paths
from tsjax.decoding.verification import accept
from tsjax.methods.partial_cache import init_draft_cache, refresh_draft_cache
from tsjax.model.cache import KVCache, init_cache
from tsjax.model.passes import run_rows

Place = tuple[float, float]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"

# --- the look ---------------------------------------------------------------------------------

STYLE = """\
<style>
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  .page { fill: #ffffff } .panel { fill: #f6f8fa } .ink { fill: #1f2328 } .faint { fill: #656d76 }
  .line { stroke: #afb8c1; fill: none } .path { stroke: #1a7f37; fill: none }
  .node { fill: #ffffff; stroke: #afb8c1 } .known { fill: #d8dee4; stroke: #afb8c1 }
  .heads { fill: #dafbe1; stroke: #1a7f37 } .ngrams { fill: #fff1b8; stroke: #9a6700 }
  .suffix { fill: #ddf4ff; stroke: #0969da } .own { fill: #ffe2cc; stroke: #bc4c00 }
  .own-ink { fill: #bc4c00 } .seen { fill: #57606a } .unseen { fill: #eaeef2 }
  .sinks { fill: #8250df } .chosen { fill: #2da44e } .newest { fill: #e16f24 }
  .all { fill: #8c959f }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .panel { fill: #161b22 } .ink { fill: #e6edf3 }
    .faint { fill: #9198a1 } .line { stroke: #484f58 } .path { stroke: #3fb950 }
    .node { fill: #0d1117; stroke: #6e7681 } .known { fill: #30363d; stroke: #6e7681 }
    .heads { fill: #12351d; stroke: #3fb950 } .ngrams { fill: #3b2c06; stroke: #d29922 }
    .suffix { fill: #0c2d4e; stroke: #58a6ff } .own { fill: #4a2410; stroke: #f0883e }
    .own-ink { fill: #f0883e } .seen { fill: #b1bac4 } .unseen { fill: #21262d }
    .sinks { fill: #a371f7 } .chosen { fill: #3fb950 } .newest { fill: #f0883e }
    .all { fill: #6e7681 }
  }
</style>"""


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-size="12">'
    )
    page = '<rect width="100%" height="100%" rx="8" class="page"/>'
    return "\n".join([head, STYLE, page, *parts, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 4) -> str:
    size = f'width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "ink", **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{more}>{escape(words)}</text>'


def centred(x: float, y: float, words: str, kind: str = "ink", **attributes: object) -> str:
    return text(x, y, words, kind, text_anchor="middle", **attributes)


def line(points: Sequence[Place], kind: str = "line", width: float = 1.2) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}" stroke-width="{width:g}"/>'


def arrow(x: float, y: float, size: float = 6, kind: str = "faint") -> str:
    """A head that points to the right and ends at (x, y)."""
    return f'<path d="M{x:g} {y:g}l{-size:g} {-size * 0.7:g}v{size * 1.4:g}z" class="{kind}"/>'


# --- the example of both trees -----------------------------------------------------------------

KNOWN = ("The", "old", "house")  # the last one is the root
DRAFTS = {  # paths from the root on, and who drafted them
    ("was", "very", "old"): "heads",
    ("was", "not"): "heads",
    ("stood", "on"): "heads",
    ("was", "very", "large"): "ngrams",
    ("was", "very", "large", "and"): "suffix",
}
# What plain decoding says after each path; of the others, anything that no draft has.
SAYS = {
    (): "was",
    ("was",): "very",
    ("was", "very"): "quiet",
    ("was", "very", "old"): "one",
    ("was", "very", "large"): "one",
    ("was", "very", "large", "and"): "dark",
    ("was", "not"): "a",
    ("stood",): "in",
    ("stood", "on"): "a",
}
WORDS = sorted({*KNOWN, *SAYS.values(), *(word for path in DRAFTS for word in path)})
PADDING = 2  # nodes that no draft fills


class Example:
    """The tree of DRAFTS as tsjax builds and walks it, as plain lists."""

    def __init__(self):
        count = len({path[:end] for path in DRAFTS for end in range(1, len(path) + 1)})
        longest = max(map(len, DRAFTS))
        paths = np.zeros((1, len(DRAFTS), longest), np.int32)
        for row, path in enumerate(DRAFTS):
            paths[0, row, : len(path)] = [WORDS.index(word) for word in path]
        tree: DraftTree = merge_paths(
            jnp.asarray([WORDS.index(KNOWN[-1])], jnp.int32),
            jnp.asarray(paths),
            jnp.asarray([[len(path) for path in DRAFTS]], jnp.int32),
            [0] * len(DRAFTS),
            width=1 + count + PADDING,
        )
        self.mask = np.asarray(tree.mask[0])
        self.parents = np.asarray(tree.parents[0]).tolist()
        self.depths = np.asarray(tree.depths[0]).tolist()
        self.size = 1 + count  # without padding
        self.words = [WORDS[token] for token in tree.tokens[0, : self.size].tolist()]
        nodes = [[node for node in path if node != NO_NODE] for path in tree.path[0].tolist()]
        behind = [tuple(self.words[node] for node in nodes[t][1:]) for t in range(self.size)]
        self.says = [SAYS[path] for path in behind]
        self.sources = ["known"] + [
            next(source for path, source in DRAFTS.items() if path[: len(mine)] == mine)
            for mine in behind[1:]
        ]
        target = [WORDS.index(word) for word in self.says] + [0] * PADDING
        accepted = accept(tree, jnp.asarray([target], jnp.int32))
        self.path = accepted.path[0, : int(accepted.count[0]) + 1].tolist()

    def places(self, left: float, top: float, across: float, down: float) -> list[Place]:
        """A place for each node: leaves side by side, parents above the middle of theirs."""
        x: dict[int, float] = {}
        leaves = 0

        def put(node: int) -> float:
            nonlocal leaves
            children = [child for child in range(self.size) if self.parents[child] == node]
            if not children:
                x[node] = left + across * leaves
                leaves += 1
            else:
                below = [put(child) for child in children]
                x[node] = (below[0] + below[-1]) / 2
            return x[node]

        put(0)
        return [(x[node], top + down * self.depths[node]) for node in range(self.size)]


def tree_nodes(
    example: Example, places: Sequence[Place], *, says: bool = False, accepted: bool = False
) -> Iterable[str]:
    for node in range(1, example.size):
        above = example.parents[node]
        chosen = accepted and node in example.path
        kind, width = ("path", 2.4) if chosen else ("line", 1.2)
        yield line([places[above], places[node]], kind, width)
    for node, (x, y) in enumerate(places):
        faded = ' opacity="0.35"' if accepted and node not in example.path else ""
        yield f"<g{faded}>"
        yield box(x - 20, y - 10, 40, 20, example.sources[node])
        yield centred(x, y + 4, example.words[node], font_size=11)
        yield "</g>"
        if says:
            yield box(x - 17, y + 11, 34, 14, "panel", 0)  # keeps lines off the word
            yield centred(x, y + 22, example.says[node], "own-ink", font_size=11)


# --- the figures ------------------------------------------------------------------------------


def step() -> str:
    """The five parts of a step, side by side."""
    example, wide, high, gap = Example(), 180, 312, 8
    titles = {
        "draft": "a tree of guesses, from the model's small cache, heads, n-grams, repetitions",
        "verify": "one pass of the model: what it says itself after each node",
        "accept": "the walk from the root, as long as guess and model agree",
        "commit": "the walk and the model's last word, in the text and in the cache",
        "learn": "what the next drafts are made from",
    }
    left = [gap + index * (wide + gap) for index in range(len(titles))]
    parts = []
    for x, (title, what) in zip(left, titles.items(), strict=True):
        parts.append(box(x, 12, wide, high, "panel", 8))
        parts.append(text(x + 12, 34, title, font_size=15, font_weight=600))
        for row, words in enumerate(wrapped(what, 28)):
            parts.append(text(x + 12, 53 + 15 * row, words, "faint", font_size=11))
        if title != "learn":
            parts.append(arrow(x + wide + gap - 1, 30, 9))
    for x, options in zip(left, ({}, {"says": True}, {"accepted": True}), strict=False):
        places = example.places(x + 25, 118, 43, 44)
        if options.get("accepted"):
            (px, py), last = places[example.path[-1]], example.says[example.path[-1]]
            parts.append(line([(px, py), (px + 66, py + 44)], "path", 2.4))
            parts.append(box(px + 46, py + 34, 40, 20, "own"))
            parts.append(centred(px + 66, py + 48, last, font_size=11))
        parts += tree_nodes(example, places, **options)
    parts += legend(left[0] + 112, 250, down=18)
    parts += commit_panel(example, left[3] + 12)
    parts += learn_panel(example, left[4] + 12)
    low = high + 12
    begin, end = left[0] + wide / 2, left[-1] + wide / 2
    parts.append(line([(end, low), (end, low + 20), (begin, low + 20), (begin, low)]))
    parts.append(f'<path d="M{begin:g} {low:g}l-4 7h8z" class="faint"/>')
    last = example.says[example.path[-1]]
    parts.append(
        centred((begin + end) / 2, low + 38, f'the next step begins with "{last}"', "faint")
    )
    return svg(left[-1] + wide + gap, low + 50, parts)


def legend(x: float, y: float, across: float = 0, down: float = 0) -> Iterable[str]:
    for kind, label in {"heads": "model", "ngrams": "n-grams", "suffix": "suffix"}.items():
        yield box(x, y, 12, 12, kind, 3)
        yield text(x + 17, y + 10, label, "faint", font_size=11)
        x, y = x + across, y + down


def wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def commit_panel(example: Example, x: float) -> Iterable[str]:
    emitted = [example.words[node] for node in example.path[1:]]
    last = example.says[example.path[-1]]
    yield text(x, 112, "the text", "faint", font_size=11)
    kinds = ["known"] * len(KNOWN) + [example.sources[node] for node in example.path[1:]] + ["own"]
    at, y = x, 118
    for word, kind in zip([*KNOWN, *emitted, last], kinds, strict=True):
        size = 12 + 6 * len(word)
        if at + size > x + 160:
            at, y = x, y + 26
        yield box(at, y, size, 20, kind)
        yield centred(at + size / 2, y + 14, word, font_size=11)
        at += size + 4
    yield text(x, 196, "the cache: a row for each", "faint", font_size=11)
    yield text(x, 210, "token but the last", "faint", font_size=11)
    for slot in range(10):
        filled = slot < len(KNOWN) - 1
        fresh = len(KNOWN) - 1 <= slot < len(KNOWN) + len(emitted)
        kind = "known" if filled else "heads" if fresh else "node"
        yield box(x + 15.8 * slot, 218, 13, 26, kind, 2)
    begin, count = x + 15.8 * (len(KNOWN) - 1), 1 + len(emitted)
    yield line([(begin, 250), (begin + 15.8 * count - 3, 250)], "path", 2.4)
    yield centred(begin + 7.9 * count, 266, "written now", font_size=11)


def learn_panel(example: Example, x: float) -> Iterable[str]:
    emitted = [example.words[node] for node in example.path] + [example.says[example.path[-1]]]
    yield text(x, 112, "n-grams, counted", "faint", font_size=11)
    yield box(x, 118, 156, 22, "ngrams")
    yield text(x + 8, 133, " ".join(emitted), font_size=11)
    yield text(x + 148, 133, "+1", text_anchor="end", font_size=11)
    yield text(x, 168, "the small cache", "faint", font_size=11)
    for slot in range(10):
        kind = "sinks" if slot < 2 else "chosen" if slot < 8 else "newest"
        yield box(x + 15.8 * slot, 174, 13, 26, kind, 2)
    yield text(x, 214, "first, important, newest", font_size=11)
    yield text(x, 242, "the last hidden state", "faint", font_size=11)
    yield box(x, 248, 156, 14, "heads")


def tree() -> str:
    """The draft tree, and which rows of the verification see which."""
    example, cell = Example(), 24
    size = len(example.mask)
    names = [*example.words, *["padding"] * (size - example.size)]
    places = example.places(50, 84, 66, 62)
    parts = [text(20, 32, "The draft tree", font_size=15, font_weight=600)]
    parts += tree_nodes(example, places)
    parts += [
        text(x + 24, y - 4, str(node), "faint", font_size=10) for node, (x, y) in enumerate(places)
    ]
    parts.append(
        centred(places[0][0], places[0][1] - 17, "the root: the last known token", "faint")
    )
    parts += legend(22, 372, across=72)
    left, top = 440, 84
    parts.append(text(left - 72, 32, "Its mask", font_size=15, font_weight=600))
    parts.append(text(left - 72, 50, "a row sees the cache, its ancestors and itself", "faint"))
    cache = 92
    parts.append(box(left, top, cache, cell * size - 2, "seen", 3))
    parts.append(centred(left + cache / 2, top - 10, "the cache", "faint", font_size=11))
    begin = left + cache + 10
    for row, name in enumerate(names):
        y = top + cell * row
        parts.append(text(left - 10, y + 15, f"{name}  {row}", text_anchor="end", font_size=11))
        parts.append(centred(begin + cell * row + 11, top - 10, str(row), "faint", font_size=11))
        for column in range(size):
            kind = "seen" if example.mask[row, column] else "unseen"
            parts.append(box(begin + cell * column, y, cell - 2, cell - 2, kind, 3))
    return svg(begin + cell * size + 20, 404, parts)


BUDGET, SINKS, PROMPT, STEP, TOKENS, LAYER = 40, 4, 24, 2, 128, 3


def partial_cache() -> str:
    """Which tokens the partial cache holds, step by step."""
    rows = held_by_step()
    cell, left, top = 5, 56, 64
    classes: dict[str, list[str]] = {"all": [], "sinks": [], "chosen": [], "newest": []}
    for row, (length, held) in enumerate(rows):
        y = top + cell * row
        for kind, positions in held.items():
            for first, last in runs(positions):
                width = cell * (last - first + 1)
                classes[kind].append(f"M{left + cell * first} {y}h{width}v{cell - 1}h-{width}z")
        edge = left + cell * length
        classes.setdefault("edge", []).append(f"M{edge} {y}v{cell}")
    high = cell * len(rows)
    parts = [
        text(16, 30, "The partial cache over time", font_size=15, font_weight=600),
        text(
            left + cell * TOKENS,
            30,
            f"{BUDGET} slots, {SINKS} of them for the first tokens; {STEP} tokens per step",
            "faint",
            text_anchor="end",
        ),
        centred(left + cell * TOKENS / 2, top - 8, "position in the text →", "faint", font_size=11),
        f'<text transform="translate(44 {top + high / 2:g}) rotate(-90)" class="faint" '
        'text-anchor="middle" font-size="11">← steps</text>',
        f'<path d="{"".join(classes.pop("edge"))}" class="line" stroke-width="1"/>',
        *(f'<path d="{"".join(paths)}" class="{kind}"/>' for kind, paths in classes.items()),
    ]
    labels = {
        "all": "all tokens, while they fit",
        "sinks": "the first tokens",
        "chosen": "chosen by importance",
        "newest": "new, in place of the least so",
    }
    x = left
    for kind, label in labels.items():
        parts += [box(x, top + high + 16, 12, 12, kind, 2)]
        parts += [text(x + 17, top + high + 26, label, font_size=11)]
        x += 31 + 5.9 * len(label)
    return svg(left + cell * TOKENS + 24, top + high + 44, parts)


def held_by_step() -> list[tuple[int, dict[str, list[int]]]]:
    """For each step the length of the text, and the positions that the partial cache holds.

    Keys and queries are the model's own. A value is its token's position, to be read back.
    """
    model = tsjax.load(tsjax.EMBEDDED, dtype="float32")
    cfg, prompt = model.cfg, "Once upon a time"
    settings: dict[str, Any] = dict(
        min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=True, min_p=0.1
    )
    result = tsjax.generate(model, prompt, **settings)
    tokens = jnp.asarray(result.tokens[0][None, :TOKENS])
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    weights, nothing = model.params.model, init_cache(cfg, 1, TOKENS)
    rows = run_rows(weights, nothing, tokens, positions[None], causal, cfg=cfg)

    def whole(length: int) -> KVCache:
        keys = tuple(jnp.swapaxes(k, 1, 2) for k in rows.k)
        values = tuple(jnp.broadcast_to(positions[:, None], k.shape).astype(k.dtype) for k in keys)
        return KVCache(k=keys, v=values, length=jnp.full((1,), length, jnp.int32))

    refresh = jax.jit(refresh_draft_cache, static_argnames=("num_sinks", "max_rows"))
    draft, found = init_draft_cache(cfg, 1, BUDGET), []
    for length in range(PROMPT, TOKENS + 1, STEP):
        draft = draft.replace(query=tuple(query[:, length - 1] for query in rows.query))
        draft = refresh(draft, whole(length), num_sinks=SINKS, max_rows=STEP)
        held = draft.v[LAYER][0, 0, : int(draft.length[0]), 0].astype(int).tolist()
        newest = int(draft.newest[0])
        if length <= BUDGET:
            found.append((length, {"all": held}))
            continue
        parts = {"sinks": held[:SINKS], "chosen": held[SINKS:newest], "newest": held[newest:]}
        found.append((length, parts))
    return found


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of neighbours."""
    found: list[tuple[int, int]] = []
    for position in sorted(positions):
        if found and found[-1][1] == position - 1:
            found[-1] = found[-1][0], position
        else:
            found.append((position, position))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the figures of docs/ as SVG.")
    parser.add_argument("--check", action="store_true")
    figures = {"step": step, "tree": tree}  # the same on every machine
    if parser.parse_args().check:
        return int(any((FOLDER / f"{name}.svg").read_text() != f() for name, f in figures.items()))
    for name, draw in {**figures, "partial_cache": partial_cache}.items():
        (FOLDER / f"{name}.svg").write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
