# SPDX-License-Identifier: Apache-2.0
"""Tiny models and tokenizers, and a slow NumPy decoder that shares no code with tsjax.

`tiny_model` has random weights; `chain_model` says exactly what the test wants it to say; `oracle`
decodes without a cache, one full pass in float64 per token, with naive processors. Nothing here
reads a file that is not made here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from pallas_kernels import native
from tsjax.decoding.noise import position_noise
from tsjax.methods.cost_model import Costs, Line
from tsjax.steps import sampling_values

VOCAB = 61

# --- models ----------------------------------------------------------------------------------

# One table of shapes for what is compared run by run, so that its programs are shared.
LOOPING = dict(vocab_size=24, embed_dim=24, mlp_dim=32)
SIZES = dict(capacity=128, prefill_width=16)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 4, 5], [6]]

# Seconds of every part of a step, each another number.
MIXED_COSTS = Costs(
    passes=((1, Line(10.0, 0.5)), (4, Line(16.0, 0.5)), (8, Line(24.0, 1.5))),
    heads=3.0,
    choice=Line(2.0, 0.25),
    suffix=Line(0.125, 0.001),
    ngrams=0.75,
    overhead=4.0,
    origin="measured",
)


def tiny_config(**changes) -> tsjax.ModelConfig:
    return tsjax.ModelConfig(
        **{
            "vocab_size": VOCAB,
            "embed_dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "mlp_dim": 48,
            "max_positions": 100_000,
            "norm_eps": 1e-5,
            **changes,
        }
    )


def tiny_model(*, seed: int = 0, mesh=None, stop_ids=(), path=None, **changes) -> tsjax.Model:
    """Random weights, large enough for logits that differ clearly from token to token."""
    cfg = tiny_config(**changes)
    params = tsjax.steps.init_params(cfg, seed=seed, scale=0.4, mesh=mesh)
    return tsjax.Model(params, cfg=cfg, stop_ids=stop_ids, path=path)


def looping_model(*, seed: int = 2, mesh=None, stop_ids=(), path=None, **changes) -> tsjax.Model:
    """Mostly continues token t with 5 t + 3, so that drafts are accepted also when sampling.

    The layers are random, and change its mind now and then.
    """
    cfg = tiny_config(**{**LOOPING, **changes})
    params, V = tsjax.steps.init_params(cfg, seed=seed, scale=0.1), cfg.vocab_size
    table = 0.3 * np.random.default_rng(seed).standard_normal((V, V))
    table[np.arange(V), (5 * np.arange(V) + 3) % V] += 1.2
    weights = params.model.replace(
        embed=jnp.eye(V, dtype=cfg.dtype), unembed=jnp.asarray(table.T, cfg.dtype)
    )
    params = params.replace(model=weights)
    if params.drafter is not None:
        params = params.replace(drafter=_knowing_drafter(params, cfg.drafter.words, cfg.dtype))
    if mesh is not None:
        placed = tsjax.steps.init_params(cfg, mesh=mesh)
        params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, placed)
    return tsjax.Model(params, cfg=cfg, stop_ids=stop_ids, path=path)


def _knowing_drafter(params: tsjax.steps.Params, words: int, dtype: str):
    """It knows what mostly follows each token, of all tokens but a few; its layer is random."""
    V = len(params.model.embed)
    said = np.random.default_rng(1).permutation(V)[:words].astype(np.int32)
    return params.drafter.replace(
        token=jnp.eye(V, dtype=dtype), words=jnp.asarray(said), unembed=params.model.unembed[said]
    )


def chain_model(successor: Mapping[int, int], *, vocab_size: int = VOCAB, **kwargs) -> tsjax.Model:
    """A model whose greedy token depends on the last token alone: `successor[token]`, else 0.

    The layers add nothing, the embedding is one-hot, and the unembedding is the table.
    """
    cfg = tiny_config(vocab_size=vocab_size, embed_dim=vocab_size, num_layers=1)
    params = tsjax.steps.init_params(cfg)
    weights = jax.tree.map(jnp.zeros_like, params.model)
    table = np.zeros((vocab_size, vocab_size), np.float32)
    for token in range(vocab_size):
        table[token, successor.get(token, 0)] = 1.0
    weights = weights.replace(
        embed=jnp.eye(vocab_size), final_norm=jnp.ones((vocab_size,)), unembed=jnp.asarray(table.T)
    )
    return tsjax.Model(params.replace(model=weights), cfg=cfg, **kwargs)


def chain(*tokens: int) -> dict[int, int]:
    """The table of a model that says `tokens` one after the other."""
    return dict(zip(tokens, tokens[1:], strict=False))


# --- states, without generate ------------------------------------------------------------------


def fresh_state(
    model, texts, *, method=None, capacity=64, max_length=None, prompt_length=None, repeats=None,
    **settings,
) -> tsjax.steps.DecodeState:  # fmt: skip
    """init_state of ragged texts; `settings` are those of GenerationConfig."""
    lengths = np.asarray([len(text) for text in texts], np.int32)
    tokens = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    config = tsjax.GenerationConfig(**settings)
    stop_ids = config.eos_token_id or ()
    return tsjax.steps.init_state(
        tokens,
        lengths if prompt_length is None else prompt_length,
        cfg=tsjax.steps.DecodeConfig(model.cfg, method or tsjax.methods.Autoregressive()),
        capacity=capacity,
        max_length=[capacity] * len(texts) if max_length is None else max_length,
        length=lengths,
        sampling=sampling_values(config, stop_ids, model.cfg.vocab_size, model.cfg.dtype),
        row_key=tsjax.steps.row_keys([config.seed] * len(texts), repeats or range(len(texts))),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "width"))
def prefilled(params, state, *, cfg, width=8):
    return tsjax.steps.prefill(params, state, width=width, cfg=cfg)


@functools.partial(jax.jit, static_argnames="cfg")
def decoded(params, state, num_steps, *, cfg):
    return tsjax.steps.decode(params, state, num_steps, cfg=cfg)


def new_tokens(state) -> list[list[int]]:
    tokens, start, end = map(np.asarray, (state.tokens, state.prompt_length, state.length))
    return [row[a:b].tolist() for row, a, b in zip(tokens, start, end, strict=True)]


# --- the slow decoder ------------------------------------------------------------------------


def oracle_hidden(
    model: tsjax.Model, tokens: Sequence[int], watch: Callable[..., None] | None = None
) -> np.ndarray:
    """The last layer's output [T, D] of one row in float64: dense attention, default RoPE.

    watch(layer, head, q, k, attention) sees what each query head does.
    """
    cfg = model.cfg
    assert cfg.rope.kind == "default"
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params.model)
    T, H = len(tokens), cfg.head_dim
    x = weights.embed[np.asarray(tokens)]

    def norm(x, weight):
        return oracle_norm(x, weight, cfg.norm_eps)

    def rotate(x):  # [T, heads, H]
        turned = np.empty_like(x)
        for pair in range(H // 2):
            angle = np.arange(T) * cfg.rope.theta ** (-2 * pair / H)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            a, b = x[..., pair], x[..., pair + H // 2]
            turned[..., pair], turned[..., pair + H // 2] = a * cos - b * sin, b * cos + a * sin
        return turned

    for index, layer in enumerate(weights.layers):
        h, parts = norm(x, layer.attn_norm), unpacked(layer)
        q, k, v = (np.einsum("td,nhd->tnh", h, parts[name]) for name in "qkv")
        q, k = rotate(q), rotate(k)
        for head in range(cfg.num_heads):
            shared = head // cfg.group_size
            scores = q[:, head] @ k[:, shared].T / math.sqrt(H)
            scores[np.triu_indices(T, 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            if watch is not None:
                watch(index, head, q[:, head], k[:, shared], scores)
            mixed = scores @ v[:, shared]
            x = x + mixed @ layer.o[:, head].T
        h = norm(x, layer.mlp_norm)
        gate, up = h @ parts["gate"].T, h @ parts["up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return x


def unpacked(layer) -> dict[str, np.ndarray]:
    """What lies together in a layer: q [N, H, D], k and v [K, H, D], gate and up [F, D], biases."""
    found = {}
    for end in ("", "_bias"):
        joined = getattr(layer, f"qkv{end}")
        if joined is not None:
            heads = np.asarray(joined)
            of_group = [head[:-2] for head in heads]  # its query heads, before its key and value
            found[f"q{end}"] = np.concatenate(of_group)
            found[f"k{end}"], found[f"v{end}"] = heads[:, -2], heads[:, -1]
        joined = getattr(layer, f"gate_up{end}")
        if joined is not None:
            found[f"gate{end}"], found[f"up{end}"] = np.moveaxis(np.asarray(joined), 1, 0)
    return found


def packed(layer, **parts):
    """The layer with some of its parts replaced, in any shape that has their numbers in order."""
    parts, changed = unpacked(layer) | parts, {}
    K, D = len(layer.qkv), layer.qkv.shape[-1]
    for end, inputs in (("", (D,)), ("_bias", ())):
        if f"q{end}" in parts:
            shape = (K, -1, layer.qkv.shape[2], *inputs)
            heads = [np.reshape(parts[f"{name}{end}"], shape) for name in "qkv"]
            changed[f"qkv{end}"] = jnp.asarray(np.concatenate(heads, axis=1))
        if f"gate{end}" in parts:
            units = [np.reshape(parts[f"{name}{end}"], (-1, *inputs)) for name in ("gate", "up")]
            changed[f"gate_up{end}"] = jnp.asarray(np.stack(units, axis=1))
    return layer.replace(**changed)


def oracle_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def oracle_unembed(model: tsjax.Model, normed: np.ndarray) -> np.ndarray:
    weights = model.params.model
    matrix = weights.embed if weights.unembed is None else weights.unembed
    return normed @ np.asarray(matrix, np.float64).T


def oracle_logits(model: tsjax.Model, tokens: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of one row in float64."""
    weight = np.asarray(model.params.model.final_norm, np.float64)
    hidden = oracle_norm(oracle_hidden(model, tokens), weight, model.cfg.norm_eps)
    return oracle_unembed(model, hidden)


