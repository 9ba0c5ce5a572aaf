# SPDX-License-Identifier: Apache-2.0
"""Several answers to one prompt, texts read ahead, other weights, and results that keep."""

import json
import pickle

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import SIZES, TOKENS, compilations, looping_model, save_tokenizer, tiny_model

import tsjax
from tsjax.host import run, sizes

SAMPLED = dict(do_sample=True, seed=5, max_new_tokens=20)
MODEL = looping_model()
PROMPT = (np.arange(80) * 7 % 24).tolist()


def rows_of(result):
    return [row.tolist() for row in result.tokens]


@pytest.fixture
def passes(monkeypatch):
    """Counts the rows of each pass of a prefill."""
    rows, read = [], run._read

    def counted(model, request, state):
        for index, begun in enumerate(read(model, request, state)):
            if index:
                rows.append(len(request.rows))
            yield begun

    monkeypatch.setattr(run, "_read", counted)
    return rows


# --- several answers -----------------------------------------------------------------------------


def test_each_answer_is_that_of_a_repeated_prompt(passes):
    how = dict(num_return_sequences=4, method=AnyTree(), **SAMPLED, **SIZES)
    found = tsjax.generate(MODEL, PROMPT, **how)
    assert passes == [1] * 5  # the prompt once, in passes of 16
    repeated = tsjax.generate(MODEL, [PROMPT] * 4, **SAMPLED, **SIZES)
    assert rows_of(found) == rows_of(repeated)
    assert len({*map(tuple, rows_of(found))}) == 4
    alone = tsjax.generate(MODEL, PROMPT, **SAMPLED, **SIZES)
    assert rows_of(found)[:1] == rows_of(alone)


def test_answers_to_several_prompts_with_seeds_of_their_own(passes):
    prompts = [PROMPT, [3, 4, 5]]
    how = dict(SAMPLED, seed=(8, 9))
    found = tsjax.generate(MODEL, prompts, num_return_sequences=2, **how, **SIZES)
    assert set(passes) == {2}
    for index, prompt in enumerate(prompts):
        own = dict(SAMPLED, seed=how["seed"][index], num_return_sequences=2)
        alone = tsjax.generate(MODEL, prompt, **own, **SIZES)
        assert rows_of(found)[2 * index :][:2] == rows_of(alone)


def test_a_batch_of_answers_is_saved_and_resumed(tmp_path):
    path, how = tmp_path / "run.json", dict(SAMPLED, num_return_sequences=3, **SIZES)
    whole = tsjax.generate(MODEL, PROMPT, **how)
    tsjax.generate(MODEL, PROMPT, save_to=path, **{**how, "max_new_tokens": 7})
    found = tsjax.generate(MODEL, PROMPT, resume_from=path, max_new_tokens=20, **SIZES)
    assert rows_of(found) == rows_of(whole)
    assert not tsjax.check_run(MODEL, path).departures


def test_where_memory_is_short_each_row_is_read_by_itself(monkeypatch, passes):
    how = dict(SAMPLED, num_return_sequences=4, **SIZES)
    wanted = tsjax.generate(MODEL, PROMPT, **how)
    shared = sizes.memory_shortage

    def short(asked, model):
        return "too little" if asked.of_rows is not None else shared(asked, model)

    monkeypatch.setattr(sizes, "memory_shortage", short)
    passes.clear()
    found = tsjax.generate(MODEL, PROMPT, **how)
    assert set(passes) == {4} and rows_of(found) == rows_of(wanted)


def test_greedy_answers_would_be_all_the_same():
    with pytest.raises(ValueError, match="num_return_sequences=2 .*add do_sample"):
        tsjax.generate(MODEL, PROMPT, num_return_sequences=2)
    with pytest.raises(ValueError, match="num_return_sequences=0"):
        tsjax.generate(MODEL, PROMPT, num_return_sequences=0)
    with pytest.raises(TypeError, match="write num_return_sequences"):
        tsjax.generate(MODEL, PROMPT, n=2)


