# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on benchmarks/longcontext/tasks.py, from short prompts to long ones.

    python -m benchmarks longcontext_model --out longcontext-model --minutes 60

Only the answers' tokens count. The model is evaluated while it trains, on prompts it has not seen,
by its best guess at every token of the answer; the run ends when all retrieval tasks are above
--enough, or when its time is up. What comes out is a tsjax checkpoint and a metrics file.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from benchmarks.longcontext.tasks import (
    BEGIN,
    NAMES,
    RETRIEVAL,
    TASKS,
    VALUES,
    VOCAB,
    Example,
    Question,
)
from tools.embedded_model.training import Settings as Schedule
from tools.embedded_model.training import (
    first_weights,
    optimizer,
    scheduled,
    token_logits,
    token_losses,
)
from tsjax.training.saved import write_metrics

CONFIG = tsjax.ModelConfig(
    vocab_size=VOCAB, embed_dim=128, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=16,
    mlp_dim=128, max_positions=65536, norm_eps=1e-5, rope=tsjax.RopeConfig(theta=100_000.0),
    tie_embeddings=True,
)  # fmt: skip
# More often the tasks that take longest to learn.
SHARES = dict(
    passkey=1, key_values=3, multi_query=3, late_query=2, variable_tracking=3, common_word=1,
    long_copy=2, repetition=3,
)  # fmt: skip
MORE_OFTEN = 4


def repetition(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """Names and values in any order, and all of them again: the plainest way to look things up.

    Not a task to be measured: every token of the second half is an answer to learn from.
    """
    del questions
    drawn = rng.choice(
        np.asarray([*NAMES, *VALUES]), size=length - 2, replace=length > 200
    ).tolist()
    return Example([BEGIN, *drawn], [Question(drawn[:1], drawn[1:])])


LESSONS = {**TASKS, "repetition": repetition}


def batch_of(rng: np.random.Generator, rows: int, length: int, more: Sequence[str] = ()):
    """tokens [rows, length] padded on the right, and which of them count.

    The context takes a third to two thirds of a row, and as many questions as fit follow it: with
    more answers the model learns to look things up sooner. Tasks in `more` come MORE_OFTEN times as
    often as otherwise.
    """
    often = {name: share * (MORE_OFTEN if name in more else 1) for name, share in SHARES.items()}
    names, shares = zip(*often.items(), strict=True)
    drawn = rng.choice(len(names), size=rows, p=np.asarray(shares) / sum(shares))
    tokens = np.zeros((rows, length), np.int32)
    counts = np.zeros(tokens.shape, bool)
    for row, index in enumerate(drawn):
        size = int(rng.integers(length // 3, 2 * length // 3 + 1))
        example = LESSONS[names[index]](rng, size, questions=length)
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
    return tokens, counts


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnums=(0, 1))
def update(weights, moments, tokens, counts, rate, *, cfg):
    def loss_of(weights):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        losses = token_losses(weights, inputs, targets, positions, cfg)
        wanted = counts[:, 1:]
        return jnp.sum(losses * wanted) / jnp.sum(wanted)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    changes, moments = optimizer(OPTIMIZER).update(gradient, moments, weights)
    return jax.tree.map(lambda w, c: w + rate * c, weights, changes), moments, loss


OPTIMIZER = Schedule(steps=1, weight_decay=0.02)
LONGEST_ANSWER = 17


def accuracy(weights, cfg, task: str, length: int, samples: int = 40, seed: int = 1) -> float:
    """Share of examples whose whole answer is the model's best guess, given what comes before."""
    rng = np.random.default_rng([seed, length])
    examples = [TASKS[task](rng, length) for _ in range(samples)]
    tokens = np.zeros((samples, length + LONGEST_ANSWER), np.int32)
    for row, example in zip(tokens, examples, strict=True):
        n = len(example.prompt)
        row[: n + len(example.answer)] = [*example.prompt, *example.answer]
    guesses = np.asarray(_guesses(weights, tokens, cfg=cfg))
    right = 0
    for row, example in zip(guesses, examples, strict=True):
        n, count = len(example.prompt), len(example.answer)
        right += bool((row[n - 1 : n - 1 + count] == example.answer).all())
    return right / samples


@functools.partial(jax.jit, static_argnames=("cfg",))
def _guesses(weights, tokens, *, cfg):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jnp.argmax(token_logits(weights, tokens, positions, cfg), axis=-1)


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("longcontext_model", __doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 768])
    parser.add_argument("--batch", type=int, default=4096, help="tokens of one update")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--enough", type=float, default=0.95)
    parser.add_argument("--every", type=int, default=100, help="updates between evaluations")
    parser.add_argument("--more", nargs="*", choices=TASKS, default=[], help="practise these more")
    parser.add_argument("--start", help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out FOLDER is needed: the checkpoint goes there")

    rng = np.random.default_rng(args.seed)
    weights = (
        tsjax.load(args.start).params.model if args.start else first_weights(CONFIG, args.seed)
    )
    moments = optimizer(OPTIMIZER).init(weights)
    args.out.mkdir(parents=True, exist_ok=True)
    begin, step, level, log = time.monotonic(), 0, 0, []
    while (minutes := (time.monotonic() - begin) / 60) < args.minutes:
        # Mostly the longest prompts so far, some of the shorter ones.
        length = args.lengths[level if rng.random() < 0.7 else int(rng.integers(level + 1))]
        tokens, counts = batch_of(rng, max(1, args.batch // length), length, args.more)
        rate = args.learning_rate * float(scheduled(minutes / args.minutes, 0.02))
        weights, moments, loss = update(weights, moments, tokens, counts, rate, cfg=CONFIG)
        step += 1
        if step % args.every:
            continue
        found = {
            task: accuracy(weights, CONFIG, task, 2 * args.lengths[level] // 3) for task in TASKS
        }
        record = {"step": step, "minutes": round(minutes, 2), "length": args.lengths[level]}
        log.append({**record, "loss": float(loss), "accuracy": found})
        print(json.dumps(log[-1]), flush=True)
        write_metrics(str(args.out), log)
        save(weights, args.out)
        able = min(found[task] for task in RETRIEVAL) >= args.enough
        if able and level == len(args.lengths) - 1:
            break
        level += able or minutes > args.minutes * (level + 1) / (len(args.lengths) + 1)
        level = min(level, len(args.lengths) - 1)
    save(weights, args.out)


def save(weights, out: Path) -> None:
    """Replaces the checkpoint; the one before is there until the new one is whole."""
    model = tsjax.Model(tsjax.Params(model=weights), cfg=CONFIG)
    tsjax.save(model, out / "checkpoint", overwrite=True)