# Each processor for one row of logits, written from transformers' logits_process.py.


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def define_process(logits, history, prompt_length, config):
    """`history` are all tokens before the one to be chosen."""
    x = np.array(logits, np.float64)
    window = config.repetition_window or len(history)
    for token in set(history[max(len(history) - window, 0) :]):
        negative = x[token] < 0
        x[token] *= config.repetition_penalty if negative else 1 / config.repetition_penalty
    if len(history) - prompt_length < config.min_new_tokens:
        x[list(config.eos_token_id or ())] = -np.inf
    x[list(config.suppress_tokens)] = -np.inf
    return x


def define_warp(logits, config):
    """The warped logits, and the smallest relative distance of a decision to its threshold."""
    x = np.array(logits, np.float64) / config.temperature
    keep = min(config.min_tokens_to_keep, len(x))
    order = np.argsort(x, kind="stable")  # ascending
    protected = order[-keep:]
    finite = np.sort(x[np.isfinite(x)])
    slack = np.min(np.diff(finite) / np.maximum(np.abs(finite[1:]), 1), initial=1)

    def remove(doomed, distance):
        nonlocal x, slack
        candidates = np.isfinite(x)
        candidates[protected] = False
        slack = min(slack, np.min(np.abs(distance[candidates]), initial=1))
        x = np.where(doomed & candidates, -np.inf, x)

    if config.top_k:
        kth = np.sort(x)[-min(max(config.top_k, keep), len(x))]
        x = np.where(x < kth, -np.inf, x)
    if config.top_p < 1:
        order = np.argsort(x, kind="stable")
        mass = np.empty(len(x))
        mass[order] = np.cumsum(softmax(x)[order])  # of a token and all that are less probable
        remove(mass <= 1 - config.top_p, mass - (1 - config.top_p))
    if config.min_p:
        threshold = config.min_p * softmax(x).max()
        remove(softmax(x) < threshold, softmax(x) / threshold - 1)
    if config.epsilon_cutoff:
        threshold = config.epsilon_cutoff
        remove(softmax(x) < threshold, softmax(x) / threshold - 1)
    if config.eta_cutoff:
        probs = softmax(x)
        entropy = -sum(p * np.log(p) for p in probs if p > 0)
        threshold = min(config.eta_cutoff, np.sqrt(config.eta_cutoff) * np.exp(-entropy))
        remove(probs < threshold, probs / threshold - 1)
    return x, slack


