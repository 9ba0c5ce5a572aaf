# SPDX-License-Identifier: Apache-2.0
"""What one of several processes does in test_processes.py: `one_of_several.py JOB DEVICES ...`."""

import contextlib
import json
import sys

import jax
import numpy as np
from any_tree import AnyTree
from helpers import VOCAB, tiny_model

import tsjax
from tsjax.files import weight_files
from tsjax.host import processes

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 4, 5]]
METHODS = {
    "plain": None,
    "any tree": AnyTree(),
    "tokenswift": tsjax.TokenSwift(tree=(2, 2), draft_budget=24, num_sinks=4),
}
SAMPLED = dict(do_sample=True, seed=3, repetition_penalty=1.2, repetition_window=8)
LONG = dict(max_new_tokens=100_000, exceed_max_positions=True, do_sample=True, seed=3)


def texts(model, methods, prompts=PROMPTS):
    """The tokens of each method, sampled; and greedily, of one prompt by plain decoding."""
    how = dict(max_new_tokens=30, logprobs=1)
    made = {name: (prompts, {**SAMPLED, "method": METHODS[name]}) for name in methods}
    made["greedy, one prompt"] = PROMPTS[:1], {}
    found = {
        name: [row.tolist() for row in tsjax.generate(model, some, **own, **how).tokens]
        for name, (some, own) in made.items()
    }
    probable = tsjax.score(model, PROMPTS[0], PROMPTS[1], logprobs=2).logprobs[0].top_tokens
    return {**found, "score": probable.tolist()}


BOOK = np.random.default_rng(0).integers(0, 30, (9, 16))
TRAINING = dict(
    num_heads=1, sequence_length=16, warmup_steps=1, batch_size=4, micro_batch=1, init_scale=0.1
)
LONGER = [1, 2, 3, 4, 5, 6, 7, 8] * 3


def no_fives(logits, tokens, length):
    return logits.at[tokens[length - 1] % 5 * 5].set(-np.inf)


def streamed(model):
    how = dict(method=METHODS["any tree"], max_new_tokens=20)
    by = dict(logits_processor=[tsjax.token_bias({7: 1.5}, VOCAB), no_fives], presence_penalty=0.5)
    chunks = list(tsjax.stream(model, PROMPTS, **how, **by, **SAMPLED))
    return [sum((chunk.tokens[row].tolist() for chunk in chunks), []) for row in range(2)]


def many(model):
    """Prompts of different lengths, of which one does not fit, in a batch of two rows."""
    prompts = [{"ids": LONGER[: 3 + 2 * n], "seed": n, "max_new_tokens": 5 + n} for n in range(5)]
    prompts.insert(2, {"ids": [99]})
    answers = tsjax.generate_many(model, prompts, rows=2, do_sample=True, prefill_width=16)
    return {f"{one.index}": [one.finish_reason, one.tokens.tolist()] for one in answers}


class Enough(Exception):
    pass


def stop_at_two(record):
    if record["step"] == 2:
        raise Enough


def trained(model, folder=None, **more):
    """Losses of heads; of a run with a folder that was stopped and taken up again."""
    how = dict(held_out=BOOK[:3], steps=4, save_to=folder, **TRAINING, **more)
    if folder is not None and "resume" not in more:
        with contextlib.suppress(Enough):
            tsjax.training.train_heads(model, BOOK, on_step=stop_at_two, **how)
        how["resume"] = True
    found = tsjax.training.train_heads(model, BOOK, **how)
    (head,) = found.model.params.heads
    return [
        *(record["head_losses"][0] for record in found.history),
        *(record["loss"] for record in found.evaluation),
        float(np.abs(processes.on_host(head.linear)).sum()),
    ]


def measured_run(model, method, file):
    """A run that is long enough for Auto to measure what a step costs, and how it went."""
    how = dict(max_new_tokens=400, eos_token_id=(), save_to=file)
    made = tsjax.generate(model, PROMPTS, method=method, **how)
    assert not tsjax.check_run(model, file).departures
    how_it_went = repr(made.stats.method), made.stats.steps
    return [row.tolist() for row in made.tokens], how_it_went


def why_not(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def refused(model, folder):
    """What is said of calls that cannot be."""
    part = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    alone, number = tiny_model(), jax.process_index()
    calls = (
        lambda: tsjax.save(model, folder),
        lambda: tiny_model(mesh=part),
        lambda: tsjax.generate(alone, [1]),
        lambda: tsjax.score(alone, [1], [2]),
        lambda: tsjax.training.train_heads(alone, BOOK, steps=2, **TRAINING),
        lambda: tsjax.generate(model, [1 + number]),
        lambda: tsjax.score(model, [1], [1 + number]),
        lambda: tsjax.training.train_heads(model, BOOK[number:], steps=2, **TRAINING),
    )
    return [why_not(call) for call in calls]


def mesh_of(sizes):
    sizes = tuple(map(int, sizes.split(",")))
    return jax.make_mesh(sizes, ("data", "model", "slots")[: len(sizes)])


def generate(out, *meshes):
    found = {}
    for sizes in meshes:
        model = tiny_model(mesh=mesh_of(sizes), num_draft_heads=2)
        found[sizes] = texts(model, METHODS)
    write(out, found)


def calls(out, folder):
    model = tiny_model(mesh=mesh_of("2,2"))
    found = {
        "streamed": streamed(model), "many": many(model), "trained": trained(model, folder),
        "refused": refused(model, f"{folder}-model"),
        "auto": measured_run(model, tsjax.Auto(), f"{out}.run"),
    }  # fmt: skip
    write(out, found)


def load(out, folder, sizes):
    read, rows = [0], weight_files._safetensors_rows

    def counted(*args):
        block = rows(*args)
        read[0] += block.nbytes
        return block

    weight_files._safetensors_rows = counted
    model = tsjax.load(folder, mesh=mesh_of(sizes))
    write(out, {"read": read[0], "texts": texts(model, ["plain"])})


def long_run(out, sizes):
    model = tiny_model(mesh=mesh_of(sizes), max_positions=64)
    tsjax.generate(model, PROMPTS, save_to=out, save_every=50, eos_token_id=(), **LONG)


def write(out, found):
    with open(out if processes.is_first() else f"{out}.{jax.process_index()}", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    jax.config.update("jax_enable_compilation_cache", False)
    processes.meet_others()
    jobs = generate, calls, load, long_run
    {job.__name__: job for job in jobs}[sys.argv[1]](*sys.argv[3:])
