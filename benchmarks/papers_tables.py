# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's tables beside ours, and what a run survived, from committed JSON alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks import soak_troubles
from benchmarks.real_tables import MODELS
from benchmarks.report import ROOT
from benchmarks.table_parts import head, line, read, source, table
from tsjax.measure.roofline_table import roofline_of

PUBLISHED = ROOT / "benchmarks" / "published.json"
SIZES = {"Qwen2.5-1.5B": "qwen2.5-1.5b", "Qwen2.5-7B": "qwen2.5-7b", "Qwen2.5-14B": "qwen2.5-14b"}
LENGTHS = ("20K", "40K", "60K", "80K", "100K")
USUAL, PUBLISHED_RULE = "min-p", "published rule"  # a case, and the one method that is not lossless
Pairs = Sequence[Sequence[float]]  # alpha and speed-up at each mark


class Cases:
    """Our runs by their names.

    Attributes:
      marks: lengths of the new text, in the papers' order.
    """

    def __init__(self, document: dict[str, Any]):
        self._cases = {one["case"]: one for one in document["cases"]}
        self.marks = self._cases[USUAL]["marks"]

    def pairs(self, case: str, method: str) -> Pairs:
        """Alpha and speed-up until each mark."""
        row = self.row(case, method)
        positions = row["draft_positions"]
        rates = [(tokens - 1) / positions for tokens in row["tokens_per_step"]]
        return list(zip(rates, row["speedup"], strict=True))

    def row(self, case: str, method: str) -> dict[str, Any]:
        return self._cases[case]["methods"][method]

    def text(self, case: str, method: str | None = None) -> dict[str, float]:
        """Figures of the whole text: plain decoding's, or of a method that says another one."""
        if method is None:
            return self._cases[case]["text"][-1]
        return self.row(case, method)["text"][-1]


def tables() -> str:
    document, published = read("papers"), json.loads(PUBLISHED.read_text())
    ours = Cases(document)
    parts = (
        table_3, published_rule, table_4, table_5, table_6, table_7, table_8, table_12,
        figures_3_and_4,
    )  # fmt: skip
    return "\n\n".join([opening(document), *(part(ours, published) for part in parts)])


def section(title: str, lines: Sequence[str], note: str = "") -> str:
    return "\n".join([f"### {title}", "", *lines, *(("", note) if note else ())])


def opening(document: dict) -> str:
    equal = [
        row["same_tokens"]
        for case in document["cases"]
        for name, row in case["methods"].items()
        if name not in ("plain", PUBLISHED_RULE)
    ]
    heads, fifth = document["heads"], document["new_tokens"] // 5
    right, counted = (
        ", ".join(f"{share:.0%}" for share in heads[name]) for name in ("top1", "counts")
    )
    parted, model = len(equal) - sum(equal), MODELS[document["model"]["name"]]
    all_of = "All" if not parted else f"All but {parted} of the"
    return f"""Published figures are those of [arXiv 2502.18890](https://arxiv.org/abs/2502.18890):
one A100, models of 1.5B to 14B parameters, 20K to 100K new tokens. Ours are the same experiments on
a real model, {model} in {document["dtype"]}, on a CPU, at the lengths that it allows: 256 slots of
the draft cache for 4,096 there, {fifth:,} to {5 * fifth:,} new tokens for 20K to 100K; penalty
windows are the paper's. **Compare alpha, and the order of the settings. The speed of the paper's
settings is a GPU's**: a step has 30 to 100 rows, which a CPU computes one after the other.

From {source(document)}. Prompt, in the model's chat template: "{document["prompt"]}" The end of
the text is barred. Heads: three, trained for {heads["steps"]} steps of {heads["batch_size"]}
rows of {heads["sequence_length"]} tokens of stories that the model had written (`tsjax
train-heads`): three minutes of a CPU, a three-thousandth of the paper's tokens. They are right
for {right} of the tokens, where counts are for {counted}. So alpha here comes from the draft
pass and the n-grams; what well-trained heads would add is not in it.

* **alpha**: accepted drafts over drafted positions, as the paper defines it. **x**: seconds per
  token of plain decoding over the method's, both until that length, measured side by side in one
  run.
* {all_of} {len(equal)} runs of the methods here gave the tokens of plain decoding, except those
  of the published rule, which cannot.
* One prompt, one seed: the paper gives 0.02 to 0.11 of alpha as the spread over its five.
* Written as *published / here*.
""".rstrip()


