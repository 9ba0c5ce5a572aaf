# SPDX-License-Identifier: Apache-2.0
"""transformers' own `generate`, in torch, beside ours: plain and with prompt lookup.

Knows checkpoints that transformers reads. torch and transformers are imported only where a peer is
asked for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tsjax.files.checkpoint import is_tsjax
from tsjax.files.gguf_files import is_gguf

PEER_TOKENS = 64  # of a run, which takes long; where nothing else is asked for
LOOKUP = 10  # tokens that are looked up in the text
PREFILL_WIDTH = 512


def why_not(folder: str | None) -> str | None:
    """Why transformers cannot run a checkpoint here; None where it may be able to."""
    if importlib.util.find_spec("torch") is None:
        return "there is no torch (pip install 'tsjax[parity]')"
    if folder is not None and is_gguf(folder):
        if importlib.util.find_spec("accelerate") is None:
            return "transformers reads a GGUF file by accelerate (pip install accelerate)"
        return None
    if folder is None or is_tsjax(folder):
        return "transformers cannot read this checkpoint: it is no HuggingFace folder"
    if not os.path.exists(os.path.join(folder, "config.json")):
        return "transformers cannot read this checkpoint: it has no config.json"
    return None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What transformers will call otherwise one day is none of a user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Peer:
    """A checkpoint in torch."""

    def __init__(self, folder: str, dtype: str, threads: int | None = None):
        import torch
        import transformers

        if threads is not None:
            torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch = torch
        on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
        self.device = "cuda" if on_gpu else "cpu"
        file = {}
        if is_gguf(folder):
            folder, file["gguf_file"] = os.path.split(folder)
        with _quietly():
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, **file
            )
        self.model = model.to(self.device).eval()


class PeerRuns:
    """Runs after one prompt, each from a copy of its cache."""

    def __init__(self, peer: Peer, prompt: np.ndarray, new: int):
        self._peer, self._torch, self.new = peer, peer.torch, new
        self.prompt = self._torch.tensor(prompt)[None].long().to(peer.device)
        with self._torch.no_grad(), _quietly():
            cache = None
            for part in self.prompt[:, :-1].split(PREFILL_WIDTH, dim=1):
                if part.numel():
                    read = peer.model(part, past_key_values=cache, use_cache=True)
                    cache = read.past_key_values
        self._cache = cache

    def run(
        self, settings: Mapping[str, Any], new: int | None = None, **how: Any
    ) -> dict[str, Any]:
        """Its sampling is as `settings` say, but for a penalty's window, which it does not know."""
        new = self.new if new is None else new
        times: list[float] = []
        counts: list[int] = []

        class Clock:
            def put(self, value):
                times.append(time.perf_counter())
                counts.append(value.numel())

            def end(self):
                pass

        known = {name: x for name, x in settings.items() if "window" not in name}
        with self._torch.no_grad(), _quietly():
            self._peer.model.generate(
                self.prompt,
                attention_mask=self._torch.ones_like(self.prompt),
                past_key_values=copy.deepcopy(self._cache),
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
                streamer=Clock(),
                **{"do_sample": False, **known, **how},
            )
        # The first put is the prompt, the second what the first step found.
        made, steps = np.cumsum(counts[2:]).tolist(), len(counts[2:])
        seconds = [then - times[1] for then in times[2:]]
        return {
            "ms_per_token": 1e3 * seconds[-1] / made[-1],
            "tokens_per_step": made[-1] / steps,
            "made": [(0, 0, 0.0), *zip(made, range(1, steps + 1), seconds, strict=True)],
        }

    def calls(
        self, settings: Mapping[str, Any], leave_out: Callable[[str, Exception], Any]
    ) -> dict[str, Callable[..., dict[str, Any]]]:
        """What it does with the settings; `leave_out` is told what it cannot do."""
        lookup = functools.partial(self.run, settings, prompt_lookup_num_tokens=LOOKUP)
        calls: dict[str, Callable] = {"torch": functools.partial(self.run, settings)}
        try:
            lookup(new=min(self.new, 2 * LOOKUP))
        except Exception as error:
            leave_out("torch lookup", error)
            return calls
        return {**calls, "torch lookup": lookup}
