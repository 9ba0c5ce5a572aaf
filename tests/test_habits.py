# SPDX-License-Identifier: Apache-2.0
"""What users of transformers, vLLM, llama.cpp and trainers in JAX type: each line works, or one
line says what to write."""

import re

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TOKENS, save_tokenizer

import tsjax
from tsjax.__main__ import main
from tsjax.base.habits import HABITS, LOADING, NEUTRAL, OF_MODEL, OF_PACKAGE

SIZES = dict(max_new_tokens=4, capacity=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("habits") / "hf"
    hf_fixtures.make(folder, vocab_size=len(TOKENS), max_position_embeddings=256)
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder):
    return tsjax.load(folder)


# --- lines that work ---------------------------------------------------------------------------

WORK = """
tsjax.load(path, dtype=jnp.bfloat16)
tsjax.load(path, dtype="bf16")
tsjax.load(path, dtype="auto")
tsjax.load(path, dtype=np.float32)
tsjax.load(path, revision="main", local_files_only=True, cache_dir=None, token=None)
tsjax.generate(model, "the", max_new_tokens=4, num_beams=1)
tsjax.generate(model, "the", max_new_tokens=4, top_k=None, top_p=None, seed=None)
tsjax.generate(model, "the", max_new_tokens=4, temperature=0)
tsjax.generate(model, "the", max_new_tokens=4, temperature=0.0, top_p=0.9, do_sample=True)
tsjax.generate(model, "the", max_new_tokens=4, use_cache=True, early_stopping=False)
tsjax.generate(model, "the", max_new_tokens=4, stop=None, n=1, stream=False)
tsjax.generate(model, **model.tokenizer("the"), max_new_tokens=4)
tsjax.generate(model, input_ids=np.asarray([[3, 4, 5]]), max_new_tokens=4)
tsjax.generate(model, ["the", "an"], max_new_tokens=4, do_sample=True, temperature=0.8)
list(tsjax.generate_many(model, ["the", "an"], max_new_tokens=4, num_beams=1))
tsjax.rollout(model, ["the"], group=2, max_new_tokens=4, seed=jax.random.key(0))
tsjax.generate(model, "the", max_new_tokens=4, do_sample=True, seed=jax.random.key(0))
tsjax.from_hf(tsjax.to_hf(model), model.cfg)
jax.grad(lambda p: tsjax.log_probs(model.replace(params=p), [[3, 4, 5]]).sum())(model.params)
model.with_params(jax.tree.map(jnp.asarray, model.params))
""".strip().splitlines()


@pytest.mark.parametrize("line", WORK)
def test_it_works(line, model, folder):
    eval(line, {"tsjax": tsjax, "jax": jax, "jnp": jnp, "np": np, "model": model, "path": folder})


# --- lines that are answered by what to write --------------------------------------------------

