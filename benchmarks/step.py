# SPDX-License-Identifier: Apache-2.0
"""One step of a model of real size on a GPU, by context, against the bytes that it has to read.

* plain: the whole step of plain decoding;
* draft: the draft pass on the partial cache, one row and its logits;
* verify: a pass of T rows on the whole cache and their logits;
* tokenswift: the whole step of the paper's settings for the model, three heads included.

Weights and caches hold random numbers, made on the device: times mean something, tokens do not.
Each kind runs several steps in one program whose state is donated and carried on, as in
`tsjax.generate`; the kinds take turns round by round. The bound is the time to read weights and
cache once (tokenswift: twice, the partial cache the first time) at the bandwidth of a plain copy in
the same run, and beside it at the one of the data sheet.

    python -m benchmarks step --model llama3.1-8b --out benchmarks/results/h200
    python -m benchmarks step --model llama3.1-8b --weights int8 --cache int8 --out ...
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tsjax
from benchmarks import report
from pallas_kernels import narrowed
from tsjax.base.model_config import CACHES
from tsjax.decoding.held import USABLE, held_by_text
from tsjax.decoding.programs import programs as decode_programs
from tsjax.decoding.sampling import sampling_values
from tsjax.files.tensor_names import ROUNDED, with_weights
from tsjax.measure.timing import summary
from tsjax.model.cache import KVCache, cache_bytes
from tsjax.model.params import normal, random_params
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed

MODELS = ("llama3.1-8b", "qwen2.5-1.5b", "qwen2.5-14b")
CONTEXTS = (4096, 32_768, 65_536, 106_496)
ROWS = (1, 8, 16, 41, 64, 101, 128)
NUM_HEADS = 3
RECENT = 256  # tokens whose n-grams are entered before the first step
COMPILE_SHARE = 0.6  # of the time budget; what is not compiled by then is left out


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kind of work that is timed."""

    kind: str  # "plain", "draft", "verify" or "tokenswift"
    rows: int = 1

    @property
    def name(self) -> str:
        return f"verify {self.rows}" if self.kind == "verify" else self.kind


def passes(rows=ROWS) -> list[Pass]:
    """The most important first."""
    found = [Pass("plain"), Pass("draft"), Pass("tokenswift")]
    return found + [Pass("verify", T) for T in sorted(rows, key=lambda T: (T != 64, T != 1, T))]


def read_bytes(kind: str, *, weights: int, heads: int, per_token: int, context: int, budget: int):
    """What a step has to read once. `weights` are those that every pass reads."""
    drafted = weights + per_token * min(budget, context)
    whole = weights + per_token * context
    return {
        "plain": whole,
        "draft": drafted,
        "verify": whole,
        "tokenswift": drafted + heads + whole,
    }[kind]


def caught_up(
    state: tsjax.steps.DecodeState, cfg: tsjax.steps.DecodeConfig
) -> tsjax.steps.DecodeState:
    """The state with a memory that knows all tokens, as after a step in the midst of a run."""
    method, memory = cfg.method, cfg.method.read(cfg.model, None, state.memory, state)
    if getattr(memory, "cache", None) is not None:
        cache, most = memory.cache, cfg.sizes.depth + 1
        cache = method.caught_up(cfg.model, None, cache, state.kv, state.tokens, most)
        memory = memory.replace(cache=cache)
    return state.replace(memory=memory)


