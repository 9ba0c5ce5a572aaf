# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates without transformers: ids, texts and chats are those of its own.

The tokenizers are trained here and written as the folders of seven families have them; templates
are short ones in the manner of known models.
"""

import copy
import json
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from helpers import save_tokenizer
from test_gguf import trained
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from tsjax.files.plain_tokenizer import PlainTokenizer
from tsjax.files.tokenizer import load_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
TEXT_END = "<|endoftext|>"


def added_tokens(folder) -> dict:
    document = json.loads((folder / "tokenizer.json").read_text())
    return {str(token.pop("id")): token for token in document["added_tokens"]}


def by_bytes(folder, rule, family, **settings):
    """A folder with a tokenizer of bytes, which some classes of transformers make anew."""
    trained(folder, rule)
    if settings.pop("begins", False):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        begin = [(BEGIN, tokenizer.token_to_id(BEGIN))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, begin)
        tokenizer.save(str(folder / "tokenizer.json"))
    legacy = settings.pop("special_tokens_map", None)
    if legacy is None:
        settings["added_tokens_decoder"] = added_tokens(folder)
    else:
        (folder / "special_tokens_map.json").write_text(json.dumps(legacy))
    write(folder, family, settings)


def by_pieces(folder, family, **settings):
    save_tokenizer(folder)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    write(folder, family, settings)


def write(folder, family, settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if family is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": family}))


QWEN = dict(tokenizer_class="Qwen2Tokenizer", bos_token=None, eos_token=END, pad_token=TEXT_END)
FOLDERS = {
    "qwen_2.5": lambda folder: by_bytes(
        folder, "qwen2", "qwen2", **QWEN, add_bos_token=False, add_prefix_space=False,
        additional_special_tokens=[BEGIN, "<more>"], errors="replace", split_special_tokens=False,
    ),
    "qwen_3": lambda folder: by_bytes(folder, "qwen2", "qwen3", **QWEN),
    "llama_3": lambda folder: by_bytes(
        folder, "llama-bpe", "llama", tokenizer_class="PreTrainedTokenizerFast", begins=True,
        bos_token=BEGIN, clean_up_tokenization_spaces=True, model_max_length=131072,
        special_tokens_map={"eos_token": {"content": TEXT_END, "lstrip": False}},
    ),
    "smollm_2": lambda folder: by_bytes(
        folder, "smollm", "llama", tokenizer_class="GPT2Tokenizer", bos_token=BEGIN, eos_token=END,
        unk_token=TEXT_END, pad_token=END, add_prefix_space=False,
    ),
    "distilled": lambda folder: by_bytes(
        folder, "llama-bpe", "llama", tokenizer_class="LlamaTokenizerFast", begins=True,
        legacy=True, add_bos_token=True, add_eos_token=False, sp_model_kwargs={}, pad_token=END,
        bos_token={"__type": "AddedToken", "content": BEGIN, "normalized": True}, eos_token=END,
    ),
    "llama_2": lambda folder: by_pieces(
        folder, "llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=False,
        add_eos_token=False, pad_token=None,
    ),
    "mistral": lambda folder: by_pieces(
        folder, "mistral", tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=True,
        added_tokens_decoder={"1": {"content": "<s>", "special": True}}, pad_token="</s>",
        additional_special_tokens=[],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FOLDERS)
def both(request, tmp_path_factory):
    """The tokenizer of a folder, and that of transformers."""
    folder = tmp_path_factory.mktemp("tokenizers") / request.param
    FOLDERS[request.param](folder)
    ours = load_tokenizer(str(folder))
    assert isinstance(ours, PlainTokenizer) and load_tokenizer(str(folder)) is ours
    return ours, AutoTokenizer.from_pretrained(folder)


def some_texts(count: int, special: list[str]) -> list[str]:
    rng = random.Random(0)
    pieces = [
        " ", "  ", "\t", "\n", "\r\n", "\n\n", "the hat", "a tin", " don't", "DON'T", "x = f(1)\n",
        "    if a[0] != 12345:", "é", "e\u0301", "ñ", "日本語", "Привет", "مرحبا", "😀", "👩‍👩‍👧",
        "\u202e", "\ufeff", "\x00", "½", "<0x41>", "\u2581", "</", "|>", "<|", "naïve", "3.14",
        "\U0010ffff", "ﬁ", "...", "'s", *special, *special,
    ]  # fmt: skip

    def piece() -> str:
        kind = rng.random()
        if kind < 0.7:
            return rng.choice(pieces)
        if kind < 0.9:
            return "".join(rng.choices("abcdehilnorstuw 019.,", k=rng.randrange(1, 12)))
        code = rng.randrange(0x10000)
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    return ["", *("".join(piece() for _ in range(rng.randrange(8))) for _ in range(count - 1))]


def test_a_thousand_texts_are_the_same_ids_and_the_same_text_again(both):
    ours, theirs = both
    for text in some_texts(1000, [*theirs.all_special_tokens, "<tool>"]):
        for start in (True, False):
            ids = theirs.encode(text, add_special_tokens=start)
            assert ours.encode(text, add_special_tokens=start) == ids, text
            for skip in (True, False):
                wanted = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == wanted, text


def test_what_else_is_asked_of_a_tokenizer_is_the_same(both):
    ours, theirs = both
    names = ["special_tokens_map", "all_special_tokens", "all_special_ids", "vocab_size"]
    names += ["added_tokens_decoder", "chat_template", "padding_side", "name_or_path", "is_fast"]
    names += [f"{name}{end}" for name in theirs.SPECIAL_TOKENS_ATTRIBUTES for end in ("", "_id")]
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    ids = np.arange(len(ours) + 3)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    for index in range(0, len(ours), 7):
        assert ours.decode(index) == theirs.decode(index)
    assert ours.decode(ids) == theirs.decode(ids)
    tokens = [theirs.convert_ids_to_tokens(5), "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    texts = ["the hat", "a", ""]
    assert ours.tokenize(texts[0]) == theirs.tokenize(texts[0])
    assert dict(ours(texts)) == dict(theirs(texts)) and dict(ours("a")) == dict(theirs("a"))
    assert ours.batch_decode(ours(texts).input_ids) == theirs.batch_decode(theirs(texts).input_ids)
    if theirs.pad_token is None:
        with pytest.raises(ValueError, match="padding needs a pad_token"):
            ours(texts, padding=True)
    else:
        for how in ({}, {"return_tensors": "np"}):
            one, other = ours(texts, padding=True, **how), theirs(texts, padding=True, **how)
            assert all(np.array_equal(one[name], other[name]) for name in other)
    again = pickle.loads(pickle.dumps(ours))
    assert again.encode("the hat") == ours.encode("the hat") == copy.copy(ours).encode("the hat")


def test_a_saved_tokenizer_is_read_again_by_both(both, tmp_path):
    ours, _ = both
    ours.save_pretrained(tmp_path)
    for again in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        for text in some_texts(50, ours.all_special_tokens):
            assert again.encode(text) == ours.encode(text)
        assert again.special_tokens_map == ours.special_tokens_map


# --- what transformers reads -----------------------------------------------------------------

OTHERS = {
    "a class with code of its own": dict(auto_map={"AutoTokenizer": [None, "its.Own"]}),
    "a setting that is unknown": dict(image_token="<tool>"),
    "spaces as they used to be": dict(tokenizer_class="LlamaTokenizer", legacy=True),
    "spaces before words": dict(tokenizer_class="LlamaTokenizer", add_prefix_space=False),
    "another begin of texts": dict(add_bos_token=False),
    "special tokens as texts": dict(split_special_tokens=True),
    "an unknown class": dict(tokenizer_class="BertTokenizer"),
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_other_tokenizers_are_read_by_transformers(settings, tmp_path):
    by_pieces(tmp_path, "llama", **{"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    assert not isinstance(load_tokenizer(str(tmp_path)), PlainTokenizer)


def test_whoever_needs_more_is_told_where_it_is(both):
    ours, _ = both
    hint = f"transformers.AutoTokenizer.from_pretrained({ours.name_or_path!r})"
    for ask in (
        lambda: ours.train_new_from_iterator,
        lambda: ours("a", truncation=True),
        lambda: ours("a", return_tensors="pt"),
        lambda: ours.apply_chat_template([{}], "", truncation=True),
    ):
        with pytest.raises((AttributeError, TypeError, NotImplementedError)) as error:
            ask()
        assert hint in str(error.value)


def test_transformers_is_not_imported(tmp_path):
    FOLDERS["qwen_2.5"](tmp_path / "qwen")
    (tmp_path / "qwen" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code = (
        "import sys; from tsjax.files.tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer({str(tmp_path / 'qwen')!r});"
        "ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'a hat'}]).input_ids;"
        "assert tokenizer.decode(ids) == 'a hat' and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- chats -----------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": "the <hat> & 'tin' é 😀"}
ANSWER = {"role": "assistant", "content": " a tin  "}
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": [1, None]}}}],
}  # fmt: skip
SAID = {"role": "tool", "content": '{"hat": 1}'}
THOUGHT = {"role": "assistant", "content": "<think>a</think>the", "reasoning": "as it is"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]

# In the manner of Llama 3, Qwen 2.5, ChatML, Mistral and DeepSeek's distilled models.
TEMPLATES = {
    "llama_3": """\
{{- bos_token }}
{%- set day = strftime_now('%Y') if now is not defined else now %}
{%- set ns = namespace(said=0, last='') %}
{% for m in messages %}
    {% if m.content is string %}{% set content = m.content | trim %}
    {% else %}{% set content = m.content | map(attribute='text') | join(' ') %}{% endif %}
    {% set ns.said = ns.said + 1 %}
