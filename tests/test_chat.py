# SPDX-License-Identifier: Apache-2.0
"""Chats by the checkpoint's template, conversations, and the commands for both."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from helpers import TOKENS, save_tokenizer, tiny_model

import tsjax
from tsjax.__main__ import main
from tsjax.commands.chat_sampling import settings_for_chat
from tsjax.files.tokenizer import load_tokenizer
from tsjax.host import conversation as conversation_module
from tsjax.host.chat import chat_prompt

# Templates as three families have them, in short; the last belongs to models that reason.
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<' + messages[0]['content'] + '>>' %}\
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}\
{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% if m['role'] == 'user' %}{{ bos_token + ' ' + (system if loop.index0 == 0 else '') \
+ m['content'] + ' ' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"""
CHATML = """{% for m in messages %}\
{{ ' ' + m.role + ' ' + m.content + eos_token + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ ' assistant\n' }}{% endif %}"""
QWEN_3 = """{% for m in messages %}{% set content = m.content %}\
{% if m.role == 'assistant' and 'thin' in content %}\
{% set content = content.split('thin')[-1] %}{% endif %}\
{{ ' ' + m.role + ' ' + content + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ ' assistant ' }}\
{% if enable_thinking is defined and enable_thinking is false %}{{ 'thin thin' }}{% endif %}\
{% endif %}"""
TEMPLATES = dict(llama_2=LLAMA_2, chatml=CHATML, qwen_3=QWEN_3)
USER, ASSISTANT = {"role": "user", "content": "the tea"}, {"role": "assistant", "content": "has"}
CHATS = [
    [USER],
    [USER, ASSISTANT, USER],
    [USER, {"role": "assistant", "content": "thin/th a"}, USER],
]
SIZES = dict(capacity=256, prefill_width=16)
GREEDY = ["--no-do-sample"]


def with_template(folder, template: str | None, **fields):
    """A model whose folder has a tokenizer with this template."""
    tsjax.save(tiny_model(vocab_size=len(TOKENS), **fields), folder / "model")
    save_tokenizer(folder / "model")
    if template is not None:
        (folder / "model" / "chat_template.jinja").write_text(template)
    return tsjax.load(folder / "model")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return with_template(tmp_path_factory.mktemp("chatty"), CHATML)


# --- prompts -------------------------------------------------------------------------------------


def by_transformers(model, chat, **how) -> list[int]:
    tokenizer = load_tokenizer(model.path)
    return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **how)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name, tmp_path):
    model = with_template(tmp_path, TEMPLATES[name])
    system = {"role": "system", "content": "the in"}
    for chat in [*CHATS, [system, USER]]:
        theirs = by_transformers(model, chat, add_generation_prompt=True)
        assert chat_prompt(model, chat).tolist() == theirs


def test_options_reach_the_template(tmp_path):
    model = with_template(tmp_path, QWEN_3)
    usual, without = (chat_prompt(model, [USER], **how) for how in ({}, {"enable_thinking": False}))
    assert len(without) > len(usual) and without[:20].tolist() == usual[:20].tolist()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(340) %}{{ 'a' * 100000 }}{% endfor %}", ".* it writes 34000000 char"),
        ("{% for i in range(100001) %}a{% endfor %}", ".*Range too big"),
        (LLAMA_2, ".*: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", ""),  # out of its sandbox
    ],
)
def test_what_a_template_may_not_do_is_told(template, why, tmp_path):
    with pytest.raises(ValueError, match=f"messages is not valid for the chat template{why}"):
        chat_prompt(with_template(tmp_path, template), [USER, USER])


def test_an_answer_that_is_begun_is_continued(chatty):
    chat = [USER, {"role": "assistant", "content": "the"}]
    theirs = by_transformers(chatty, chat, continue_final_message=True)
    assert chat_prompt(chatty, chat).tolist() == theirs


def test_messages_and_a_tokenizers_output_are_prompts(chatty):
    ids = [chat_prompt(chatty, chat) for chat in CHATS]
    padded = {"input_ids": [[0, 0, 5, 6], [5, 6, 7, 8]], "attention_mask": [[0, 0, 1, 1], [1] * 4]}
    for given, prompt in (
        (dict(messages=CHATS), ids),
        (load_tokenizer(chatty.path)("the tea"), "the tea"),
        (padded, [[5, 6], [5, 6, 7, 8]]),
    ):
        found = tsjax.generate(chatty, **given, max_new_tokens=5, **SIZES)
        alone = tsjax.generate(chatty, prompt, max_new_tokens=5, **SIZES)
        assert [r.tolist() for r in found.tokens] == [r.tolist() for r in alone.tokens]


