# SPDX-License-Identifier: Apache-2.0
"""tsjax bench: methods, lengths and sampling of one checkpoint, measured side by side.

Knows what a measurement is asked for, its cells, and how to print them. Does not know how a run
goes (paired_runs.py). Everything that can be wrong with the question is said before anything runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.config import DTYPES, ModelConfig, check, check_int, one_of
from tsjax.decoding.method import Autoregressive, Method
from tsjax.errors import NotEnoughMemory
from tsjax.files.checkpoint import Model, check_dtype, load
from tsjax.files.presets import model_preset, model_preset_names, preset, preset_names
from tsjax.files.tokenizer import encode
from tsjax.host import peers, processes
from tsjax.host.generation import generate
from tsjax.host.info import facts
from tsjax.host.interrupt import Interrupted
from tsjax.host.measuring import reader
from tsjax.host.memory import SCOPES, available_bytes
from tsjax.host.paired_runs import (
    EVERY,
    PEERS,
    PLAIN,
    SETTINGS,
    Runs,
    by_position,
    compared,
    requested,
)
from tsjax.host.peers import MOST_TOKENS
from tsjax.host.plots import check_plot, plot
from tsjax.host.progress import TimeLeft, in_words
from tsjax.host.request import encode_text, tokenizer_of
from tsjax.host.run import programs_of
from tsjax.host.timing import Rounds, fill, ratios, summary
from tsjax.host.trace import read_trace
from tsjax.input_files import read_text
from tsjax.methods import METHODS
from tsjax.methods.devices import plain_bytes
from tsjax.model.params import abstract_params, random_params
from tsjax.model.sharding import mesh_of

BOUND = "bound"  # the call that reads as many bytes as a plain step
LENGTHS, NEW_TOKENS, ROUNDS = (512, 2048), 512, 3
DEFAULT = (PLAIN, "auto", "ngram", "tokenswift")
STOPPED = (KeyboardInterrupt, Interrupted)
EXACT = ("float32", "float64")
WARM_UP = 1  # rounds
SIMULATED = "simulated acceptance, random weights"
SIMULATED_HEADS = 3  # of a preset, as the paper trains
CHARACTERS = 20  # of a text for each token, at first
BEGINNING = "Once upon a time"
PACKAGES = ("tsjax", "jax", "jaxlib", "numpy", "transformers", "torch")
SECONDS_BETWEEN_LINES = 10


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be measured. Defaults are those of the command.

    Attributes:
      model: a checkpoint; with `simulate` the name of a preset.
      methods: PLAIN, which the others are held against, and names of METHODS; "tokenswift" is the
        paper's settings.
      lengths: tokens of the prompts.
      warm_up: rounds that do not count, before the others.
      settings: of SETTINGS.
      text: a file that prompts are the beginning of; None for a text that the model writes.
      draft_model: a second, smaller checkpoint, for methods that take one.
      peers: whether transformers runs too, where it can.
      peer_tokens: new tokens of its runs at most, as they take long.
      plot: a file.
      simulate: a file with accepted lengths, see `read_trace`.
    """

    model: str
    methods: tuple[str, ...] = DEFAULT
    lengths: tuple[int, ...] = LENGTHS
    new_tokens: int = NEW_TOKENS
    rounds: int = ROUNDS
    warm_up: int = WARM_UP
    settings: tuple[str, ...] = tuple(SETTINGS)
    dtype: str | None = None
    text: str | None = None
    draft_model: str | None = None
    exceed_max_positions: bool = False
    peers: bool = True
    peer_tokens: int = MOST_TOKENS
    plot: str | None = None
    simulate: str | None = None

    def __post_init__(self):
        wanted = one_of((PLAIN, *METHODS))
        for name in self.methods:
            check(name == PLAIN or name in METHODS, "--methods", name, wanted)
        for flag, values in (
            ("--methods", self.methods),
            ("--lengths", self.lengths),
            ("--settings", self.settings),
        ):
            good = bool(values) and len(set(values)) == len(values)
            check(good, flag, " ".join(map(str, values)), "one or more, each once")
        held = f"with {PLAIN} among them, which the others are held against"
        check(PLAIN in self.methods, "--methods", " ".join(self.methods), held)
        takers = [name for name, one in METHODS.items() if one().takes_draft_model]
        if self.draft_model is None:
            with_one = "left out, or with --draft-model PATH"
            check("draft_model" not in self.methods, "--methods", "draft_model", with_one)
        else:
            taken = not set(takers).isdisjoint(self.methods)
            check(taken, "--draft-model", self.draft_model, f"with --methods {' or '.join(takers)}")
        for length in self.lengths:
            check_int(length, "--lengths", 1)
        check_int(self.new_tokens, "--new-tokens", 1)
        check_int(self.rounds, "--rounds", 1)
        check_int(self.warm_up, "--warm-up", 0)
        check_int(self.peer_tokens, "--peer-tokens", 32)
        for name in self.settings:
            check(name in SETTINGS, "--settings", name, one_of(SETTINGS))
        if self.dtype is not None:
            check(self.dtype in DTYPES, "--dtype", self.dtype, one_of(DTYPES))
        if self.plot is not None:
            check_plot(self.plot, "--plot")
        if self.simulate is not None:
            names = model_preset_names()
            only = f"with --simulate-acceptance the name of a preset, {one_of(names)}"
            check(self.model in names, "model", self.model, only)
            check(self.text is None, "--text", self.text, "left out, as a preset has no tokenizer")
            alone = "left out, as drafts are simulated"
            check(self.draft_model is None, "--draft-model", self.draft_model, alone)


