# SPDX-License-Identifier: Apache-2.0
"""The usual tokenizers' folders, read as transformers 5 reads them and without it.

Which folder is read here, and which by transformers, is said at `described_folder`. AutoTokenizer
chooses a class by `tokenizer_class` and the model's family, and some classes keep no more of a
tokenizer.json than its vocabulary, its merges and what is put around texts. Does not know models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from tsjax.base.input_files import read_json, read_text, require_file
from tsjax.files.gguf_tokenizer import QWEN2_WORDS, SPACE
from tsjax.files.plain_tokenizer import (
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    Described,
    add_special_tokens,
    special_names,
    special_token,
)

_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"

# Settings that transformers overlooks, does as well without, or that `described_folder` looks at.
_OF_NO_EFFECT = {
    "tokenizer_class", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "errors",
    "legacy", "add_prefix_space", "max_length", "model_max_length", "processor_class", "stride",
    "sp_model_kwargs", "spaces_between_special_tokens", "truncation_side", "truncation_strategy",
    "use_default_system_prompt", "name_or_path", "special_tokens_map_file", "tokenizer_file",
    "is_local", "local_files_only", "backend", "pad_to_multiple_of", "pad_token_type_id",
    "use_fast",
}  # fmt: skip
_READ = {
    *SPECIAL_TOKENS, "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
    "chat_template", "padding_side",
}  # fmt: skip
# Settings that have to be as they mostly are.
_USUAL = {
    "split_special_tokens": (False,),
    "model_input_names": (["input_ids", "attention_mask"],),
    "padding_side": ("left", "right"),
}

_FAMILIES = (None, "llama", "mistral", "qwen2", "qwen3")
_AS_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizer")

_BY_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


class _Class(NamedTuple):
    """What a class of transformers takes in place of a file's."""

    parts: dict[str, Any]
    model: dict[str, Any]
    tokens: dict[str, str]
    add_prefix_space: bool
    padding_side: str = "right"


