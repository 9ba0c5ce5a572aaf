# SPDX-License-Identifier: Apache-2.0
"""A saved run's tokens against plain decoding: which ones it would not have chosen, and how near.

Knows files of runs. Each token is judged after the run's own tokens before it (teacher-forced), by
the same passes of one row, prefill, penalties and noise as `generate` has with
method="autoregressive".
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.checks import check, check_type
from tsjax.base.telling import doing
from tsjax.decoding.replaying import init_replay
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.asking import make_request
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.progress import progress_bar
from tsjax.host.prompts import check_row
from tsjax.host.resuming import check_same_model, check_same_processors
from tsjax.host.run import start_run
from tsjax.host.saved_run import read_run

STEPS_PER_CALL = 32  # after which the progress bar moves and Ctrl-C is heard


@dataclasses.dataclass(frozen=True)
class Departure:
    """A token that plain decoding would not have chosen.

    Attributes:
      row: of the batch.
      index: of the new token, from 0.
      token: the run's.
      choice: plain decoding's.
      behind: by how much the token's score is below that of the choice; inf if it was barred, or
        removed by a truncation.
    """

    row: int
    index: int
    token: int
    choice: int
    behind: float


@dataclasses.dataclass(frozen=True)
class RunCheck:
    """What `check_run` found.

    A token's score is its processed logit, plus the noise of its position when sampling.

    Attributes:
      departures: the tokens that plain decoding would not have chosen, row by row.
      leads: per row and new token, by how much the score of plain decoding's choice is above the
        next best; inf where nothing else was left to choose.
      dtype: the model's.
    """

    departures: list[Departure]
    leads: list[np.ndarray]
    dtype: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.leads))

    @property
    def departures_per_1000(self) -> float:
        return 1000 * len(self.departures) / max(self.num_tokens, 1)

    def num_below(self, lead: float) -> int:
        """How many tokens were chosen with a smaller lead than this."""
        return sum(int(np.sum(row < lead)) for row in self.leads)

    def nearest(self, count: int) -> list[tuple[int, int, float]]:
        """(row, index of the new token, lead) of the smallest leads, the smallest first."""
        every = [
            (row, index, float(lead))
            for row, leads in enumerate(self.leads)
            for index, lead in enumerate(leads)
        ]
        return sorted(every, key=lambda entry: entry[2])[:count]


def check_run(
    model: Model, run: str | os.PathLike, *, logits_processor: Any = None, progress: bool = False
) -> RunCheck:
    """Whether the tokens of a saved run are those that plain decoding chooses, and by what margin.

    In float32 and float64 they are, whatever the method. In bfloat16 and float16 a pass over
    several rows rounds otherwise than a pass over one, so at a near-tie a draft may be accepted
    that plain decoding would not have chosen.

    Args:
      model: the run's, from `tsjax.load` with the run's dtype.
      run: a file that `generate(save_to=...)` wrote.
      logits_processor: those of the run.
      progress: show a progress bar on stderr.
    """
    check_type(model, Model, "model", "what tsjax.load returns")
    name, saved = f"run={os.fspath(run)!r}", read_run(run, "run")
    check_same_model(name, saved, model, stacklevel=3)
    made = [check_row(row, f"a row in {name}", model) if len(row) else row for row in saved.tokens]
    longest, most = max(map(len, made)), saved.config.max_new_tokens
    check(longest <= most, "run", os.fspath(run), f"at most max_new_tokens={most} tokens in a row")
    wide = saved.exceed_max_positions
    how = {"exceed_max_positions": wide, "logits_processor": logits_processor}
    how["prefill"], how["read_first"] = saved.prefill, saved.prefix_length
    # The rows of a saved run are those of all answers; what is told beside them matters not.
    seed, answers = saved.config.seed, saved.config.num_return_sequences
    if isinstance(seed, tuple):
        seed = tuple(one for one in seed for _ in range(answers))
    config = saved.config.replace(seed=seed, num_return_sequences=1, logprobs=None)
    request = make_request(model, saved.prompts, config, {}, **how)
    check_same_processors(name, saved, request.processors)
    begin = request.prompt_length
    end = [first + len(row) for first, row in zip(begin, made, strict=True)]
    state = start_run(model, request, Interrupt())
    state = state.replace(max_length=jnp.asarray(end, jnp.int32))
    given = np.zeros(state.tokens.shape, np.int32)
    for row, tokens, first in zip(given, made, begin, strict=True):
        row[first : first + len(tokens)] = tokens
    found, given = init_replay(state), jnp.asarray(given)
    step = programs_of(model).replay
    with (
        doing("checking", longest, "tokens") as work,
        progress_bar(progress, longest, "tok") as bar,
    ):
        for done in range(0, longest, STEPS_PER_CALL):
            steps = min(STEPS_PER_CALL, longest - done)
            work.done(done)
            state, found = step(model.params, state, given, found, steps, cfg=request.decode)
            found.choice.block_until_ready()
            bar.update(steps)

    def new(array: jax.Array) -> list[np.ndarray]:
        rows = processes.on_host(array)
        return [row[a:b] for row, a, b in zip(rows, begin, end, strict=True)]

    departures = [
        Departure(row, int(index), int(tokens[index]), int(choice[index]), float(behind[index]))
        for row, (tokens, choice, behind) in enumerate(
            zip(made, new(found.choice), new(found.behind), strict=True)
        )
        for index in np.flatnonzero(tokens != choice)
    ]
    return RunCheck(departures, new(found.lead), model.cfg.dtype)