def write(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    if processes.is_first():
        print(line, file=sys.stderr, flush=True)


def answer(question: Question, command: str, mesh: jax.sharding.Mesh | None = None) -> int:
    """Measures, prints a line for each cell and one JSON document at the end. Of several processes
    the first one's clock counts.

    Returns the exit code: 1 where a run in float32 or float64 has other tokens than plain decoding,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    asked = _prepared(question, mesh)
    document: dict[str, Any] = {
        "command": command, **facts(PACKAGES), "model": question.model,
        "draft_model": question.draft_model, "dtype": asked.model.cfg.dtype,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(asked.model.params)),
        "mesh": mesh and dict(mesh.shape), "processes": jax.process_count(),
        "simulated": asked.simulated, "new_tokens": question.new_tokens,
        "rounds": question.rounds, "warm_up": question.warm_up,
        "settings": {name: SETTINGS[name] for name in question.settings},
        "text": asked.text, "peak_bytes_are": SCOPES, "complete": False, "rows": [],
        "left_out": list(asked.left_out),
    }  # fmt: skip
    code = 0
    for gone in document["left_out"]:
        write(f"left out: {gone['method']}: {gone['error']}")
    try:
        for row in _measured(asked, document):
            document["rows"].append(row)
            write(line_of(row))
        document["complete"] = True
    except STOPPED as error:
        code = getattr(error, "code", None) or 130
        result = getattr(error, "result", None)
        if isinstance(result, Mapping):  # a run's part until then
            names = ("method", "ms_per_token", "tokens_per_step")
            document["interrupted"] = {name: result[name] for name in names}
            document["interrupted"]["tokens"] = len(result["tokens"])
    except Exception:  # whatever it is: what was measured is not lost
        write(json.dumps(document))
        raise
    write(json.dumps(document))
    if question.plot is not None and document["rows"] and processes.is_first():
        plot_of(document, question.plot)
    differs = [row for row in document["rows"] if row.get("same_tokens") is False]
    if not code and differs and asked.model.cfg.dtype in EXACT:
        note("tsjax: error: runs differ from plain decoding, see same_tokens")
        return 1
    return int(code)


# --- before anything runs -----------------------------------------------------------------------


class Prepared(NamedTuple):
    """Attributes:
    beginning: the prompt of all lengths, as far as it is known; the model writes the rest.
    draft_model: the second one; None without.
    traces: accepted lengths of each method that drafts; {} for real acceptance.
    left_out: what cannot run, and why.
    """

    question: Question
    model: Model
    draft_model: Model | None
    methods: dict[str, Method]
    beginning: np.ndarray
    text: dict[str, Any]
    traces: dict[str, tuple[int, ...]]
    left_out: tuple[dict[str, Any], ...]

    @property
    def simulated(self) -> bool:
        return self.question.simulate is not None

    @property
    def with_peers(self) -> bool:
        return self.question.peers and not self.left_out

    @property
    def with_bound(self) -> bool:
        return mesh_of(self.model.params) is None


def _prepared(question: Question, mesh: jax.sharding.Mesh | None) -> Prepared:
    longest, traces, second = max(question.lengths), {}, None
    methods = {name: _method(name, question) for name in question.methods}
    if question.simulate is not None:
        one_device = "left out with --simulate-acceptance, on one device"
        check(mesh is None, "--mesh", mesh and dict(mesh.shape), one_device)
        traces = read_trace(question.simulate, list(question.methods), "--simulate-acceptance")
        cfg = _shape(question)
        _check_methods(methods, cfg)
        model = Model(random_params(cfg), cfg=cfg)
        words = np.random.default_rng(0).zipf(1.2, longest)  # follow Zipf's law, as in text
        ids = np.minimum(words, cfg.vocab_size - 1).astype(np.int32)
        text = {"name": "random words by Zipf's law"}
        why = "the weights are random ones in memory"
    else:
        model = load(question.model, dtype=question.dtype, mesh=mesh)
        if question.draft_model is not None:
            second = load(question.draft_model, dtype=question.dtype)
        _check_methods(methods, model.cfg)
        ids, text = _beginning(question, model, longest)
        why = peers.why_not(model.path) if mesh is None else "it runs on no mesh"
    for length in question.lengths:
        prompt = np.resize(ids, length)  # its length is what counts
        for setting in question.settings:
            new, beyond = question.new_tokens, question.exceed_max_positions
            one = next((one for one in methods.values() if one.takes_draft_model), Autoregressive())
            one = Autoregressive() if second is None else one
            requested(model, prompt, SETTINGS[setting], one, new, beyond, second)
    gone = [{"method": name, "error": why} for name in PEERS if why and question.peers]
    if mesh is not None:
        gone.append({"method": BOUND, "error": "the devices of a mesh read parts of it each"})
    return Prepared(question, model, second, methods, ids, text, traces, tuple(gone))


def _check_methods(methods: Mapping[str, Method], cfg: ModelConfig) -> None:
    """ValueError for a model that lacks what a method needs. Auto takes what there is."""
    for method in methods.values():
        if not method.chooses:
            method.sizes(cfg)


def _method(name: str, question: Question) -> Method:
    if name == PLAIN:
        return Autoregressive()
    if name == "tokenswift" and question.simulate and question.model in preset_names():
        return preset(question.model).method
    return METHODS[name]()


def _shape(question: Question) -> ModelConfig:
    """Of a preset that fits the question and the memory."""
    cfg = model_preset(question.model).with_heads(SIMULATED_HEADS)
    cfg = dataclasses.replace(cfg, dtype=question.dtype or cfg.dtype)
    check_dtype(cfg.dtype)
    longest, most = max(question.lengths), cfg.max_positions - question.new_tokens
    fits = longest <= most or question.exceed_max_positions
    wanted = f"at most {most}, as the model has {cfg.max_positions} positions"
    check(fits, "--lengths", longest, f"{wanted}; or --exceed-max-positions")
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_params(cfg)))
    free = available_bytes(jax.devices()[0])
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"not enough memory: the weights of {question.model} in {cfg.dtype} are {needed:,} "
            f"bytes, {free:,} are free; a smaller preset, or --dtype bfloat16"
        )
    return cfg


def _beginning(question: Question, model: Model, longest: int) -> tuple[np.ndarray, dict[str, Any]]:
    if question.text is not None:
        text = read_text(question.text)
        check(bool(text), "--text", question.text, "a file with text")
        ids = encode(model.tokenizer, text[: CHARACTERS * longest])  # a long file takes long
        ids = ids if len(ids) >= longest else encode(model.tokenizer, text)
        enough = f"a text of at least the {longest} tokens of --lengths; it has {len(ids)}"
        check(len(ids) >= longest, "--text", question.text, enough)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return np.asarray(ids[:longest], np.int32), {"name": question.text, "sha256": digest}
    if tokenizer_of(model) is None:
        ids = np.random.default_rng(0).integers(model.cfg.vocab_size, size=16, dtype=np.int32)
        return ids[:longest], {"name": "written by the model after 16 random tokens"}
    ids = encode_text(model, BEGINNING, "prompt")
    return ids[:longest], {"name": f"written by the model after {BEGINNING!r}"}


# --- the cells ----------------------------------------------------------------------------------


Cell = tuple[int, str]  # tokens of the prompt, setting


class LeftOut:
    """What could not be measured: into the document, and a line on stdout."""

    def __init__(self, document: dict[str, Any]):
        self._entries = document["left_out"]

    def add(self, method: str, error: Exception | str, **where: Any) -> None:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        self._entries.append({"method": method, **where, "error": why})
        cell = "".join(f", {name}={value}" for name, value in where.items())
        write(f"left out: {method}{cell}: {why}")


def _measured(asked: Prepared, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of each cell, also of one that is interrupted."""
    question, left_out = asked.question, LeftOut(document)
    ids, peer = _written(asked), _peer(asked, left_out)
    kinds = [*asked.methods, *(PEERS if peer else ()), *([BOUND] if asked.with_bound else [])]
    cells = [(length, name) for length in question.lengths for name in question.settings]
    total = question.warm_up + question.rounds
    left = TimeLeft((kind, cell) for cell in cells for kind in kinds for _ in range(total))
    for cell in cells:
        prompt, setting = ids[: cell[0]], cell[1]
        where = {"context": cell[0], "setting": setting}
        calls: dict[str, Callable[[], Any]] = {}
        try:
            runs = _runs(asked, prompt, setting)
            calls = _calls(asked, runs, prompt, setting, peer, left_out)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if processes.are_several() and not isinstance(error, NotEnoughMemory):
                raise  # the others know nothing of it
            left_out.add("all", error, **where)
        for kind in set(kinds) - set(calls):
            left.drop((kind, cell))
        if not calls:
            continue
        found = Rounds({name: [] for name in calls}, {name: [] for name in calls}, {})
        try:
            _take_turns(found, calls, question, cell, left)
        finally:  # also after a signal
            yield from _rows(asked, runs, found, cell)
        for kind, error in found.failed.items():
            left_out.add(kind, error, **where)


def _take_turns(
    found: Rounds, calls: Mapping[str, Callable], question: Question, cell: Cell, left: TimeLeft
) -> None:
    """Fills `found`, and tells the time left now and then."""
    last, rounds, warm_up = time.monotonic(), question.rounds, question.warm_up
    together = processes.are_several()  # an error of one ends all
    for kind, seconds in fill(found, calls, rounds, warm_up, keep_errors=not together):
        left.add((kind, cell), seconds)
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(progress_line(left, kind, cell))
    for kind in found.failed:
        left.drop((kind, cell))
    note(progress_line(left, "", cell))


def _peer(asked: Prepared, left_out: LeftOut) -> peers.Peer | None:
    if not asked.with_peers:
        return None
    try:
        return peers.Peer(str(asked.model.path), asked.model.cfg.dtype)
    except Exception as error:  # of whatever kind: it is theirs
        for name in PEERS:
            left_out.add(name, error)
        return None


def progress_line(left: TimeLeft, kind: str, cell: Cell) -> str:
    where = f"{cell[0]:,} tokens, {cell[1]}" + (f", {kind}" if kind else " done")
    time_left = f"about {in_words(left.seconds)} left" if left.made < left.total else "the end"
    return f"[{left.made} of {left.total} runs, {time_left}: {where}]"


def _written(asked: Prepared) -> np.ndarray:
    """The longest prompt; the model writes what is missing, sampled with seed 0."""
    missing = max(asked.question.lengths) - len(asked.beginning)
    if missing <= 0:
        return asked.beginning
    note(f"[the model writes a text of {missing:,} tokens to begin with]")
    settings = {**SETTINGS["sampled"], "eos_token_id": (), "max_new_tokens": missing}
    written = generate(asked.model, asked.beginning, exceed_max_positions=True, **settings)
    return np.concatenate([asked.beginning, written.tokens[0]])


def _runs(asked: Prepared, prompt: np.ndarray, setting: str) -> Runs:
    new = dict.fromkeys(asked.methods, asked.question.new_tokens)
    model, programs = asked.model, {}
    for name, trace in asked.traces.items():
        lengths = jnp.asarray(trace, jnp.int32)

        def simulated(params, state, steps, *, cfg, lengths=lengths):
            return programs_of(model).simulate(params, state, lengths, steps, cfg=cfg)

        programs[name] = simulated
    settings, beyond = SETTINGS[setting], asked.question.exceed_max_positions
    second = asked.draft_model
    return Runs(model, prompt, settings, asked.methods, new, programs, beyond, second)


def _calls(
    asked: Prepared,
    runs: Runs,
    prompt: np.ndarray,
    setting: str,
    peer: peers.Peer | None,
    left_out: LeftOut,
) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(runs.run, name) for name in asked.methods
    }
    if peer is not None:
        where = {"context": len(prompt), "setting": setting}
        try:
            new = min(asked.question.new_tokens, asked.question.peer_tokens)
            theirs = peers.PeerRuns(peer, prompt, new)
            calls |= theirs.calls(SETTINGS[setting], functools.partial(left_out.add, **where))
        except Exception as error:  # of whatever kind: it is theirs
            for name in PEERS:
                left_out.add(name, error, **where)
    if asked.with_bound:
        nbytes = _plain_bytes(asked, len(prompt))
        rate = reader(nbytes)
        calls[BOUND] = lambda: nbytes / rate()
    return calls


