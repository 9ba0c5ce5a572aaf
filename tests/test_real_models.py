# SPDX-License-Identifier: Apache-2.0
"""Real models in GGUF files, where they are: weights, tokens and chats are transformers', and every
method writes what plain decoding writes. `TSJAX_REAL_MODELS=FOLDER pytest -m slow` names the files'
folder; each test is one file of it."""

import os
import re
import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import tsjax
from tsjax.files.checkpoint import named_arrays

FOLDER = os.environ.get("TSJAX_REAL_MODELS")
FILES = sorted(Path(FOLDER).glob("*.gguf")) if FOLDER else []
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILES, reason="TSJAX_REAL_MODELS is unset")]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

CHAT = [
    {"role": "user", "content": "Write a Python function that adds up the squares of a list."},
    {"role": "assistant", "content": "def f(x): return sum(v * v for v in x)"},
    {"role": "user", "content": "Explain it, and then write tests."},
]
SAMPLED = dict(do_sample=True, temperature=0.7, min_p=0.05)
PAPER = dict(do_sample=True, min_p=0.1, repetition_penalty=1.2, repetition_window=1024)
METHODS = {
    "ngram": tsjax.NGram(num_ngrams=2, suffix_length=6),
    "tokenswift": tsjax.TokenSwift(num_ngrams=2, suffix_length=6, tree=(1, 2, 1), draft_passes=2),
    "the paper's settings": tsjax.TokenSwift(),
    "likely tree": tsjax.LikelyTree(width=6, pass_widths=(1, 2, 4), places=8),
    "int8 passes": tsjax.LikelyTree(width=6, draft_passes=2, draft_weights="int8"),
    "magicdec": tsjax.methods.MagicDec(),
    "triforce": tsjax.methods.TriForce(),
    "auto": tsjax.Auto(),
}


@pytest.fixture(scope="module")
def theirs():
    """The model and the tokenizer that transformers reads from a file."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")

    def read(path: Path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return model.eval(), tokenizer

    return read


@pytest.mark.filterwarnings("default")
@pytest.mark.parity
@each_file
def test_weights_and_texts_are_those_of_transformers(path, theirs):
    import torch

    model = tsjax.load(path, dtype="float32")
    network, tokenizer = theirs(path)
    wanted = network.state_dict()
    for entry, leaf in named_arrays(model):
        for tensor in entry.tensors:
            found = np.asarray(tensor.of(np.asarray(leaf))).view(np.uint32)
            np.testing.assert_array_equal(found, wanted[tensor.key].numpy().view(np.uint32))
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [file.read_text("utf-8", "ignore") for file in sorted(folder.glob("*.py"))[:20]]
    lines = [line for text in texts for line in text.splitlines(keepends=True)[:100]]
    # Where transformers does not split by the file's rule, see docs/models.md.
    lines = [
        x for x in lines if not re.search(r"\s\s\d", x) and unicodedata.is_normalized("NFC", x)
    ]
    assert len(lines) > 1000
    for line in lines:
        assert model.tokenizer.encode(line) == tokenizer.encode(line)
    options = dict(tokenize=False, add_generation_prompt=True)
    text = model.tokenizer.apply_chat_template(CHAT, **options)
    assert text == tokenizer.apply_chat_template(CHAT, **options)
    # What plain decoding chooses is the best by torch's logits, or as good.
    prompt = np.asarray(model.tokenizer.encode(text, add_special_tokens=False))
    made = tsjax.generate(model, prompt, max_new_tokens=500, eos_token_id=()).tokens[0]
    with torch.no_grad():
        logits = network(torch.tensor([*prompt, *made])[None]).logits[0, len(prompt) - 1 : -1]
    lacking = logits.max(-1).values - logits[np.arange(len(made)), made.tolist()]
    assert float(lacking.max()) < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_file
def test_every_method_writes_what_plain_decoding_writes(path, dtype):
    """In bfloat16 with the CPU kernels."""
    model = tsjax.load(path, dtype=dtype)
    how = dict(messages=CHAT[:1], max_new_tokens=300, eos_token_id=(), seed=3)
    for settings in (SAMPLED, PAPER):
        wanted = tsjax.generate(model, **settings, **how).tokens[0]
        for name, method in METHODS.items():
            found = tsjax.generate(model, method=method, **settings, **how).tokens[0]
            np.testing.assert_array_equal(found, wanted, err_msg=name)