class Machine:
    """Weights, one cache for every kind of step, and the programs."""

    def __init__(self, model, preset, contexts, slack: int):
        self.model = model.with_heads(NUM_HEADS)
        self.cfgs = {
            "plain": tsjax.steps.DecodeConfig(self.model),
            "tokenswift": tsjax.steps.DecodeConfig(self.model, preset.method),
        }
        self.budget = preset.method.draft_budget
        depth = self.cfgs["tokenswift"].sizes.depth
        # Each step of each run may commit a whole path.
        self.capacity = -(-(max(contexts) + slack * (depth + 1) + depth) // 128) * 128
        self.params = random_params(self.model)
        leaves = jax.tree.leaves(self.params.model)
        self.weight_bytes = sum(leaf.nbytes for leaf in leaves)
        if self.params.model.unembed is not None:
            self.weight_bytes -= self.params.model.embed.nbytes  # one row of it is read
        self.head_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params.heads))
        self.token_bytes = cache_bytes(self.model, 1, 1)
        rng = np.random.default_rng(0)
        # Words follow Zipf's law, as in text.
        words = np.minimum(rng.zipf(1.2, (1, self.capacity)), model.vocab_size - 1)
        self.states = {}
        for kind, cfg in self.cfgs.items():
            state = tsjax.steps.init_state(
                words.astype(np.int32),
                [max(contexts)],
                cfg=cfg,
                capacity=self.capacity,
                max_length=[self.capacity],
                sampling=sampling_values(preset.config, (), model.vocab_size, model.dtype),
            )
            # The cache is one for all kinds: a state is without it while it does not run.
            self.states[kind] = without_cache(state)
            del state
        self.kv: Any = None
        self.fill()
        query = [normal(i, q.shape, self.model.dtype) for i, q in enumerate(self._draft.query)]
        self._set_draft(query=tuple(query))

    @property
    def _draft(self):
        return self.states["tokenswift"].memory.cache

    def _set_draft(self, **changes) -> None:
        state = self.states["tokenswift"]
        memory = state.memory.replace(cache=state.memory.cache.replace(**changes))
        self.states["tokenswift"] = state.replace(memory=memory)

    def fill(self) -> None:
        """Random keys and values in every slot."""
        self.kv = None
        shape = (1, self.model.num_kv_heads, self.capacity, self.model.head_dim)
        layers, is_narrow = range(self.model.num_layers), self.model.cache == "int8"

        def rows(index: int):
            wide = normal(index, shape, self.model.dtype)
            return jax.jit(narrowed)(wide) if is_narrow else wide

        k, v = (tuple(rows(1000 * part + i) for i in layers) for part in (1, 2))
        self.kv = KVCache(k=k, v=v, length=int32([0]))

    def fill_if_lost(self) -> None:
        """After an error, which may have taken the donated cache along."""
        if self.kv is None or self.kv.k[0].is_deleted():
            self.fill()

    # Programs, lowered from the arrays themselves

    def program(self, what: Pass):
        """Compiled for the device that holds the arrays."""
        if what.kind in self.cfgs:
            cfg = self.cfgs[what.kind]
            decode = decode_programs(jax.default_backend(), self.model.dtype).decode
            state = self._with_cache(what.kind)
            return decode.lower(self._params(what.kind), state, int32(1), cfg=cfg).compile()
        run = jax.jit(functools.partial(run_passes, cfg=self.model), donate_argnames="tokens")
        cache = self._draft if what.kind == "draft" else self.kv
        arguments = (self.params.model, self.tokens(what.rows), cache, int32([0]), int32(1))
        return run.lower(*arguments).compile()

    def preparation(self):
        """The program that brings what is remembered for drafts up to a context."""

        def prepare(state):
            return caught_up(state, cfg)

        cfg = self.cfgs["tokenswift"]
        state = self._with_cache("tokenswift")
        return jax.jit(prepare, donate_argnames="state").lower(state).compile()

    def tokens(self, rows: int):
        return jnp.arange(rows, dtype=jnp.int32)[None]

    def _params(self, kind: str):
        return self.params if kind == "tokenswift" else self.params.replace(heads=())

    def _with_cache(self, kind: str):
        state = self.states[kind]
        return state.replace(kv=self.kv.replace(length=state.kv.length))

    def _keep(self, kind: str, state) -> None:
        self.kv = state.kv.replace(length=int32([0]))
        self.states[kind] = without_cache(state)

    # Runs

    def go_to(self, context: int, prepare) -> None:
        """Every kind of step continues after `context` tokens, the last one not in the cache."""
        for kind, state in self.states.items():
            kv = state.kv.replace(length=int32([context - 1]))
            self.states[kind] = state.replace(kv=kv)
        if isinstance(prepare, BaseException):
            return
        self._set_draft(seen=int32([0]))
        memory = self.states["tokenswift"].memory
        if memory.ngrams is not None:
            ngrams = memory.ngrams.replace(entered=int32([max(0, context - 1024 - RECENT)]))
            memory = memory.replace(ngrams=ngrams)
            self.states["tokenswift"] = self.states["tokenswift"].replace(memory=memory)
        self._keep("tokenswift", jax.block_until_ready(prepare(self._with_cache("tokenswift"))))

    def run(self, what: Pass, program, context: int, steps: int) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        if what.kind in self.cfgs:
            state = self._with_cache(what.kind)
            self.kv = None
            state = program(self._params(what.kind), state, int32(steps))
            jax.block_until_ready(state.kv.length)
            seconds = time.perf_counter() - begin
            self._keep(what.kind, state)
            return seconds / steps
        cache = self._draft if what.kind == "draft" else self.kv.replace(length=int32([context]))
        position = int32([context])
        tokens = self.tokens(what.rows)
        begin = time.perf_counter()
        tokens = program(self.params.model, tokens, cache, position, int32(steps))
        jax.block_until_ready(tokens)
        return (time.perf_counter() - begin) / steps


