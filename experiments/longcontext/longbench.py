# SPDX-License-Identifier: Apache-2.0
"""Accuracy and time of pruned prompts on LongBench's English and code sets.

    python -m experiments.longcontext.longbench --model MODEL --data FOLDER \\
        --config FOLDER --out OUT

The files are the user's: the first folder has LongBench's <set>.jsonl (with --e LongBench-E's
<set>_e.jsonl), the second one its dataset2prompt.json and dataset2maxlen.json. Prompts are read one
at a time, without a chat template, and answered greedily; a prompt that is too long loses its
middle. Whatever had to wait for a compilation is run again, so that no time includes one.

Scores are those of LongBench's own program, from 0 to 1. The table at the end is in the manner of
the LazyLLM paper (arXiv 2407.14057, Table 1): means of the sets of each kind, and how many times
sooner than with the full prefill the first token comes, and the whole answer.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tsjax
from benchmarks import report
from experiments.longcontext.asking import Reply, ask_compiled
from experiments.longcontext.rivals import rivals
from experiments.longcontext.verdict import interval

# --- metrics: (answer, reference) -> score, from 0 to 1 ---------------------------------------

ARTICLES = re.compile(r"\b(?:an?|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
NOT_CODE = ("`", "#", "//")  # a line with one of them is a comment, or ends a block of code


def token_f1(answer: str, reference: str) -> float:
    """Of words, each as often as it occurs, in lower case without punctuation and articles."""
    said, wanted = (Counter(_normal_words(text)) for text in (answer, reference))
    shared = (said & wanted).total()
    return 2 * shared / (said.total() + wanted.total()) if shared else 0.0


def _normal_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def rouge_l(answer: str, reference: str) -> float:
    """F measure of the words of longest common subsequences, as the package `rouge` counts.

    A subsequence is taken of each sentence of one with each sentence of the other. A word counts
    once, however often it occurs.
    """
    said, wanted = _sentences(answer), _sentences(reference)
    if not said or not wanted:
        return 0.0
    pairs = itertools.product(wanted, said)
    shared = {word for pair in pairs for word in longest_common_subsequence(*pair)}
    sizes = [len(set(itertools.chain(*sentences))) for sentences in (said, wanted)]
    return 2 * len(shared) / sum(sizes)


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; one of white space has an empty word there."""
    return [part.split() or [""] for part in text.split(".") if part]


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """One of the longest: the one that is left when the end of `second` is given up first."""
    lengths = [[0] * (len(second) + 1)]  # of all beginnings
    for word in first:
        above, row = lengths[-1], [0]
        for column, other in enumerate(second):
            same = word == other
            row.append(above[column] + 1 if same else max(above[column + 1], row[column]))
        lengths.append(row)
    i, j, found = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def class_accuracy(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the answer names, if the right one is among them.

    A class whose name is a part of the right one's is not counted.
    """
    named = [name for name in classes if name in answer]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def count_accuracy(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are right."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval_accuracy(answer: str, reference: str) -> float:
    """As count_accuracy, of the paragraph's number."""
    paragraph = re.search(r"Paragraph (\d+)", reference)
    if paragraph is None:
        raise ValueError(f"the answer {reference!r:.80} is not valid: 'Paragraph' and its number")
    return count_accuracy(answer, paragraph[1])


def edit_similarity(answer: str, reference: str) -> float:
    """Of the answer's first line of code, in whole percent."""
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in NOT_CODE))
    ratio = difflib.SequenceMatcher(None, next(code, ""), reference).ratio()
    return round(100 * ratio) / 100


# --- sets -------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """How a set is scored.

    Attributes:
      group: the kind of its tasks.
      metric: compares an answer with a reference; of several references, the best score counts.
      first_line: whether an answer ends with its first line, as it goes on with made-up examples.
      stops: whether the model is stopped there, too.
    """

    group: str
    metric: Callable[..., float]
    first_line: bool = False
    stops: bool = False


SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarization"
FEW_SHOT, SYNTHETIC, CODE = "few-shot", "synthetic", "code"
SETS = {
    "narrativeqa": Rules(SINGLE, token_f1),
    "qasper": Rules(SINGLE, token_f1),
    "multifieldqa_en": Rules(SINGLE, token_f1),
    "hotpotqa": Rules(MULTI, token_f1),
    "2wikimqa": Rules(MULTI, token_f1),
    "musique": Rules(MULTI, token_f1),
    "gov_report": Rules(SUMMARY, rouge_l),
    "qmsum": Rules(SUMMARY, rouge_l),
    "multi_news": Rules(SUMMARY, rouge_l),
    "trec": Rules(FEW_SHOT, class_accuracy, first_line=True),
    "triviaqa": Rules(FEW_SHOT, token_f1, first_line=True),
    "samsum": Rules(FEW_SHOT, rouge_l, first_line=True, stops=True),
    "passage_count": Rules(SYNTHETIC, count_accuracy),
    "passage_retrieval_en": Rules(SYNTHETIC, retrieval_accuracy),
    "lcc": Rules(CODE, edit_similarity),
    "repobench-p": Rules(CODE, edit_similarity),
}
NOT_IN_E = ("narrativeqa", "musique", "qmsum")
ANY_DEPTH = 32  # which the names of the methods do not depend on
METHODS = tuple(rivals(ANY_DEPTH))


def score(name: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Of an answer to a prompt of the set `name`."""
    rules = SETS[name]
    if rules.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    more = (classes,) if rules.metric is class_accuracy else ()
    return max(rules.metric(answer, reference, *more) for reference in references)


