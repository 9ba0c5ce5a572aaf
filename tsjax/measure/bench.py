# SPDX-License-Identifier: Apache-2.0
"""tsjax bench: methods, lengths or prompts, and sampling of one checkpoint, side by side.

Knows the cells of a measurement, how to print them and the file that has them. Does not know what
can be asked (bench_question.py) or how a run goes (paired_runs.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.errors import BadValue, NotEnoughMemory
from tsjax.base.input_files import read_json
from tsjax.base.telling import doing
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.tensor_names import held_as
from tsjax.files.whole_files import write_text
from tsjax.host import processes
from tsjax.host.costs import measured_on
from tsjax.host.device_programs import programs_of
from tsjax.host.generation import generate
from tsjax.host.info import PACKAGES, facts
from tsjax.host.interrupt import Interrupted
from tsjax.host.measuring import device_in
from tsjax.host.memory import SCOPES
from tsjax.host.progress import TimeLeft, in_words
from tsjax.measure import peers
from tsjax.measure.bandwidth import reader
from tsjax.measure.bench_question import BOUND, Prepared, Question, prepare
from tsjax.measure.paired_runs import EVERY, PEERS, SETTINGS, Runs, compared, times_by_position
from tsjax.measure.plots import plot
from tsjax.measure.timing import Rounds, fill, ratios, summary
from tsjax.methods.devices import device_of, estimated, plain_bytes

ENDED = (KeyboardInterrupt, Interrupted)
EXACT = ("float32", "float64")
SIMULATED = "simulated acceptance, random weights"
SECONDS_BETWEEN_LINES = 10
DEAR = 2.0  # plain steps that a pass may take before the bench says so
FEWEST_TOKENS = 8  # of a run, where an answer is shorter: fewer are too few to time
NOT_ASKED = ("plot", "out", "quiet")  # what no figure depends on
CHOOSE_KERNELS = ("TSJAX_NATIVE", "TSJAX_NO_TRITON", "XLA_FLAGS")  # variables


def write(line: str) -> None:
    print(line, flush=True)


def note(line: str, quiet: bool = False) -> None:
    if processes.is_first() and not quiet:
        print(line, file=sys.stderr, flush=True)


def answer(question: Question, command: str, mesh: jax.sharding.Mesh | None = None) -> int:
    """Measures, prints a line for each row and one JSON document at the end, or writes that to a
    file after each cell. Of several processes the first one's clock counts.

    Returns the exit code: 1 where a run in float32 or float64 has other tokens than plain decoding,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    asked = prepare(question, mesh)
    document: dict[str, Any] = {
        "command": command, **facts((*PACKAGES, "torch")), "model": question.model,
        "draft_model": question.draft_model, "dtype": asked.model.cfg.dtype,
        "weights": held_as(asked.model.cfg), "cache": asked.model.cfg.cache,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(asked.model.params)),
        "mesh": mesh and dict(mesh.shape), "processes": jax.process_count(),
        "simulated": asked.simulated, "new_tokens": question.new_tokens,
        "rounds": question.rounds, "warm_up": question.warm_up,
        "settings": {name: SETTINGS[name] for name in question.settings},
        "text": asked.text, "peak_bytes_are": SCOPES, "complete": False, "rows": [],
        "left_out": list(asked.left_out),
    }  # fmt: skip
    code = 0
    for line in too_wide(asked):
        note(f"tsjax: {line}", question.quiet)
    for gone in document["left_out"]:
        write(f"left out: {gone['method']}: {gone['error']}")
    if question.out is not None:
        document["asked"] = asked_of(asked, document)
        go_on_from(question.out, document)
    wide = max(map(len, asked.methods))
    for row in document["rows"]:
        write(line_of(row, wide))
    try:
        for row in _measured(asked, document):
            document["rows"].append(row)
            write(line_of(row, wide))
        document["complete"] = True
    except ENDED as error:
        code = getattr(error, "code", None) or 130
        result = getattr(error, "result", None)
        if isinstance(result, Mapping):  # a run's part until then
            names = ("method", "ms_per_token", "tokens_per_step")
            document["interrupted"] = {name: result[name] for name in names}
            document["interrupted"]["tokens"] = len(result["tokens"])
    except Exception:  # whatever it is: what was measured is not lost
        if question.out is None:
            write(json.dumps(document))
        raise
    if question.prompts is not None:
        document["over_prompts"] = over_prompts(document["rows"])
        for one in document["over_prompts"]:
            write(line_over_prompts(one, wide))
    if question.out is None:
        write(json.dumps(document))
    elif document["complete"]:
        save_bench(document, question.out)
    else:
        note("[go on with the same command]", question.quiet)
    if question.plot is not None and document["rows"] and processes.is_first():
        plot_of(document, question.plot)
    differs = [row for row in document["rows"] if row.get("same_tokens") is False]
    if not code and differs and asked.model.cfg.dtype in EXACT:
        note("tsjax: error: runs differ from plain decoding, see same_tokens")
        return 1
    return int(code)


