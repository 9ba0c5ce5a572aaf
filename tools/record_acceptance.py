# SPDX-License-Identifier: Apache-2.0
"""Records how many drafts are right, for test_acceptance.py.

Run by hand in the root of a checkout, where it replaces tests/goldens/acceptance.json:

    python -m tools.record_acceptance

Recorded with jax 0.10.2 (CPU), numpy 2.4.6 and Python 3.11.

Every method returns the same tokens, so a draft that became worse shows in nothing but how many are
accepted. The file holds, for each case, the tokens of the run, the steps that emitted 0, 1, ...
drafted tokens, and the emitted drafts of each source.

Everything is float64, and a case is recorded only if weights that differ by NUDGE give the same:
no decision is so near a tie that a compiler could turn it, whose float64 differs by about 1e-13.
Sampled tokens also follow from the noise, that is from jax's threefry and from how a position makes
a key. What draws other noise changes the file, and many other tests with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from tsjax.costs import Costs, Line
from tsjax.methods import MagicDec, Medusa, TriForce
from tsjax.model.heads import ParallelHead
from tsjax.model.params import inputs_first, join
from tsjax.model.transformer import declare_model

FILE = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "acceptance.json"
NUDGE = 1e-9  # of each weight's size

# --- two models --------------------------------------------------------------------------------

SMALL_VOCAB = 48


@functools.cache
def small_model() -> tsjax.Model:
    """Made by hand: it likes one successor of each token, and what it attends to changes its mind.

    The embedding is one-hot and the unembedding a table of successors. Attention is sharp, so a
    draft that sees other tokens says something else. The heads follow the table, not quite.
    """
    cfg = tsjax.ModelConfig(
        vocab_size=SMALL_VOCAB, embed_dim=SMALL_VOCAB, num_layers=3, num_heads=6, num_kv_heads=2,
        head_dim=8, mlp_dim=48, max_positions=100_000, norm_eps=1e-5, num_draft_heads=3,
        dtype="float64",
    )  # fmt: skip
    rng = np.random.RandomState(5)  # NumPy keeps what it draws

    def draw(shape, scale):
        return jnp.asarray(rng.randint(-1024, 1025, shape) / 1024 * scale)

    def drawn(spec, scales):
        parts = zip(inputs_first(spec), scales, strict=True)
        return join(spec, [draw(part.shape, scale) for part, scale in parts])

    weights = jax.tree.map(jnp.ones_like, tsjax.steps.init_params(cfg))
    layers = tuple(
        layer.replace(
            qkv=drawn(spec.qkv, (0.9, 0.9, 0.4)),
            o=drawn(spec.o, (0.012,)),
            gate_up=drawn(spec.gate_up, (0.1, 0.1)),
            down=drawn(spec.down, (0.1,)),
        )
        for layer, spec in zip(weights.model.layers, declare_model(cfg).layers, strict=True)
    )
    one_hot, tokens = jnp.eye(SMALL_VOCAB), np.arange(SMALL_VOCAB)
    follows = one_hot[(5 * tokens + 3) % SMALL_VOCAB]
    model = weights.model.replace(
        embed=one_hot, layers=layers, unembed=(draw(one_hot.shape, 0.5) + 1.1 * follows).T
    )
    heads = tuple(
        head.replace(linear=2.0**index * (follows + draw(one_hot.shape, 0.1)).T)
        for index, head in enumerate(weights.heads, start=1)
    )
    return tsjax.Model(tsjax.steps.Params(model, heads), cfg=cfg)


@functools.cache
def small_parallel_model() -> tsjax.Model:
    """The small model with Medusa's heads: each looks up a further successor, not quite."""
    model = small_model()
    cfg = model.cfg.with_heads(2, "parallel")
    rng, tokens = np.random.RandomState(6), np.arange(SMALL_VOCAB)
    follows = np.eye(SMALL_VOCAB)[(5 * tokens + 3) % SMALL_VOCAB]
    heads = tuple(
        ParallelHead(
            block=jnp.asarray(np.linalg.matrix_power(follows, depth).T + _small(rng)),
            block_bias=jnp.asarray(_small(rng)[0]),
        )
        for depth in (1, 2)
    )
    return tsjax.Model(tsjax.steps.Params(model.params.model, heads), cfg=cfg)


def _small(rng: np.random.RandomState) -> np.ndarray:
    return rng.randint(-1024, 1025, (SMALL_VOCAB, SMALL_VOCAB)) / 10240


def first_layer(model: tsjax.Model) -> tsjax.Model:
    """A model of the first layer alone, without heads."""
    weights = model.params.model
    cfg = dataclasses.replace(model.cfg, num_layers=1, num_draft_heads=0)
    return tsjax.Model(tsjax.steps.Params(weights.replace(layers=weights.layers[:1])), cfg=cfg)


@functools.cache
def embedded_model() -> tsjax.Model:
    return tsjax.load(tsjax.EMBEDDED, dtype="float64")


# --- methods --------------------------------------------------------------------------------


class Case(NamedTuple):
    method: Any
    settings: dict[str, Any]
    models: tuple[str, ...] = ("small", "embedded")
    second: bool = False  # whether the model's first layer drafts as a second model