def test_a_model_without_a_template_says_so(tmp_path, capsys, monkeypatch):
    model = with_template(tmp_path, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    assert main(["chat", model.path]) == 2
    assert "has no chat template" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no chat template"):
        tsjax.generate(model, messages=[USER])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompt="the", messages=[USER]), "messages is not valid beside a prompt"),
        (dict(prompt="the", input_ids=[1]), "input_ids is not valid beside a prompt"),
        (dict(messages=[USER], input_ids=[1]), "beside input_ids"),
        (dict(attention_mask=[1]), "without input_ids"),
        (dict(prompt=[USER]), r"pass a chat as messages"),
        (dict(messages="hello"), "messages='hello'"),
        (dict(messages=[]), r"messages=\[\]"),
        (dict(messages=[{"role": "", "content": "the"}]), r"messages\[0\]\['role'\]=''"),
        (dict(messages=[{"role": "user"}]), r"messages\[0\]"),
        (dict(messages=[[USER], [dict(USER, content=3)]]), r"messages\[1\]\[0\]\['content'\]=3"),
    ],
)
def test_a_text_is_given_once_and_in_its_form(arguments, message, chatty):
    with pytest.raises(ValueError, match=message):
        tsjax.generate(chatty, **arguments)


def said_in(text: str) -> str:
    """Without line ends, and without what is said of a character that a limit has divided."""
    return text.replace("\n", "").replace("\ufffd", "")


# --- conversations -------------------------------------------------------------------------------


def test_a_conversation_says_what_its_messages_say(chatty):
    how = dict(max_new_tokens=12, do_sample=True, seed=3, eos_token_id=(), **SIZES)
    conversation = tsjax.Conversation(chatty, system="in", **how)
    for question in ("the tea", "has a", "the"):
        before = [*conversation.messages, {"role": "user", "content": question}]
        pieces = list(conversation.say(question))
        alone = tsjax.generate(chatty, messages=before, **how)
        assert conversation.result.tokens[0].tolist() == alone.tokens[0].tolist()
        assert "".join(pieces) == alone.text
        last = conversation.messages[-1]
        assert last == {"role": "assistant", "content": alone.text.strip()}
    assert conversation.messages[0] == {"role": "system", "content": "in"}


def test_what_was_read_is_not_read_again(chatty):
    conversation = tsjax.Conversation(chatty, max_new_tokens=6, eos_token_id=(), **SIZES)
    list(conversation.say("the tea has a lot of it " * 4))
    assert conversation.tokens_read_anew == conversation.result.stats.prompt_tokens[0]
    list(conversation.say("and"))
    stats = conversation.result.stats
    assert stats.prefix_tokens > 60 and conversation.tokens_read_anew < 60
    conversation.forget()
    assert conversation.messages == [] and conversation.prefix is None


def test_a_lazy_prefill_prunes_long_turns_on_top_of_what_was_read(chatty):
    long = "the tea has a lot of it " * 4
    how = dict(prefill=tsjax.LazyPrefill(keep={1: 0.4}, revive="never"), eos_token_id=())
    how |= dict(SIZES, capacity=512)
    conversation = tsjax.Conversation(chatty, max_new_tokens=6, **how)
    list(conversation.say(long))
    stats, kept = conversation.result.stats, conversation.prefix
    assert stats.prompt_computed[1] < 0.45 and kept.length == stats.prompt_tokens[0] + 5
    asked = [*conversation.messages, {"role": "user", "content": long}]
    list(conversation.say(long))
    stats = conversation.result.stats
    assert stats.prefix_tokens > 60 and stats.prompt_computed[1] < 0.45
    list(conversation.more())  # as a larger limit would have made it
    wanted = tsjax.generate(chatty, messages=asked, prefix=kept, max_new_tokens=12, **how)
    assert conversation.result.tokens[0].tolist() == wanted.tokens[0].tolist()
    list(conversation.say("and"))  # a short turn, which is read as a whole
    stats = conversation.result.stats
    assert stats.prompt_computed == () and conversation.tokens_read_anew < 60
    for _ in conversation.say(long):
        break  # and leaves what is missing
    before = sum(stats.prompt_tokens) - 1
    assert before <= conversation.prefix.length < conversation.tokens_in_context - 40


