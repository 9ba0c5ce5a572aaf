# SPDX-License-Identifier: Apache-2.0
"""What a step of each method is expected to find and to take, or that this is not known."""

import ast
import dataclasses
from pathlib import Path

import pytest
from helpers import MIXED_COSTS as MIXED
from helpers import tiny_config, tiny_model

import tsjax
from tsjax.methods import METHODS
from tsjax.methods.devices import GPUS, plain_bytes
from tsjax.methods.roofline import Span, expected

CONTEXT = 9000
SECOND = tiny_config(num_layers=1)
MODEL = tiny_config(num_draft_heads=3, head_kind="parallel")
GIVEN = {"draft_model": {"model": SECOND}, "triforce": {"model": SECOND}}
UNKNOWN = ("auto",)  # it drafts by the methods that it chooses


@pytest.mark.parametrize("name", METHODS)
def test_every_method_answers_for_itself(name):
    method = METHODS[name](**GIVEN.get(name, {}))
    promise = method.promise(MODEL, MIXED, CONTEXT)
    if name in UNKNOWN:
        assert promise is None
        return
    assert promise is not None
    sizes = method.sizes(MODEL)
    assert 1 <= promise.tokens <= sizes.depth + 1 and promise.width in sizes.pass_widths
    # Beside its drafts it takes the pass that judges them.
    judged = MIXED.of_pass(promise.width, CONTEXT) + MIXED.overhead
    assert (promise.seconds > judged) is (name != "autoregressive")
    assert promise.seconds >= judged
    assert promise.seconds_per_token == promise.seconds / promise.tokens


def test_magicdec_is_priced_by_its_passes():
    method = tsjax.methods.MagicDec(draft_passes=3, draft_budget=64)
    promise = method.promise(MODEL, MIXED, CONTEXT)
    one = 10 + 0.5 * 64
    assert promise.seconds == pytest.approx(3 * one + MIXED.of_pass(4, CONTEXT) + 4)
    assert promise.tokens == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    # Chosen again after 8 tokens, of which a step finds some.
    again = dataclasses.replace(method, draft_refresh=8).promise(MODEL, MIXED, CONTEXT)
    choice = (2 + 0.25 * CONTEXT) * promise.tokens / 8
    assert again.seconds - promise.seconds == pytest.approx(choice)


def test_a_second_model_is_priced_by_what_it_reads():
    assert tsjax.DraftModel().promise(MODEL, MIXED, CONTEXT) is None
    method = tsjax.DraftModel(length=4, model=SECOND)
    promise = method.promise(MODEL, MIXED, CONTEXT)
    share = plain_bytes(SECOND, CONTEXT) / plain_bytes(MODEL, CONTEXT)
    assert 0.4 < share < 0.6
    judged = MIXED.of_pass(5, CONTEXT) + MIXED.overhead
    assert promise.seconds == pytest.approx(4 * share * MIXED.of_pass(1, CONTEXT) + judged)
    own = dataclasses.replace(method, draft_choice="streaming", draft_budget=64)
    assert own.promise(MODEL, MIXED, CONTEXT).seconds < promise.seconds


def test_triforce_is_priced_by_both_levels():
    method = tsjax.methods.TriForce(length=6, draft_budget=64)
    promise = method.promise(MODEL, MIXED, CONTEXT)
    passes = 6 / 1.2  # one token each, and what the text offers
    one = 10 + 0.5 * 64 + 2 + 0.125 + 0.001 * CONTEXT  # of two rows
    judged = MIXED.of_pass(7, CONTEXT) + MIXED.overhead
    assert promise.seconds == pytest.approx(passes * one + judged)
    both = dataclasses.replace(method, model=SECOND).promise(MODEL, MIXED, CONTEXT)
    assert both.passes == pytest.approx(6 / 1.65) and both.tokens == promise.tokens


def test_no_other_file_asks_for_a_method_s_type():
    """What a method is, only its own file knows: a new one then needs no branch elsewhere."""
    classes, asked = {method.__name__ for method in METHODS.values()}, []
    for path in sorted(Path(tsjax.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass"):
                names = {getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(call.args[1])}
                asked += [(path.name, name) for name in names & classes - own]
    assert not asked


@dataclasses.dataclass(frozen=True)
class Own(tsjax.methods.Method):
    """A user's, which says nothing of what it finds."""


def test_what_is_not_known_is_said():
    """And not that of one pass that finds one token."""
    assert Own().promise(MODEL, MIXED, CONTEXT) is None
    choice = tsjax.costs.choose_method(Own(), tiny_model(), 100)
    assert choice.method == Own() and choice.step_cost is None
    with pytest.raises(ValueError, match="what a step of Own finds is not known"):
        expected(Own(), MODEL, MIXED, GPUS["h100"], Span(100, 100))
