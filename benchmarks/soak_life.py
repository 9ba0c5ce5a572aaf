# SPDX-License-Identifier: Apache-2.0
"""One life of a run that may be ended at any moment: `python -m benchmarks.soak_life ASKED.json`.

Goes on with the saved file where there is one. Counts the tokens in a file for who watches from
outside, and notes each program when it has been compiled, or found among the kept ones. Does not
know who ends it, nor when.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import jax.monitoring

import tsjax
from tsjax.host.compilation import keep_programs
from tsjax.host.saved_run import read_run

COUNT = struct.Struct("<q")
# Of jax: a program is there; it was found, and that comes first.
IS_THERE, WAS_FOUND = (
    "/jax/core/compile/backend_compile_duration",
    "/jax/compilation_cache/cache_hits",
)


class Notes:
    """A streamer that counts, and a file with a line of JSON for what is worth a word."""

    def __init__(self, notes: str, counter: str, tokens: int):
        self._notes, self._counter = notes, os.open(counter, os.O_RDWR | os.O_CREAT)
        self.tokens, self._prompt_seen, self._was_found = tokens, False, False
        self._count()

    def _count(self) -> None:
        os.pwrite(self._counter, COUNT.pack(self.tokens), 0)

    def put(self, ids: Any) -> None:
        if self._prompt_seen:
            self.tokens += len(ids)
            self._count()
        self._prompt_seen = True

    def end(self) -> None:
        os.close(self._counter)

    def say(self, **what: Any) -> None:
        with open(self._notes, "a", encoding="utf-8") as file:
            print(json.dumps({"tokens": self.tokens, **what}), file=file)

    def listen(self) -> None:
        def event(name: str, **_: Any) -> None:
            self._was_found = self._was_found or name == WAS_FOUND

        def duration(name: str, seconds: float, *, fun_name: str = "?", **_: Any) -> None:
            if name == IS_THERE:
                program = fun_name.removeprefix("jit(").removesuffix(")")
                self.say(program=program, found=self._was_found)
                self._was_found = False

        jax.monitoring.register_event_listener(event)
        jax.monitoring.register_event_duration_secs_listener(duration)


def live(asked: dict[str, Any]) -> None:
    saved = asked["saved"]
    if os.path.exists(saved):
        known, run = len(read_run(saved).tokens[0]), {"resume_from": saved}
    else:
        known, run = 0, {"method": asked["method"], **asked["settings"]}
        run |= {"prompt": asked["prompt"], "max_new_tokens": asked["tokens"], "eos_token_id": ()}
    notes = Notes(asked["notes"], asked["counter"], known)
    notes.listen()
    keep_programs()
    model = tsjax.load(asked["model"])
    how: dict[str, Any] = {"save_to": saved, "save_every": asked["save_every"]}
    try:
        result = tsjax.generate(model, streamer=notes, exceed_max_positions=True, **how, **run)
    except tsjax.Interrupted as interrupted:
        notes.say(ended=_told(interrupted.result))
        raise
    notes.say(ended=_told(result))


def _told(result: tsjax.GenerationResult) -> dict[str, Any]:
    return {
        "tokens": len(result.tokens[0]),
        "finish_reason": result.finish_reason[0],
        "unsaved": result.unsaved,
        "problems": list(result.problems),
    }


if __name__ == "__main__":
    live(json.loads(Path(sys.argv[1]).read_text("utf-8")))