ANSWERED = {
    # transformers
    'tsjax.AutoModelForCausalLM.from_pretrained(path)': "tsjax.load(path)",
    'model.generate("the")': "tsjax.generate(model, prompt)",
    'model.to("cuda")': "tsjax.load(mesh=...)",
    "model.eval()": "leave it out",
    "model.config.vocab_size": "model.cfg",
    "model.save_pretrained(path)": "tsjax.save_hf(model, folder)",
    'tsjax.load(path, torch_dtype="float16")': "dtype='bfloat16'",
    'tsjax.load(path, device_map="auto")': "mesh=",
    "tsjax.load(path, load_in_4bit=True)": "weights='int4'",
    "tsjax.load(path, trust_remote_code=True)": "never run",
    'tsjax.generate(model, "the", max_length=9)': "max_new_tokens",
    'tsjax.generate(model, "the", num_beams=4)': "no beam search",
    'tsjax.generate(model, "the", assistant_model=model)': "draft_model=tsjax.load(...)",
    'tsjax.generate(model, "the", prompt_lookup_num_tokens=3)': "method='ngram'",
    'tsjax.generate(model, "the", stopping_criteria=[])': "tsjax.stream(...)",
    'tsjax.generate(model, "the", penalty_alpha=0.6)': "contrastive",
    'tsjax.generate(model, "the", tokenizer=1)': "has its own",
    # vLLM
    "tsjax.LLM(path)": "tsjax.load(path)",
    "tsjax.SamplingParams(n=3)": "arguments of tsjax.generate",
    'tsjax.generate(model, "the", max_tokens=9)': "max_new_tokens",
    'tsjax.generate(model, "the", sampling_params=1)': "temperature=",
    'tsjax.generate(model, "the", stop=["a"])': "stop_strings",
    'tsjax.generate(model, "the", ignore_eos=True)': "eos_token_id=()",
    'tsjax.generate(model, "the", tools=[{}])': "apply_chat_template",
    'tsjax.generate(model, "the", temperature=0.7)': "do_sample=True",
    "tsjax.load(path, tensor_parallel_size=2)": "mesh=",
    "tsjax.load(path, max_model_len=8)": "leave it out",
    # llama.cpp
    "tsjax.Llama(path)": "tsjax.load(path)",
    'tsjax.generate(model, "the", n_predict=9)': "max_new_tokens",
    'tsjax.generate(model, "the", repeat_penalty=1.1)': "repetition_penalty",
    "tsjax.load(path, n_gpu_layers=99)": "leave it out",
    "tsjax.load(path, lora_path=path)": "adapter=",
    # trainers in JAX
    "tsjax.rollout(model, ['the'], n=8)": "write group",
    "model.apply({}, [[1]])": "tsjax.forward(model, tokens)",
    "tsjax.load(path, tempo=3)": "unknown argument 'tempo'",
    # names in other letters
    "tsjax.Ngram()": "write tsjax.NGram",
    "tsjax.medusa()": "write tsjax.methods.Medusa",
}  # fmt: skip


@pytest.mark.parametrize("line", ANSWERED)
def test_it_is_answered_by_what_to_write(line, model, folder):
    with pytest.raises((AttributeError, TypeError, ValueError, NotImplementedError)) as caught:
        eval(line, {"tsjax": tsjax, "jax": jax, "model": model, "path": folder})
    said = str(caught.value)
    assert ANSWERED[line] in said
    assert "\n" not in said and len(said) < 300


# --- what is meant ------------------------------------------------------------------------------


def test_other_words_for_greedy_and_for_defaults(model):
    greedy = tsjax.GenerationConfig(max_new_tokens=4)
    for said in (
        dict(temperature=0), dict(temperature=0.0, do_sample=True, top_p=0.5, top_k=3),
        dict(top_k=None, seed=None, temperature=None, repetition_penalty=None),
    ):  # fmt: skip
        assert tsjax.GenerationConfig(max_new_tokens=4, **said) == greedy
        assert greedy.replace(**said) == greedy
    assert tsjax.GenerationConfig(do_sample=True).replace(temperature=0).do_sample is False


def test_a_config_of_transformers(model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.7)
    wanted = tsjax.GenerationConfig.from_hf(theirs)
    found = tsjax.generate(model, "the", config=theirs, seed=3)
    again = tsjax.generate(model, "the", config=wanted, seed=3)
    assert found.tokens[0].tolist() == again.tokens[0].tolist() and len(found.tokens[0]) <= 5
    with pytest.raises(TypeError, match="config={}.* transformers'"):
        tsjax.generate(model, "the", config={})


def test_types_of_torch(folder):
    torch = pytest.importorskip("torch")
    assert tsjax.load(folder, dtype=torch.bfloat16).cfg.dtype == "bfloat16"


def test_every_advice_is_a_line_about_what_exists():
    names = {*tsjax.__all__, *dir(tsjax)}
    for table in (HABITS, LOADING, OF_MODEL, OF_PACKAGE):
        for text in table.values():
            assert "\n" not in text
            assert {*re.findall(r"tsjax\.(\w+)\(", text)} <= names
    assert NEUTRAL.keys() <= HABITS.keys()
    assert not HABITS.keys() & {*tsjax.GenerationConfig.__dataclass_fields__}


def test_flags_of_llama_cpp(folder, capsys):
    assert main(["generate", "-m", folder, "-p", "the", "-n", "4", "--quiet"]) == 0
    found = capsys.readouterr().out
    assert main(["generate", folder, "the", "--max-new-tokens", "4", "--quiet"]) == 0
    assert capsys.readouterr().out == found
    with pytest.raises(SystemExit):
        main(["generate", folder, "the", "-p", "the"])
    assert "give the prompt once" in capsys.readouterr().err
