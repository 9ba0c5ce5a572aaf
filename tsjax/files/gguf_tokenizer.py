# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that a GGUF file describes, the tokens that end its texts, and its chat template.

A file has the tokens with their kinds, merges or scores, and the name of the rule by which text is
split before tokens are merged. Rules are those of llama.cpp by that name, written for HuggingFace's
tokenizers, which runs them; neither torch nor transformers is needed. Does not know models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsjax.base.checks import check_int
from tsjax.base.errors import BadValue, NotSupported
from tsjax.files.plain_tokenizer import Described, add_special_tokens

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"  # tokenizer.ggml.model
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
SPACE = "\u2581"  # stands for a space in a vocabulary of SentencePiece

# How text is split before merges, by tokenizer.ggml.pre.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS_AND_REST}"
QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS_AND_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_WORDS),
    "tekken": _TEKKEN,
}
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "default")
_DIGITS_BY_THEMSELVES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # to Unicode's NFC, as their own tokenizers do
_BEGIN_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "tekken")  # with the token of beginning

# Ends of texts and of turns. Files name one of them, chats end with another.
_NAMES_OF_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_NAMES_OF_ENDS += ("</s>",)
_IDS_OF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


def has_tokenizer(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("tokenizer.ggml.tokens"))


def stop_ids_of(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The token of the file's end of text, then others that end a text or a turn."""
    tokens, kinds = fields.get("tokenizer.ggml.tokens") or [], _kinds(fields)
    ids = [fields.get(f"tokenizer.ggml.{name}") for name in _IDS_OF_ENDS]
    found = [index for index in ids if index is not None]
    for index in found:
        check_int(index, "tokenizer.ggml.eos_token_id", 0)
    names = set(_NAMES_OF_ENDS)
    found += [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
              if kind == CONTROL and token in names]  # fmt: skip
    return tuple(dict.fromkeys(found))


def special_ids_of(fields: Mapping[str, Any]) -> dict[str, int | None]:
    """As a config.json names them; None where the file names none."""
    names = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    return {name: fields.get(f"tokenizer.ggml.{theirs}") for name, theirs in names.items()}


def described(fields: Mapping[str, Any]) -> Described:
    tokens, model = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.model")
    if model == BYTE_LEVEL:
        tokenizer = _byte_level(fields, tokens)
    elif model == SENTENCE_PIECE:
        tokenizer = _sentence_piece(fields, tokens)
    else:
        known = f"{BYTE_LEVEL!r} and {SENTENCE_PIECE!r}"
        raise NotSupported(f"tokenizer.ggml.model={model!r:.80}; supported are {known}")
    _add_tokens(tokenizer, tokens, _kinds(fields))
    settings = {}
    for name, key in _SPECIAL.items():
        index = fields.get(f"tokenizer.ggml.{key}")
        if index is not None:
            check_int(index, f"tokenizer.ggml.{key}", 0, len(tokens) - 1)
            settings[name] = tokens[index]
    add_special_tokens(tokenizer, settings, [])
    _begin_and_end(tokenizer, fields, settings)
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return Described(tokenizer, settings)


def _kinds(fields: Mapping[str, Any]) -> Sequence[int]:
    tokens = fields.get("tokenizer.ggml.tokens") or []
    kinds = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise BadValue(f"{len(tokens)} tokens and {len(kinds)} of their types")
    return kinds


def _vocabulary(fields: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """Without the places that are only there to fill the matrix."""
    kinds = _kinds(fields)
    found = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == UNUSED and token == f"[PAD{index}]":
            continue
        found.setdefault(token, index)
    return found


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges") or ()]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise BadValue("tokenizer.ggml.merges is not valid: pairs of tokens with a space between")
    rule = fields.get("tokenizer.ggml.pre", "default")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _SPLITS)
    if rule in _SPLITS:
        before = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
    elif rule in _DIGITS_BY_THEMSELVES:
        before = pre_tokenizers.Digits(individual_digits=True)
    elif rule in _AS_GPT2:
        before = None
    else:
        known = ", ".join((*_SPLITS, *_AS_GPT2, *_DIGITS_BY_THEMSELVES))
        raise NotSupported(f"tokenizer.ggml.pre={rule!r:.80} is not supported; supported: {known}")
    vocabulary, whole = _vocabulary(fields, tokens), _SPLITS.get(rule) in (_LLAMA3, _TEKKEN)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    if rule in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    parts = [by_bytes] if before is None else [before, by_bytes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """As transformers reads Llama 2's: pieces are merged, the best score first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    scores = fields.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(tokens):
        raise BadValue(f"{len(tokens)} tokens and {len(scores)} scores of them")
    vocabulary = _vocabulary(fields, tokens)
    merges = []
    for token, index in vocabulary.items():
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(*pair, scores[index]) for pair in splits if vocabulary.keys() >= {*pair}]
    merges.sort(key=lambda one: (-one[2], -len(one[0]), vocabulary[one[0]], vocabulary[one[1]]))
    pairs = [(left, right) for left, right, _ in merges]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=True, byte_fallback=True)
    )
    begins = fields.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first" if begins else "never", split=False
    )
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(content=" ", left=1)] if begins else []
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _add_tokens(tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Those that stay whole in a text; a decoded text leaves the special ones out."""
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [token for token, of in zip(tokens, kinds, strict=True) if of == kind]
        added = [AddedToken(token, normalized=False, special=special) for token in whole if token]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _begin_and_end(tokenizer: Any, fields: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """The tokens that every text gets at its ends."""
    from tokenizers import processors

    rule, model = fields.get("tokenizer.ggml.pre"), fields.get("tokenizer.ggml.model")
    by_default = model == SENTENCE_PIECE or rule in _BEGIN_BY_DEFAULT
    wanted = {
        "bos_token": fields.get("tokenizer.ggml.add_bos_token", by_default),
        "eos_token": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    known = {name: settings[name] for name in wanted if wanted[name] and name in settings}
    if not known:
        return
    begin = [known["bos_token"]] if "bos_token" in known else []
    end = [known["eos_token"]] if "eos_token" in known else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{token}:1" for token in begin), "$B:1",
              *(f"{token}:1" for token in end)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*known.values()}],
    )  # fmt: skip
