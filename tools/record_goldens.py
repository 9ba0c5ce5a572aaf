# SPDX-License-Identifier: Apache-2.0
"""Records what transformers computes for tiny random models of every family, for test_goldens.py.

Needs torch; run by hand in the root of a checkout, where it replaces tests/goldens/:

    python -m tools.record_goldens

Recorded with torch 2.13.0 (CPU), transformers 5.23.0, numpy 2.4.6 and Python 3.11.

Each goldens/<case>.npz holds a model as a HuggingFace folder would, and what transformers makes of
it in float32 with eager attention:

    config                 the config.json
    weights/<name>         the tensors, as float16: they are drawn from the float16 numbers
    prompt, logits         64 tokens and the logits of every position [64, V]
    greedy                 200 tokens that follow the first 8 of the prompt
    margin                 the smallest lead of a greedy token over the runner-up

goldens/processors.npz holds logits [4, 200], the tokens before them and, for each of the settings
in PROCESSORS, what the processors leave of the logits.

This module imports torch inside its functions only, so that tests without torch can read the cases.
"""

from __future__ import annotations

import copy
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "goldens"
PROMPT_TOKENS, GREEDY_PROMPT, GREEDY_TOKENS = 64, 8, 200
LARGEST_ERROR = 1.5e-5  # of transformers' float32 logits: models that amplify rounding prove little
SMALLEST_MARGIN = 1e-3  # far above the difference of two float32 implementations

_COMMON = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 97,
}


def _llama(**changes):
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}
    return {**raw, "attention_bias": False, "mlp_bias": False, **changes}


def _qwen2(**changes):
    raw = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_COMMON}
    window = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}
    return {**raw, **window, "rope_theta": 1e6, "rms_norm_eps": 1e-6, **changes}


def _scaled(factor, positions):
    return {"factor": factor, "original_max_position_embeddings": positions}


def _yarn(factor, positions, **more):
    return {"rope_type": "yarn", **_scaled(factor, positions), **more}


def _llama3(factor, positions):
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    positions = {"original_max_position_embeddings": positions}
    return {"factor": factor, **bounds, **positions, "rope_type": "llama3"}


def _without(raw, *names):
    return {name: value for name, value in raw.items() if name not in names}


# The config.json of each case, written as the published checkpoints of that family write it.
CASES = {
    # Llama 2: every query head has its own keys, and no rope_theta in the file.
    "llama_mha": _llama(num_key_value_heads=4),
    "llama_linear": _llama(rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    # Llama 3.1: rope that is slowed down for long wavelengths; the file names head_dim.
    "llama_llama3": _llama(head_dim=16, rope_theta=500000.0, rope_scaling=_llama3(8.0, 64)),
    # Llama 3.2: the same with shared embeddings.
    "llama_llama3_tied": _llama(
        num_key_value_heads=1,
        tie_word_embeddings=True,
        vocab_size=128,
        rope_theta=500000.0,
        rope_scaling=_llama3(32.0, 128),
    ),
    # YaRN-Llama-2: the old key "type".
    "llama_yarn_type": _llama(
        num_key_value_heads=4,
        max_position_embeddings=1024,
        rope_scaling=dict(_scaled(16.0, 64), type="yarn", finetuned=True),
    ),
    "llama_yarn_attention_factor": _llama(
        rope_theta=10000.0,
        rope_scaling=_yarn(4.0, 128, attention_factor=0.8, beta_fast=16.0, beta_slow=2.0),
    ),
    "llama_yarn_mscale": _llama(
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_theta=10000.0,
        rope_scaling=_yarn(8.0, 64, mscale=1.0, mscale_all_dim=0.7, truncate=False),
    ),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True, rope_theta=10000.0),
    "qwen2": _qwen2(),
    "qwen2_yarn_tied": _qwen2(
        tie_word_embeddings=True,
        vocab_size=128,
        rope_scaling=dict(_scaled(4.0, 128), rope_type="yarn"),
    ),
    # Qwen3: norms of q and k, and heads larger than hidden_size / num_attention_heads.
    "qwen3": {
        **_qwen2(head_dim=16, attention_bias=False, sliding_window=None),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
    },
    "mistral": {
        **_without(_llama(sliding_window=None, rope_theta=1e6), "attention_bias", "mlp_bias"),
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
    },
    # XGen: a Llama whose vocabulary is a little larger than its tokenizer's.
    "xgen": _without(
        _llama(num_key_value_heads=4, vocab_size=113, rms_norm_eps=1e-6, hidden_size=40),
        "num_key_value_heads",
        "rope_scaling",
    ),
    # As transformers 5 writes it: rope_parameters for rope_scaling, dtype for torch_dtype.
    "llama_transformers5": {
        **_without(_llama(head_dim=8), "rope_scaling", "torch_dtype"),
        "dtype": "float32",
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 2.0},
    },
}

