# SPDX-License-Identifier: Apache-2.0
"""Many prompts through one batch that stays full: each as alone; files that are resumed."""

import dataclasses
import fcntl
import functools
import io
import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import MIXED_COSTS, TOKENS, compilations, looping_model, save_tokenizer

import tsjax
from tsjax.__main__ import main
from tsjax.host import judge, many, prompt_files, run, sizes

VOCAB = len(TOKENS)
SAMPLED = dict(do_sample=True, temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.1)
SIZES = dict(prefill_width=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "m"
    tsjax.save(looping_model(vocab_size=VOCAB, embed_dim=VOCAB, stop_ids=(2,)), folder)
    return tsjax.load(save_tokenizer(folder))


def prompts_of(count, seed=0):
    """Of mixed lengths, and answers of mixed lengths."""
    rng = np.random.default_rng(seed)
    return [
        {
            "ids": rng.integers(3, VOCAB, rng.integers(1, 60)).tolist(),
            "seed": int(rng.integers(1000)), "max_new_tokens": int(rng.integers(1, 50)),
        }
        for _ in range(count)
    ]  # fmt: skip


def alone(model, prompt, **how):
    own = {name: prompt[name] for name in ("seed", "max_new_tokens") if name in prompt}
    return tsjax.generate(model, prompt["ids"], capacity=2048, **{**how, **own}, **SIZES)


def are_as_alone(answers, model, prompts, **how):
    for one in answers:
        assert one.tokens.tolist() == alone(model, prompts[one.index], **how).tokens[0].tolist()
    return len(answers)


# --- in memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["autoregressive", AnyTree()], ids=["plain", "any_tree"])
def test_each_answer_is_that_of_its_prompt_alone(method, model):
    prompts = prompts_of(20)
    how = dict(SAMPLED, method=method, logprobs=1)
    answers = list(tsjax.generate_many(model, iter(prompts), rows=3, **how, **SIZES))
    assert sorted(a.index for a in answers) == list(range(20))
    assert len({a.finish_reason for a in answers}) == 2  # "eos" and "length"
    for answer in answers:
        wanted = alone(model, prompts[answer.index], **dict(SAMPLED, logprobs=1))
        assert answer.tokens.tolist() == wanted.tokens[0].tolist()
        assert answer.text == wanted.text and answer.finish_reason == wanted.finish_reason[0]
        assert answer.prompt_tokens == len(prompts[answer.index]["ids"])
        np.testing.assert_allclose(answer.logprobs.raw, wanted.logprobs[0].raw, atol=1e-4)


def test_texts_and_stop_strings_and_loops(model):
    texts = ["the tea", "has", "the tea", "in an"] * 3
    how = dict(max_new_tokens=40, stop_strings=("e",), repetition_detection=(1, 4, 4))
    for answer in tsjax.generate_many(model, texts, rows=3, **how):
        wanted = tsjax.generate(model, texts[answer.index], **how)
        assert answer.text == wanted.text and answer.finish_reason == wanted.finish_reason[0]


@dataclasses.dataclass(frozen=True)
class KnowsLengths(AnyTree):
    """Remembers how long each row is."""

    def init(self, model, batch, capacity, mesh):
        return jnp.zeros((batch,), jnp.int32)

    def read(self, model, params, memory, state):
        return jnp.maximum(memory, state.length)

    def learn(self, model, params, memory, state, verdict, acceptance):
        return memory + state.emitted


def test_the_batch_stays_full_and_its_method_knows_who_is_in_it(model, monkeypatch):
    """No step is made with an empty row while prompts wait, nor with what was of another prompt."""
    wrong, read = [], many._Many.read

    def watched(self, state, interrupted):
        if state.stats.steps.any():
            wrong.append(self.waits and self.running < len(self.rows))
            wrong.append((np.asarray(state.memory) != state.length).any())
        return read(self, state, interrupted)

    monkeypatch.setattr(many._Many, "read", watched)
    how = dict(method=KnowsLengths(), rows=3, **SAMPLED, **SIZES)
    answers = list(tsjax.generate_many(model, prompts_of(20), **how))
    assert len(answers) == 20 and len(wrong) > 9 and not any(wrong)


@pytest.fixture
def reading(monkeypatch):
    """The requests of the prompts as they are read."""
    found, start_run = [], many.start_run
    monkeypatch.setattr(many, "start_run", lambda *all: found.append(all[1]) or start_run(*all))
    return found


def test_what_all_prompts_begin_with_is_read_once(model, reading):
    begin, how = [*range(3, 30)], dict(SAMPLED, max_new_tokens=9)
    prompts = [{"ids": [*begin, *prompt["ids"]]} for prompt in prompts_of(7)] + [{"ids": [5, 6]}]
    prefix = tsjax.read(model, begin, **SIZES)
    answers = [*tsjax.generate_many(model, prompts, rows=3, prefix=prefix, **how, **SIZES)]
    assert are_as_alone(answers, model, prompts, **how) == 8
    assert [request.prefix_length for request in reading] == [26] * 7 + [0]


@pytest.mark.parametrize("drafts_from", ["corpus", "draft_model"])
def test_what_others_draft_from_serves_later_prompts_too(drafts_from, model, monkeypatch):
    news, ended = [], many._Many._ended
    monkeypatch.setattr(many._Many, "_ended", lambda *all: news.append(all[1]) or ended(*all))
    prompts, how = prompts_of(12), dict(do_sample=True, temperature=0.9)
    texts = [alone(model, prompt, **how).tokens[0].tolist() for prompt in prompts]
    corpus = tsjax.Corpus([[*p["ids"], *text] for p, text in zip(prompts, texts, strict=True)])
    drafts = tsjax.LikelyTree(width=8, pass_widths=(), places=0, corpus=True, costs=MIXED_COSTS)
    by = {"corpus": dict(corpus=corpus, method=drafts), "draft_model": dict(draft_model=model)}
    for answer in tsjax.generate_many(model, prompts, rows=3, **by[drafts_from], **how, **SIZES):
        assert answer.tokens.tolist() == texts[answer.index]
    steps, right = news[-1].steps.steps, news[-1].steps.by_source[:, -1]
    made = sum(map(len, texts))
    assert made - sum(right) <= sum(steps) < made / 2 and min(right) > made / 9


def test_prompts_are_taken_as_they_are_needed(model):
    taken = []

    def endless():
        for index in range(10**9):
            taken.append(index)
            yield {"ids": [3, 4, 5], "max_new_tokens": 4}

    answers = tsjax.generate_many(model, endless(), rows=2)
    next(answers)
    assert len(taken) <= 4


def test_a_longer_prompt_makes_the_buffers_grow(model, reading):
    prompts = [{"ids": [3] * 5}, {"ids": [4] * 2000, "max_new_tokens": 100}, {"ids": [5] * 9}]
    how = dict(max_new_tokens=60, eos_token_id=())
    answers = [*tsjax.generate_many(model, prompts, rows=2, **how, **SIZES)]
    short = [answer for answer in answers if answer.index != 1]  # which `alone` has room for
    assert are_as_alone(short, model, prompts, **how) == 2
    assert [request.capacity for request in reading] == [2048, 4096, 4096]


def test_a_prompt_that_is_not_valid_is_an_answer_with_an_error(model):
    deep = functools.reduce(lambda inner, _: [inner], range(5000), [])
    prompts = ["the", [], {"ids": [VOCAB]}, {"ids": [1], "prompt": "a"}, {"ids": [1], "top_k": 3}]
    prompts += ["in", {"ids": [[1], [2]]}, {"ids": [1], "seed": -1}, {"ids": deep}, None]
    answers = {a.index: a for a in tsjax.generate_many(model, prompts, rows=2, max_new_tokens=3)}
    assert [i for i, a in answers.items() if a.error is None] == [0, 5]
    for index, wanted in ((1, "at least one"), (2, f"token id {VOCAB}"), (4, "top_k"), (7, "seed")):
        assert isinstance(answers[index].error, tsjax.TsjaxError)
        assert wanted in str(answers[index].error) and answers[index].finish_reason == "error"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(rows=0), "rows=0"),
        (dict(prompts="the tea"), "prompts='the tea'"),
        (dict(prompts={"ids": [1]}), "an iterable of prompts"),
        (dict(config=tsjax.GenerationConfig(do_sample=True, num_return_sequences=2)), "num_return"),
        (dict(seed=(1, 2)), "seed"),
        (dict(no_such=1), "no_such"),
        (dict(method="none"), "method"),
    ],
)
def test_what_all_prompts_share_is_checked_at_the_call(settings, message, model):
    with pytest.raises(tsjax.TsjaxError, match=message):
        tsjax.generate_many(model, **{"prompts": [], **settings})


