# SPDX-License-Identifier: Apache-2.0
"""tsjax against transformers itself, run here in PyTorch on freshly drawn models.

The cases are those of record_goldens.py with other weights, and the checkpoints are written by
save_pretrained. Skipped where torch or transformers is missing.
"""

import numpy as np
import pytest
from test_goldens import apply_processors

import tsjax
from tools import record_goldens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

SEED = 1000  # not one that the recording may have chosen
NEAR_TIE = 1e-4  # two float32 implementations may disagree below such a lead


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make_pair(name, folder, seed=SEED):
    """The same model in transformers and, through a folder, in tsjax."""
    model, _ = record_goldens.build(record_goldens.CASES[name], seed)
    model.save_pretrained(folder)
    return model, tsjax.load(folder)


def draw_prompt(model, length, seed=SEED):
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, length)


def assert_same_tokens(ours, theirs, margins):
    """Equal up to the first near-tie of theirs, after which both are right."""
    ties = np.flatnonzero(margins < NEAR_TIE)
    certain = ties[0] if len(ties) else max(len(ours), len(theirs))
    np.testing.assert_array_equal(ours[:certain], theirs[:certain])
    assert certain > 50 or certain == len(theirs), "a near-tie this early tests nothing"


@pytest.mark.wide  # test_goldens.py has what was recorded of other weights
@pytest.mark.parametrize("name", record_goldens.CASES)
def test_model(name, tmp_path):
    theirs, ours = make_pair(name, tmp_path)
    prompt = draw_prompt(theirs, 64)
    expected = record_goldens.run_logits(theirs, prompt.tolist())
    np.testing.assert_allclose(tsjax.forward(ours, prompt[None])[0], expected, rtol=0, atol=5e-5)

    tokens, margins = record_goldens.run_greedy(theirs, prompt[:8].tolist(), 200)
    result = tsjax.generate(ours, prompt[:8], max_new_tokens=200, eos_token_id=())
    assert_same_tokens(result.tokens[0], tokens, margins)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair("qwen2", tmp_path_factory.mktemp("qwen2"), seed=9)


def test_processors_in_the_order_of_generate(pair):
    """The scores that transformers' generate reports, from the logits that it reports."""
    theirs, _ = pair
    settings = {
        "do_sample": True, "repetition_penalty": 1.3, "min_new_tokens": 7,
        "eos_token_id": (2, 3, 50), "suppress_tokens": (9, 60), "temperature": 0.6, "top_k": 30,
        "top_p": 0.97, "min_p": 0.001, "epsilon_cutoff": 0.002, "eta_cutoff": 0.003,
    }  # fmt: skip
    prompt = draw_prompt(theirs, 12)
    ids = torch.tensor(prompt[None])
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    config = transformers.GenerationConfig(
        max_new_tokens=20, return_dict_in_generate=True, output_logits=True, output_scores=True,
        **asked,
    )  # fmt: skip
    torch.manual_seed(0)
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert len(out.scores) > settings["min_new_tokens"]
    for step in (0, 6, 7, len(out.scores) - 1):
        logits, scores = out.logits[step], out.scores[step]
        known = out.sequences[:, : len(prompt) + step].numpy()
        ours = apply_processors(settings, known, logits.numpy(), len(prompt))
        np.testing.assert_allclose(ours, scores.numpy(), rtol=2e-6)


def draw_settings(rng):
    """Random settings, each switched off half of the time."""
    settings = {
        "repetition_penalty": float(rng.uniform(0.5, 2.0)),
        "min_new_tokens": int(rng.integers(0, 20)),
        "suppress_tokens": tuple(rng.choice(200, 5, replace=False).tolist()),
        "temperature": float(rng.uniform(0.2, 3.0)),
        "top_k": int(rng.integers(1, 300)),
        "top_p": float(rng.uniform(0, 1)),
        "min_p": float(rng.uniform(0, 0.5)),
        "epsilon_cutoff": float(10 ** rng.uniform(-5, -1)),
        "eta_cutoff": float(10 ** rng.uniform(-5, -1)),
        "min_tokens_to_keep": int(rng.integers(1, 8)),
    }
    settings = {name: value for name, value in settings.items() if rng.random() < 0.5}
    return {"do_sample": True, "eos_token_id": (0, 77), **settings}


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(4, 24))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_processors(seed):
    settings = draw_settings(np.random.default_rng(seed))
    tokens, logits = record_goldens.processor_inputs(seed)
    prompt_length = record_goldens.PROCESSOR_PROMPT
    theirs = record_goldens.run_processors(settings, tokens, logits, prompt_length)
    ours = apply_processors(settings, tokens, logits, prompt_length)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, err_msg=str(settings))