def oracle_choice(logits, history, prompt_length, config, noise) -> int:
    """The next token, with the processors in HuggingFace's order."""
    scores = define_process(logits, history, prompt_length, config)
    if config.do_sample:
        scores = define_warp(scores, config)[0] + noise
    return int(np.argmax(scores))


def oracle(model: tsjax.Model, prompt: Sequence[int], **settings) -> list[int]:
    """The new tokens of one row.

    Fails where float32 could decide otherwise: a test must not stand on a near-tie.
    """
    config = tsjax.GenerationConfig(**settings)
    stop_ids = model.stop_ids if config.eos_token_id is None else config.eos_token_id
    stop_ids = (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
    config = config.replace(eos_token_id=stop_ids)
    key = tsjax.steps.row_keys([config.seed], [0])
    history = list(prompt)
    nudge = np.random.default_rng(0)
    for _ in range(config.max_new_tokens):
        logits = oracle_logits(model, history)[-1]
        noise = 0.0
        if config.do_sample:
            at = jnp.asarray([[len(history)]])
            noise = np.asarray(position_noise(key, at, len(logits), jnp.float32))[0, 0]
        choices = {
            oracle_choice(nearby, history, len(prompt), config, noise)
            for nearby in [logits, *(logits + nudge.normal(size=(3, len(logits))) * 1e-5)]
        }
        assert len(choices) == 1, f"near-tie at {len(history)}: choose another seed or prompt"
        history += choices
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


# --- a tokenizer -----------------------------------------------------------------------------

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in (*"\n€é".encode(), 0xFF))
LETTERS = ("▁", *"abcdehilnorstuw", "▁t", "he", "▁the", "in", "an", "re", "▁a")
TOKENS = {token: index for index, token in enumerate((*SPECIAL, *BYTES, *LETTERS))}
EOS_ID = TOKENS["</s>"]


