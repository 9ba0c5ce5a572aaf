# SPDX-License-Identifier: Apache-2.0
"""For JAX programs: the step of decoding and what it needs, pure functions of arrays."""

# ruff: noqa: I001
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.start import init_state
from tsjax.decoding.reading import prefill
from tsjax.decoding.step import decode, decode_step
from tsjax.decoding.state import DecodeState, StepStats
from tsjax.decoding.noise import row_keys
from tsjax.decoding.sampling import sampling_values
from tsjax.model.params import Params, init_params, with_int8_drafts
from tsjax.base.model_config import RopeConfig

__all__ = [
    "DecodeConfig", "init_state", "prefill", "decode", "decode_step", "DecodeState", "StepStats",
    "row_keys", "sampling_values", "Params", "init_params", "with_int8_drafts", "RopeConfig",
]  # fmt: skip