@pytest.mark.parametrize(("place", "name"), [(run, "_next_chunk"), (many, "start_run")])
def test_ctrl_c_ends_it_and_what_was_yielded_is_whole(place, name, model, monkeypatch):
    """In a chunk of steps, or while a prompt is read: no step runs on a cache half filled."""
    real, calls, found = getattr(place, name), [], []

    def struck(*given):
        calls.append(1)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(place, name, struck)
    with pytest.raises(KeyboardInterrupt):
        for answer in tsjax.generate_many(model, prompts_of(30), rows=2, **SAMPLED, **SIZES):
            found.append(answer)
    assert 0 < are_as_alone(found, model, prompts_of(30), **SAMPLED) < 30


def test_who_makes_the_prompts_may_fail(model):
    """What runs then is answered first."""

    def failing():
        yield from ({"ids": [3, 4]}, {"ids": []}, {"ids": [5]})
        raise RuntimeError("no more")

    found = []
    with pytest.raises(RuntimeError, match="no more"):
        for answer in tsjax.generate_many(model, failing(), rows=4, max_new_tokens=30):
            found.append(answer)
    assert sorted(answer.index for answer in found) == [0, 1, 2]


def test_a_row_that_memory_has_no_room_for_is_an_error(model, monkeypatch):
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 100_000_000)
    prompts = [{"ids": [3]}, {"ids": [4] * 60_000}, {"ids": [5]}]
    how = dict(rows=40, max_new_tokens=4, exceed_max_positions=True)
    found = {a.index: a for a in tsjax.generate_many(model, prompts, **how)}
    assert [found[i].error is None for i in range(3)] == [True, False, True]
    assert isinstance(found[1].error, MemoryError) and "40 rows" in str(found[1].error)


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_only_some_rows_take_is_remembered_as_no_plain_one(model, monkeypatch, count):
    kept = []
    monkeypatch.setattr(judge, "STEPS_TO_KEEP", (16,))
    monkeypatch.setattr(judge, "keep_plain", lambda *what: kept.append(what))
    prompts = [{"ids": [3, 4, 5], "seed": n} for n in range(count)]
    list(tsjax.generate_many(model, prompts, rows=2, max_new_tokens=300, eos_token_id=()))
    assert len(kept) == (count == 2)


