# SPDX-License-Identifier: Apache-2.0
"""A long run that is killed again and again: its tokens, its memory, and what it compiles.

Parts, each of which says on which machine it ran:

* plain: plain decoding in one process, whose tokens the others have to give. Left out where
  results/cpu/longrun.json has the hash of the same run.
* killed: Auto, saved now and then, in many processes. Half of the kills (SIGKILL) fall at a random
  moment within a chunk of steps, after a random number of tokens; the others at any moment of a
  process, while it starts and reads the text, too. SIGINT and SIGTERM come once each. All of them
  come in the first half of the run, so that the last process makes the other half by itself. In
  the first life a second run wants the same file.
* full disk: a short run on a file system of a few pages, which goes on elsewhere.
* whole: Auto in one process from the first token to the last. Left out unless it is asked for.

Each part begins with an empty folder for compiled programs. Memory is read from /proc by the
process that watches. The document is written again after each part, and a part that is there is not
run again. No times are reported: the machine may do other things as well.

    python -m benchmarks soak --out benchmarks/results/cpu
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.soak_life import COUNT
from benchmarks.soak_troubles import (
    ANY_TIME,
    ASKED,
    BY_ITSELF,
    FULL_TOKENS,
    WARM_UP,
    WITHIN,
    growths,
    troubles,
)
from pallas_kernels import native
from pallas_kernels.cache_folder import cache_folder
from tsjax.host.saved_run import read_run
from tsjax.measure.paired_runs import SETTINGS

SETTING = "sampled, penalty"
NEW_TOKENS, PROMPT = 102_400, "Once upon a time"
PARTS = ("plain", "killed", "full disk", "whole")
SAVE_EVERY = 250
SAMPLES = 100  # of memory, from the first token of a run to the last
FULL_BYTES = 16 * 1024  # of a disk that FULL_TOKENS do not fit on twice, as each write needs
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size="$1" none "$2"'
# The disk is gone with the process, so what it had is taken away from it at the end.
ON_A_DISK = f'{MOUNT} && shift 2 && "$@"; code=$?; cp "$SAVED" "$KEPT" && exit $code'
LONGEST_WAIT = 3600.0  # seconds for anything


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("soak", __doc__)
    parser.add_argument("--model", default=tsjax.EMBEDDED)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    text = "default: all but whole, and plain where nothing is recorded"
    parser.add_argument("--parts", nargs="+", choices=PARTS, help=text)
    args = parser.parse_args(argv)
    if args.new_tokens < FULL_TOKENS:
        parser.error(f"--new-tokens {args.new_tokens}: at least {FULL_TOKENS}")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored stays so
    model = tsjax.load(args.model)
    kernels = native.status(try_now=True).state  # which the processes then find
    settings = {**SETTINGS["sampled"], "seed": args.seed}
    asked = {
        "model": Path(args.model).name, "dtype": model.cfg.dtype, "new_tokens": args.new_tokens,
        "prompt": PROMPT, "setting": SETTING, "settings": settings, "kills": args.kills,
        "save_every": SAVE_EVERY, "warm_up": WARM_UP, "kernels": kernels,
    }  # fmt: skip
    document = report.series(args.out, "soak", asked, "parts")
    recorded = recorded_tokens(asked)
    wanted = args.parts or [*(["plain"] if recorded is None else []), "killed", "full disk"]
    for name in wanted:
        if any(one["part"] == name for one in document["parts"]):
            print(f"there already: {name}", file=sys.stderr)
            continue
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        print(f"{name}, in {folder}", file=sys.stderr)
        series = Series(folder, args, settings)
        part = {"part": name, "facts": report.facts(), **RUN[name](series)}
        document["parts"].append(part)
        report.save(judged(document, recorded), args.out, "soak")
        show(part)
        if not document["troubles"]:  # else the files are worth a look
            shutil.rmtree(folder)
    report.write(judged(document, recorded), args.out, "soak")
    for trouble in document["troubles"]:
        print(f"TROUBLE: {trouble}", file=sys.stderr)
    return 1 if document["troubles"] else None


def recorded_tokens(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What longrun.json has of plain decoding's tokens, where it was asked the same."""
    path = report.ROOT / "benchmarks" / "results" / "cpu" / "longrun.json"
    document = json.loads(path.read_text("utf-8"))
    same = {"model": asked["model"], "dtype": asked["dtype"], "tokens": asked["new_tokens"]}
    same |= {"prompt": asked["prompt"], "seed": asked["settings"]["seed"]}
    if any(document[name] != value for name, value in same.items()):
        return None
    for group in document["groups"]:
        if group["group"][0] == asked["setting"] and group["complete"]:
            return {"from": path.name, "facts": group["facts"], "sha256": group["sha256"]}
    return None


