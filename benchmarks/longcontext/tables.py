# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences that a page shows of a document of evaluate.py, in Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.longcontext.rivals import FAMILIES
from benchmarks.longcontext.selection import chosen
from benchmarks.longcontext.verdict import GOAL, MOST_LOSS, USEFUL, Spread, points, summary, verdict

Document = dict[str, Any]
SHORT = [name for name, family in FAMILIES.items() if family.falls_short]


def head(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def task_name(task: str) -> str:
    return task.replace("_", " ")


def setting_name(family: str, target: float | None) -> str:
    return family if target is None else f"{family}, {target:g}x"


def tasks_of(document: Document) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in document["rows"] if row["scores"]))


def scores(document: Document) -> str:
    """Score, loss and times, a table for each length."""
    tasks, blocks = tasks_of(document), []
    found = points(document)
    for length in sorted({point.length for point in found}):
        lines = head(["method", "operations", *map(task_name, tasks)])
        for point in found:
            if point.length != length:
                continue
            rows = {row["task"]: row for row in point.rows}
            cells = [score_cell(rows.get(task), document) for task in tasks]
            saved = f"{point.rows[0]['operations']:.2f}x"
            name = setting_name(point.family, point.target)
            lines.append(f"| {name} | {saved} | {' | '.join(cells)} |")
        samples = max(len(row["scores"]) for point in found for row in point.rows
                      if point.length == length)  # fmt: skip
        blocks.append(
            "\n".join([f"Prompts of {length:,} tokens, {samples} of each task:", "", *lines])
        )
    notes = [
        "In each cell the score in percent, the points lost against the full prefill on the same "
        "prompts with their 95% interval, and how many times sooner than after it the first token "
        "comes and the whole answer is there (medians, prompt by prompt). A method's number is "
        "the target, how many times fewer operations, that its best setting was sought for. "
        "Where none of N prompts lost anything the interval is empty; at 95% confidence less than "
        "a share of 3/N lose something.",
        *empty_places(document),
        *left_out(document),
    ]
    return "\n\n".join([*blocks, " ".join(notes)])


def chosen_settings(document: Document) -> str:
    """What the development tasks chose, and their scores with it."""
    tasks = list(document["candidates"][0]["scores"])
    lines = head(["method", "cuts", *map(task_name, tasks)])
    for family in dict.fromkeys(row["family"] for row in document["candidates"]):
        for target in document["targets"]:
            if best := chosen(document, family, target):
                cuts = ", ".join(f"{layer}: {share:g}" for layer, share in best["cuts"])
                points = " | ".join(f"{100 * best['scores'][task]:.1f}" for task in tasks)
                lines.append(f"| {setting_name(family, target)} | {cuts} | {points} |")
    note = (
        f"The best mean of the tasks for development, {document['develop_samples']} prompts of "
        f"{document['develop_length']:,} tokens each, in percent. In longer prompts the same "
        "layers have the shares that meet the target there. Layer 0 means before the model; "
        "GemFilter's layer is where it chooses."
    )
    return "\n".join([*lines, "", note])


def score_cell(row: dict[str, Any] | None, document: Document) -> str:
    if row is None:
        return ""
    found = summary([row], document)
    if row["family"] == "full":
        return f"{100 * found.score:.1f} ± {100 * found.interval:.1f}"
    return (
        f"{100 * found.score:.1f}, {100 * found.loss:.1f} ± {100 * found.loss_interval:.1f}, "
        f"{found.first.median:.2f}x, {found.whole.median:.2f}x"
    )


def empty_places(document: Document) -> list[str]:
    """Families and targets that no setting met."""
    families = dict.fromkeys(row["family"] for row in document["rows"] if row["target"])
    there = {(row["family"], row["target"]) for row in document["rows"]}
    missing = [
        setting_name(family, target)
        for family in families
        for target in document["targets"]
        if (family, target) not in there
    ]
    short = {row["family"]: row["operations"] for row in document["rows"]
             if row["target"] is None and row["family"] in SHORT}  # fmt: skip
    found = [f"No setting met: {', '.join(missing)}."] if missing else []
    for family, reached in short.items():
        found.append(f"{family} meets no target; its smallest share takes {reached:.2f}x.")
    return found


