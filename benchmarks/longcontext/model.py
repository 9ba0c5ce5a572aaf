# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on benchmarks/longcontext/tasks.py, from short prompts to long ones.

    python -m benchmarks longcontext_model --out longcontext-model

What comes out follows from the number of updates and the seed alone, never from the clock. --resume
goes on from the last update that was saved, with the same result. Only the answers' tokens count.

First a few layers learn to look things up in short rows, which takes hundreds of updates of little
work. Then they are spread over all layers, between new ones that change nothing yet, and rows get
longer. Positions of most rows have gaps, so that the model meets distances between tokens that no
short row is long enough for; the last updates read rows of thousands of tokens.

The checkpoint is stored in bfloat16 and meant to be read in float32. Beside it lies a metrics file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tsjax
from benchmarks import report
from benchmarks.longcontext.tasks import (
    BEGIN,
    FILLER,
    NAMES,
    TASKS,
    VALUES,
    VOCAB,
    Example,
    Question,
)
from tools.embedded_model.training import first_weights, scheduled
from tsjax.files.whole_files import replacing
from tsjax.model.transformer import ModelWeights, apply_layers, embed, final_norm, unembed
from tsjax.training.saved import write_metrics

CONFIG = tsjax.ModelConfig(
    vocab_size=VOCAB, embed_dim=128, num_layers=16, num_heads=4, num_kv_heads=2, head_dim=32,
    mlp_dim=160, max_positions=65536, norm_eps=1e-5, rope=tsjax.RopeConfig(theta=10_000_000.0),
    tie_embeddings=True,
)  # fmt: skip
LONGEST = 8192  # tokens of a prompt
MOST_STRETCHED = 16  # times as many positions as tokens in a row with gaps, at most


class Phase(NamedTuple):
    """Some updates of a model of so many layers, with rows of one length."""

    layers: int
    length: int
    updates: int


PHASES = (
    Phase(4, 32, 1200), Phase(4, 64, 1500), Phase(4, 128, 1500), Phase(4, 256, 1000),
    Phase(16, 256, 150), Phase(16, 512, 200), Phase(16, 1024, 300), Phase(16, 2048, 200),
    Phase(16, 4096, 100), Phase(16, 8192, 40),
)  # fmt: skip
# More often the tasks that take longest to learn.
SHARES = dict(
    passkey=1, key_values=3, multi_query=3, late_query=2, variable_tracking=3, common_word=1,
    long_copy=2, recall=4,
)  # fmt: skip
ONE_QUESTION = ("passkey", "late_query", "common_word")  # so their context takes all of a row
ROOM = 20  # for the answer then
LONGEST_ANSWER = 17
BLOCK = 128  # queries that attention takes at once in short rows
LOOPS, TURNS = 4, 2  # in long ones a turn has an eighth of them; a loop sees no key after its own
FITS = 512  # tokens of a row whose attention weights are kept for the gradient
SAVE_EVERY = 50


