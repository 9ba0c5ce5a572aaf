# SPDX-License-Identifier: Apache-2.0
"""LongBench's metrics by hand, its files as a user has them, and one run from end to end."""

import json
from pathlib import Path

import helpers
import hf_fixtures
import pytest

import tsjax
from experiments.longcontext import longbench

# --- metrics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "score"),
    [
        ("token_f1", "The cat, a dog!", "cat and dog", 4 / 5),
        ("token_f1", "It's an Answer.", "its answer", 1),
        ("token_f1", "", "cat", 0),
        ("rouge_l", "the cat sat", "the dog sat", 2 / 3),
        ("rouge_l", "x. a b", "a b. y", 2 / 3),  # of each sentence with each
        ("rouge_l", "a c. b d", "a b c d", 1),  # what several sentences have is put together
        ("rouge_l", "a a a a", "a", 1),  # a word counts once
        ("rouge_l", "A b", "a b", 1 / 2),  # as it is written
        ("rouge_l", "a. b. ", "a. b", 4 / 5),  # white space is a sentence of one empty word
        ("count_accuracy", "There are 7 of 17, or 7.", "7", 2 / 3),
        ("retrieval_accuracy", "Paragraph 3, not 13", "Paragraph 3", 1 / 2),
        ("edit_similarity", "\n\n# why\n```\n// so\nx = 1\ny = 2", "x = 1", 1),
        ("edit_similarity", "abc", "abxy", 0.57),  # of 4/7 the whole percent
        ("edit_similarity", "# nothing else", "x", 0),
    ],
)
def test_metrics_by_hand(metric, answer, reference, score):
    assert getattr(longbench, metric)(answer, reference) == pytest.approx(score)


def test_classes_by_hand():
    classes = ["number", "City", "Other", "Food", "Other number"]
    for answer, score in (
        ("Number", 0),
        ("Other number", 1),  # its part "number" does not count
        ("Other number, or City", 1 / 2),
        ("City", 0),
    ):
        assert longbench.class_accuracy(answer, "Other number", classes) == score


def test_an_answer_is_scored_by_the_rules_of_its_set():
    assert longbench.score("qasper", "cat", ["dog", "cat", "bird"]) == 1
    assert longbench.score("triviaqa", "\ncat\nQuestion: dog", ["cat"]) == 1  # its first line
    assert longbench.score("trec", "City\nFood", ["City"], ["Food", "City"]) == 1


# --- files ------------------------------------------------------------------------------------


def write(folder: Path, *, ending: str = "", **sets: list[dict] | str) -> list[str]:
    """Files of sets and their formats; returns the arguments that name them."""
    for name in ("data", "config"):
        (folder / name).mkdir()
    for name, rows in sets.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        text = rows if isinstance(rows, str) else "".join(lines)
        (folder / "data" / f"{name}{ending}.jsonl").write_bytes(text.encode())
    formats = {name: f"{name} \u8bf7: {{context}} | {{input}} =" for name in sets}
    for name, table in (("prompt", formats), ("maxlen", dict.fromkeys(sets, 4))):
        path = folder / "config" / f"dataset2{name}.json"
        path.write_bytes(json.dumps(table, indent=4, ensure_ascii=False).encode())
    return ["--data", str(folder / "data"), "--config", str(folder / "config"), "--sets", *sets]


def sample(**changes) -> dict:
    fields = {"input": "who?", "context": "a cat {sat}", "answers": ["cat"], "all_classes": None}
    return {**fields, "length": 3, "language": "en", "_id": "1f", **changes}


ONE_LINE, TWO_LINES = '{"input": 1}\n', json.dumps(sample()) + '\n\n{"input": '
BROKEN = [
    (dict(qasper=ONE_LINE), "qasper.jsonl, line 1: context, answers missing"),
    (dict(qasper=TWO_LINES), "qasper.jsonl, line 3 is not valid JSON: Expecting value"),
    (dict(qasper=[sample(answers=[])]), "line 1: answers=[] is not valid: a list of"),
    (dict(trec=[sample()]), "line 1: all_classes=None is not valid"),
    (dict(passage_retrieval_en=[sample(answers=["3"])]), "line 1: the answer '3' is not valid"),
]