SMALL = ("small",)
# Ten more rows take as long as a plain step, and a pass on few slots a small part of it.
COSTS = Costs(
    passes=((1, Line(0.25, 0.01)), (11, Line(0.5, 0.02))), heads=0.01,
    choice=Line(0.1), suffix=Line(0.01), ngrams=0.01, overhead=0.0, origin="measured",
)  # fmt: skip
CASES = {
    "ngrams": Case(
        tsjax.NGram(num_ngrams=4, ngram_size=3, ngram_slots=6, ngram_delay=9, suffix_length=0),
        {},
    ),
    "ngrams and suffix": Case(
        tsjax.NGram(num_ngrams=3, suffix_length=6, suffix_match=2, pass_widths=(1, 7)),
        dict(do_sample=True, temperature=0.6, top_k=20),
    ),
    # Chosen by importance again and again; second ranks at each depth, n-grams after the draft.
    "partial cache": Case(
        tsjax.TokenSwift(
            tree=(2, 2, 2, 1), draft_budget=20, num_sinks=2, draft_refresh=5,
            num_ngrams=3, ngram_size=4, ngram_delay=0, suffix_length=0,
        ),
        dict(do_sample=True, temperature=0.5),
    ),
    "verified state": Case(
        tsjax.TokenSwift(
            tree=(3, 2, 2), draft_from="verified_state", num_ngrams=3, ngram_size=3,
            suffix_length=0,
        ),
        dict(do_sample=True, temperature=0.7, min_p=0.1),
    ),
    # N-grams wait until they have left the window.
    "several passes": Case(
        tsjax.TokenSwift(
            tree=(2, 2, 1, 1), draft_passes=3, draft_rest=True, draft_budget=24, num_sinks=2,
            num_ngrams=4, ngram_size=4, suffix_length=4, suffix_match=3, suffix_alone=4,
        ),
        dict(
            do_sample=True, temperature=0.8, top_p=0.9, repetition_penalty=1.1,
            repetition_window=12,
        ),
    ),
    "likely text": Case(
        tsjax.LikelyTree(width=8, pass_widths=(1, 3), places=6, costs=COSTS),
        dict(do_sample=True, temperature=0.5),
    ),
    "likely passes and heads": Case(
        tsjax.LikelyTree(
            width=12, pass_widths=(1, 4), places=4, draft_passes=2, heads=True, draft_budget=24,
            num_sinks=2, draft_refresh=6, costs=COSTS,
        ),
        dict(do_sample=True, temperature=0.6, min_p=0.1),
    ),
    "int8 drafts": Case(
        tsjax.TokenSwift(
            tree=(2, 2, 1), draft_passes=2, draft_budget=24, num_sinks=2, draft_weights="int8",
            num_ngrams=0, suffix_length=0,
        ),
        dict(do_sample=True, temperature=0.6, min_p=0.05),
        ("embedded",),  # many weights of the small one lie between two steps of int8
    ),
    "streaming": Case(
        MagicDec(draft_budget=24, num_sinks=2), dict(do_sample=True, temperature=0.6), SMALL
    ),
    "snapkv": Case(
        MagicDec(draft_choice="snapkv", draft_budget=40, num_sinks=2, draft_refresh=9),
        dict(do_sample=True, temperature=0.6),
        SMALL,
    ),
    "retrieval once": Case(
        TriForce(draft_budget=32), dict(do_sample=True, temperature=0.6, top_k=20), SMALL
    ),
    "retrieval again": Case(
        TriForce(draft_budget=32, draft_refresh=None, inner_budget=40, inner_sinks=2),
        dict(do_sample=True, temperature=0.6, top_k=20),
        SMALL,
        second=True,
    ),
    "medusa": Case(
        Medusa(tree=((0,), (0, 0), (0, 1), (1,), (1, 0), (2,))),
        dict(do_sample=True, temperature=0.6, min_p=0.05),
        ("small, parallel heads",),
    ),
    "second model": Case(tsjax.DraftModel(), dict(do_sample=True, temperature=0.6), SMALL, True),
    "second model, a part": Case(
        tsjax.DraftModel(length=3, draft_choice="importance", draft_budget=24, num_sinks=2),
        dict(do_sample=True, temperature=0.6, repetition_penalty=1.1, repetition_window=12),
        SMALL,
        True,
    ),
}  # fmt: skip
TEXT = """\
It was a dark night, and the wind was high. The old man sat by the fire and looked at the door. "I \
shall not go," said he; "the night is dark, and the wind is high, and the door is shut." The old \
woman looked at the fire and said nothing. The old man sat by the fire and looked at her."""
SMALL_PROMPT = np.random.RandomState(0).randint(0, SMALL_VOCAB, 60).tolist()
MODELS = {
    "small": (small_model, SMALL_PROMPT, 300),
    "small, parallel heads": (small_parallel_model, SMALL_PROMPT, 300),
    "embedded": (embedded_model, TEXT, 80),
}


def run(model_name: str, case_name: str, nudge: float = 0.0, **changes) -> dict[str, Any]:
    """What the file holds for one case; `nudge` changes each weight by up to this share of it, and
    `changes` are other settings of `generate`."""
    make, prompt, new_tokens = MODELS[model_name]
    method, settings, _, second = CASES[case_name]
    with jax.enable_x64(True):
        model = make()
        if nudge:
            rng = np.random.RandomState(1)
            params = jax.tree.map(
                lambda x: x * (1 + nudge * rng.uniform(-1, 1, x.shape)), model.params
            )
            model = model.replace(params=params)
        result = tsjax.generate(
            model, prompt, method=method, max_new_tokens=new_tokens, eos_token_id=(),
            capacity=512, prefill_width=64, draft_model=first_layer(model) if second else None,
            **settings, **changes,
        )  # fmt: skip
    return {
        "accepted_lengths": list(result.stats.accepted_lengths),
        "by_source": result.stats.accepted_by_source,
        "tokens": result.tokens[0].tolist(),
    }


def main():
    entries = []
    for model in MODELS:
        for case in (name for name in CASES if model in CASES[name].models):
            found = run(model, case)
            if run(model, case, NUDGE) != found:
                raise SystemExit(f"{model}: {case}: a near-tie; choose another seed or prompt")
            entries.append(f'"{model}: {case}": {json.dumps(found)}')
    FILE.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
