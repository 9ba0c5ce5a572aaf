# SPDX-License-Identifier: Apache-2.0
"""Lines of OpenAI's batch files: each is what `generate` says with its settings, in their form."""

import json

import pytest
from helpers import TOKENS, looping_model, save_tokenizer

import tsjax
from tsjax.__main__ import main
from tsjax.host.batch_lines import asked_by

CHATML = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch") / "m"
    tsjax.save(looping_model(vocab_size=len(TOKENS), embed_dim=len(TOKENS)), folder)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return tsjax.load(folder)


def line(name, body, url="/v1/chat/completions"):
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


CHAT = {"messages": [{"role": "user", "content": "the ant"}]}
LINES = [
    (line("a", {**CHAT, "max_tokens": 6}), CHAT, dict(max_new_tokens=6)),
    (
        line("b", {**CHAT, "max_completion_tokens": 5, "temperature": 0.8, "seed": 3, "n": 1}),
        CHAT, dict(max_new_tokens=5, do_sample=True, temperature=0.8, seed=3),
    ),
    (
        line("c", {"prompt": "the", "max_tokens": 7, "temperature": 0}, "/v1/completions"),
        {"prompt": "the"}, dict(max_new_tokens=7),
    ),
    (
        line("d", {**CHAT, "max_tokens": 4, "top_p": 0.9, "temperature": 0.8, "logprobs": True,
                   "top_logprobs": 2, "response_format": {"type": "text"}, "stop": None}),
        CHAT, dict(max_new_tokens=4, do_sample=True, temperature=0.8, top_p=0.9, logprobs=2),
    ),
    (
        line("e", {"prompt": [5, 6, 7], "max_tokens": 3, "frequency_penalty": 0.5,
                   "stop": ["zz"], "logprobs": 1}, "/v1/completions"),
        {"prompt": [5, 6, 7]},
        dict(max_new_tokens=3, frequency_penalty=0.5, stop_strings=("zz",), logprobs=1),
    ),
    (
        line("f", {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "the "}, {"type": "text", "text": "ant"}]}],
            "max_tokens": 6, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2}),
        CHAT, dict(max_new_tokens=6, do_sample=True, min_p=0.1, repetition_penalty=1.2,
                   min_new_tokens=2),
    ),
]  # fmt: skip


def run(model, lines, tmp_path, *flags):
    file, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    argv = ["batch", model.path, str(file), "--out", str(out), "--quiet", *flags]
    code = main(argv)
    found = [json.loads(one) for one in out.read_text().splitlines()]
    return code, {one["custom_id"]: one for one in found if "custom_id" in one}


def test_each_line_has_its_own_settings_and_its_answer_their_form(model, tmp_path):
    code, found = run(model, [one for one, _, _ in LINES], tmp_path)
    assert code == 0 and found.keys() == set("abcdef")
    for asked, text, settings in LINES:
        alone = tsjax.generate(model, **text, **settings)
        answer = found[asked["custom_id"]]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert asked["custom_id"] in body["id"] and body["id"] == answer["response"]["request_id"]
        assert body["created"] > 1e9
        (choice,) = body["choices"]
        is_chat = asked["url"] == "/v1/chat/completions"
        said = choice["message"]["content"] if is_chat else choice["text"]
        assert said == alone.text
        assert (
            choice["finish_reason"] == {"length": "length", "eos": "stop"}[alone.finish_reason[0]]
        )
        count, before = len(alone.tokens[0]), alone.stats.prompt_tokens[0]
        assert body["usage"] == {
            "prompt_tokens": before, "completion_tokens": count, "total_tokens": before + count,
        }  # fmt: skip
        if "logprobs" in settings:
            told = choice["logprobs"]
            values = (
                [one["logprob"] for one in told["content"]] if is_chat else told["token_logprobs"]
            )
            assert values == pytest.approx(alone.logprobs[0].raw.tolist())
    # What is answered is not answered again.
    again = run(model, [one for one, _, _ in LINES], tmp_path)
    assert again == (code, found)


def test_a_line_that_cannot_be_answered_has_an_error_and_is_tried_again(model, tmp_path):
    bodies = {
        "good": {**CHAT, "max_tokens": 2}, "bad": {**CHAT, "tools": [{"a": 1}]},
        "worse": {"max_tokens": 3}, "high": {**CHAT, "temperature": -1},
    }  # fmt: skip
    lines = [line(name, body) for name, body in bodies.items()]
    code, found = run(model, lines, tmp_path)
    assert code == 1 and found["good"]["error"] is None
    for name, word in (("bad", "tools="), ("worse", "messages"), ("high", "temperature=-1")):
        assert word in found[name]["error"]["message"] and found[name]["response"] is None
    lines[1] = line("bad", {**CHAT, "max_tokens": 2})
    code, found = run(model, lines, tmp_path)
    assert found["bad"]["error"] is None and code == 1


def test_a_name_stands_once(tmp_path, capsys):
    file = tmp_path / "batch.jsonl"
    lines = [line("a", CHAT), line("b", CHAT), line("a", {**CHAT, "seed": 1})]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["batch", "no-model", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "line 3: 'a' is line 1's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**CHAT, "n": 2}, "n=2"),
        ({**CHAT, "stream": True}, "stream=True"),
        ({**CHAT, "logit_bias": {"5": 1}}, "logit_bias="),
        ({**CHAT, "response_format": {"type": "json_object"}}, "response_format="),
        ({**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "the"}, "messages"),
    ],
)
def test_what_does_not_exist_here_is_refused(body, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        asked_by(line("x", body))