_END = "<|endoftext|>"
_OF_BYTES = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_CLASSES = {
    "GPT2Tokenizer": _Class(
        {"normalizer": None, "pre_tokenizer": {**_BY_BYTES, "use_regex": True},
         "decoder": {**_BY_BYTES, "use_regex": True}},
        _OF_BYTES, {"unk_token": _END, "bos_token": _END, "eos_token": _END}, False,
    ),
    "Qwen2Tokenizer": _Class(
        {"normalizer": {"type": "NFC"},
         "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
             {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated",
              "invert": False},
             {**_BY_BYTES, "use_regex": False}]},
         "decoder": {**_BY_BYTES, "use_regex": True}},
        _OF_BYTES, {"unk_token": _END, "eos_token": _END, "pad_token": _END}, False,
    ),
    "LlamaTokenizer": _Class(
        {"normalizer": None,
         "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first",
                           "split": False},
         "decoder": {"type": "Sequence", "decoders": [
             {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
             {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}},
        {"fuse_unk": True, "byte_fallback": True},
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, True, "left",
    ),
}  # fmt: skip


class NeedsTransformers(Exception):
    """A tokenizer that is not known to be the same without transformers; says why."""


def described_folder(path: str) -> Described:
    """The tokenizer of a folder, if it is one of the usual: a NeedsTransformers if not.

    Usual is a tokenizer.json that merges pairs, with settings that are known, of a class that takes
    it as it is (PreTrainedTokenizerFast) or of one of `_CLASSES`, beside a model that tsjax runs.
    Transformers reads what has only SentencePiece's or tiktoken's file, whose class has code of its
    own, whose settings add or change anything, and what is not as its own settings say.
    """
    names = set(os.listdir(path))
    _expect(TOKENIZER in names, f"there is no {TOKENIZER}")
    settings = read_json(os.path.join(path, CONFIG)) if CONFIG in names else {}
    _check_settings(settings)
    config = read_json(os.path.join(path, "config.json")) if "config.json" in names else {}
    family = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    _expect(family in _FAMILIES and isinstance(named, str), "the family is another")
    _expect(family != "mistral" or "tekken.json" not in names, "it may be read from tekken.json")
    file = os.path.join(path, TOKENIZER)
    require_file(file)
    with open(file, encoding="utf-8") as opened:
        content = opened.read()
    name = _class_of(named.removesuffix("Fast"), family, '"ByteLevel"' in content)
    _expect(name in (*_AS_THE_FILE, *_CLASSES), f"its class is {name!r}")
    kind = _CLASSES.get(name)
    prefix = settings.get("add_prefix_space")
    _expect(kind is None or prefix in (None, kind.add_prefix_space), "it changes first words")
    _expect(kind is None or not settings.get("legacy"), "it puts spaces as it used to")
    settings = _with_files(path, names, settings, kind)
    tokenizer, added = _tokenizer(content, kind, settings.pop("added_tokens_decoder", None))
    add_special_tokens(tokenizer, settings, added)
    if name == "Qwen2Tokenizer":  # marks all of them once more
        tokenizer.add_tokens([special_token(name) for name in special_names(settings)])
    for token, place in (("bos_token", 0), ("eos_token", -1)):
        wanted = settings.pop(f"add_{token}", None)
        if wanted is not None:
            ends = tokenizer.encode("").ids[place:][:1]
            index = tokenizer.token_to_id(settings.get(token) or "")
            _expect((index is not None and ends == [index]) == bool(wanted), f"add_{token} differs")
    return Described(tokenizer, settings)


def _expect(condition: Any, otherwise: str) -> None:
    if not condition:
        raise NeedsTransformers(otherwise)


def _class_of(named: str, family: str | None, by_bytes: bool) -> str:
    """As AutoTokenizer chooses, which for some families knows better than the folder."""
    if family == "qwen2":
        return "Qwen2Tokenizer"
    if family == "mistral" or (named == "LlamaTokenizer" and by_bytes):
        return "TokenizersBackend"
    return named or ("Qwen2Tokenizer" if family == "qwen3" else "")


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        _expect(name in _OF_NO_EFFECT | _READ | _USUAL.keys(), f"{name} is unknown")
        _expect(value in _USUAL.get(name, (value,)), f"{name}={value!r}")


def _with_files(
    path: str, names: set[str], settings: dict[str, Any], kind: _Class | None
) -> dict[str, Any]:
    """The settings with those of other files and of the class, and names of tokens as texts."""
    if "added_tokens_decoder" not in settings:
        _expect("added_tokens.json" not in names, "it has an added_tokens.json")
        if "special_tokens_map.json" in names:
            more = read_json(os.path.join(path, "special_tokens_map.json"))
            _check_settings(more)
            settings = {**settings, **more}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    both = {"extra_special_tokens", "additional_special_tokens"} <= settings.keys()
    _expect(not both and isinstance(extra, list), "extra_special_tokens")
    found: dict[str, Any] = {"padding_side": "right"}
    if kind is not None:
        found = {"padding_side": kind.padding_side, **kind.tokens}
    found |= {k: v for k, v in settings.items() if k in (*_READ, "add_bos_token", "add_eos_token")}
    for name in SPECIAL_TOKENS:
        found[name] = None if found.get(name) is None else _content(found[name])
    found.pop("additional_special_tokens", None)
    found["extra_special_tokens"] = [_content(token) for token in extra]
    found["chat_template"] = _templates(path, names, settings.get("chat_template"))
    return found


def _content(token: Any) -> str:
    if isinstance(token, dict):
        _expect(not any(map(token.get, ("lstrip", "rstrip", "single_word"))), "a token takes more")
        token = token.get("content")
    _expect(isinstance(token, str), f"{token!r:.80} is no token")
    return token


def _templates(path: str, names: set[str], own: Any) -> str | dict[str, str] | None:
    """The file's, before that of the settings; by their names where there are several."""
    found = {}
    if _TEMPLATE in names:
        found["default"] = read_text(os.path.join(path, _TEMPLATE))
    folder = os.path.join(path, _MORE_TEMPLATES)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".jinja"):
            found[name.removesuffix(".jinja")] = read_text(os.path.join(folder, name))
    if isinstance(own, list):
        own = {entry["name"]: entry["template"] for entry in own}
    one = own if not found else found["default"] if found.keys() == {"default"} else found
    texts = one.values() if isinstance(one, dict) else [one or ""]
    _expect(all(isinstance(text, str) for text in texts), "a chat template is no text")
    return one


def _tokenizer(content: str, kind: _Class | None, added: Any) -> tuple[Any, list[Any]]:
    """The file's tokenizer with what a class takes in its place; the tokens to add to it."""
    from tokenizers import AddedToken, Tokenizer, models

    if kind is None:
        tokenizer = Tokenizer.from_str(content)
        _expect(isinstance(tokenizer.model, models.BPE), "it does not merge pairs")
        own = tokenizer.get_added_tokens_decoder()
    else:
        document = json.loads(content)
        model = document["model"]
        _expect(model.get("type") == "BPE", "it does not merge pairs")
        merges = ((one.split(" ") if isinstance(one, str) else one) for one in model["merges"])
        pairs: Any = [tuple(pair) for pair in merges]
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        frame = {**document, **kind.parts, "added_tokens": [], "model": empty}
        tokenizer = Tokenizer.from_str(json.dumps(frame))
        tokenizer.model = models.BPE(vocab=model["vocab"], merges=pairs, **kind.model)
        own = {token.pop("id"): token for token in document["added_tokens"]}
    _expect(tokenizer.truncation is None and tokenizer.padding is None, "it cuts or fills texts")
    found = {int(index): token for index, token in (own if added is None else added).items()}
    in_order = [found[index] for index in sorted(found)]
    made = [AddedToken(**one) if isinstance(one, dict) else one for one in in_order]
    return tokenizer, made