# --- the user's files -------------------------------------------------------------------------


class Sample(NamedTuple):
    prompt: str
    references: list[str]
    classes: list[str]


class Questions(NamedTuple):
    """A set as it is asked."""

    samples: list[Sample]
    new_tokens: int


def read_sets(
    data: Path, config: Path, names: Sequence[str], samples: int | None = None, ending: str = ""
) -> dict[str, Questions]:
    """The first `samples` of each set. Errors name the file and the line.

    Args:
      ending: of the names of the files, "_e" for LongBench-E.
    """
    for folder in (data, config):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not valid: no such folder")
    formats = _read_table(config / "dataset2prompt.json", names, str, "a text")
    lengths = _read_table(config / "dataset2maxlen.json", names, int, "a number of tokens")
    files = {name: data / f"{name}{ending}.jsonl" for name in names}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{data} is not valid: it has no {', '.join(missing)}")
    return {
        name: Questions(_read_set(path, name, formats[name], samples), lengths[name])
        for name, path in files.items()
    }


def _read_table(path: Path, names: Sequence[str], kind: type, wanted: str) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not valid: no such file")
    table = _parsed(path.read_bytes(), str(path))
    for name in names:
        value = table.get(name) if isinstance(table, dict) else None
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_kind or not value or (kind is int and value < 1):
            raise ValueError(f"{path} is not valid: {wanted} for {name!r} is missing")
    return table


def _parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error


def _read_set(path: Path, name: str, prompt_format: str, limit: int | None) -> list[Sample]:
    found = []
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(lines, limit):
            where = f"{path}, line {number}"
            fields = _parsed(line, where)
            try:
                found.append(_sample(name, fields, prompt_format))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"{path} is not valid: it is empty")
    return found