def run_passes(weights, tokens, cache, position, steps, *, cfg):
    """`steps` passes of T rows and their logits; each takes the most probable tokens of the last.

    The rows form a chain, except that every third one is seen by itself alone, as a leaf is.
    """
    order = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    mask = (order <= order[:, None]) & ((order % 3 != 2) | (order == order[:, None]))
    positions = position[:, None] + order

    def step(_, tokens):
        rows = run_rows(weights, cache, tokens, positions, mask, cfg=cfg)
        logits = unembed(weights, final_norm(weights, rows.hidden, cfg=cfg), cfg=cfg)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, steps, step, tokens)


def without_cache(state):
    return state.replace(kv=state.kv.replace(k=(), v=()))


def int32(value):
    return jnp.asarray(value, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    seconds: float  # of one round of one kind
    most_steps: int
    workers: int  # compilations at a time


GPU = Effort(rounds=7, seconds=0.1, most_steps=32, workers=8)
QUICK = Effort(rounds=2, seconds=0.01, most_steps=4, workers=2)


def measure_context(machine: Machine, programs: dict, context: int, effort: Effort) -> dict:
    """{pass: seconds of one step in each round, or an error}."""
    found: dict[Pass, Any] = {}
    calls = {}

    def run(what: Pass, count: int) -> float:
        try:
            return machine.run(what, programs[what], context, count)
        except Exception:
            machine.fill_if_lost()
            raise

    try:
        machine.go_to(context, programs["prepare"])
    except Exception as error:
        # Without its preparation a draft cache holds anything: leave its kinds out.
        found = {what: error for what in programs if what in (Pass("draft"), Pass("tokenswift"))}
        machine.fill_if_lost()
    for what, program in programs.items():
        needs = isinstance(what, Pass) and what.kind in ("draft", "tokenswift")
        if what == "prepare" or what in found:
            continue
        if isinstance(program, BaseException):
            found[what] = program
        elif needs and isinstance(programs["prepare"], BaseException):
            found[what] = programs["prepare"]
        else:
            try:
                run(what, 1)
                seconds = run(what, 2)
            except Exception as error:
                found[what] = error
                continue
            count = max(1, min(effort.most_steps, round(effort.seconds / seconds)))
            calls[what] = functools.partial(run, what, count)
    rounds = report.interleaved(calls, effort.rounds, warmup=0, keep_errors=True)
    return {**rounds.results, **found, **rounds.failed}


def rows_of(context: int, times: dict, machine: Machine, document: dict) -> list[dict]:
    bandwidth, nominal = (document[f"{n}_bytes_per_second"] for n in ("copy", "nominal"))
    rows = []
    plain = times.get(Pass("plain"))
    for what, seconds in times.items():
        row = {"context": context, "pass": what.kind, "rows": what.rows}
        if what.kind == "tokenswift":
            row["rows"] = machine.cfgs["tokenswift"].sizes.width
        if isinstance(seconds, BaseException):
            rows.append({**row, "error": report.first_line(seconds)})
            continue
        nbytes = read_bytes(
            what.kind,
            weights=machine.weight_bytes,
            heads=machine.head_bytes,
            per_token=machine.token_bytes,
            context=context,
            budget=machine.budget,
        )
        median = statistics.median(seconds)
        row |= {
            "ms": summary([1e3 * value for value in seconds]),
            "read_bytes": nbytes,
            "bound_ms": 1e3 * nbytes / bandwidth,
            "over_bound": median * bandwidth / nbytes,
            "nominal_bound_ms": 1e3 * nbytes / nominal if nominal else None,
            "over_nominal_bound": median * nominal / nbytes if nominal else None,
        }
        if isinstance(plain, list):
            row["over_plain"] = median / statistics.median(plain)
        rows.append(row)
    return rows


def bars(rows: list[dict]) -> list[dict]:
    found = []
    for row in rows:
        if "error" in row:
            continue
        if row["pass"] == "plain":
            what, value, bar = "plain step over its bound", row["over_bound"], 1.25
        elif row["pass"] == "verify" and row["rows"] == 64 and "over_plain" in row:
            what, value, bar = "verify pass of 64 rows over a plain step", row["over_plain"], 1.15
        else:
            continue
        what = f"{what}, context {row['context']}"
        found.append({"what": what, "value": value, "bar": bar, "met": value <= bar})
    return found


def print_row(row: dict) -> None:
    start = f"{row['context']:8}  {row['pass']:11}{row['rows']:5}"
    if "error" in row:
        print(f"{start}  {row['error'][:100]}", flush=True)
        return
    nominal = row["over_nominal_bound"]
    print(
        f"{start}{row['ms']['median']:10.3f}{row['bound_ms']:10.3f}{row['over_bound']:9.2f}x"
        + (f"{nominal:10.2f}x" if nominal else f"{'':11}")
        + (f"{row['over_plain']:10.2f}x" if "over_plain" in row else ""),
        flush=True,
    )


def tiny(model, preset):
    """A model and settings that run anywhere."""
    model = dataclasses.replace(
        model, vocab_size=256, embed_dim=64, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, mlp_dim=128, dtype="float32",
    )  # fmt: skip
    method = dataclasses.replace(
        preset.method, tree=(1, 2), draft_budget=64, num_sinks=4, num_ngrams=4
    )
    return model, preset._replace(method=method)


def fitting(contexts, model, limit: float | None) -> tuple[list[int], list[int]]:
    """The contexts whose weights and cache leave a tenth of `limit` bytes free, and the others."""
    if limit is None:
        return sorted(contexts), []
    good = [n for n in contexts if held_by_text(model, 1, n) < USABLE * limit]
    return sorted(good), sorted(set(contexts) - set(good))


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("step", __doc__)
    parser.add_argument("--model", default=MODELS[0], help=f"such as {', '.join(MODELS)}")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of the verify passes")
    parser.add_argument("--weights", choices=("float", *ROUNDED), default="float")
    parser.add_argument("--cache", choices=CACHES, default=CACHES[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    report.add_budget(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.contexts, args.rows = (128, 256), (1, 8)

    report.use_configs()
    is_gpu, budget = report.on_gpu(parser, args.quick), report.Budget(args.minutes)
    effort = QUICK if args.quick else GPU
    model, preset = tsjax.model_preset(args.model), tsjax.preset(args.model)
    if args.quick:
        model, preset = tiny(model, preset)
    model = with_weights(model, args.weights, {}, "").with_cache(args.cache)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit") if is_gpu else None
    contexts, too_long = fitting(args.contexts, model, limit)
    given = dict(weights=args.weights, cache=args.cache)
    held = "-".join(f"{how}-{what}" for what, how in given.items() if how not in ("float", "same"))
    name = f"step-{args.model}" + (held and f"-{held}")
    document = report.begun(is_gpu, model=args.model, dtype=model.dtype, **given)
    document["rows"] += [
        {"context": n, "pass": what.kind, "rows": what.rows, "error": "does not fit the memory"}
        for n in too_long
        for what in passes(args.rows)
    ]
    # A warm-up of three steps, then the rounds, at each context.
    machine = Machine(model, preset, contexts, slack=3 + effort.rounds * effort.most_steps)
    document |= {
        "capacity": machine.capacity,
        "weight_bytes": machine.weight_bytes,
        "head_bytes": machine.head_bytes,
        "cache_bytes_per_token": machine.token_bytes,
        "draft_budget": machine.budget,
    }
    print(f"weights and caches are there after {budget.used:.0f} s", flush=True)
    tasks: dict[Any, Any] = {
        what: functools.partial(machine.program, what) for what in passes(args.rows)
    }
    tasks = {"prepare": machine.preparation, **tasks}
    programs = report.attempt_all(tasks, effort.workers, COMPILE_SHARE * budget.left)
    document["seconds_to_compile"] = budget.used
    finished = not any(isinstance(program, TimeoutError) for program in programs.values())
    print(f"programs are there after {budget.used:.0f} s", flush=True)
    print(
        f"{'context':>8}  {'pass':11}{'rows':>5}{'ms':>10}{'bound':>10}{'over it':>10}"
        f"{'nominal':>11}{'over plain':>11}"
    )
    for context in contexts:
        if budget.is_used_up:
            document["left_out"].append(context)
            print(f"left out: context {context}")
            continue
        times = measure_context(machine, programs, context, effort)
        rows = rows_of(context, times, machine, document)
        for row in rows:
            print_row(row)
        document["rows"] += rows
        document["bars"] = bars(document["rows"])
        report.save(document, args.out, name)
    report.show_bars(document)
    complete = finished and not document["left_out"]
    document |= {"complete": complete, "seconds": budget.used}
    report.write(document, args.out, name)
    report.leave()
