# SPDX-License-Identifier: Apache-2.0
"""A method from outside of the package, one class, with all that the built-in ones get."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import pytest
from helpers import SIZES, tiny_model

import tsjax
from tsjax.methods import METHODS, resolve_method

# docs/own_method.md shows this class; the test at the end compares.
# --- the method ---


@dataclasses.dataclass(frozen=True)
class FromText(tsjax.methods.Method):
    """Drafts the next tokens of a text that the output may follow, such as a file to be edited."""

    text: tuple[int, ...] = (0,)
    length: int = 4  # tokens drafted in a step
    sources: ClassVar[tuple[str, ...]] = ("text",)

    def sizes(self, model):
        return tsjax.methods.Sizes(width=1 + self.length, depth=self.length)

    def init(self, model, batch, capacity, mesh):
        return jnp.zeros((batch,), jnp.int32)  # where each row is in the text

    def read(self, model, params, memory, state):
        return state.length - state.prompt_length

    def draft(self, model, params, state, noise):
        text, here = jnp.asarray(self.text, jnp.int32), state.memory
        places = here[:, None] + jnp.arange(self.length, dtype=jnp.int32)
        tokens = text[jnp.minimum(places, len(self.text) - 1)][:, None]
        left = jnp.clip(len(self.text) - here, 0, self.length)[:, None]
        tree = tsjax.methods.merge_paths(state.root, tokens, left, width=1 + self.length)
        return here, tree

    def learn(self, model, params, memory, state, verdict, acceptance):
        return memory + state.emitted


# --- end ---

MODEL = tiny_model()
SETTINGS = dict(max_new_tokens=48, do_sample=True, seed=3, **SIZES)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [1, 2, 3]]


@pytest.fixture(scope="module", autouse=True)
def registered():
    tsjax.methods.register_method("from_text", FromText)
    yield
    del METHODS["from_text"]


@pytest.fixture(scope="module")
def plain():
    return [row.tolist() for row in tsjax.generate(MODEL, PROMPTS, **SETTINGS).tokens]


@pytest.fixture(scope="module")
def method(plain):
    """Knows the first row's output but for every ninth token."""
    return FromText(text=tuple(0 if i % 9 == 8 else token for i, token in enumerate(plain[0])))


def test_a_batch_says_what_plain_decoding_says_in_fewer_steps(method, plain):
    result = tsjax.generate(MODEL, PROMPTS, method=method, **SETTINGS)
    assert [row.tolist() for row in result.tokens] == plain
    stats = result.stats
    assert stats.steps[0] < 20 and stats.steps[1] > 30
    assert stats.method == method and not stats.gave_up
    assert stats.accepted == stats.accepted_by_source["text"] > 30
    assert list(stats.accepted_by_source) == ["text"] and len(stats.accepted_lengths) == 5
    assert stats.accepted + sum(stats.steps) == stats.computed_tokens == 3 * 48


def test_a_run_is_saved_and_resumed_where_it_was(method, plain, tmp_path):
    """It reads what is known, so it goes on with the drafts of the place where it was."""
    path, begun = tmp_path / "run.json", {**SETTINGS, "max_new_tokens": 20}
    tsjax.generate(MODEL, PROMPTS, method=method, save_to=path, **begun)
    whole = tsjax.generate(MODEL, resume_from=path, max_new_tokens=48, **SIZES)
    assert [row.tolist() for row in whole.tokens] == plain
    assert whole.stats.method == method
    assert whole.stats.steps[0] <= 10 and whole.stats.computed_tokens == 3 * 28


@dataclasses.dataclass(frozen=True)
class GivesUp(FromText):
    """Goes on with plain decoding once it has drafted enough."""

    def next(self, measured):
        enough = measured.current is not None and measured.steps >= 8
        return tsjax.methods.Autoregressive() if enough else measured.current or self


def test_a_method_may_go_on_as_another(method, plain):
    """Counters of both add up, and of the sources of the first."""
    given = GivesUp(text=method.text)
    result = tsjax.generate(MODEL, PROMPTS, method=given, **SETTINGS)
    assert [row.tolist() for row in result.tokens] == plain
    assert result.stats.gave_up and result.stats.method == given
    assert result.stats.accepted + sum(result.stats.steps) == 3 * 48
    assert result.stats.accepted == result.stats.accepted_by_source["text"]


def test_names(method, tmp_path):
    assert resolve_method("from_text") == FromText()
    with pytest.raises(ValueError, match="name='ngram' is not valid: free"):
        tsjax.methods.register_method("ngram", FromText)
    with pytest.raises(ValueError, match="name='from text' is not valid: an identifier"):
        tsjax.methods.register_method("from text", FromText)
    with pytest.raises(ValueError, match="method=.*dataclass that extends tsjax.methods.Method"):
        tsjax.methods.register_method("mutable", dataclasses.make_dataclass("Mutable", ["x"]))
    given = GivesUp(text=method.text)  # it runs without a name, but is not saved
    with pytest.raises(ValueError, match="save_to.*GivesUp.*register_method"):
        tsjax.generate(MODEL, [1], method=given, save_to=tmp_path / "run.json", **SETTINGS)


@dataclasses.dataclass(frozen=True)
class Wider(FromText):
    def sizes(self, model):
        return super().sizes(model)._replace(width=9)


def test_wrong_sizes_are_told():
    with pytest.raises(ValueError, match=r"Wider.draft gave .*\(5, 5\).*\(9, 5\).*width=9"):
        tsjax.generate(MODEL, [1], method=Wider(), **SETTINGS)


def test_the_page_shows_this_class():
    root = Path(__file__).resolve().parent
    source = Path(__file__).read_text(encoding="utf-8")
    shown = source.partition("# --- the method ---")[2].partition("# --- end ---")[0].strip()
    assert shown.count("\n") < 36
    assert shown in (root.parent / "docs/own_method.md").read_text(encoding="utf-8")