def left_out(document: Document) -> list[str]:
    """The tasks that the model does not master even without pruning."""
    names = [
        f"{task_name(row['task'])} at {row['length']:,} ({100 * row['score']:.0f}%)"
        for row in document["dense"]
        if row["left_out"]
    ]
    if not names:
        return []
    least = f"{100 * document['least_dense']:.0f}%"
    return [f"Left out, as the full prefill scores less than {least}: {', '.join(names)}."]


def computed(document: Document) -> str:
    """What settings that revive had computed of the prompt by the end, and what answers took."""
    tasks = tasks_of(document)
    lines = head(["prompt", "method", *map(task_name, tasks)])
    for point in points(document):
        if point.rows[0]["revive"] in (None, "never"):
            continue
        rows = {row["task"]: row for row in point.rows}
        cells = [computed_cell(rows.get(task), document) for task in tasks]
        name = setting_name(point.family, point.target)
        lines.append(f"| {point.length:,} | {name} | {' | '.join(cells)} |")
    note = (
        "The share of the prompt that was computed by the end of the answer, the mean over layers "
        "(and in each stage), the points of it that were revived after the prefill, and how many "
        "times sooner than with a full prefill the whole answer is there. The same run."
    )
    return "\n".join([*lines, "", note])


def computed_cell(row: dict[str, Any] | None, document: Document) -> str:
    if row is None:
        return ""
    stages = ", ".join(f"{share:.0%}" for share in row["computed"])
    revived = 100 * (row["computed_share"] - row["let_through"])
    whole = summary([row], document).whole
    return f"{row['computed_share']:.0%} ({stages}), +{revived:.0f}, {shown(whole)}"


def shown(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def verdict_text(document: Document) -> str:
    """The verdict in sentences, one a line."""
    found, lines = verdict(document), []
    for goal in found["goal"]:
        who = "any method" if goal["family"] == "any" else goal["family"]
        size = "at most" if goal["loss_is_small"] else "more than"
        doubt = "" if goal["also_with_interval"] == goal["loss_is_small"] else (
            ", but for the interval"
        )  # fmt: skip
        lost = f"{100 * goal['loss']:.1f} ± {100 * goal['loss_interval']:.1f} points"
        lost += f" ({size} {MOST_LOSS:.0%} of the full prefill's score{doubt})"
        if goal["loss"] == goal["loss_interval"] == 0:
            lost = f"nothing in {goal['samples']} prompts"
        reached = "reached" if goal["reached"] else "not reached, and the best there is"
        lines.append(
            f"* {goal['length']:,} tokens, a first token {GOAL}x sooner by {who}: {reached} with "
            f"{setting_name(goal['best'], goal['target'])}, {goal['first']:.2f}x, losing {lost}; "
            f"whole answers {goal['whole']:.2f}x."
        )
    revived = found["revival"]
    lines.append(
        f"* Revival against none, where the better keeps {USEFUL:.0%} of the full prefill's score: "
        f"of {revived['compared']} comparisons, beyond the 95% interval of the difference prompt "
        f"by prompt, revival is better in {len(revived['better'])}{places(revived['better'])} and "
        f"worse in {len(revived['worse'])}{places(revived['worse'])}. By chance alone, one in "
        "twenty would be."
    )
    if slow := found["slowest"]:
        lines.append(
            f"* The whole answer that gains least, of lazy prefills: {slow['whole']:.2f}x, with "
            f"{setting_name(slow['family'], slow['target'])} on {task_name(slow['task'])} at "
            f"{slow['length']:,}."
        )
    return "\n".join(lines)


def places(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    texts = [
        f"{setting_name(one['family'], one['target'])} on {task_name(one['task'])} at "
        f"{one['length']:,}, {100 * one['gain']:+.1f} ± {100 * one['interval']:.1f}"
        + ("" if one["same_cuts"] else ", by other cuts")
        for one in found
    ]
    return f" ({'; '.join(texts)})"
