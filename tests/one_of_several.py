# SPDX-License-Identifier: Apache-2.0
"""What one of several processes does in test_processes.py: `one_of_several.py JOB DEVICES ...`."""

import json
import sys

import jax
from helpers import tiny_model

import tsjax
from tsjax.files import weight_files
from tsjax.host import processes

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 4, 5]]
METHODS = {
    "plain": None,
    "ngram": tsjax.NGram(suffix_length=4),
    "tokenswift": tsjax.TokenSwift(tree=(2, 2), draft_budget=24, num_sinks=4),
    "magicdec": tsjax.MagicDec(draft_budget=24),
    "triforce": tsjax.TriForce(draft_budget=32),
    "auto": tsjax.Auto(),
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


def mesh_of(sizes):
    return jax.make_mesh(tuple(map(int, sizes.split(","))), ("data", "model"))


def generate(out, *meshes):
    found = {}
    for sizes in meshes:
        model = tiny_model(mesh=mesh_of(sizes), num_draft_heads=2)
        methods = METHODS if sizes == "2,2" else ("plain", "tokenswift")
        found[sizes] = texts(model, methods)
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
    if processes.is_first():
        with open(out, "w") as file:
            json.dump(found, file)
    else:
        with open(f"{out}.{jax.process_index()}", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    jax.config.update("jax_enable_compilation_cache", False)
    processes.join()
    {"generate": generate, "load": load, "long_run": long_run}[sys.argv[1]](*sys.argv[3:])