def judged(document: dict[str, Any], recorded: dict[str, Any] | None) -> dict[str, Any]:
    """The document, with plain decoding's tokens and what is not as it should be."""
    plain = next((part for part in document["parts"] if part["part"] == "plain"), None)
    if plain is not None:
        recorded = {"from": "plain", "facts": plain["facts"], "sha256": plain["sha256"]}
    document["tokens_of_plain_decoding"] = recorded
    document["troubles"] = troubles(document)
    return document


# --- a process, watched -------------------------------------------------------------------------


class Series:
    """Lives of one run: where they lie, and what they are asked."""

    def __init__(self, folder: Path, args: argparse.Namespace, settings: dict[str, Any]):
        self.folder, self.args, self.settings = folder, args, settings
        self.saved, self.cache = folder / "run.json", folder / "cache"
        self.began, self.number = time.monotonic(), 0
        self.cache.mkdir()
        kept = cache_folder()
        if kept is not None and (kept / "native").exists():
            (self.cache / "native").symlink_to(kept / "native")

    def life(self, method: str = "auto", **changes: Any) -> Life:
        self.number += 1
        name = f"life-{self.number}"
        asked = {
            "model": self.args.model, "prompt": PROMPT, "settings": self.settings,
            "method": method, "tokens": self.args.new_tokens, "save_every": SAVE_EVERY,
            "saved": str(self.saved), "notes": str(self.folder / f"{name}.jsonl"),
            "counter": str(self.folder / f"{name}.count"),
        }  # fmt: skip
        (self.folder / f"{name}.json").write_text(json.dumps(asked))
        program = [sys.executable, "-m", "benchmarks.soak_life", str(self.folder / f"{name}.json")]
        return Life(self, name, program, **changes)

    def tokens_saved(self) -> int:
        return len(read_run(self.saved).tokens[0]) if self.saved.exists() else 0

    def result(self) -> dict[str, Any]:
        """Of the saved file, when all is done."""
        run = read_run(self.saved)
        (tokens,) = run.tokens
        return {
            "new_tokens": len(tokens),
            "finish_reason": run.finish_reason[0],
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
            "sha256_of_first": hashlib.sha256(tokens[:FULL_TOKENS].tobytes()).hexdigest(),
        }

    def programs(self, lives: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """How many programs were made in all lives, and how many different ones are kept."""
        made = Counter(name for life in lives for name, _ in life["made"])
        files = [path.name for path in self.cache.rglob("*-cache")]
        kept = Counter(re.sub(r"^jit_|-[0-9a-f]+-cache$", "", name) for name in files)
        again = {name: count - kept[name] for name, count in made.items() if count > kept[name]}
        return {"made": made.total(), "kept": kept.total(), "made_again": again}


class Life:
    """A process that makes tokens, seen from outside.

    Attributes:
      known: tokens that the file had when it began.
    """

    def __init__(
        self,
        series: Series,
        name: str,
        program: Sequence[str],
        before: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ):
        """`before` is what starts the program in its place."""
        self._series, self._name, self._folder = series, name, series.folder
        self.known = series.tokens_saved()
        self._counter = self._folder / f"{name}.count"
        self._counter.write_bytes(COUNT.pack(self.known))
        (self._folder / f"{name}.jsonl").touch()  # it may end before it has noted anything
        self.began, self.first_token = time.monotonic(), None
        self._memory: list[tuple[int, int]] = []
        self._every = max(1, series.args.new_tokens // SAMPLES)
        # What jax keeps or not is the program's own affair here.
        own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        own |= {"TSJAX_CACHE": str(series.cache), "JAX_PLATFORMS": "cpu", **(env or {})}
        with open(self._folder / f"{name}.err", "wb") as errors:
            self.process = subprocess.Popen(
                [*before, *program], stdout=subprocess.DEVNULL, stderr=errors, env=own,
                cwd=report.ROOT,
            )  # fmt: skip

    @property
    def tokens(self) -> int:
        return COUNT.unpack(self._counter.read_bytes())[0]

    @property
    def errors(self) -> str:
        return self._read("err")

    def _read(self, ending: str) -> str:
        """What it wrote; names of files are those within the folder."""
        text = (self._folder / f"{self._name}.{ending}").read_text("utf-8", "replace")
        return text.replace(f"{self._folder}{os.sep}", "")

    def watch(self, enough: Callable[[], bool]) -> bool:
        """Until there is enough of it; False where it ended before."""
        end = time.monotonic() + LONGEST_WAIT
        while self.process.poll() is None:
            self._look()
            if enough():
                return True
            if time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(f"{self._name} has hung; it said: {self.errors}")
            time.sleep(0.005)
        return False

    def _look(self) -> None:
        tokens = self.tokens
        if tokens > self.known and self.first_token is None:
            self.first_token = time.monotonic()
        latest = self._memory[-1][0] if self._memory else self.known
        if tokens >= latest + (self._every if self._memory else 1):
            found = memory_of(self.process.pid)
            if found is not None:
                self._memory.append((tokens, found))

    def next_chunk(self) -> float:
        """Waits for the next tokens; how many seconds they took, or 0.0 where it ended before."""
        seen, begin = self.tokens, time.monotonic()
        came = self.watch(lambda: self.tokens != seen)
        return time.monotonic() - begin if came else 0.0

    def has_begun(self) -> bool:
        return self.tokens > self.known

    def is_beyond(self, tokens: int, seconds: float = float("inf")) -> bool:
        return self.tokens >= tokens or time.monotonic() >= self.began + seconds

    def end(self, how: str, number: int) -> dict[str, Any]:
        self.process.send_signal(number)
        self.process.wait(LONGEST_WAIT)
        return {**self.told(how), "signal": signal.Signals(number).name}

    def told(self, how: str) -> dict[str, Any]:
        notes = [note for line in self._read("jsonl").splitlines() if (note := whole_note(line))]
        programs = [note for note in notes if "program" in note]
        late = [note for note in programs if note["tokens"] >= self.known + WARM_UP]
        return {
            "begun_after_seconds": round(self.began - self._series.began, 1),
            "tokens_at_begin": self.known,
            "tokens_at_end": self.tokens,
            "tokens_saved": self._series.tokens_saved(),
            "ended": how,
            "exit_code": self.process.returncode,
            "found": sum(note["found"] for note in programs),
            "made": [[note["program"], note["tokens"]] for note in programs if not note["found"]],
            "after_warm_up": [[note["program"], note["tokens"]] for note in late],
            "memory": [list(one) for one in self._memory],
            "result": next((note["ended"] for note in notes if "ended" in note), None),
        }


def whole_note(line: str) -> dict[str, Any] | None:
    """None for the last line of a process that was killed while it wrote."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def memory_of(process: int) -> int | None:
    """Resident bytes; None where it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


# --- the parts ----------------------------------------------------------------------------------


def plain(series: Series) -> dict[str, Any]:
    return in_one_process(series, "autoregressive")


def whole(series: Series) -> dict[str, Any]:
    return in_one_process(series, "auto")


def in_one_process(series: Series, method: str) -> dict[str, Any]:
    lives = [last_life(series, method)]
    return {"lives": lives, "programs": series.programs(lives), **series.result()}


class End(NamedTuple):
    """How a life ends: `after` so many tokens, or after a `share` of the time that the life before
    took until its first token."""

    how: str
    number: int
    after: int
    share: float = 0.0


def planned(tokens: int, kills: int, seed: int) -> list[End]:
    rng = np.random.default_rng(seed)
    within = kills // 2
    places = np.sort(rng.integers(tokens // 100, tokens // 2, within + 2)).tolist()
    asked = rng.choice(len(places), 2, replace=False)
    numbers = dict(zip(asked.tolist(), (signal.SIGINT, signal.SIGTERM), strict=True))
    ends = [
        End(ASKED if i in numbers else WITHIN, numbers.get(i, signal.SIGKILL), place)
        for i, place in enumerate(places)
    ]
    for _ in range(kills - within):
        before = int(rng.integers(1, len(ends)))  # at the latest where the next one ends
        end = End(ANY_TIME, signal.SIGKILL, ends[before].after, float(rng.uniform(0, 2)))
        ends.insert(before, end)
    return ends


def killed(series: Series) -> dict[str, Any]:
    rng = np.random.default_rng(series.args.seed + 1)
    lives: list[dict[str, Any]] = []
    rival, usual = None, 0.0
    for end in planned(series.args.new_tokens, series.args.kills, series.args.seed):
        life = series.life()
        if rival is None:
            life.watch(life.has_begun)
            rival = second_run(series, life)
        if end.how == ANY_TIME:
            life.watch(functools.partial(life.is_beyond, end.after, end.share * usual))
        else:
            life.watch(functools.partial(life.is_beyond, end.after))
            wait(rng.uniform(0, min(life.next_chunk(), 1.0)))
        lives.append(life.end(end.how, end.number))
        show_life(lives[-1])
        if life.process.returncode == 0:
            raise RuntimeError(f"it was through after {len(lives) - 1} ends: more tokens")
        usual = usual if life.first_token is None else life.first_token - life.began
    lives.append(last_life(series))
    found = {"lives": lives, "second_run": rival, "programs": series.programs(lives)}
    return {**found, **series.result()}


def second_run(series: Series, first: Life) -> dict[str, Any]:
    """Wants the file that the first run writes."""
    second = series.life()
    while second.process.poll() is None:
        first.watch(lambda: second.process.poll() is not None)
    said = second.errors.strip().splitlines()
    return {
        "exit_code": second.process.returncode,
        "said": said[-1].partition(": ")[2] if said else "",
        "first_was_there": first.process.poll() is None,
    }


def full_disk(series: Series) -> dict[str, Any]:
    """A file system of a few pages, mounted for one process; the run goes on elsewhere with the
    last file that had room there."""
    series.args = argparse.Namespace(**{**vars(series.args), "new_tokens": FULL_TOKENS})
    disk, kept = series.folder / "disk", series.folder / "kept.json"
    disk.mkdir()
    sizes = ["sh", str(FULL_BYTES), str(disk)]
    probe = subprocess.run([*OWN_MOUNTS, MOUNT, *sizes], capture_output=True, text=True)
    if probe.returncode:
        return {"left_out": f"no file system could be mounted: {probe.stderr.strip()}"}
    series.saved = disk / "run.json"
    env = {"SAVED": str(series.saved), "KEPT": str(kept)}
    first = last_life(series, before=[*OWN_MOUNTS, ON_A_DISK, *sizes], env=env)
    series.saved = kept
    first["tokens_saved"] = series.tokens_saved()
    return {"bytes": FULL_BYTES, "lives": [first, last_life(series)], **series.result()}


def last_life(series: Series, method: str = "auto", **changes: Any) -> dict[str, Any]:
    """One that nobody ends."""
    life = series.life(method, **changes)
    life.watch(lambda: False)
    told = life.told(BY_ITSELF)
    show_life(told)
    if life.process.returncode:
        raise RuntimeError(life.errors)
    return told


def wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # as time.sleep may take longer
        time.sleep(min(0.001, max(0.0, end - time.monotonic())))


RUN = {"plain": plain, "whole": whole, "killed": killed, "full disk": full_disk}


# --- what it shows ------------------------------------------------------------------------------


def show(part: dict[str, Any]) -> None:
    if "left_out" in part:
        print(f"{part['part']}: left out, {part['left_out']}", flush=True)
        return
    said = f"{part['part']}: {part['new_tokens']:,} tokens in {len(part['lives'])} processes"
    if "programs" in part:
        said += f", {part['programs']['made']} programs made, {part['programs']['kept']} kept"
    for one in growths(part)[-1:]:
        said += f", {one.first / 2**20:.0f} to {one.last / 2**20:.0f} MiB"
    print(said, flush=True)


def show_life(life: dict[str, Any]) -> None:
    saved = f"{life['tokens_at_end']:,} tokens, {life['tokens_saved']:,} saved"
    programs = f"{len(life['made'])} programs made, {life['found']} found"
    late = f", after the warm-up {life['after_warm_up']}" if life["after_warm_up"] else ""
    how = f"{life.get('signal', '')} {life['ended']}".strip()
    print(f"  from {life['tokens_at_begin']:,} to {saved}; {how}; {programs}{late}", flush=True)
