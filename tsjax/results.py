# SPDX-License-Identifier: Apache-2.0
"""What calls return, and what functions of yours are given."""

# ruff: noqa: I001
from tsjax.host.result import RunStats, StreamChunk
from tsjax.base.telling import Progress
from tsjax.host.many import Answer
from tsjax.host.scoring import Scored
from tsjax.decoding.logprobs import LogProbs
from tsjax.host.rollouts import Rollout, FINISH_REASONS
from tsjax.host.replay import RunCheck, Departure

__all__ = [
    "RunStats", "StreamChunk", "Progress", "Answer", "Scored", "LogProbs", "Rollout",
    "FINISH_REASONS", "RunCheck", "Departure",
]  # fmt: skip