# Settings in the names of GenerationConfig; without do_sample only the first three processors run.
PROCESSORS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "suppress_tokens": (3, 5, 199)},
    {"min_new_tokens": 11, "eos_token_id": (0, 7)},  # 10 tokens are new: still too early
    {"min_new_tokens": 10, "eos_token_id": (0, 7)},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_k": 20},
    {"do_sample": True, "top_k": 3, "min_tokens_to_keep": 6},
    {"do_sample": True, "top_p": 0.9},
    {"do_sample": True, "top_p": 0.2, "min_tokens_to_keep": 5, "temperature": 1.4},
    {"do_sample": True, "min_p": 0.1},
    {"do_sample": True, "min_p": 0.6, "min_tokens_to_keep": 4},
    {"do_sample": True, "epsilon_cutoff": 0.01},
    {"do_sample": True, "epsilon_cutoff": 0.3, "min_tokens_to_keep": 3},
    {"do_sample": True, "eta_cutoff": 0.02},
    {"do_sample": True, "eta_cutoff": 0.9, "min_tokens_to_keep": 2, "temperature": 0.5},
    {
        "do_sample": True,
        "repetition_penalty": 1.2,
        "min_new_tokens": 20,
        "eos_token_id": (1, 2),
        "suppress_tokens": (10, 20, 30),
        "temperature": 0.8,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.005,
        "epsilon_cutoff": 0.003,
        "eta_cutoff": 0.002,
        "min_tokens_to_keep": 2,
    },
]
PROCESSOR_PROMPT, PROCESSOR_TOKENS = 20, 30  # 30 tokens are known, the first 20 are the prompt


def random_weights(shapes, seed):
    """Arrays of float16 numbers in float32, large enough that no part of a model is negligible."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name in sorted(shapes):
        values = rng.standard_normal(shapes[name])
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.startswith(("model.embed_tokens", "lm_head")):
            values = 0.4 * values
        else:  # linear layers and their biases
            values = 0.2 * values
        weights[name] = values.astype(np.float16).astype(np.float32)
    return weights


def build(raw, seed):
    """A transformers model of the config.json `raw`, and its weights by name, without duplicates.

    The config is read from a file as any checkpoint's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(raw, file)
        config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    weights = random_weights(shapes, seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(weights[name]))
    # Without this, generation ends at the family's default end token.
    model.generation_config.eos_token_id = None
    return model, weights


def run_logits(model, tokens):
    """Logits [T, V] of a row of tokens."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def run_greedy(model, prompt, max_new_tokens):
    """The new tokens, and by how much each led over the runner-up after all processors."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    best = torch.stack(out.scores)[:, 0].topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).numpy()


def hf_processors(settings, prompt_length):
    """transformers' processors of `settings`, in its order, as a LogitsProcessorList."""
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as hf

    eos = list(settings.get("eos_token_id", ()))
    keep = settings.get("min_tokens_to_keep", 1)
    found = []
    if "repetition_penalty" in settings:
        found.append(hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "min_new_tokens" in settings:
        least = settings["min_new_tokens"]
        found.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, least, eos))
    if "suppress_tokens" in settings:
        found.append(hf.SuppressTokensLogitsProcessor(settings["suppress_tokens"]))
    if settings.get("do_sample"):
        if "temperature" in settings:
            found.append(hf.TemperatureLogitsWarper(settings["temperature"]))
        for name, warper in (
            ("top_k", hf.TopKLogitsWarper),
            ("top_p", hf.TopPLogitsWarper),
            ("min_p", hf.MinPLogitsWarper),
            ("epsilon_cutoff", hf.EpsilonLogitsWarper),
            ("eta_cutoff", hf.EtaLogitsWarper),
        ):
            if name in settings:
                found.append(warper(settings[name], min_tokens_to_keep=keep))
    return LogitsProcessorList(found)


def run_processors(settings, tokens, logits, prompt_length):
    import torch

    processors = hf_processors(settings, prompt_length)
    return processors(torch.from_numpy(tokens), torch.from_numpy(logits)).numpy()


def processor_inputs(seed=0):
    """Tokens [4, 30], which repeat themselves, and logits [4, 200]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60, (4, PROCESSOR_TOKENS))
    return tokens, (3 * rng.standard_normal((4, 200))).astype(np.float32)


def record_case(name):
    """The arrays of one case, with the first seed that is well-conditioned and has no near-tie."""
    raw = CASES[name]
    for seed in range(100):
        model, weights = build(raw, seed)
        prompt = np.random.default_rng(seed).integers(0, raw["vocab_size"], PROMPT_TOKENS)
        logits = run_logits(model, prompt.tolist())
        exact = run_logits(copy.deepcopy(model).double(), prompt.tolist())
        if np.abs(logits - exact).max() > LARGEST_ERROR:
            continue
        greedy, margins = run_greedy(model, prompt[:GREEDY_PROMPT].tolist(), GREEDY_TOKENS)
        # A text that ends in a short cycle tests little of what comes late.
        varied = len(set(greedy[GREEDY_TOKENS // 2 :])) > 20
        if varied and margins.min() > SMALLEST_MARGIN:
            break
    else:
        raise RuntimeError(f"{name}: no seed will do")
    print(f"{name}: seed {seed}, margin {margins.min():.4f}, {len(set(greedy))} distinct tokens")
    return {
        "config": np.asarray(json.dumps(raw)),
        **{f"weights/{key}": value.astype(np.float16) for key, value in weights.items()},
        "prompt": prompt.astype(np.int32),
        "logits": logits,
        "greedy": np.asarray(greedy, np.int32),
        "margin": margins.min(),
    }


def write(name, arrays):
    """As np.savez_compressed, but the same arrays always give the same file."""
    path = FOLDER / f"{name}.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for key, value in arrays.items():
            content = io.BytesIO()
            np.save(content, value)
            archive.writestr(zipfile.ZipInfo(f"{key}.npy"), content.getvalue(),
                             zipfile.ZIP_DEFLATED)  # fmt: skip


def main():
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        write(name, record_case(name))
    tokens, logits = processor_inputs()
    outputs = [run_processors(s, tokens, logits, PROCESSOR_PROMPT) for s in PROCESSORS]
    write("processors", {"tokens": tokens, "logits": logits, "outputs": np.stack(outputs)})


if __name__ == "__main__":
    main()
