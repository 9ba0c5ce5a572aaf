# SPDX-License-Identifier: Apache-2.0
"""experiments/longcontext: its prompts, what an answer scores, and what settings meet a target.

That its tables are made from the results, test_readme.py says; longbench.py has tests of its own.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import tiny_model

from experiments.longcontext import rivals, tasks, verdict
from experiments.longcontext.asking import divergence
from experiments.longcontext.rivals import Asked, operations, rival_of, solved
from experiments.longcontext.tasks import HALVES, TASKS, Sources, examples_of

LENGTH = 6000  # a token is a byte here


class Bytes:
    """A tokenizer of bytes, with a template for chats."""

    name_or_path, chat_template = "bytes", "yes"

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def apply_chat_template(self, chat, tokenize, **how):
        return "".join(f"<{one['role']}>{one['content']}" for one in chat) + "<assistant>"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    books, modules = (tmp_path_factory.mktemp(name) for name in ("books", "modules"))
    for number in range(2):
        prose = (f"In town {number} it rained on day {i}. Nobody went out." for i in range(2000))
        (books / f"{number}.txt").write_text(" ".join(prose))
        lines = ["import collections", "SETTING = {}", ""]
        for i in range(300):
            lines += [
                f"def part{number}_{i}(val, other):", "    total = collections.Counter(val)",
                "    val = other", "    return total, val", "",
            ]  # fmt: skip
        (modules / f"{number}.py").write_text("\n".join(lines))
    model: Any = SimpleNamespace(tokenizer=Bytes())
    return {half: Sources(model, books, modules, half) for half in HALVES}


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_nearly_as_long_as_asked_and_says_what_is_right(task, sources):
    texts = []
    for half in HALVES:
        (one,) = examples_of(sources[half], task, LENGTH, range(3, 4), 1, half)
        (again,) = examples_of(sources[half], task, LENGTH, range(3, 4), 1, half)
        np.testing.assert_array_equal(one.prompt, again.prompt)
        assert 0.7 * LENGTH < len(one.prompt) <= LENGTH
        text = bytes(one.prompt.tolist()).decode()
        texts.append(text)
        right = " ".join(one.answers)
        assert one.by(right, one.answers) == 1 and one.by("nothing", one.answers) < 0.5
        if task in ("needle", "keys", "several", "chapter", "variables"):
            assert all(text.count(answer) == 1 for answer in one.answers if answer.isdigit())
            assert all(answer in text[: -len(text) // 50] for answer in one.answers)
        if task == "frequent":
            words = text.split()
            assert words.count(one.answers[0]) > LENGTH / 10 / 10
        if task == "next_line":
            assert text.endswith("\n") and "import collections" in text
        if task == "distant_edit":
            assert text.index("is to be called") < text.index("def part")
    assert texts[0] != texts[1]
    assert not ("town 0" in texts[0] and "town 0" in texts[1])  # each half has its own sources


def test_what_an_answer_scores():
    assert tasks.share_said("It is 12345, then 6.", ("12345", "6", "7")) == pytest.approx(2 / 3)
    assert tasks.share_said("123456", ("12345",)) == 0
    assert tasks.likeness("a  b\n c```more", ("a b c",)) == 1
    assert tasks.first_line("\nreturn x\nreturn y", ("return x",)) == 1


def test_divergence_is_that_of_the_likeliest_and_all_others():
    p = {token: np.log(share) for token, share in enumerate((0.6, 0.3))}
    q = {token: np.log(share) for token, share in ((1, 0.5), (0, 0.25))}
    wanted = 0.6 * np.log(0.6 / 0.25) + 0.3 * np.log(0.3 / 0.5) + 0.1 * np.log(0.1 / 0.25)
    assert divergence(p, q) == pytest.approx(wanted, rel=1e-6)
    assert divergence(p, p) == 0
    assert divergence(p, {1: np.log(0.5)}) > 0.1  # a token that is not told counts as the least


def test_settings_take_what_the_target_says_and_hardly_less():
    asked = Asked(tiny_model(num_layers=12), tiny_model(num_layers=6))
    for name, family in rivals.FAMILIES.items():
        if family.fixed:
            continue
        for shape, target in itertools.product(family.shapes(asked), (1.6, 3.0)):
            setting = solved(asked, name, shape, 900, target)
            if setting is None:
                least = shape.setting(name, target, 0.0)
                reached = operations(asked.model.cfg, rival_of(asked, least), 900)
                assert reached < target * 1.01
                continue
            reached = operations(asked.model.cfg, rival_of(asked, setting), 900)
            assert target <= reached < 1.25 * target or setting["cuts"][-1][1] == 0.02


def test_intervals_and_the_best_point():
    mean, half = verdict.interval([1.0, 0.0, 1.0, 1.0])
    assert mean == 0.75 and half == pytest.approx(1.96 * np.sqrt(0.1875 / 4))

    def row(family, score, first):
        return dict(
            task="a", length=9, family=family, target=None, scores=[score] * 2, first=[first] * 2,
            whole=[1.0] * 2, full_first=[2.0] * 2, full_whole=[2.0] * 2, agrees=[1, 1],
            divergence=[0.0] * 2,
        )  # fmt: skip

    def alone(task, score):
        return {key: some[:1] if isinstance(some, list) else some
                for key, some in (row("late", score, 1.0) | {"task": task}).items()}  # fmt: skip

    full = [alone(task, 1.0) | {"family": "full"} for task in "ab"]
    said = verdict.summary([alone("a", 1.0), alone("b", 0.0)], {"rows": full})
    assert said.loss == 0.5 and said.loss_interval == pytest.approx(1.96 * 0.5 / np.sqrt(2))
    rows = [row("full", 1.0, 2.0), row("late", 1.0, 1.25), row("early", 0.5, 0.5)]
    found = [one for one in verdict.points({"rows": rows}) if one.family != "full"]
    assert verdict.best_point(found, 1.5).family == "late"
    assert verdict.best_point(found, 3.0).family == "early"
    assert verdict.best_point(found, 9.0).family == "late"  # none is so fast: what loses nothing