def table_3(ours: Cases, published: dict) -> str:
    models, names = published["table_3"], {
        "TriForce*": "triforce, chosen again", "TokenSwift": "tokenswift"
    }  # fmt: skip
    lines = head("method", "new tokens", *(f"{one}: alpha, x" for one in models), "here")
    for name, method in names.items():
        here = ours.pairs(USUAL, method)
        for index in (0, 2, 4):
            cells = (_pair(found[name]["4096"][index]) for found in models.values())
            length = f"{published['generated'][index]} / {ours.marks[index]:,}"
            lines.append(line(name, length, *cells, _pair(here[index])))
    last = {name: ours.pairs(USUAL, name)[-1][1] for name in ("tokenswift", "triforce", "auto")}
    note = (
        "TriForce has no second model here: what followed the longest earlier match is offered at "
        f"the lowest level. `Auto` on the same text: {last['auto']:.2f}x, where the paper's "
        f"settings are at {last['tokenswift']:.2f}x and TriForce as published, its cache chosen "
        f"once, at {last['triforce']:.2f}x."
    )
    return section("Table 3: methods, after a prompt of 4,096 tokens there", lines, note)


def published_rule(ours: Cases, published: dict) -> str:
    name, case = "top-p", "rule, top-p"
    alphas = (
        published["table_12"][name][0],
        ours.pairs(case, "same drafts")[-1],
        ours.pairs(case, PUBLISHED_RULE)[-1],
        ours.pairs(name, "tokenswift")[0],
    )
    distinct = (ours.text(case), ours.text(case, PUBLISHED_RULE))
    lines = head(
        "truncation", "published", "same drafts, exact", "same drafts, published rule",
        "noise shared with the drafts (default here)", "Distinct-2, exact",
        "Distinct-2, published rule",
    )  # fmt: skip
    figures = [*(alpha for alpha, _ in alphas), *(one["distinct_2"] for one in distinct)]
    lines.append(line(name, *(f"{figure:.2f}" for figure in figures)))
    note = (
        f"Alpha over {ours.marks[0]:,} new tokens. The published program draws a token for each "
        "row of the tree at each depth and keeps the row that agrees the longest; a token that "
        "47 rows share has 47 tries. What it says is therefore not a sample of the model, and "
        "its alpha is not one of a lossless method (`benchmarks/published_rule.py` of that "
        "commit). Ours draws one token per position. Drafts that are ranked with the noise of "
        "their positions win some of it back, exactly."
    )
    return section("What the published acceptance owes to its rule", lines, note)


def table_4(ours: Cases, published: dict) -> str:
    del ours
    lines = head(
        "model", "alpha", "x", "plain decoding", "at least, by what it reads", "times the bound",
        "the scheme at that alpha, at most",
    )  # fmt: skip
    for name, preset in SIZES.items():
        alpha, gain, plain, _ = published["table_4"][name][-1]
        given = [f"tokenswift={alpha}"]
        found = roofline_of(preset, prompt=4096, new=102_400, device="a100", acceptance=given)
        ideal = next(one.ideal for one in found.methods if one.name == "tokenswift")
        bound = found.bound * 102_400 / 60
        figures = f"{alpha:.2f}", f"{gain:.2f}x", f"{plain:.0f} min", f"{bound:.1f} min"
        lines.append(line(name, *figures, f"{plain / bound:.0f}x", f"{ideal:.2f}x"))
    note = (
        "The last three columns are arithmetic (`tsjax roofline`), not runs: no checkpoint of "
        "these sizes was run here. The paper's plain decoding takes many times what reading "
        "weights and cache takes, and its x are held against that. Against decoding at the bound "
        "the scheme, which reads all weights twice per step, can give what the last column says."
    )
    return section("Table 4: Qwen2.5 of three sizes, 100K tokens after 4,096", lines, note)