def recall(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """Pairs of names and values, and then their first ones in another order, each with its second:
    the plainest way to look things up.

    Not a task to be measured. No answer follows from where the one before was found.
    """
    known = np.asarray([*NAMES, *VALUES])
    pairs = rng.permutation(known)[: min(length - 1, len(known)) // 2 * 2].reshape(-1, 2).tolist()
    asked = rng.permutation(len(pairs))[:questions]
    context = [BEGIN, *(token for pair in pairs for token in pair)]
    return Example(context, [Question(pairs[i][:1], pairs[i][1:]) for i in asked])


LESSONS = {**TASKS, "recall": recall}


class Batch(NamedTuple):
    """Rows to learn from, [rows, length]: padded on the right; positions have gaps in some."""

    tokens: np.ndarray
    positions: np.ndarray
    counts: np.ndarray  # bool: whether a token is an answer's


def batch_of(rng: np.random.Generator, rows: int, length: int) -> Batch:
    """The context takes a third to two thirds of a row, and as many questions as fit follow it:
    with more answers the model learns to look things up sooner."""
    names, shares = zip(*SHARES.items(), strict=True)
    drawn = rng.choice(len(names), size=rows, p=np.asarray(shares) / sum(shares))
    tokens, counts = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, index in enumerate(drawn):
        size = int(rng.integers(length // 3, 2 * length // 3 + 1))
        if names[index] in ONE_QUESTION:
            size = length - ROOM
        example = LESSONS[names[index]](rng, size, questions=length // 3)
        n = len(example.context)
        tokens[row, :n] = example.context
        for question in example.questions:
            asked = n + len(question.tokens)
            end = asked + len(question.answer)
            if end > length and n > len(example.context):
                break
            asked_and_answered = [*question.tokens, *question.answer]
            tokens[row, n:end] = asked_and_answered[: length - n]
            counts[row, asked:end] = True
            n = end
    return Batch(tokens, _positions(rng, tokens), counts)


def _positions(rng: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Those of the rows; in two thirds with up to eight gaps, before statements or filler."""
    rows, length = tokens.shape
    steps = np.ones((rows, length), np.int64)
    may_follow_a_gap = (tokens < NAMES[0]) | (tokens >= FILLER[0])
    for row in range(rows):
        places = np.flatnonzero(may_follow_a_gap[row, 1:]) + 1
        room = min(LONGEST * 5 // 4, MOST_STRETCHED * length) - length
        if room < 32 or not len(places) or rng.random() < 1 / 3:
            continue
        total = np.exp(rng.uniform(np.log(16), np.log(room)))
        chosen = rng.choice(places, size=min(len(places), int(rng.integers(1, 9))), replace=False)
        steps[row, chosen] += (total * rng.dirichlet(np.ones(len(chosen)))).astype(np.int64)
    return (np.cumsum(steps, axis=1) - 1).astype(np.int32)


# --- the model's passes -----------------------------------------------------------------------


def attention(layer: int, q, k, v):
    """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H], causal, in blocks of queries.

    In long rows, what a block makes is made again for the gradient, as it would not fit. Blocks are
    then turns of loops: of what follows one another XLA finds that it is the same, and keeps it.
    """
    del layer
    T = q.shape[1]
    if T <= FITS:
        starts = range(0, T, BLOCK)
        blocks = [_block(q[:, at : at + BLOCK], k, v, at, min(at + BLOCK, T)) for at in starts]
        return jnp.concatenate(blocks, 1)
    size = -(-T // (LOOPS * TURNS))
    q = jnp.pad(q, ((0, 0), (0, LOOPS * TURNS * size - T), (0, 0), (0, 0)))
    starts = size * jnp.arange(LOOPS * TURNS).reshape(LOOPS, TURNS)
    blocks = jnp.moveaxis(q.reshape(q.shape[0], LOOPS, TURNS, size, *q.shape[2:]), 0, 2)
    mixed = []
    for loop in range(LOOPS):
        seen = min((loop + 1) * TURNS * size, T)

        def turn(block, seen=seen):
            return _block(block[0], k, v, block[1], seen)

        mixed.append(lax.map(jax.checkpoint(turn), (blocks[loop], starts[loop])))
    found = jnp.moveaxis(jnp.stack(mixed), 2, 0)  # [B, LOOPS, TURNS, size, N, H]
    return found.reshape(found.shape[0], -1, *found.shape[4:])[:, :T]


def _block(q, k, v, start, seen: int):
    """Rows from `start` on, which see the first `seen` keys at most."""
    (B, T, N, H), K = q.shape, k.shape[2]
    q = (q * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    k, v = k[:, :seen].transpose(0, 2, 1, 3), v[:, :seen].transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkth,bksh->bkts", q, k, preferred_element_type=jnp.float32)
    row = jnp.tile(start + jnp.arange(T), N // K)
    weights = jax.nn.softmax(jnp.where(row[:, None] >= jnp.arange(seen), scores, -jnp.inf))
    mixed = jnp.einsum("bkts,bksh->bkth", weights.astype(v.dtype), v)
    return mixed.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def logits_of(weights, tokens, positions, cfg):
    """[B, T, V], with no cache."""
    hidden = embed(weights, tokens)
    hidden, *_ = apply_layers(weights, hidden, positions=positions, attend=attention, cfg=cfg)
    return unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnums=(0, 1))
def update(weights, moments, batch: Batch, rate, *, cfg):
    def loss_of(weights):
        targets, wanted = batch.tokens[:, 1:], batch.counts[:, 1:]
        logits = logits_of(weights, batch.tokens[:, :-1], batch.positions[:, :-1], cfg)
        found = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - found
        return jnp.sum(losses * wanted) / jnp.sum(wanted)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    changes, moments = OPTIMIZER.update(gradient, moments, weights)
    return jax.tree.map(lambda w, c: w + rate * c, weights, changes), moments, loss


# For a learning rate of 1.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1.0, b2=0.98, weight_decay=0.02)
)


def spread_out(weights: ModelWeights, cfg: tsjax.ModelConfig, seed: int) -> ModelWeights:
    """The same model with as many layers as `cfg` says: new ones between the old ones."""
    old, layers = len(weights.layers), list(first_weights(cfg, seed).layers)
    layers = [one.replace(o=0 * one.o, down=0 * one.down) for one in layers]
    for number, layer in enumerate(weights.layers, start=1):
        layers[round(number * cfg.num_layers / (old + 1))] = layer
    return weights.replace(layers=tuple(layers))


@functools.partial(jax.jit, static_argnames=("cfg",))
def _guesses(weights, tokens, *, cfg):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jnp.argmax(logits_of(weights, tokens, positions, cfg), axis=-1)


def accuracy(weights, cfg, task: str, length: int, samples: int, seed: int = 1) -> float:
    """The share of an answer's tokens that are the model's best guess, given what comes before."""
    rng = np.random.default_rng([seed, length])
    right = []
    for _ in range(samples):
        example = TASKS[task](rng, length)
        n, count = len(example.prompt), len(example.answer)
        tokens = np.zeros((1, length + LONGEST_ANSWER), np.int32)
        tokens[0, : n + count] = [*example.prompt, *example.answer]
        guesses = np.asarray(_guesses(weights, tokens, cfg=cfg))[0, n - 1 : n - 1 + count]
        right += (guesses == example.answer).tolist()
    return float(np.mean(right))


# --- the run ----------------------------------------------------------------------------------


def phase_at(step: int, phases: Sequence[Phase]) -> Phase:
    """That of the update that follows `step` others."""
    end = 0
    for phase in phases:
        end += phase.updates
        if step < end:
            return phase
    raise ValueError(f"step {step} lies after the last phase")


def part_done(step: int, phases: Sequence[Phase]) -> float:
    """Of the phases with as many layers as the one of this step: each size has its own schedule."""
    layers = phase_at(step, phases).layers
    before = sum(phase.updates for phase in phases if phase.layers < layers)
    return (step - before) / sum(phase.updates for phase in phases if phase.layers == layers)


def config_of(layers: int) -> tsjax.ModelConfig:
    return dataclasses.replace(CONFIG, num_layers=layers)


def train(args: argparse.Namespace, phases: Sequence[Phase]) -> None:
    settings = {
        "phases": [list(phase) for phase in phases], "batch": args.batch, "seed": args.seed,
        "learning_rate": args.learning_rate, "model": CONFIG.to_dict(),
    }  # fmt: skip
    cfg = config_of(phases[0].layers)
    weights = first_weights(cfg, args.seed)
    moments = OPTIMIZER.init(weights)
    step, log, losses = 0, [], []
    args.out.mkdir(parents=True, exist_ok=True)
    state_file = args.out / "state.msgpack"
    if args.resume:
        step, log, weights, moments = _restored(state_file, settings, phases)
        cfg = config_of(len(weights.layers))
    total = sum(phase.updates for phase in phases)
    while step < total:
        layers, length, _ = phase_at(step, phases)
        if layers > cfg.num_layers:
            cfg = config_of(layers)
            weights = spread_out(weights, cfg, args.seed)
            moments = OPTIMIZER.init(weights)
        rng = np.random.default_rng([args.seed, step])
        batch = batch_of(rng, max(1, args.batch // length), length)
        rate = args.learning_rate * float(scheduled(part_done(step, phases), 0.02))
        weights, moments, loss = update(weights, moments, batch, rate, cfg=cfg)
        losses.append(float(loss))
        step += 1
        if step % SAVE_EVERY and step < total:
            continue
        line = {"step": step, "layers": layers, "length": length, "loss": float(np.mean(losses))}
        if step % args.every == 0 or step == total:
            at = max(24, length * 2 // 3)
            line["accuracy"] = {task: accuracy(weights, cfg, task, at, 20) for task in TASKS}
        losses = []
        log.append(line)
        print(json.dumps(line), flush=True)
        write_metrics(str(args.out), log)
        _save(state_file, settings, step, log, weights, moments)
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    model = tsjax.Model(tsjax.Params(model=stored), cfg=cfg)
    tsjax.save(model, args.out / "checkpoint", overwrite=True)


def _save(file: Path, settings, step: int, log, weights, moments) -> None:
    arrays = flax.serialization.to_state_dict((weights, moments))
    content = {
        "settings": json.dumps(settings), "step": step, "log": json.dumps(log),
        "arrays": jax.device_get(arrays),
    }  # fmt: skip
    with replacing(str(file)) as fresh:
        Path(fresh).write_bytes(flax.serialization.msgpack_serialize(content))


def _restored(file: Path, settings, phases: Sequence[Phase]):
    if not file.exists():
        raise SystemExit(f"--resume: {file} is missing; there is nothing to go on with")
    content = cast(dict[str, Any], flax.serialization.msgpack_restore(file.read_bytes()))
    if content["settings"] != json.dumps(settings):
        raise SystemExit(f"--resume: {file} was written with other settings")
    step = content["step"]
    weights = first_weights(config_of(phase_at(step - 1, phases).layers), 0)
    like = weights, OPTIMIZER.init(weights)
    weights, moments = flax.serialization.from_state_dict(like, content["arrays"])
    weights, moments = jax.tree.map(jnp.asarray, (weights, moments))
    return step, json.loads(content["log"]), weights, moments


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("longcontext_model", __doc__)
    parser.add_argument(
        "--phases", nargs="+", default=[":".join(map(str, phase)) for phase in PHASES],
        help="LAYERS:LENGTH:UPDATES, one after the other; layers grow, up to 16",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=2048, help="tokens of an update, if not a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=200, help="updates between evaluations")
    parser.add_argument("--resume", action="store_true", help="go on from what was saved in --out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out FOLDER is needed: the checkpoint goes there")
    phases = [Phase(*map(int, phase.split(":"))) for phase in args.phases]
    grows = [phase.layers for phase in phases]
    if grows != sorted(grows) or grows[-1] > CONFIG.num_layers:
        parser.error(f"--phases={args.phases} is not valid: layers grow, up to {CONFIG.num_layers}")
    train(args, phases)