<{{ m['role'] }} {{ day }}>

{{ content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant {{ ns.said }}>

{% endif %}""",
    "qwen_2.5": """\
{%- if tools %}{{- 'tools:\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' ~ (tool | tojson(indent=2)) }}{% endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '[' + m.content + ']' }}{%- continue %}
    {%- endif %}
    {{- '<' + m.role + '>' }}
    {%- if m.content is defined %}{{- m.content }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '{' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ '}' }}
    {%- endfor %}
    {{- eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- 'no' }}{% endif %}
{%- endif %}""",
    "chatml": """\
{% for m in messages %}
{{ '<' + m['role'] + '>\n' }}
    {% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<assistant>\n' }}
{% endif %}""",
    "mistral": """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[I]' ~ m.content ~ '[/I]' }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}""",
    "distilled": """\
{% set ns = namespace(is_first=true, **dict(a=1)) %}{{ bos_token }}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' %}{% set content = m.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<A>' + (m.reasoning_content or '') + content + eos_token }}
{%- else %}{{ '<U>' ~ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}""",
}
CHATS = [
    [USER], [SYSTEM, USER], [USER, ANSWER], [SYSTEM, USER, ANSWER, USER], [USER, CALL, SAID, SAID],
    [USER, THOUGHT, USER], [PARTS, ANSWER], [ANSWER, USER], [USER, ANSWER, PARTS], [USER, THOUGHT],
    [{"role": "user", "content": ""}], [USER, {"role": "assistant", "content": ""}],
]  # fmt: skip
HOW = [
    {}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"tools": TOOLS},
    {"add_generation_prompt": True, "enable_thinking": False, "now": "today"},
    {"continue_final_message": "reasoning_content"}, {"bos_token": "other", "tools": None},
    {"add_generation_prompt": True, "continue_final_message": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats") / "folder"
    FOLDERS["mistral"](folder)
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


def written(tokenizer, chat, **how):
    """The text, or None where the template, or the library, refuses."""
    try:
        return tokenizer.apply_chat_template(copy.deepcopy(chat), tokenize=False, **how)
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_written_as_transformers_writes_them(name, pair):
    ours, theirs = pair
    how_many = 0
    for chat in CHATS:
        for how in HOW:
            found = written(ours, chat, chat_template=TEMPLATES[name], **how)
            assert found == written(theirs, chat, chat_template=TEMPLATES[name], **how), (chat, how)
            how_many += found is not None
    assert how_many > 10


def a_function(hat: str, tins: int = 3):
    """
    Looks.

    Args:
        hat: a hat
        tins: how many
    """


def test_chats_as_ids_and_what_a_template_is_given(pair):
    ours, theirs = pair
    odd = "{{ messages[0].content | tojson }} {{ x }} {{ x | length }} {{ tools | tojson }}"
    chat = [{"role": "user", "content": [1, 2.5, (True, None)]}]
    for x in (np.float32(0.5), np.arange(3), ("a", b"b"), {1: np.int64(2)}):
        how = dict(chat_template=odd, x=x, tools=[a_function])
        assert written(ours, chat, **how) == written(theirs, chat, **how), x
    chats = [[USER], [USER, ANSWER]]
    how = dict(chat_template=TEMPLATES["mistral"])
    for one in (chats, chats[0]):
        found, wanted = ours.apply_chat_template(one, **how), theirs.apply_chat_template(one, **how)
        assert dict(found) == dict(wanted)
        bare = {"return_dict": False, **how}
        assert ours.apply_chat_template(one, **bare) == found["input_ids"]
    for escape in (
        "{{ messages.__class__ }}", "{{ dict.__class__ }}", "{{ namespace(__a=1) }}",
        "{% set n = namespace() %}{% set n._a = 1 %}{{ n }}", "{{ messages.append(1) }}",
    ):  # fmt: skip
        found = written(ours, [USER], chat_template=escape)
        assert found == written(theirs, [USER], chat_template=escape)


def test_several_templates_by_name(tmp_path):
    by_pieces(tmp_path, None, tokenizer_class="PreTrainedTokenizerFast", chat_template="unused")
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == theirs.chat_template
    ways = ({}, {"tools": TOOLS}, {"chat_template": "tool_use"}, {"chat_template": "own"})
    for how in ways:
        assert written(ours, [USER], **how) == written(theirs, [USER], **how) is not None
    ours.save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).chat_template == ours.chat_template
