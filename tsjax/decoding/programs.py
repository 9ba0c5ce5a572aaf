# SPDX-License-Identifier: Apache-2.0
"""The functions of a run, compiled.

Knows which arguments are static and which states are given up. Does not know what runs when.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax

from tsjax.decoding.logprobs import text_log_probs
from tsjax.decoding.reading import complete, finish_part, read_made, read_part, slots_of_layers
from tsjax.decoding.replaying import replay
from tsjax.decoding.simulating import simulate
from tsjax.decoding.start import adopt, begin, fill_row, first_memory, grown, spread
from tsjax.decoding.step import decode
from tsjax.model.cache import in_slots
from tsjax.model.logits import hidden_states, logits, tapped_states


@functools.cache
def programs(platform: str, dtype: str) -> SimpleNamespace:
    """What `generate` and `forward` run on a platform ("cpu", "gpu", ...), for a model's type:
    functions of decoding and of the model, compiled; those with a state donate it."""
    jit = functools.partial(jax.jit, compiler_options=compiler_options(platform, dtype))
    return SimpleNamespace(
        begin=jit(begin, static_argnames=("cfg", "prompt_capacity", "mesh")),
        first_memory=jit(first_memory, static_argnames=("cfg", "batch", "capacity", "mesh")),
        adopt=jit(adopt, donate_argnames=("state",)),
        fill_row=jit(fill_row, donate_argnames=("state",)),
        grown=jit(grown, static_argnames=("capacity",)),
        spread=jit(spread, donate_argnames=("state",)),
        read_part=jit(
            read_part, static_argnames=("part", "width", "cfg"), donate_argnames=("state",)
        ),
        finish_part=jit(finish_part, static_argnames=("part", "cfg"), donate_argnames=("state",)),
        read_made=jit(read_made, static_argnames=("width", "cfg"), donate_argnames=("state",)),
        complete=jit(complete, static_argnames=("width", "cfg"), donate_argnames=("state",)),
        slots_of_layers=jit(slots_of_layers, static_argnames=("cfg",)),
        in_slots=jit(in_slots, static_argnames=("parts",)),
        decode=jit(decode, static_argnames=("cfg",), donate_argnames=("state",)),
        replay=jit(replay, static_argnames=("cfg",), donate_argnames=("state", "found")),
        simulate=jit(simulate, static_argnames=("cfg",), donate_argnames=("state",)),
        hidden_states=jit(hidden_states, static_argnames=("cfg", "width")),
        tapped_states=jit(tapped_states, static_argnames=("cfg", "taps", "width")),
        logits=jit(logits, static_argnames=("cfg", "width")),
        log_probs=jit(text_log_probs, static_argnames=("cfg", "count", "width")),
    )


def compiler_options(platform: str, dtype: str) -> dict[str, str] | None:
    if platform == "cpu" and dtype == "bfloat16":
        # In jax 0.10 this pass widens every bfloat16 operation to float32, slices too, and the
        # widened copy of the whole cache then moves out of the loop over its blocks.
        return {"xla_disable_hlo_passes": "float-normalization-bf16"}
    return None
