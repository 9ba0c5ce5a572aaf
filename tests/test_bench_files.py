# SPDX-License-Identifier: Apache-2.0
"""tsjax bench after the prompts of a file, and with a file that it goes on with."""

import json

import helpers
import hf_fixtures
import numpy as np
import pytest
from test_bench import TWO, run

import tsjax
from tsjax.__main__ import main
from tsjax.measure import bench as bench_module
from tsjax.measure import bench_question

SHORT = ["--new-tokens", "12", "--rounds", "3", "--warm-up", "0", "--settings", "greedy"]


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> str:
    """A model that says 1, 2, ... greedily, and ends at 14."""
    path = tmp_path_factory.mktemp("bench") / "counting"
    tsjax.save(helpers.chain_model(helpers.chain(*range(1, 15)), stop_ids=(14,)), path)
    return str(path)


@pytest.fixture
def three(tmp_path) -> list[str]:
    lines = [{"ids": [1]}, {"ids": [3, 4], "seed": 5, "id": "a"}, {"prompt": None, "ids": [12]}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    return ["--prompts", str(tmp_path / "prompts.jsonl")]


def test_runs_end_where_plain_decoding_s_answer_does(counting, three, capsys):
    """2 to 14 are more than are asked for; 5 to 14 are 10; 13 and 14 are fewer than can be timed.
    What is told of all prompts is NumPy's median of theirs."""
    found, lines, err = run(capsys, counting, *three, *TWO, *SHORT, "--no-peers")
    assert found["text"]["prompts"] == 3 and not found["text"]["chat"]
    places = [(row["prompt"], row["context"], row["timed_tokens"]) for row in found["rows"][::2]]
    assert places == [(1, 1, 12), (3, 2, 10), (5, 1, 8)]
    assert lines[0].startswith("prompt 1   greedy   plain ")
    assert "[27 of 27 runs, the end: prompt 5, 1 tokens, greedy done]" in err
    plain, ngram = found["over_prompts"]
    assert "speedup_over_plain" not in plain
    rows = [row for row in found["rows"] if row["method"] == "ngram"]
    for name in ("speedup_over_plain", "ms_per_token"):
        each = [row[name]["median"] for row in rows]
        wanted = {"median": np.median(each), "min": min(each), "max": max(each)}
        assert ngram[name] == pytest.approx(wanted)
    assert ngram["tokens_per_step"] == np.median([row["tokens_per_step"] for row in rows])
    over = ngram["speedup_over_plain"]
    said = f"{over['median']:.2f}x plain ({over['min']:.2f} to {over['max']:.2f})"
    assert lines[-1].startswith("  3 prompts greedy   ngram") and said in lines[-1]


def test_texts_of_a_file_are_messages_with_chat(capsys, monkeypatch, tmp_path):
    prompts = []
    monkeypatch.setattr(
        bench_question, "requested", lambda model, prompt, *_: prompts.append(prompt.tolist())
    )
    monkeypatch.setattr(bench_module, "_measured", lambda *_: iter(()))
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    hf_fixtures.make(tmp_path / "hf", vocab_size=len(helpers.TOKENS), max_position_embeddings=512)
    folder = helpers.save_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text(template)
    (tmp_path / "texts.txt").write_text("a thin man\r\n\nthe\n")
    argv = [folder, "--prompts", str(tmp_path / "texts.txt"), *TWO, *SHORT, "--no-peers"]
    run(capsys, *argv)
    run(capsys, *argv, "--chat")
    encode = tsjax.load(folder).tokenizer.encode
    bare = [encode(text, add_special_tokens=False) for text in ("<s>a thin man", "<s>the")]
    assert prompts == [[*encode("a thin man")], [*encode("the")], *map(list, bare)]


@pytest.mark.parametrize(
    ("line", "flags", "words"),
    [
        ('{"ids": [1, 99999]}', [], ["line 1: prompt holds token id 99999"]),
        ('{"text": "a"}', [], ["prompt={'text': 'a'}", "with one of prompt, messages, ids"]),
        ("{", [], ["line 1: no JSON"]),
        ('{"ids": [1]}', ["--lengths", "8"], ["--lengths=(8,)", "left out with --prompts"]),
        ('{"ids": [1]}', ["--text", "a.txt"], ["--text='a.txt'", "left out with --prompts"]),
    ],
)
def test_wrong_prompts(line, flags, words, counting, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_module, "Runs", lambda *_: pytest.fail("it computes"))
    (tmp_path / "one.jsonl").write_text(line)
    assert main(["bench", counting, "--prompts", str(tmp_path / "one.jsonl"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and all(word in err for word in words), err


# --- a file that goes on ----------------------------------------------------------------------


def but_for_times(document: dict) -> dict:
    timed = {"ms_per_token", "bound_ms", "share_of_bound", "speedup_over_plain", "peak_bytes"}
    timed |= {"prefill_seconds", "compile_seconds", "command", "over_prompts"}

    def kept(value):
        if isinstance(value, dict):
            return {name: kept(one) for name, one in value.items() if name not in timed}
        return [kept(one) for one in value] if isinstance(value, list) else value

    return kept(document)


def test_a_measurement_that_was_killed_goes_on(counting, three, capsys, monkeypatch, tmp_path):
    """After its second cell of three: the first two stay as they are, to the last figure."""
    argv = ["bench", counting, *three, *TWO, *SHORT, "--no-peers", "--out"]
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    assert main([*argv, str(whole)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 6 + 2 and "{" not in out
    honest, saved = bench_module.save_bench, []

    def killed(document, path):
        honest(document, path)
        saved.append(path)
        if len(saved) == 2:
            raise SystemError("killed")

    monkeypatch.setattr(bench_module, "save_bench", killed)
    with pytest.raises(SystemError):
        main([*argv, str(parts)])
    before = json.loads(parts.read_text())
    assert len(before["rows"]) == 4 and not before["complete"]
    monkeypatch.setattr(bench_module, "save_bench", honest)
    assert main([*argv, str(parts)]) == 0
    found = json.loads(parts.read_text())
    assert found["rows"][:4] == before["rows"]
    assert but_for_times(found) == but_for_times(json.loads(whole.read_text()))
    assert len(found["over_prompts"]) == 2 and found["complete"]
    # All is there: nothing runs.
    monkeypatch.setattr(bench_module, "Runs", lambda *_: pytest.fail("it computes"))
    capsys.readouterr()
    assert main([*argv, str(parts)]) == 0
    assert json.loads(parts.read_text()) == found
    assert len(capsys.readouterr().out.splitlines()) == 6 + 2


def test_a_file_of_another_question_is_refused(counting, three, capsys, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    argv = ["bench", counting, *three, *TWO, *SHORT, "--no-peers", "--out", str(out)]
    assert main(argv) == 0
    monkeypatch.setattr(bench_module, "Runs", lambda *_: pytest.fail("it computes"))
    before = out.read_bytes()
    (tmp_path / "prompts.jsonl").write_text('{"ids": [2]}')
    assert main([*argv, "--rounds", "2", "--methods", "plain", "ngram:num_ngrams=1"]) == 2
    err = capsys.readouterr().err
    assert "rounds was 3, and is 2" in err and "text was {" in err and "fingerprint" not in err
    assert "methods was ['plain', 'ngram'], and is ['plain', 'ngram:num_ngrams=1']" in err
    assert out.read_bytes() == before
    out.write_text('{"rows": []}')
    assert main(argv) == 2
    assert "tsjax bench --out wrote none" in capsys.readouterr().err