def table_5(ours: Cases, published: dict) -> str:
    names = {
        "full": "the whole cache", "partial": "chosen once, after the prompt",
        "dynamic": "chosen again as the text grows",
    }  # fmt: skip
    found = {
        title: (published["table_5"][name], ours.pairs("caches and trees", name))
        for name, title in names.items()
    }
    note = "As there, a cache that is chosen once falls behind as the text grows."
    return section("Table 5: the draft cache, without n-grams", _by_length(ours, found), note)


def table_6(ours: Cases, published: dict) -> str:
    texts = {name: ours.text(USUAL if name == "min-p" else name) for name in published["table_6"]}
    note = (
        "Distinct-n falls with the length of a text, and ours are an eightieth as long: compare "
        "within a column."
    )
    title = "Table 6: the penalty, by kind of truncation (theta 1.2, window 1,024)"
    return section(title, _distinct("sampling", published["table_6"], texts), note)


def table_7(ours: Cases, published: dict) -> str:
    found = {
        f"[{name}]": (published["table_7"][name], ours.pairs("caches and trees", method))
        for name, method in {"3,3,3,3": "tree 3,3,3,3", "1,3,3,3": "dynamic"}.items()
    }
    return section("Table 7: the shape of the tree, without n-grams", _by_length(ours, found))


def table_8(ours: Cases, published: dict) -> str:
    cases = {"1.0": "min-p, no penalty", "1.2": USUAL}
    texts = {theta: ours.text(cases.get(theta, f"theta {theta}")) for theta in published["table_8"]}
    title = "Table 8: the strength of the penalty (window 1,024)"
    return section(title, _distinct("theta", published["table_8"], texts))


def table_12(ours: Cases, published: dict) -> str:
    found = {
        name: (there, ours.pairs(USUAL if name == "min-p" else name, "tokenswift"))
        for name, there in published["table_12"].items()
    }
    note = "The published alpha rises with the length, as its texts repeat themselves (Table 6)."
    return section("Table 12: kinds of truncation", _by_length(ours, found), note)


def figures_3_and_4(ours: Cases, published: dict) -> str:
    there = published["figure_3"]
    found = {
        "k = 20": (there["k=20"], ours.pairs(USUAL, "tokenswift")),
        "k = 0": (there["k=0"], ours.pairs("caches and trees", "dynamic")),
    }
    row = ours.row(USUAL, "tokenswift")
    steps = sum(row["accepted_lengths"])
    beta = row["accepted_by_source"].get("ngrams", 0) / (row["draft_positions"] * steps)
    note = (
        f"Of alpha with k = 20, n-grams have a part (beta) of {beta:.2f} here; the paper gives "
        f"{there['k=20, beta'][0]:.2f} to {there['k=20, beta'][-1]:.2f}. Figure 4 was published "
        "without numbers."
    )
    title = "Figures 3 and 4: tokens said before, as n-grams"
    return section(title, _by_length(ours, found), note)


def _by_length(ours: Cases, found: dict[str, tuple[Pairs | None, Pairs]]) -> list[str]:
    """A column for each length, a row for each name: alpha and x, published / here."""
    labels = [f"{there} / {mark:,}" for there, mark in zip(LENGTHS, ours.marks, strict=True)]
    lines = head("alpha, x", *labels)
    for name, (there, here) in found.items():
        cells = []
        for index in range(len(labels)):
            left = "" if there is None else _pair(there[index])
            right = _pair(here[index]) if index < len(here) else ""
            cells.append(f"{left} / {right}" if left and right else left or right)
        lines.append(line(name, *cells))
    return lines


