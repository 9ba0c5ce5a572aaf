# SPDX-License-Identifier: Apache-2.0
"""How long the chunks of a run take, after each of which the host looks at what there is."""

from __future__ import annotations

from tsjax.host.request import Request

SECONDS_PER_CHUNK, SECONDS_ON_GPU = 0.2, 1.0


def seconds_per_chunk(platform: str, request: Request, watched: bool) -> float:
    """After one a GPU waits some milliseconds for the next, which is 1 or 2% of the short time.

    The long one has to do nobody harm: a stream speaks at a chunk's end, so one that is `watched`
    has the short time. So has one that the host cuts, by a stop string or by a loop: what it
    computes beyond is thrown away. A Ctrl-C, and a change of the method, wait up to a second.
    """
    cut_by_host = request.config.stop_strings or request.config.repetition_detection is not None
    return SECONDS_PER_CHUNK if watched or cut_by_host or platform != "gpu" else SECONDS_ON_GPU