def _sample(name: str, fields: Any, prompt_format: str) -> Sample:
    """One line. It is scored with an empty answer, for the metric to say what it misses."""
    wanted = ["input", "context", "answers"]
    if SETS[name].metric is class_accuracy:
        wanted.append("all_classes")
    missing = [key for key in wanted if not isinstance(fields, dict) or key not in fields]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    for key in wanted[2:]:
        texts = fields[key]
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"{key}={texts!r:.80} is not valid: a list of texts, at least one")
    try:
        prompt = prompt_format.format_map(fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        reason = report.first_line(error)
        raise ValueError(f"the prompt of {name!r} cannot be filled in: {reason}") from error
    sample = Sample(prompt, fields["answers"], fields.get("all_classes") or [])
    score(name, "", sample.references, sample.classes)
    return sample


def without_middle(ids: Sequence[int], most: int) -> np.ndarray:
    """At most `most` ids, [P] int32: if they are more, half of them from each end."""
    row = np.asarray(ids, np.int32)
    if len(row) <= most:
        return row
    half = most // 2
    return np.concatenate([row[:half], row[-half:]])


# --- answers ----------------------------------------------------------------------------------


def settings_of(model: tsjax.Model, name: str, new_tokens: int) -> dict[str, Any]:
    """How a set is answered: greedily, and up to the end of the first line where that is asked."""
    settings: dict[str, Any] = {"max_new_tokens": new_tokens}
    if SETS[name].stops:
        newline = model.tokenizer.encode("\n", add_special_tokens=False)[-1:]
        known = [token for token in model.stop_ids if token < model.cfg.vocab_size]
        settings |= {"eos_token_id": (*known, *newline), "min_new_tokens": 1}
    return settings


def row_of(name: str, method: str, samples: Sequence[Sample], replies: list[Reply]) -> dict:
    """What the document says about a method on a set."""
    pairs = zip(replies, samples, strict=True)
    mean, half = interval(
        [score(name, reply.text, one.references, one.classes) for reply, one in pairs]
    )
    computed = [reply.computed for reply in replies]
    return {
        "set": name, "group": SETS[name].group, "method": method, "samples": len(replies),
        "score": mean, "interval": half,
        "first_token_seconds": float(np.mean([reply.first_token_seconds for reply in replies])),
        "seconds": float(np.mean([reply.seconds for reply in replies])),
        "read": float(np.mean([reply.read for reply in replies])),
        "computed": np.mean(computed, axis=0).tolist() if computed[0] else [],
    }  # fmt: skip


# --- the table --------------------------------------------------------------------------------


def by_group(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of the sets of each group, method by method, and ratios of mean seconds to "full"."""
    found = []
    for group in dict.fromkeys(rules.group for rules in SETS.values()):
        here = [row for row in rows if row["group"] == group]
        whole = [row for row in here if row["method"] == "full"]
        for method in dict.fromkeys(row["method"] for row in here):
            mine = [row for row in here if row["method"] == method]
            line = {
                "group": group,
                "method": method,
                "sets": [row["set"] for row in mine],
                "score": float(np.mean([row["score"] for row in mine])),
                "interval": float(np.linalg.norm([row["interval"] for row in mine])) / len(mine),
            }
            for key in ("first_token_seconds", "seconds"):
                line[key] = float(np.mean([row[key] for row in mine]))
                if whole:
                    full = float(np.mean([row[key] for row in whole]))
                    line[key.replace("seconds", "speedup")] = full / line[key]
            found.append(line)
    return found


def table(groups: Sequence[dict[str, Any]]) -> str:
    lines, last = [f"{'':34}{'score':>15}{'first token':>13}{'answer':>9}"], None
    for line in groups:
        if line["group"] != last:
            last = line["group"]
            lines.append(f"{last} ({', '.join(line['sets'])})")
        text = f"  {line['method']:32}{100 * line['score']:7.2f} +- {100 * line['interval']:4.1f}"
        if "speedup" in line:
            text += f"{line['first_token_speedup']:12.2f}x{line['speedup']:8.2f}x"
        lines.append(text)
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("experiments.longcontext.longbench", __doc__)
    parser.add_argument("--model", required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of the <set>.jsonl files")
    parser.add_argument(
        "--config", type=Path, required=True, help="folder of dataset2prompt.json and -2maxlen.json"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help="all by default")
    parser.add_argument("--e", action="store_true", help="LongBench-E, whose lengths are even")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--samples", type=_from(1), help="of each set; all of them by default")
    parser.add_argument("--prompt-tokens", type=_from(2), default=3500, help="at most this many")
    args = parser.parse_args(argv)
    names = args.sets or [name for name in SETS if not (args.e and name in NOT_IN_E)]
    try:
        sets = read_sets(args.data, args.config, names, args.samples, "_e" if args.e else "")
    except (OSError, ValueError) as error:
        parser.error(str(error))

    model = tsjax.load(args.model)
    longest = args.prompt_tokens + max(one.new_tokens for one in sets.values())
    if longest > model.cfg.max_positions:
        parser.error(
            f"--prompt-tokens={args.prompt_tokens} is not valid: with the answers these are "
            f"{longest} tokens, and the model has {model.cfg.max_positions} positions"
        )
    document: dict[str, Any] = {
        "model": model.cfg.to_dict(), "prompt_tokens": args.prompt_tokens, "rows": [],
    }  # fmt: skip
    chosen = {name: rivals(model.cfg.num_layers)[name] for name in args.methods}
    for name, (samples, new_tokens) in sets.items():
        ids = [model.tokenizer.encode(sample.prompt) for sample in samples]
        prompts = [without_middle(row, args.prompt_tokens) for row in ids]
        settings = settings_of(model, name, new_tokens)
        for method, rival in chosen.items():
            replies = [ask_compiled(model, rival, prompt, **settings) for prompt in prompts]
            row = row_of(name, method, samples, replies)
            document["rows"].append(row)
            document["groups"] = by_group(document["rows"])
            print(
                f"{name:22}{method:26}{100 * row['score']:6.2f} +- {100 * row['interval']:.1f}"
                f"{row['first_token_seconds']:9.3f} s to the first token",
                flush=True,
            )
            report.save({**report.facts(), **document}, args.out, "longbench")
    print(table(document["groups"]))
    report.write(document, args.out, "longbench")


def _from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: a number from {least} on")
        return int(text)

    return number


if __name__ == "__main__":
    main(sys.argv[1:])