def _distinct(title: str, there: dict[str, Sequence[float]], here: dict[str, dict]) -> list[str]:
    """How many of the n-grams of a text are different, published / here."""
    return table(
        here,
        (title, str),
        *(
            (
                f"Distinct-{n}",
                lambda name, n=n: f"{there[name][n - 1]:.2f} / {here[name][f'distinct_{n}']:.2f}",
            )
            for n in range(1, 5)
        ),
    )


def _pair(pair: Sequence[float]) -> str:
    alpha, gain = pair
    return f"{alpha:.2f}, {gain:.2f}x"


# --- what a run survived ----------------------------------------------------------------------


def killed_runs() -> str:
    document = read("soak")
    if document["troubles"]:
        raise ValueError(f"soak.json has troubles, and no place here: {document['troubles']}")
    parts = {part["part"]: part for part in document["parts"]}
    killed, full = parts["killed"], parts["full disk"]
    lives, plain = killed["lives"], document["tokens_of_plain_decoding"]
    shot = [life for life in lives if life.get("signal") == "SIGKILL"]
    within = sum(life["ended"] == soak_troubles.WITHIN for life in shot)
    early = sum(life["tokens_at_end"] == life["tokens_at_begin"] for life in shot)
    lost = max(life["tokens_at_end"] - life["tokens_saved"] for life in shot)
    asked = " and ".join(life["signal"] for life in lives if life["ended"] == soak_troubles.ASKED)
    made_by_last = lives[-1]["tokens_at_end"] - lives[-1]["tokens_at_begin"]
    *others, last = soak_troubles.growths(killed)
    later = [name for life in lives[1:] for name, _ in life["made"]]
    late, compiled_late = (
        [
            name
            for life in lives
            for name, at in life[key]
            if at >= life["tokens_at_begin"] + document["warm_up"]
        ]
        for key in ("after_warm_up", "made")
    )
    tokens, warm_up = f"{document['new_tokens']:,}", f"{document['warm_up']:,}"
    return f"""{tokens} new tokens of an earlier embedded model, of the same shape, after
{document["prompt"]!r}, {document["setting"]}, by Auto, saved every
{document["save_every"]} tokens, in {len(lives)} processes, each of which goes on with
the saved file; the last one makes {made_by_last:,} tokens. From {source(document)}.

* **Kills.** {len(shot)} processes ended by SIGKILL: {within} at a random moment within a chunk of
  steps, {len(shot) - within} at any moment; {early} had made no token yet. At most {lost:,} tokens
  were made again. {asked} ended two more, and all that they had made was saved.
* **Tokens.** They are those of plain decoding, all {tokens}, compared by their SHA-256 with that of
  `{plain["from"]}`.
* **Memory** (resident, all of it) is shown from {warm_up} tokens after a process has begun to its
  end. The last had {_mib(last.first)} after {last.since:,} tokens and {_mib(last.last)} after
  {last.until:,}, at most {_mib(last.most)} in between. Of the {len(others)} others that made so
  many tokens none grew by more than {max(one.share for one in others):.1%}.
* **Programs.** The first process compiled {len(lives[0]["made"])}, all others together
  {len(later)}{_named(later)}. None was compiled twice: kept ones were found
  {sum(life["found"] for life in lives):,} times. After the first {warm_up} tokens of a process
  {len(compiled_late) or "none"} were compiled{_named(compiled_late)}, and
  {len(late) - len(compiled_late)} small kept ones were read{_named(late)}.
* **Two runs at once.** A second run of the same file was refused while the first went on.
* **A full disk.** On a file system of {full["bytes"] // 1024} KiB a run of {full["new_tokens"]:,}
  tokens went on to its end, and said that the file lacks it. The file had the first
  {full["lives"][0]["tokens_saved"]:,}; with these, where there was room, the run went on to the
  same {full["new_tokens"]:,}.
""".rstrip()


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""