def _plain_bytes(asked: Prepared, length: int) -> float:
    """Of a plain step at the mean context."""
    return plain_bytes(asked.model.cfg, length + asked.question.new_tokens / 2)


def _rows(asked: Prepared, runs: Runs, found: Rounds, cell: Cell) -> Iterator[dict[str, Any]]:
    length, setting = cell
    results = {name: made for name, made in found.results.items() if made}
    bound = [1e3 * seconds for seconds in results.pop(BOUND, [])]
    for row in compared(runs, results):
        name, made = row["method"], results[row["method"]]
        row = {"context": length, "setting": setting, **row, "rounds": len(made)}
        times = [one["ms_per_token"] for one in made]
        if bound:
            pairs = min(len(bound), len(times))
            row["bound_ms"] = summary(bound)
            row["share_of_bound"] = ratios(bound[:pairs], times[:pairs])
            row["bound_bytes"] = _plain_bytes(asked, length)
        if name in asked.methods:
            row |= _of_ours(runs, name, made)
        row["timed_tokens"] = made[0]["made"][-1][0]
        if row["timed_tokens"] > EVERY:
            row["by_position"] = by_position([one["made"] for one in made])
        if asked.simulated:
            del row["same_tokens"], row["parted_at"]
            row["simulated"] = True
            if name in asked.traces:
                trace = asked.traces[name]
                row["trace_tokens_per_step"] = 1 + sum(trace) / len(trace)
        yield row