def save_tokenizer(folder: Path) -> str:
    """Writes a Llama-like tokenizer: BPE, a space is ▁, unknown characters fall back to bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("a", "n"), ("r", "e"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(TOKENS, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", TOKENS["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",'
        ' "eos_token": "</s>", "unk_token": "<unk>"}'
    )
    return str(folder)


# --- what a test observes ---------------------------------------------------------------------


def assert_same_bits(found, wanted) -> None:
    """With the kernels in C++ of which every sum has one order; in plain XLA it follows shapes."""
    if native.status(try_now=True).state == "ready":
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class RecordingStreamer:
    """Collects what a HuggingFace streamer is given; `on_token(count)` may act in between."""

    def __init__(self, on_token=lambda count: None):
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.ended = False
        self.on_token = on_token

    def put(self, value):
        assert not self.ended
        if self.prompt is None:
            self.prompt = np.asarray(value).tolist()
            return
        self.tokens += np.asarray(value).tolist()
        self.on_token(len(self.tokens))

    def end(self):
        assert not self.ended
        self.ended = True


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the names of the functions that XLA compiles inside the block."""
    names: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith("Finished XLA compilation of "):
                names.append(message.split()[4])

    logger, collector = logging.getLogger("jax"), Collector()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        with jax.log_compiles(True):
            yield names
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate


def entry_computation(hlo: str) -> str:
    """The part of a compiled program's text that runs whatever its loops and conditions do."""
    return hlo[hlo.index("\nENTRY ") :]


# --- compiled programs --------------------------------------------------------------------------

# What these tests look at depends on how operations are fused; conftest.py has other tests do with
# less, where this jax knows how to.
FUSED_AS_FOR_USERS: dict[str, bool | str] = (
    {"xla_cpu_use_fusion_emitters": True}
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", "")
    else {}
)
# What may yield an array of a buffer's shape: names for it, and writing into it in place.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "fusion"}


def operations(executable, array) -> list[str]:
    """The operations of a compiled program that yield an array of this shape and type."""
    names = {"float32": "f32", "bfloat16": "(?:f32|bf16)", "int32": "s32", "int8": "s8"}
    kind = names[str(array.dtype)]
    shape = ",".join(map(str, array.shape))
    return re.findall(rf"= {kind}\[{shape}\]\S* ([a-z-]+)\(", executable.as_text())
