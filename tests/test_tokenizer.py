# SPDX-License-Identifier: Apache-2.0
"""Text pieces join to the whole text, for any tokens and any way of handing them in.

The tokenizers are built here: a byte-level one (Llama 3, Qwen) and two with a space symbol, one of
them with byte tokens (Llama 2, Mistral).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tsjax.files.tokenizer import Detokenizer, decode_text

SAMPLE = "Hello world, naïve 日本語 😀 👩‍👩‍👧 \u202e x  y\n"


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    start = [("<s>", tokenizer.token_to_id("<s>"))]
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("H", "e"), ("l", "l"), ("Ġ", "w"), ("ð", "Ł"), ("æ", "Ĺ"), ("Ģ", "ð")]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def spaced(decoder) -> PreTrainedTokenizerFast:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁a"]
    words += [*"abcdefgHlwo,.x", "本", "é", "!▁?", "ab▁"]
    vocab = {token: index for index, token in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoder
    return wrap(tokenizer)


PARTS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte_level": byte_level(),
    "llama_like": spaced(decoders.Sequence([*PARTS, decoders.Strip(" ", 1, 0)])),
    "metaspace": spaced(decoders.Metaspace()),
}


def in_pieces(tokenizer, ids, sizes=(1,)):
    writer, pieces, start, turn = Detokenizer(tokenizer), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(writer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    whole = "".join(pieces) + writer.pending()
    pieces.append(writer.flush())
    assert "".join(pieces) == whole
    assert writer.pending() == ""
    return pieces


def rows_of(tokenizer):
    """Random tokens, with stretches of one kind: bytes, special tokens, ids without a token."""
    size = len(tokenizer)
    bytes_ = st.integers(1, 256) if "<0x41>" in tokenizer.get_vocab() else st.integers(0, 255)
    stretch = st.one_of(
        st.lists(st.integers(0, size - 1), max_size=40),
        st.lists(bytes_, max_size=90),
        st.lists(st.integers(size - 2, size + 3), max_size=90),
        st.text(max_size=20).map(lambda text: tokenizer.encode(text)),
        st.just(tokenizer.encode(SAMPLE)),
    )
    return st.lists(stretch, max_size=6).map(lambda parts: sum(parts, []))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_whole_text(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(SAMPLE)
    assert decode_text(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)

    @settings(max_examples=40)
    @given(rows_of(tokenizer), st.lists(st.integers(1, 7), min_size=1, max_size=4))
    def run(ids, sizes):
        assert "".join(in_pieces(tokenizer, ids, sizes)) == decode_text(tokenizer, ids)

    run()


def test_a_character_of_several_tokens_comes_whole():
    tokenizer = TOKENIZERS["byte_level"]
    pieces = in_pieces(tokenizer, tokenizer.encode("a日b😀"))
    assert "".join(pieces) == "a日b😀"
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[1] == "a" and "日" in pieces


def test_a_character_of_byte_tokens_comes_with_the_next_token():
    tokenizer = TOKENIZERS["llama_like"]
    vocab = tokenizer.get_vocab()
    ids = [vocab[t] for t in ("▁a", "<0xE2>", "<0x82>", "<0xAC>", "b")]
    assert in_pieces(tokenizer, ids) == ["a", "", "", "", "€b", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_row_is_decoded_in_a_bounded_window(name, monkeypatch):
    tokenizer = TOKENIZERS[name]
    ids = [*tokenizer.encode(SAMPLE), *tokenizer.all_special_ids * 50] * 20
    sizes = []
    monkeypatch.setattr(
        "tsjax.files.tokenizer.decode_text",
        lambda tokenizer, ids: (sizes.append(len(ids)), decode_text(tokenizer, ids))[1],
    )
    text = "".join(in_pieces(tokenizer, ids))
    assert text == decode_text(tokenizer, ids)
    assert max(sizes) < 150 < len(ids)