def test_programs_are_few(model):
    """Prompts of all lengths share them: a pass of each width, and one of each other kind."""
    jax.clear_caches()
    with compilations() as names:
        list(tsjax.generate_many(model, prompts_of(12, seed=3), rows=3, **SAMPLED, **SIZES))
    ours = [name for name in names if "convert" not in name and "broadcast" not in name]
    counts = {name: ours.count(name) for name in set(ours)}
    assert counts.get("jit(decode)", 0) == 1 and counts.get("jit(fill_row)", 0) == 1, counts


# --- files ---------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(path, count):
    lines = [json.dumps({**prompt, "id": f"p{i}"}) for i, prompt in enumerate(prompts_of(count))]
    path.write_text("\n".join(lines) + "\n")
    return lines


ARGV = ["--do-sample", "--temperature", "0.9", "--dtype", "float32", "--rows", "3"]


def test_a_file_of_prompts_becomes_a_file_of_answers(model, tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    lines = write_prompts(prompts, 12)
    plain = [*ARGV, "--method", "autoregressive"]
    argv = ["batch", model.path, str(prompts), "--out", str(out), *plain, "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == 12
    found = {entry["line"]: entry for entry in lines_of(out)}
    assert sorted(found) == list(range(1, 13))
    for number, line in enumerate(lines, 1):
        wanted = alone(model, json.loads(line), do_sample=True, temperature=0.9)
        assert found[number]["tokens"] == wanted.tokens[0].tolist()
        assert found[number]["text"] == wanted.text and found[number]["id"] == f"p{number - 1}"
    # Once more: all is there. Then a line is cut.
    before = out.read_bytes()
    assert main(argv) == 0 and out.read_bytes() == before
    assert "12 answered before, 0 tokens now" in capsys.readouterr().err
    # In the words of the last release, which are told once.
    old = ["generate", "--out", str(tmp_path / "old.jsonl"), model.path, "--prompts", str(prompts)]
    assert main([*old, *plain]) == 0
    assert {entry["line"]: entry for entry in lines_of(tmp_path / "old.jsonl")} == found
    assert capsys.readouterr().err.count("tsjax batch MODEL FILE --out FILE") == 1
    # A second model drafts, and a text is known before: the same answers.
    tsjax.read(model, "the").save(tmp_path / "the.prefix")
    more = ["--draft-model", model.path, "--prefix", str(tmp_path / "the.prefix")]
    other = ["batch", model.path, str(prompts), "--out", str(tmp_path / "o2")]
    assert main([*other, *ARGV, *more]) == 0
    assert {entry["line"]: entry for entry in lines_of(tmp_path / "o2")} == found
    out.write_bytes(before[: len(before) * 2 // 3])
    assert main(argv) == 0 and len(lines_of(out)) == 12
    for entry in lines_of(out):
        assert entry == found[entry["line"]]


def test_broken_lines_are_named_and_the_others_run(model, tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "the"}\n{"prompt": \n"in"\n\n{"top_k": 3}\n[1]\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    argv = ["batch", model.path, str(prompts), "--out", str(link), *ARGV]
    assert main([*argv, "--max-new-tokens", "4"]) == 1
    found = {entry["line"]: entry for entry in lines_of(out)}
    assert sorted(found) == [1, 2, 3, 5, 6]  # blank lines are none
    assert sorted(n for n, entry in found.items() if "error" in entry) == [2, 5, 6]
    assert "no JSON" in found[2]["error"] and "top_k" in found[5]["error"]
    assert "these lines could not be answered: 2, 5, 6" in capsys.readouterr().err
    # Mended, they are answered; what was answered stays.
    prompts.write_text('{"prompt": "the"}\n{"prompt": "in"}\n"in"\n\n{"ids": [3]}\n"a"\n')
    assert main([*argv, "--max-new-tokens", "4"]) == 0
    mended = lines_of(out)
    assert sorted(entry["line"] for entry in mended) == [1, 2, 3, 5, 6]
    assert not any("error" in entry for entry in mended)
    assert link.is_symlink()
    assert all(entry in mended for entry in (found[1], found[3]))
    assert "2 answered before" in capsys.readouterr().err


def test_answers_to_something_else_are_not_mixed_up(model, tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    write_prompts(prompts, 2)
    argv = ["batch", model.path, str(prompts), "--out", str(out), *ARGV]

    def refused(message, *more):
        before = out.read_bytes()
        assert main([*argv, *more]) == 2
        assert message in capsys.readouterr().err and out.read_bytes() == before

    with open(out, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused("another run")
    assert main(argv) == 0
    refused("by another model or other settings", "--top-k", "3")
    prompts.write_text('{"ids": [3]}\n{"ids": [4]}\n')
    refused("answers to other prompts")
    for content in ("a file of somebody's\n", '{"prompt": "all of it in a line"}'):
        out.write_text(content)
        refused("none that tsjax wrote")


def test_what_a_full_disk_takes_in_part_is_taken_back(tmp_path):
    class Full(io.FileIO):
        def write(self, content):
            return super().write(content[: len(content) // 2])

    path = tmp_path / "o.jsonl"
    path.write_bytes(b"before\n")
    with Full(path, "a") as file, pytest.raises(OSError, match="No space"):
        prompt_files._append(file, b"a whole line\n")
    assert path.read_bytes() == b"before\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["M", "P"], "required: --out"),
        (["M", "none.jsonl", "--out", "O"], "prompts='none.jsonl' is not valid: no such file"),
        (["none/m", "P", "--out", "no/such/o.jsonl"], "does not exist"),
        (["./none", "P", "--out", "O"], "'./none'"),
        (["./none", "P", "--out", "O", "--rows", "0"], "--rows=0 is not valid"),
        (["M", "P", "--out", "P"], "another file than the prompts"),
        (["M", "P", "--out", "O", "--save-to", "s"], "unrecognized arguments: --save-to s"),
        (["M", "P", "--out", "O", "--best-of", "2"], "unknown argument --best-of"),
    ],
)
def test_wrong_flags_are_told(more, message, model, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('"the"\n')
    named = {"M": model.path, "P": str(tmp_path / "p.jsonl"), "O": str(tmp_path / "o.jsonl")}
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(["batch", *(named.get(word, word) for word in more)]))
    assert message in capsys.readouterr().err