def too_wide(asked: Prepared) -> Iterator[str]:
    """What to say of settings that are not meant for the device, by the formula for it."""
    model, longest = asked.model, asked.longest
    costs = estimated(model.cfg, device_of(*device_in(model.params)), 1)
    for name, method in asked.methods.items():
        if method.chooses or method.wants_costs or method.takes_draft_model:
            continue
        begun = method.next(measured_on(method, model, longest, 1))
        rows = begun.sizes(model.cfg).width
        times = costs.of_pass(rows, longest) / costs.of_pass(1, longest)
        if times > DEAR:
            yield (
                f"{name}: its {rows} rows take about {times:.1f} times as long as one on this "
                "device: settings for another one, which a GPU's are on a CPU"
            )


# --- the file -----------------------------------------------------------------------------------


def save_bench(document: Mapping[str, Any], path: str) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def asked_of(asked: Prepared, document: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same where a measurement goes on."""
    found = {
        **vars(asked.question), "methods": [*asked.methods], "versions": {**document["versions"]},
        **{name: document[name] for name in ("settings", "text", "mesh", "device", "cpus")},
        "fingerprint": model_fingerprint(asked.model),
        "second": asked.draft_model and model_fingerprint(asked.draft_model),
        "drafters": _digest_of_drafters(asked), "kernels": {
            name: os.environ[name] for name in CHOOSE_KERNELS if name in os.environ
        },
    }  # fmt: skip
    return {name: value for name, value in found.items() if name not in NOT_ASKED}


def _digest_of_drafters(asked: Prepared) -> str:
    """Of what drafts and chooses no token, which a model's fingerprint leaves out."""
    digest = hashlib.sha256(json.dumps(asked.traces).encode())
    for leaf in jax.tree.leaves((asked.model.params.heads, asked.model.params.drafter)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def go_on_from(path: str, document: dict[str, Any]) -> None:
    """Takes over the cells that an earlier run of the same question has written to a file."""
    if not os.path.exists(path):
        return
    known, now = read_json(path), json.loads(json.dumps(document["asked"]))
    then, another = known.get("asked"), "another file, which may be new"
    if not isinstance(then, dict):
        raise BadValue(f"--out={path!r} is not valid: tsjax bench --out wrote none; {another}")
    differs = [
        f"{name} was {then.get(name)!r}, and is {now.get(name)!r}"
        for name in {**then, **now} if then.get(name) != now.get(name)
    ]  # fmt: skip
    if differs:
        said = f"--out={path!r} is of another question"
        raise BadValue(f"{said}: {'; '.join(differs)}. The same flags, or {another}")
    document.update({name: known[name] for name in ("date", "rows", "complete")})
    there = {_cell_of(row) for row in known["rows"]}
    of_cells = [gone for gone in known["left_out"] if _cell_of(gone) in there]
    document["left_out"] = (
        known["left_out"] if known["complete"] else document["left_out"] + of_cells
    )


# --- the cells ----------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Attributes:
    prompt: its number in a file; None for a length of a text.
    context: its tokens.
    """

    prompt: int | None
    context: int
    setting: str

    @property
    def where(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row.get("prompt"), row.get("context", 0), row.get("setting", ""))


def left_out_of(document: dict[str, Any], method: str, error: Exception, **where: Any) -> None:
    """What could not be measured: into the document, and a line on stdout."""
    why = " ".join(str(error).split())[:300] or type(error).__name__
    document["left_out"].append({"method": method, **where, "error": why})
    cell = "".join(f", {name}={value}" for name, value in where.items())
    write(f"left out: {method}{cell}: {why}")


def _measured(asked: Prepared, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of each cell that is not there, also of one that is interrupted."""
    question, leave_out = asked.question, functools.partial(left_out_of, document)
    there = {_cell_of(row) for row in document["rows"]}
    places = [(number, len(prompt)) for number, prompt in asked.prompts.items()]
    places += [(None, length) for length in question.lengths]
    cells = [Cell(*place, setting) for place in places for setting in question.settings]
    cells = [cell for cell in cells if cell not in there]
    if document["complete"] or not cells:
        return
    ids, peer = _written(asked), _peer(asked, leave_out)
    kinds = [*asked.methods, *(PEERS if peer else ()), *([BOUND] if asked.with_bound else [])]
    total = question.warm_up + question.rounds
    left = TimeLeft((kind, cell) for cell in cells for kind in kinds for _ in range(total))
    for cell in cells:
        prompt = ids[: cell.context] if cell.prompt is None else asked.prompts[cell.prompt]
        calls: dict[str, Callable[[], Any]] = {}
        try:
            with doing("preparing the runs"):
                new = _tokens(asked, prompt, cell.setting)
                runs = _runs(asked, prompt, cell.setting, new)
                calls = _calls(asked, runs, prompt, cell, new, peer, leave_out)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if processes.are_several() and not isinstance(error, NotEnoughMemory):
                raise  # the others know nothing of it
            leave_out("all", error, **cell.where)
        for kind in set(kinds) - set(calls):
            left.drop((kind, cell))
        if not calls:
            continue
        found = Rounds({name: [] for name in calls}, {name: [] for name in calls}, {})
        try:
            _take_turns(found, calls, question, cell, left)
        finally:  # also after a signal
            yield from _rows(asked, runs, found, cell, new)
        for kind, error in found.failed.items():
            leave_out(kind, error, **cell.where)
        if question.out is not None:
            save_bench(document, question.out)


def _tokens(asked: Prepared, prompt: np.ndarray, setting: str) -> int:
    """New ones of a run; after a prompt of a file as many as plain decoding answers, its stop token
    among them."""
    question = asked.question
    if question.prompts is None:
        return question.new_tokens
    said = generate(
        asked.model, prompt, method="autoregressive", max_new_tokens=question.new_tokens,
        exceed_max_positions=question.exceed_max_positions, **SETTINGS[setting],
    )  # fmt: skip
    return max(min(FEWEST_TOKENS, question.new_tokens), len(said.tokens[0]))


def _take_turns(
    found: Rounds, calls: Mapping[str, Callable], question: Question, cell: Cell, left: TimeLeft
) -> None:
    """Fills `found`, and tells the time left now and then."""
    last, rounds, warm_up = time.monotonic(), question.rounds, question.warm_up
    together = processes.are_several()  # an error of one ends all
    with doing("measuring", left.total, "runs") as work:
        work.done(left.made)
        for kind, seconds in fill(found, calls, rounds, warm_up, keep_errors=not together):
            left.add((kind, cell), seconds)
            work.done(left.made)
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                note(progress_line(left, kind, cell), question.quiet)
    for kind in found.failed:
        left.drop((kind, cell))
    note(progress_line(left, "", cell), question.quiet)


def _peer(asked: Prepared, leave_out: Callable[..., None]) -> peers.Peer | None:
    if not asked.question.peers or asked.left_out:
        return None
    try:
        with doing("loading transformers' model"):
            return peers.Peer(str(asked.model.path), asked.model.cfg.dtype)
    except Exception as error:  # of whatever kind: it is theirs
        for name in PEERS:
            leave_out(name, error)
        return None


def progress_line(left: TimeLeft, kind: str, cell: Cell) -> str:
    number = "" if cell.prompt is None else f"prompt {cell.prompt}, "
    where = f"{number}{cell.context:,} tokens, {cell.setting}" + (f", {kind}" if kind else " done")
    time_left = f"about {in_words(left.seconds)} left" if left.made < left.total else "the end"
    return f"[{left.made} of {left.total} runs, {time_left}: {where}]"


def _written(asked: Prepared) -> np.ndarray:
    """The longest prompt; the model writes what is missing, sampled with seed 0."""
    missing = max(asked.question.lengths, default=0) - len(asked.beginning)
    if missing <= 0:
        return asked.beginning
    told = f"[the model writes a text of {missing:,} tokens to begin with]"
    note(told, asked.question.quiet)
    settings = {**SETTINGS["sampled"], "eos_token_id": (), "max_new_tokens": missing}
    written = generate(asked.model, asked.beginning, exceed_max_positions=True, **settings)
    return np.concatenate([asked.beginning, written.tokens[0]])


def _runs(asked: Prepared, prompt: np.ndarray, setting: str, new_tokens: int) -> Runs:
    new = dict.fromkeys(asked.methods, new_tokens)
    model, programs = asked.model, {}
    for name, trace in asked.traces.items():
        lengths = jnp.asarray(trace, jnp.int32)

        def simulated(params, state, steps, at_least, *, cfg, lengths=lengths):
            return programs_of(model).simulate(params, state, lengths, steps, cfg=cfg)

        programs[name] = simulated
    settings, beyond = SETTINGS[setting], asked.question.exceed_max_positions
    second = asked.draft_model
    return Runs(model, prompt, settings, asked.methods, new, programs, beyond, second)


def _calls(
    asked: Prepared,
    runs: Runs,
    prompt: np.ndarray,
    cell: Cell,
    new: int,
    peer: peers.Peer | None,
    leave_out: Callable[..., None],
) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(runs.run, name) for name in asked.methods
    }
    if peer is not None:
        try:
            theirs = peers.PeerRuns(peer, prompt, min(new, asked.question.peer_tokens))
            leave_it = functools.partial(leave_out, **cell.where)
            calls |= theirs.calls(SETTINGS[cell.setting], leave_it)
        except Exception as error:  # of whatever kind: it is theirs
            for name in PEERS:
                leave_out(name, error, **cell.where)
    if asked.with_bound:
        nbytes = plain_bytes(asked.model.cfg, cell.context + new / 2)  # at the mean context
        rate = reader(nbytes)
        calls[BOUND] = lambda: nbytes / rate()
    return calls


def _rows(
    asked: Prepared, runs: Runs, found: Rounds, cell: Cell, new: int
) -> Iterator[dict[str, Any]]:
    results = {name: made for name, made in found.results.items() if made}
    bound = [1e3 * seconds for seconds in results.pop(BOUND, [])]
    for row in compared(runs, results):
        name, made = row["method"], results[row["method"]]
        row = {**cell.where, **row, "rounds": len(made)}
        times = [one["ms_per_token"] for one in made]
        if bound:
            row["bound_ms"] = summary(bound)
            row["share_of_bound"] = ratios(bound, times)
            row["bound_bytes"] = plain_bytes(asked.model.cfg, cell.context + new / 2)
        if name in asked.methods:
            row |= _of_ours(runs, name, made)
        row["timed_tokens"] = made[0]["made"][-1][0]
        if row["timed_tokens"] > EVERY:
            row["by_position"] = times_by_position([one["made"] for one in made])
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


def line_of(row: Mapping[str, Any], wide: int = 0) -> str:
    """`wide` is the longest method's name."""
    times = row["ms_per_token"]
    spread = f"({times['min']:.2f} to {times['max']:.2f})"
    place = f"{row['context']:>7}" if "prompt" not in row else f"prompt {row['prompt']:<3}"
    parts = [
        f"{place} {row['setting']:8} {row['method']:{max(wide, 12)}} {times['median']:8.2f} "
        f"ms/token {spread:19}"
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


def over_prompts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each method and setting over all prompts: medians, the least and the most."""
    found = []
    for setting, method in dict.fromkeys((row["setting"], row["method"]) for row in rows):
        some = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        gains = [r["speedup_over_plain"]["median"] for r in some if "speedup_over_plain" in r]
        found.append({
            "setting": setting, "method": method, "prompts": len(some),
            "ms_per_token": summary([row["ms_per_token"]["median"] for row in some]),
            "tokens_per_step": statistics.median(row["tokens_per_step"] for row in some),
            **({"speedup_over_plain": summary(gains)} if gains else {}),
        })  # fmt: skip
    return found


def line_over_prompts(one: Mapping[str, Any], wide: int) -> str:
    over, times = one.get("speedup_over_plain"), one["ms_per_token"]
    gain = ""
    if over:
        gain = f"{over['median']:.2f}x plain ({over['min']:.2f} to {over['max']:.2f})"
    return (
        f"{one['prompts']:>3} prompts {one['setting']:8} {one['method']:{max(wide, 12)}} "
        f"{times['median']:8.2f} ms/token  {gain:27}  {one['tokens_per_step']:.2f} tokens/step"
    )


def plot_of(document: Mapping[str, Any], path: str) -> None:
    rows = document["rows"]
    long = [row for row in rows if "by_position" in row]
    long = [row for row in long if _cell_of(row) == _cell_of(long[-1])]
    title = f"{long[-1]['setting']}, after {long[-1]['context']:,} tokens" if long else ""
    simulated = f"{document['model']}: {SIMULATED}" if document["simulated"] else ""
    plot(path, rows, long, title, simulated)