def refused(arguments, capsys, monkeypatch) -> str:
    monkeypatch.setattr(tsjax, "load", lambda path: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        longbench.main(["--model", "nowhere", *arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize(("sets", "message"), BROKEN)
def test_broken_samples_are_refused(sets, message, tmp_path, capsys, monkeypatch):
    assert message in refused(write(tmp_path, **sets), capsys, monkeypatch)


def test_broken_folders_are_refused(tmp_path, capsys, monkeypatch):
    arguments = write(tmp_path, qasper=[sample()])
    elsewhere, both = str(tmp_path / "elsewhere"), [*arguments, "trec"]
    prompts, lengths = (tmp_path / "config" / f"dataset2{n}.json" for n in ("prompt", "maxlen"))

    def says(message, arguments) -> None:
        assert message in refused(arguments, capsys, monkeypatch)

    says(f"{elsewhere} is not valid: no such folder", ["--data", elsewhere, *arguments[2:]])
    says("'novels'", [*arguments, "novels"])
    says("'best'", [*arguments, "--methods", "best"])
    for option, value in (("--samples", "0"), ("--prompt-tokens", "1")):
        says(f"{option}: '{value}' is not valid: a number from", [*arguments, option, value])
    says("dataset2prompt.json is not valid: a text for 'trec' is missing", both)
    prompts.write_text(json.dumps({"qasper": "{context} {author}", "trec": "{context}"}))
    says("dataset2maxlen.json is not valid: a number of tokens for 'trec' is missing", both)
    lengths.write_text(json.dumps({"qasper": 4, "trec": 4}))
    says("data is not valid: it has no trec.jsonl", both)
    says("line 1: the prompt of 'qasper' cannot be filled in: KeyError: 'author'", arguments)
    prompts.write_bytes(b'{"qasper": "\xff"}')
    says("dataset2prompt.json is not valid JSON", arguments)


def test_the_middle_is_cut():
    for length, most, found in ((5, 5, "01234"), (5, 9, "01234"), (9, 4, "0178"), (9, 5, "0178")):
        assert "".join(map(str, longbench.without_middle(list(range(length)), most))) == found


# --- answers ----------------------------------------------------------------------------------


def test_dialogues_end_with_a_line(tmp_path):
    path = helpers.save_tokenizer(tmp_path)
    model = helpers.tiny_model(path=path, stop_ids=(helpers.EOS_ID, 10**6))
    assert longbench.settings_of(model, "samsum", 8) == {
        "max_new_tokens": 8,
        "eos_token_id": (helpers.EOS_ID, helpers.TOKENS["<0x0A>"]),
        "min_new_tokens": 1,
    }
    assert longbench.settings_of(model, "trec", 8) == {"max_new_tokens": 8}


# A set of each kind of rules; the texts are made up.
PUBLISHED = {
    "multifieldqa_en": sample(
        input="Where did the heron rest?",
        context="The heron\u2014\u201cAdela\u201d\u2014flew.\u2028She rested. {!}\n" * 4,
        answers=["In Bod\u00f8.", "Bod\u00f8"],
    ),
    "trec": sample(answers=["Animal"], all_classes=["Individual", "Animal", "Other location"]),
    "passage_retrieval_en": sample(context="Paragraph 1: A mill.\n\n", answers=["Paragraph 2"]),
    "lcc": sample(input="", context="def area(a, b):  # \u5f62\n", answers=["    return a * b"]),
}


def published(folder: Path, ending: str) -> list[str]:
    rows = {
        name: [fields, fields | {"context": fields["context"] * 30}]
        for name, fields in PUBLISHED.items()
    }
    return write(folder, ending=ending, **rows)


@pytest.mark.parametrize("ending", ["", "_e"])
def test_published_files_are_read(tmp_path, ending):
    published(tmp_path, ending)
    places = tmp_path / "data", tmp_path / "config"
    found = longbench.read_sets(*places, list(PUBLISHED)[::-1], ending=ending)
    assert list(found) == list(PUBLISHED)[::-1]
    assert len({longbench.SETS[name].group for name in found}) == 4
    for name, (samples, new_tokens) in found.items():
        fields = PUBLISHED[name]
        assert new_tokens == 4 and len(samples) == 2
        for one, times in zip(samples, (1, 30), strict=True):
            text = fields["context"] * times
            assert one.prompt == f"{name} \u8bf7: {text} | {fields['input']} ="
        assert one.references == fields["answers"]
        assert one.classes == (fields["all_classes"] or [])
        for reference in fields["answers"]:
            assert longbench.score(name, reference, one.references, one.classes) == pytest.approx(1)
    first = longbench.read_sets(*places, ["trec"], 1, ending=ending)
    assert first["trec"].samples == found["trec"].samples[:1]
    with pytest.raises(FileNotFoundError, match="has no multifieldqa_en"):
        longbench.read_sets(*places, list(PUBLISHED), ending="" if ending else "_e")


@pytest.mark.wide
def test_published_files_from_end_to_end(tmp_path, capsys):
    arguments = published(tmp_path, "_e")
    hf_fixtures.make(tmp_path / "hf", vocab_size=len(helpers.TOKENS), max_position_embeddings=64)
    arguments += ["--model", helpers.save_tokenizer(tmp_path / "hf"), "--out", str(tmp_path)]
    methods = ["full", "LazyLLM", "random drop, 0.5"]
    arguments += ["--methods", *methods, "--e", "--prompt-tokens"]
    longbench.main([*arguments, "40"])
    document = json.loads((tmp_path / "longbench.json").read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = document["rows"]
    names = [(name, method) for name in PUBLISHED for method in methods]
    assert [(row["set"], row["method"]) for row in rows] == names
    for row in rows:
        assert row["samples"] == 2 and row["read"] <= 40
        assert 0 <= row["score"] <= 1 and row["interval"] >= 0
        assert 0 < row["first_token_seconds"] <= row["seconds"]
        assert bool(row["computed"]) == (row["method"] != "full")
    assert len(document["groups"]) == 4 * len(methods)
    with pytest.raises(SystemExit, match="2"):
        longbench.main([*arguments, "62"])
    assert "and the model has 64 positions" in capsys.readouterr().err