def test_what_was_said_is_kept_where_a_caller_leaves(chatty):
    conversation = tsjax.Conversation(chatty, max_new_tokens=100, eos_token_id=(), **SIZES)
    for _ in conversation.say("the tea"):
        break
    assert conversation.messages[-1]["role"] == "assistant" and conversation.prefix is not None
    assert conversation.result.finish_reason == ["interrupted"]
    left = conversation.say("and")  # and leaves this one without closing it
    next(left)
    list(conversation.say("in"))
    assert [m["content"] for m in conversation.messages[::2]] == ["the tea", "and", "in"]


def test_what_ends_a_chunk_is_told_and_what_was_said_kept(chatty, monkeypatch):
    """A second Ctrl-C, say: what the model has read is lost with the chunk, no more."""
    how = dict(max_new_tokens=100, eos_token_id=(), **SIZES)
    conversation = tsjax.Conversation(chatty, **how)
    ran = conversation_module.run

    def failing(model, request, interrupt, watched):
        news = ran(model, request, interrupt)
        yield next(news)
        yield next(news)
        for one in jax.tree.leaves(next(news).state):
            one.delete()
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(conversation_module, "run", failing)
        with pytest.raises(KeyboardInterrupt):
            list(conversation.say("the tea"))
    assert conversation.messages[-1]["content"] and conversation.prefix is None
    asked = [*conversation.messages, {"role": "user", "content": "in"}]
    said = "".join(conversation.say("in"))
    assert said == tsjax.generate(chatty, messages=asked, **how).text


def test_an_answer_is_as_long_as_there_are_positions(tmp_path):
    model = with_template(tmp_path, CHATML, max_positions=64)
    conversation = tsjax.Conversation(model, eos_token_id=())
    list(conversation.say("the tea"))
    stats = conversation.result.stats
    assert stats.prompt_tokens[0] + stats.new_tokens[0] == 64
    for ask in (lambda: conversation.say("in"), conversation.more):
        with pytest.raises(ValueError, match="fewer than the model's 64 positions; begin anew"):
            ask()
    assert not conversation.can_go_on
    conversation.forget()
    list(conversation.say("in"))


@pytest.mark.parametrize("sampled", [False, True])
def test_an_answer_goes_on_as_if_its_limit_had_been_larger(sampled, chatty):
    """By its tokens: the text of some of them would come back as others."""
    how: dict = dict(eos_token_id=(), repetition_penalty=1.3, presence_penalty=0.5, **SIZES)
    how |= dict(do_sample=True, temperature=1.5, seed=5) if sampled else {}
    conversation = tsjax.Conversation(chatty, max_new_tokens=7, logprobs=0, **how)
    pieces = [*conversation.say("the tea"), *conversation.more()]
    cut = conversation.more()  # as if Ctrl-C had come
    pieces.append(next(cut))
    cut.close()
    count = len(conversation.result.tokens[0])
    assert 14 < count < 21 and conversation.result.finish_reason == ["interrupted"]
    pieces += conversation.more()
    count += 7
    whole = tsjax.generate(chatty, messages=[USER], max_new_tokens=count, logprobs=0, **how)
    assert conversation.result.tokens[0].tolist() == whole.tokens[0].tolist()
    assert len(conversation.result.logprobs[0].raw) == count
    assert said_in("".join(pieces)) == said_in(whole.text)
    said = {"role": "assistant", "content": whole.text.strip()}
    assert conversation.messages == [USER, said]
    # Read once: but for the last token, which no prefill reads.
    stats = conversation.result.stats
    assert stats.prefix_tokens == stats.prompt_tokens[0] + count - 8


