# SPDX-License-Identifier: Apache-2.0
"""GGUF files: weights, settings and tokenizers are those of the HuggingFace folder they were made
of, whose reader is tested elsewhere; what cannot be read is named."""

import dataclasses
import itertools
import struct
import sys

import gguf
import gguf_fixtures
import helpers
import hf_fixtures
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Types
from hf_fixtures import BIASED, YARN, assert_same_models
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as before

import tsjax
from pallas_kernels.stored_blocks.api import BLOCK_TYPES, widened
from tsjax.files import gguf_files, gguf_numbers
from tsjax.files.gguf_files import Header
from tsjax.files.tokenizer import load_tokenizer
from tsjax.model.sharding import parts_of
from tsjax_convert import to_hf, to_tsjax, verify
from tsjax_convert.__main__ import main as convert

LLAMA3 = {**hf_fixtures.LLAMA3, "original_max_position_embeddings": 8192}

# --- weights and settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("llama", Types.F32, {}),
        ("llama", Types.Q4_1, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", Types.BF16, BIASED),
        ("mistral", Types.Q5_0, {"head_dim": 32}),
        ("qwen2", Types.Q8_0, {}),
        ("qwen2", Types.Q5_1, {"tie_word_embeddings": False}),
        ("qwen3", Types.F16, {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", None])
def test_it_is_the_folder_that_it_was_made_of(family, kind, changes, dtype, tmp_path):
    """In bfloat16, if nothing else is asked for."""
    path = gguf_fixtures.make(tmp_path / "model.gguf", family, kind, **changes)
    wanted = tsjax.load(tmp_path / "model", dtype=dtype or "bfloat16")
    if family == "mistral":  # without a window it is a Llama, and is written as one
        wanted = wanted.replace(cfg=dataclasses.replace(wanted.cfg, family="llama"))
    assert_same_models(tsjax.load(path, dtype=dtype), wanted)


ONE_BLOCK = {"hidden_size": 256, "intermediate_size": 256}
KINDS = [kind for kind in Types if kind.value not in gguf_numbers._PLAIN]


def can_be_read(kind: Types) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(gguf_numbers.native, "on_host", lambda: None)
    gguf_numbers.kind_of_code.cache_clear()
    yield
    gguf_numbers.kind_of_code.cache_clear()


READ = [kind for kind in KINDS if can_be_read(kind)]


@pytest.mark.parametrize("kind", [kind for kind in READ if kind.name in BLOCK_TYPES])
def test_types_are_known_as_the_package_knows_them(kind, without_kernels, tmp_path, rng):
    block = BLOCK_TYPES[kind.name]
    assert (block.numbers, block.nbytes) == gguf.GGML_QUANT_SIZES[kind] and block.code == kind
    test_any_part_of_any_type_is_that_part_of_the_whole(kind, tmp_path, rng)


@pytest.mark.parametrize("kind", READ)
def test_any_part_of_any_type_is_that_part_of_the_whole(kind, tmp_path, rng):
    """By the kernels in C++ where they know it: the bits that the package gives."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (6, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("some", raw, raw_dtype=kind)
    gguf_fixtures.finish(writer, tmp_path / "one.gguf")
    stored = Header(str(tmp_path / "one.gguf")).tensors["some"]
    assert (stored.shape, stored.dtype) == ((6, 2 * block), "float32")
    with np.errstate(all="ignore"):
        whole = gguf.quants.dequantize(raw, kind)
    found = stored.rows(0, 6)
    np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(
        np.signbit(found) & (found == 0), np.signbit(whole) & (whole == 0)
    )
    np.testing.assert_array_equal(stored.rows(2, 5, slice(3, block + 1)), whole[2:5, 3 : block + 1])


def test_rows_in_pairs_are_read_from_anywhere(rng):
    rows = rng.standard_normal((32, 5), np.float32)
    pairs = gguf_fixtures.paired(rows, 4)
    stored = gguf_files.StoredTensor("q", "", rows.shape, "float32", lambda a, b, c: pairs[a:b])
    read = gguf_numbers.out_of_pairs(stored, 4).rows
    for start, stop in itertools.combinations(range(33), 2):
        np.testing.assert_array_equal(read(start, stop), rows[start:stop])


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            YARN,
        ),
    ],
)  # fmt: skip
def test_scaled_positions(fields, scaling, tmp_path):
    fields = {f"ARCH.{name}": value for name, value in fields.items()}
    path = gguf_fixtures.make(tmp_path / "m.gguf", "qwen2", fields=fields, rope_scaling=scaling)
    assert_same_models(tsjax.load(path, dtype="float32"), tsjax.load(tmp_path / "m"))


def llama3_factors(head_dim: int, theta: float) -> np.ndarray:
    """By transformers' rule: what a frequency is divided by."""
    found = []
    for frequency in theta ** -(np.arange(0, head_dim, 2) / head_dim):
        turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * np.pi)
        share = min(max((turns - 1) / (4 - 1), 0), 1)  # of those that are left as they are
        found.append(1 / (share + (1 - share) / 8))
    return np.asarray(found, np.float32)


def test_positions_of_llama_3(tmp_path):
    factors = llama3_factors(64, 500000.0)
    assert len(set(factors.tolist())) == 5  # three between the least and the most
    sizes = dict(hidden_size=256, rope_scaling=LLAMA3)
    path = gguf_fixtures.make(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}, **sizes)
    assert_same_models(tsjax.load(path, dtype="float32"), tsjax.load(tmp_path / "m"))
    extra = {"rope_freqs.weight": factors * np.linspace(1, 1.1, 32, dtype=np.float32)}
    path = gguf_fixtures.make(tmp_path / "n.gguf", extra=extra, **sizes)
    with pytest.raises(NotImplementedError, match=r"n.gguf.*factors other than those of Llama 3.1"):
        tsjax.load(path)


def test_parts(tmp_path):
    gguf_fixtures.make(tmp_path / "m.gguf", parts=3)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for file in (files[0], files[2]):
        assert_same_models(tsjax.load(file, dtype="float32"), tsjax.load(tmp_path / "m"))
    files[1].rename(tmp_path / "other.gguf")
    with pytest.raises(FileNotFoundError, match=r"one of 3 parts: missing '.*m-00002-of-00003"):
        tsjax.load(files[0])
    with pytest.raises(ValueError, match=r"other.gguf' is not whole: it is one of 3 parts"):
        tsjax.load(tmp_path / "other.gguf")


def test_on_a_mesh_and_with_heads(tmp_path):
    path = gguf_fixtures.make(tmp_path / "m.gguf", "qwen2", vocab_size=64)
    hf_fixtures.make(tmp_path / "with", "qwen2", heads=2, **gguf_fixtures.SIZES)
    found = tsjax.load(path, dtype="float32", heads=tmp_path / "with")
    assert_same_models(found, tsjax.load(tmp_path / "m", heads=tmp_path / "with"))
    assert found.cfg.num_draft_heads == 2
    mesh = jax.make_mesh((2, 2), ("model", "slots"))
    split = tsjax.load(path, dtype="float32", mesh=mesh)
    assert parts_of(mesh) == 2
    assert_same_models(split, tsjax.load(tmp_path / "m"))


# --- tokenizers ----------------------------------------------------------------------------------

TEXTS = [
    "the hat in  a tin", "don't DON'T  1234 5,678.9\n\n  x = 1\n", "", " ", "\tif a:\r\n",
    "é e\u0301 ñ",
    "日本語 12 ½", "<|im_start|>user\nthe<|im_end|> <tool>a</s>", "  7  77", "a<0x41>b",
]  # fmt: skip
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# As the models' own tokenizer.json have it: split before merges, and Unicode's normal form.
RULES = {
    "qwen2": ([before.Split(Regex(QWEN2), "isolated")], normalizers.NFC()),
    "llama-bpe": ([before.Split(Regex(LLAMA), "isolated")], None),
    "smollm": (
        [before.Digits(individual_digits=True), before.Split(Regex(GPT2), "isolated")],
        None,
    ),
    "gpt-2": ([before.Split(Regex(GPT2), "isolated")], None),
}


def trained(folder, rule: str) -> Tokenizer:
    """A tokenizer of bytes that has learned this file."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    first, normalizer = RULES[rule]
    tokenizer.pre_tokenizer = before.Sequence(
        [*first, before.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=before.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([__file__], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_the_tokenizer_that_went_in(rule, tmp_path):
    wanted = trained(tmp_path / "own", rule)
    end, first = map(wanted.token_to_id, ("<|im_end|>", "<|endoftext|>"))
    fields = {
        "tokenizer.ggml.pre": rule, "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.bos_token_id": first, "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    path = gguf_fixtures.make(
        tmp_path / "m.gguf", fields=fields, tokenizer=tmp_path / "own", vocab_size=512
    )
    model = tsjax.load(path)
    assert model.stop_ids == (end, first)  # that of a chat, and that of all texts
    found = model.tokenizer
    assert len(found) == wanted.get_vocab_size()
    for text in TEXTS:
        assert found.encode(text) == wanted.encode(text).ids
        for bare in (False, True):
            ids = wanted.encode(text).ids
            assert found.decode(ids, bare) == wanted.decode(ids, skip_special_tokens=bare)
    chat = [{"role": "user", "content": "a tin"}]
    ids = wanted.encode("<|im_start|>user\na tin<|im_end|>").ids
    options = dict(tokenize=True, return_dict=False)
    assert found.apply_chat_template(chat, **options) == ids
    assert found.eos_token == "<|im_end|>"


def test_a_vocabulary_of_sentencepiece(tmp_path):
    """Every text begins with the token of beginning, unless the file says that it does not."""
    folder = helpers.save_tokenizer(tmp_path / "own")
    wanted = load_tokenizer(folder)
    begin = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for number, fields in enumerate((begin, {**begin, "tokenizer.ggml.add_bos_token": False})):
        path = gguf_fixtures.make(
            tmp_path / f"{number}.gguf", fields=fields, tokenizer=tmp_path / "own",
            vocab_size=len(wanted),
        )  # fmt: skip
        found = load_tokenizer(str(path))
        assert load_tokenizer(str(path)) is found  # loaded once
        for text in TEXTS[:4]:
            ids = wanted.encode(text)[number:]
            if text.strip() == text:  # a first space is written otherwise by newer versions
                assert found.encode(text) == ids
            assert found.decode(ids, True) == wanted.decode(ids, skip_special_tokens=True)


def test_without_a_tokenizer_token_ids_work(tmp_path):
    model = tsjax.load(gguf_fixtures.make(tmp_path / "m.gguf"), dtype="float32")
    assert len(tsjax.generate(model, [1, 2], max_new_tokens=3).tokens[0]) == 3
    with pytest.raises(FileNotFoundError, match="m.gguf' has no tokenizer: pass token ids"):
        tsjax.generate(model, "the hat", max_new_tokens=3)
    trained(tmp_path / "own", "gpt-2")
    path = gguf_fixtures.make(
        tmp_path / "n.gguf", fields={"tokenizer.ggml.pre": "other"}, tokenizer=tmp_path / "own",
        vocab_size=512,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"n.gguf' has a tokenizer .*pre='other'"):
        tsjax.generate(tsjax.load(path), "the hat", max_new_tokens=3)


# --- conversions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [to_hf, to_tsjax])
def test_it_becomes_a_folder(to, tmp_path):
    wanted = trained(tmp_path / "own", "qwen2")
    fields = {
        "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.padding_token_id": 4, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    path = gguf_fixtures.make(
        tmp_path / "m.gguf", "llama", Types.Q8_0, fields=fields, tokenizer=tmp_path / "own",
        vocab_size=512,
    )  # fmt: skip
    to(path, tmp_path / "out")
    assert verify(path, tmp_path / "out") == 21
    found, source = tsjax.load(tmp_path / "out"), tsjax.load(path)
    assert_same_models(found, source)
    assert found.stop_ids == source.stop_ids and found.stop_ids[0] == 3
    for text in TEXTS:
        assert found.tokenizer.encode(text) == wanted.encode(text).ids
    assert found.tokenizer.chat_template == TEMPLATE


# --- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ARCH.expert_count": 8}, r"m.gguf.*llama.expert_count=8: experts"),
        ({"ARCH.rope.dimension_count": 8}, r"m.gguf.*partial_rotary_factor=0.5"),
        ({"ARCH.attention.sliding_window": 64}, r"m.gguf.*sliding_attention"),
        ({"ARCH.rope.scaling.type": "longrope"}, r"m.gguf.*'longrope' is not supported"),
        ({"ARCH.attention.value_length": 8}, r"m.gguf.*value_length=8, and keys of 16"),
    ],
)
def test_what_tsjax_does_not_have_is_named(fields, message, tmp_path):
    path = gguf_fixtures.make(tmp_path / "m.gguf", fields=fields)
    with pytest.raises(NotImplementedError, match=message):
        tsjax.load(path)


def test_other_architectures_and_versions_are_named(tmp_path):
    gguf_fixtures.finish(gguf.GGUFWriter(None, "gemma2"), tmp_path / "m.gguf")
    with pytest.raises(NotImplementedError, match="architecture='gemma2' is not .* llama, mistral"):
        tsjax.load(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    with pytest.raises(NotImplementedError, match="version 50331648; .* 2 and 3, little-endian"):
        tsjax.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "cannot be read as GGUF: it is empty"),
        (lambda content: b"PK" + content, "it does not begin with GGUF"),
        (lambda content: content[:700], "it is cut off, or a length in it is wrong"),
        (lambda content: content[:-5000], r"blk.1.\w+.\w+ ends \d+ bytes behind the file"),
        (lambda content: content[:8] + b"\xff" * 8 + content[16:], "it is cut off, or a length"),
    ],
)
def test_damaged_files_are_named(damage, message, tmp_path):
    path = gguf_fixtures.make(tmp_path / "m.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"m.gguf' .*{message}"):
        tsjax.load(path)


def test_tensors_are_compared_with_the_settings(tmp_path):
    path = gguf_fixtures.make(tmp_path / "m.gguf", extra={"blk.0.other": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"not part of this model: blk.0.other in .*m.gguf"):
        tsjax.load(path)
    path = gguf_fixtures.make(tmp_path / "m.gguf", fields={"ARCH.attention.key_length": 8})
    with pytest.raises(ValueError, match=r"blk.0.attn_q.weight in .* has shape \[64, 64\]"):
        tsjax.load(path)


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch, capsys, request):
    """It is wanted for rare types, and where there are no kernels."""
    common = gguf_fixtures.make(tmp_path / "common.gguf", kind=Types.Q8_0)
    rare = gguf_fixtures.make(tmp_path / "rare.gguf", kind=Types.TQ1_0, **ONE_BLOCK)
    gguf_numbers.kind_of_code.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    if gguf_numbers.native.on_host():
        assert tsjax.load(common).cfg.num_layers
    request.getfixturevalue("without_kernels")
    for path in (common, rare):
        assert convert([str(path), str(tmp_path / "out"), "--quiet"]) == 2
        assert "pip install 'tsjax[gguf]'" in capsys.readouterr().err


@pytest.mark.skipif(not gguf_numbers.native.on_host(), reason="they are in C++")
@pytest.mark.parametrize("blocks", [np.zeros((2, 35), np.uint8), np.zeros((2, 34), np.int8)])
def test_blocks_that_do_not_fit_are_refused(blocks):
    with pytest.raises(ValueError, match=r"is not valid: \[R, n \* 34\] of uint8"):
        widened(blocks, "Q8_0")


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="m.gguf': there is no such file"):
        tsjax.load(tmp_path / "m.gguf")
    gguf_fixtures.make(tmp_path / "some" / "m.gguf")
    with pytest.raises(FileNotFoundError, match="some' .* it has .*m.gguf.*give the path of one"):
        tsjax.load(tmp_path / "some")
