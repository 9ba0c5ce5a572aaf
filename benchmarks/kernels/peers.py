# SPDX-License-Identifier: Apache-2.0
"""Attention in torch, timed by a process of its own: libraries and failures stay apart.

Knows torch and the lines of JSON between both processes. Does not know jax.
"""

from __future__ import annotations

import functools
import json
import math
import os
import select
import subprocess
import sys

from benchmarks import report
from benchmarks.kernels.cases import HEAD_DIM, tree_mask

TORCH = ("torch sdpa", "torch flex")


class TorchError(RuntimeError):
    pass


class Torch:
    """Asks a process of `torch_worker`; what it cannot do, and its silence, are TorchErrors."""

    STARTS = 10

    def __init__(self):
        self._process = None
        self._starts = 0

    def send(self, **message) -> None:
        if self._process is None:
            if self._starts == self.STARTS:
                raise TorchError(f"its process ended {self.STARTS} times")
            self._starts += 1
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.kernels.peers"],
                cwd=report.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # select sees a line only while it is in the pipe
            )
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise TorchError("its process has ended") from error

    def receive(self, timeout: float) -> dict:
        if self._process is None:
            raise TorchError("its process has ended")
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.1, timeout))
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise TorchError("its process has ended" if ready else "no answer in time")
        answer = json.loads(line)
        if "error" in answer:
            raise TorchError(answer["error"])
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class TorchRunner:
    """A case that torch's process holds."""

    def __init__(self, torch: Torch, name: str):
        self._torch, self._name = torch, name
        self.details: dict = {}

    def warm(self, seconds: float):
        self._torch.send(do="start", name=self._name, seconds=seconds)
        self.details = self._torch.receive(60)

    def round(self) -> float:
        self._torch.send(do="round", name=self._name)
        return self._torch.receive(60)["seconds"]


def torch_worker() -> None:
    """Answers one line of JSON for each line: prepare, start and time a case, or forget all."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints beside the answers
    cases: dict[str, TorchCase] = {}
    for line in sys.stdin:
        message = json.loads(line)
        do, name, broken = message["do"], message.get("name"), False
        try:
            if do == "prepare":
                cases[name] = TorchCase(name, **message["shape"])
                answer = {}
            elif do == "start":
                answer = cases[name].start(message["seconds"])
            elif do == "round":
                answer = {"seconds": cases[name].round()}
            else:
                import torch

                cases.clear()
                torch.cuda.empty_cache()
                answer = {}
        except Exception as error:
            answer = {"error": report.first_line(error)}
            broken = is_broken()
        print(json.dumps(answer), file=answers, flush=True)
        if broken:
            return


def is_broken() -> bool:
    """Whether an error has left torch's GPU unusable, so that only a new process helps."""
    try:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


class TorchCase:
    """One attention in torch, in a CUDA graph of many calls where that is possible."""

    def __init__(self, name: str, *, S: int, T: int, K: int, G: int, copies: int):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch has no GPU here")
        self._torch = torch
        options = dict(dtype=torch.bfloat16, device="cuda")
        q = torch.randn(1, K * G, T, HEAD_DIM, **options)
        self._caches = [
            [torch.randn(1, K, S, HEAD_DIM, **options) for _ in "kv"] for _ in range(copies)
        ]
        tree = torch.as_tensor(tree_mask(T), device="cuda")
        if name == "torch flex":
            call = self._flex(q, tree, S, T, G)
        else:
            call = self._sdpa(q, tree, S, T, G)
        self._call = call
        with torch.inference_mode():
            for k, v in self._caches[:2]:
                out = call(k, v)
        torch.cuda.synchronize()
        if not bool(torch.isfinite(out).all()):
            raise FloatingPointError("the output is not finite")

    def _sdpa(self, q, tree, S, T, G):
        torch, mask = self._torch, None
        if T > 1:
            mask = torch.zeros(1, 1, T, S, dtype=q.dtype, device="cuda")
            mask[..., S - T :].masked_fill_(~tree, float("-inf"))
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda k, v: attention(q, k, v, attn_mask=mask, enable_gqa=G > 1)

    def _flex(self, q, tree, S, T, G):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch, mask, first = self._torch, None, S - T
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 256)
        if T > 1:

            def sees(b, h, row, slot):
                return (slot < first) | tree[row, (slot - first).clamp(min=0)]

            mask = create_block_mask(sees, None, None, T, S, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=G > 1)

    def _calls(self, turns: int):
        with self._torch.inference_mode():
            for _ in range(turns):
                for k, v in self._caches:
                    self._call(k, v)

    def _timed(self, function, *arguments) -> float:
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        function(*arguments)
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def start(self, seconds: float) -> dict:
        torch = self._torch
        self._calls(1)
        estimate = self._timed(self._calls, 2) / 2
        self._turns = max(1, min(math.ceil(seconds / estimate), 4000 // len(self._caches)))
        self._run, timing = functools.partial(self._calls, self._turns), "events"
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._calls(self._turns)
            graph.replay()
            torch.cuda.synchronize()
            self._run, timing = graph.replay, "graph"
        except Exception as error:
            timing += f"; no graph: {report.first_line(error)}"
            torch.cuda.synchronize()
        return {"timing": timing}

    def round(self) -> float:
        return self._timed(self._run) / (self._turns * len(self._caches))


if __name__ == "__main__":
    torch_worker()