def test_only_what_was_cut_short_goes_on(chatty):
    conversation = tsjax.Conversation(chatty, max_new_tokens=3, eos_token_id=(), **SIZES)
    with pytest.raises(ValueError, match="there is no answer to go on with"):
        conversation.more()
    list(conversation.say("the tea"))
    assert conversation.can_go_on
    with pytest.raises(ValueError, match="text=''"):
        conversation.say("")
    list(conversation.more())
    conversation.forget()
    assert not conversation.can_go_on
    conversation = tsjax.Conversation(chatty, eos_token_id=tuple(range(len(TOKENS))))
    list(conversation.say("the tea"))
    assert conversation.result.finish_reason == ["eos"] and not conversation.can_go_on


# --- commands ------------------------------------------------------------------------------------


def test_generate_chat_answers_a_message(chatty, capsys):
    argv = ["generate", chatty.path, "--chat", "the tea", "--max-new-tokens", "5", "--json"]
    for flags, how in ([], dict(do_sample=True, temperature=0.7, top_p=0.95)), (GREEDY, {}):
        assert main([*argv, *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        alone = tsjax.generate(chatty, messages=[USER], max_new_tokens=5, **how)
        assert found["tokens"] == [alone.tokens[0].tolist()]
        assert found["prompt"] == [chat_prompt(chatty, [USER]).tolist()]
    assert main([*argv, "--system", "in"]) == 0
    assert main(["generate", chatty.path, "the", "--chat", "in"]) == 2
    assert "give the prompt once" in capsys.readouterr().err
    assert main(["generate", chatty.path, "the", "--system", "in"]) == 2
    assert "--system is not valid without --chat" in capsys.readouterr().err


def talk(model, lines, monkeypatch, *flags) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", model.path, "--eos-token-id", "-1", *flags])


def test_chat_is_a_conversation(chatty, capsys, monkeypatch):
    lines = ["the tea", "", "has", "/new", "the tea", "/quit"]
    assert talk(chatty, lines, monkeypatch, "--max-new-tokens", "8", *GREEDY) == 0
    conversation = tsjax.Conversation(chatty, max_new_tokens=8, eos_token_id=())
    said = ["".join(conversation.say(text)) for text in ("the tea", "has")]
    out, err = capsys.readouterr()
    assert out == "".join(text + "\n" for text in [*said, said[0]])
    assert err.splitlines()[0] == "[model: 100000 positions; greedy; /help lists commands]"
    assert err.splitlines()[1] == "[8 tokens; /more goes on]"


def test_chat_goes_on_and_tells(chatty, capsys, monkeypatch, tmp_path):
    file = str(tmp_path / "said.json")
    lines = ["the tea", "/more", "/stats", f"/save {file}", "/system in", "/new", f"/load {file}"]
    lines += ["//has", "/save /no/such/folder/x", "/load " + chatty.path, "/more now", "/help"]
    assert talk(chatty, lines, monkeypatch, "--max-new-tokens", "4", "--seed", "3") == 0
    out, err = capsys.readouterr()
    how = dict(eos_token_id=(), do_sample=True, temperature=0.7, top_p=0.95, seed=3)
    whole = tsjax.generate(chatty, messages=[USER], max_new_tokens=8, **how).text
    messages = [USER, {"role": "assistant", "content": whole.strip()}]
    assert json.loads((tmp_path / "said.json").read_text()) == messages
    asked = [*messages, {"role": "user", "content": "/has"}]
    last = tsjax.generate(chatty, messages=asked, max_new_tokens=4, **how).text
    assert said_in(out) == said_in(whole + last)
    for part in (
        "[8 tokens; /more goes on]", "[last answer: 8 tokens, ", "1.00 tokens/step, length]",
        "[conversation: 8 tokens, ", " of 100000 positions used", "top_p 0.95, seed 3]",
        f"[2 messages written to {file}]", "[begun anew, with this system message]",
        "[begun anew]", f"[2 messages from {file}]", "folder '/no/such/folder' does not exist",
        "is a folder; it must be a file", "tsjax: write /more", "\n  /save FILE    writes",
    ):  # fmt: skip
        assert part in err, part


def test_no_mistake_ends_a_chat(tmp_path, capsys, monkeypatch):
    """Neither an unknown command, which is not sent, nor a message that is too long."""
    model = with_template(tmp_path, CHATML, max_positions=128)
    lines = ["/nwe", "the tea " * 99, "/more", "the tea", "/more", "/more", "/more"]
    assert talk(model, lines, monkeypatch, "--max-new-tokens", "50") == 0
    told = capsys.readouterr().err.splitlines()[1:]
    for line, part in zip(
        told,
        ("there is no /nwe: see /help", "tsjax: prompt of ", "there is no answer to go on with",
         "[50 tokens; /more goes on]", "[100 tokens; /more goes on]", "128 positions are full",
         "fewer than the model's 128 positions; begin anew"),
        strict=True,
    ):  # fmt: skip
        assert part in line


def test_each_conversation_has_a_seed_of_its_own(chatty, capsys, monkeypatch):
    assert talk(chatty, ["/stats", "/new", "/stats"], monkeypatch) == 0
    seeds = [line for line in capsys.readouterr().err.splitlines() if "seed" in line]
    assert len(seeds) == 2 == len(set(seeds))


@pytest.mark.parametrize(
    ("file", "flags", "settings"),
    [
        (None, {}, dict(do_sample=True, temperature=0.7, top_p=0.95)),
        (None, dict(temperature=1.5), dict(do_sample=True, temperature=1.5, top_p=0.95)),
        (None, dict(do_sample=False), dict(do_sample=False)),
        # As transformers reads it, top_k too; lengths and stop tokens stay the caller's.
        (dict(do_sample=True, min_p=0.1, eos_token_id=2, max_new_tokens=9),
         dict(min_new_tokens=10), dict(do_sample=True, min_p=0.1, top_k=50, min_new_tokens=10)),
        (dict(do_sample=False, repetition_penalty=1.1, temperature=0.6), {},
         dict(repetition_penalty=1.1)),
        (dict(repetition_penalty=1.1, temperature=0.6), {},
         dict(do_sample=True, repetition_penalty=1.1, temperature=0.6, top_p=0.95)),
        (dict(do_sample=True, num_beams=4), {},
         dict(do_sample=True, temperature=0.7, top_p=0.95)),
    ],
)  # fmt: skip
def test_a_chat_samples_as_its_checkpoint_says(file, flags, settings, tmp_path, capsys):
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert settings_for_chat(str(tmp_path), flags) == settings
    assert ("num_beams=4" in capsys.readouterr().err) == ("num_beams" in (file or {}))


def test_ctrl_c_between_pieces_ends_the_answer_alone(chatty, capsys, monkeypatch):
    said, texts = tsjax.Conversation.say, ["the tea"]

    def struck(self, text):
        answer = said(self, text)
        if not texts or text != texts.pop():
            return answer
        return strike_after_one(answer)

    def strike_after_one(answer):
        with contextlib.closing(answer):
            yield next(answer)
            raise KeyboardInterrupt

    monkeypatch.setattr(tsjax.Conversation, "say", struck)
    lines = ["the tea", "/more", "has", "/quit"]
    assert talk(chatty, lines, monkeypatch, "--max-new-tokens", "40", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\[ended after \d+ tokens; /more goes on\]", err)
    # It ended after some tokens, and 40 more came.
    count = int(re.findall(r"(\d+) tokens; /more", err)[1])
    whole = tsjax.generate(chatty, messages=[USER], max_new_tokens=count, eos_token_id=()).text
    assert said_in(out).startswith(said_in(whole)) and 40 < count < 80


def test_a_paste_is_one_message():
    """In a terminal, by readline: what lies between the marks of a paste."""
    pty, readline = pytest.importorskip("pty"), pytest.importorskip("readline")
    if "GNU" not in (readline.__doc__ or ""):
        pytest.skip("libedit knows no bracketed paste")
    code = "from tsjax.commands.chat import _edit_lines; _edit_lines(); print([input('> ')])"
    terminal, inside = pty.openpty()
    told, sent = b"", False
    how: dict = dict(stdin=inside, stdout=inside, env={**os.environ, "TERM": "xterm"})
    with subprocess.Popen([sys.executable, "-c", code], **how) as process:
        os.close(inside)
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(terminal, 1024):
                told += piece
                if b"\x1b[?2004h" in told and not sent:  # the terminal is asked for marks
                    sent = os.write(terminal, b"\x1b[200~the\ntea\x1b[201~\r") > 0
    assert process.returncode == 0 and rb"['the\ntea']" in told