# --- texts that are read ahead -------------------------------------------------------------------


@pytest.mark.parametrize("known", [1, 57, 80])
def test_a_prefix_changes_no_token(known, passes):
    """Also one that goes on where another ended."""
    first = tsjax.read(MODEL, PROMPT[:known][:20], prefill_width=16)
    prefix = tsjax.read(MODEL, PROMPT[:known], prefix=first, prefill_width=16)
    passes.clear()
    how = dict(method=AnyTree(), **SAMPLED, **SIZES)
    found = tsjax.generate(MODEL, PROMPT, prefix=prefix, **how)
    assert len(passes) == -(-(79 - (known - 1)) // 16)
    assert found.stats.prefix_tokens == known - 1
    again = tsjax.generate(MODEL, PROMPT, prefix=prefix, **how)  # it is not used up
    assert rows_of(found) == rows_of(again) == rows_of(tsjax.generate(MODEL, PROMPT, **how))


def test_prompts_that_part_from_a_prefix_are_read_from_there(passes):
    prefix = tsjax.read(MODEL, PROMPT, prefill_width=16)
    prompts = [PROMPT[:40] + [1, 2, 3], PROMPT[:30] + [9] * 20]
    passes.clear()
    found = tsjax.generate(MODEL, prompts, prefix=prefix, **SAMPLED, **SIZES)
    assert found.stats.prefix_tokens == 30 and passes == [2, 2]
    assert rows_of(found) == rows_of(tsjax.generate(MODEL, prompts, **SAMPLED, **SIZES))
    other = tsjax.generate(MODEL, [5, 6, 7], prefix=prefix, **SAMPLED, **SIZES)
    assert other.stats.prefix_tokens == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_leaves_its_own_prefix(stopped, passes, tmp_path, monkeypatch):
    """Where a string has stopped it, the cache may know more tokens than the text: those count no
    more."""
    monkeypatch.setattr(run, "_next_chunk", lambda *_: 20)
    model = tiny_model(vocab_size=len(TOKENS), path=save_tokenizer(tmp_path))
    how = dict(max_new_tokens=15, eos_token_id=(), **SIZES)
    text = tsjax.generate(model, PROMPT, **how).text
    stop = (text[7:9],) if stopped else ()
    first = tsjax.generate(model, PROMPT, stop_strings=stop, keep_prefix=True, **how)
    assert (len(first.tokens[0]) < 15) == stopped and first.prefix.nbytes > 0
    assert first.prefix.tokens.tolist() == [*PROMPT, *first.tokens[0].tolist()]
    longer = [*first.prefix.tokens.tolist(), 4, 5, 6]
    passes.clear()
    found = tsjax.generate(model, longer, prefix=first.prefix, **how)
    assert passes == [1] and found.stats.prefix_tokens >= len(longer) - 4
    assert rows_of(found) == rows_of(tsjax.generate(model, longer, **how))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: tsjax.generate(MODEL, PROMPT, prefix="text"), "what tsjax.read returns"),
        (lambda p: tsjax.generate(looping_model(seed=1), PROMPT, prefix=p), "weights differ"),
        (lambda p: tsjax.generate(MODEL, [PROMPT] * 2, keep_prefix=True), "one row alone"),
        (lambda p: tsjax.generate(MODEL, PROMPT, keep_prefix=1), "keep_prefix=1"),
        (lambda p: tsjax.read(MODEL, [PROMPT] * 2), "one prompt"),
    ],
)
def test_what_is_no_prefix_is_refused(call, message):
    with pytest.raises(tsjax.TsjaxError, match=message):
        call(tsjax.read(MODEL, [1, 2, 3]))


# --- other weights -------------------------------------------------------------------------------