def _of_ours(runs: Runs, name: str, made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What only our runs tell; counts are of all rounds together."""
    stats = [one["stats"] for one in made]
    steps, drafted = sum(sum(s.steps) for s in stats), sum(s.drafted for s in stats)
    return {
        "accepted_of_drafted": sum(s.accepted for s in stats) / drafted if drafted else None,
        "alpha": stats[0].alpha,
        "accepted_per_step": {
            source: sum(s.accepted_by_source[source] for s in stats) / steps
            for source in stats[0].accepted_by_source
        },
        "accepted_lengths": stats[0].accepted_lengths,
        "peak_bytes": max(one["peak_memory"][0] for one in made),
        "peak_bytes_are": made[0]["peak_memory"][1],
        "prefill_seconds": runs.prefill_seconds,
        "compile_seconds": runs.compile_seconds[name],
    }


# --- what is printed ----------------------------------------------------------------------------


def line_of(row: Mapping[str, Any]) -> str:
    times = row["ms_per_token"]
    spread = f"({times['min']:.2f} to {times['max']:.2f})"
    parts = [
        f"{row['context']:>7} {row['setting']:8} {row['method']:13}{times['median']:9.2f} ms/token "
        f"{spread:19}"
    ]
    over = row.get("speedup_over_plain")
    times_as_fast = f"{over['median']:#5.3g}" if over else ""
    parts.append(f"{times_as_fast:>5}x plain" if over else f"{'':12}")
    parts.append(f"{row['tokens_per_step']:.2f} tokens/step")
    if "share_of_bound" in row:
        parts.append(f"{row['share_of_bound']['median']:4.0%} of the bound")
    if "peak_bytes" in row:
        parts.append(f"{row['peak_bytes'] / 1e6:,.0f} MB")
    sources = [f"{source} {x:.2f}" for source, x in row.get("accepted_per_step", {}).items() if x]
    parts += [f"accepted per step: {', '.join(sources)}"] if sources else []
    if row.get("same_tokens") is False:
        parts.append(f"OTHER TOKENS from {row['parted_at']} on")
    if row.get("gave_up"):
        parts.append(f"went on plainly in {row['gave_up']} of {row['rounds']}")
    if row.get("simulated"):
        parts.append(SIMULATED)
    return "  ".join(parts)


def plot_of(document: Mapping[str, Any], path: str) -> None:
    rows = document["rows"]
    long = [row for row in rows if "by_position" in row]
    long = [row for row in long if _cell_of(row) == _cell_of(long[-1])]
    title = f"{long[-1]['setting']}, after {long[-1]['context']:,} tokens" if long else ""
    simulated = f"{document['model']}: {SIMULATED}" if document["simulated"] else ""
    plot(path, rows, long, title, simulated)


def _cell_of(row: Mapping[str, Any]) -> Cell:
    return row["context"], row["setting"]