def test_other_weights_compile_nothing_anew_and_leave_nothing_behind():
    others = [looping_model(seed=seed) for seed in (3, 4)]
    how = dict(method=AnyTree(), **SAMPLED, **SIZES)
    wanted = [rows_of(tsjax.generate(other, PROMPT, **how)) for other in others]
    model, arrays = MODEL, []
    for step in range(19):
        arrays.append(len(jax.live_arrays()))
        params = others[step % 2].params
        if step % 5 == 4:  # as a trainer hands it over
            params = jax.tree.map(np.asarray, params)
        with compilations() as names:
            model = model.with_params(params)
            assert rows_of(tsjax.generate(model, PROMPT, **how)) == wanted[step % 2]
        # A trainer's arrays are placed by programs of their own, once.
        assert {*names} <= ({"jit(stage)"} if step == 4 else set())
    assert len(jax.live_arrays()) <= arrays[4]


def test_weights_that_do_not_fit_are_refused_or_cast_and_others_not_copied():
    with pytest.raises(ValueError, match=r"params.*is not valid"):
        MODEL.with_params(looping_model(mlp_dim=64).params)
    with pytest.raises(ValueError, match="the same tree"):
        MODEL.with_params(looping_model(num_draft_heads=1).params)
    with pytest.raises(ValueError, match="int32.*float32"):
        MODEL.with_params(jax.tree.map(lambda x: x.astype("int32"), MODEL.params))
    other = looping_model(seed=3).params
    halves = jax.tree.map(lambda x: x.astype("float16"), other)
    with pytest.warns(UserWarning, match=r"params.*: float16 is cast to float32"):
        cast = MODEL.with_params(halves).params
    same = MODEL.with_params(other).params
    leaves = map(jax.tree.leaves, (halves, cast, other, same))
    for half, one, array, kept in zip(*leaves, strict=True):
        assert one.dtype == "float32" and kept is array
        np.testing.assert_array_equal(one, half)


# --- results that keep ---------------------------------------------------------------------------


def test_a_result_says_how_it_was_made(tmp_path):
    how = dict(SAMPLED, num_return_sequences=2, logprobs=1, seed=(4, 5), **SIZES)
    result = tsjax.generate(MODEL, [[1, 2], [3]], method=AnyTree(), **how)
    result.save(tmp_path / "result.json")
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept == json.loads(json.dumps(result.to_dict()))
    assert kept["tokens"] == [row.tolist() for row in result.tokens]
    assert kept["prompt"] == [[1, 2], [3]] and kept["text"] is None
    assert kept["config"]["seed"] == [4, 5] and kept["config"]["do_sample"] is True
    assert kept["method"] == "AnyTree(paths=3, depth=4, pass_widths=(1, 6))"
    assert kept["model"]["dtype"] == "float32" and len(kept["model"]["fingerprint"]) == 16
    assert kept["versions"]["tsjax"] == tsjax.__version__
    assert [len(one["raw"]) for one in kept["logprobs"]] == [20] * 4
    # What it says is enough to make it again.
    config = tsjax.GenerationConfig(**kept["config"])
    assert rows_of(tsjax.generate(MODEL, kept["prompt"], config=config, **SIZES)) == kept["tokens"]


def test_a_pickled_result_says_the_same_and_leaves_its_model_behind(tmp_path):
    model = tiny_model(vocab_size=len(TOKENS), path=save_tokenizer(tmp_path))
    how = dict(SAMPLED, logprobs=2, method=tsjax.NGram.paper(suffix_length=4), **SIZES)
    result = tsjax.generate(model, "the hat", keep_prefix=True, **how)
    content = pickle.dumps(result)
    again = pickle.loads(content)
    assert again.to_dict() == result.to_dict() and again.text == result.text
    assert again.stats == result.stats and again.stats.method == how["method"]
    np.testing.assert_array_equal(again.tokens, result.tokens)
    jax.tree.map(np.testing.assert_array_equal, again.logprobs, result.logprobs)
    assert result.prefix is not None and again.prefix is None
    assert len(content) < 10_000 and pickle.dumps(again)
    bare = tsjax.generate(MODEL, PROMPT, **SAMPLED, **SIZES)
    for one in (bare, pickle.loads(pickle.dumps(bare))):
        with pytest.raises(ValueError, match="it has no tokenizer"):
            _ = one.text
