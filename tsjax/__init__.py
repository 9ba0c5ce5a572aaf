# SPDX-License-Identifier: Apache-2.0
"""tsjax: long text generation in JAX, with the same tokens as plain decoding.

The same in float32 and float64; in bfloat16 and float16 drafts may part from it at a near-tie.

The public list. What is not named here may change without notice.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

# Settings
from tsjax.config import GenerationConfig as GenerationConfig
from tsjax.config import ModelConfig as ModelConfig
from tsjax.config import RopeConfig as RopeConfig

# Methods
from tsjax.decoding.config import Autoregressive as Autoregressive
from tsjax.decoding.config import DecodeConfig as DecodeConfig
from tsjax.decoding.config import NGram as NGram
from tsjax.decoding.config import TokenSwift as TokenSwift
from tsjax.decoding.noise import row_keys as row_keys
from tsjax.decoding.sampling import sampling_values as sampling_values
from tsjax.decoding.state import DecodeState as DecodeState
from tsjax.decoding.state import StepStats as StepStats

# For JAX programs: pure functions of arrays
from tsjax.decoding.step import decode as decode
from tsjax.decoding.step import decode_step as decode_step
from tsjax.decoding.step import init_state as init_state
from tsjax.decoding.step import prefill as prefill
from tsjax.decoding.tree import SOURCES as SOURCES

# Models and checkpoints
from tsjax.files.checkpoint import Model as Model
from tsjax.files.checkpoint import load as load
from tsjax.files.checkpoint import save as save
from tsjax.files.presets import model_preset as model_preset
from tsjax.files.presets import preset as preset
from tsjax.files.presets import training_preset as training_preset
from tsjax.files.weight_files import EMBEDDED as EMBEDDED

# Compiled programs on disk
from tsjax.host.compilation import enable_compilation_cache as enable_compilation_cache

# The prefill that prunes, and prompts that are shortened
from tsjax.host.compression import compress_prompt as compress_prompt

# Generation
from tsjax.host.generation import GenerationResult as GenerationResult
from tsjax.host.generation import StreamChunk as StreamChunk
from tsjax.host.generation import forward as forward
from tsjax.host.generation import generate as generate
from tsjax.host.generation import stream as stream
from tsjax.host.interrupt import Interrupted as Interrupted

# Runs that were saved
from tsjax.host.replay import Departure as Departure
from tsjax.host.replay import RunCheck as RunCheck
from tsjax.host.replay import check_run as check_run
from tsjax.host.request import choose_method as choose_method
from tsjax.lazy.settings import LazyPrefill as LazyPrefill
from tsjax.model.params import Params as Params
from tsjax.model.params import init_params as init_params

# Training of draft heads
from tsjax.training.loss import HeadTraining as HeadTraining
from tsjax.training.run import TrainedHeads as TrainedHeads
from tsjax.training.run import train_heads as train_heads

try:
    __version__ = _version("tsjax")
except _PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+checkout"

__all__ = [
    "EMBEDDED",
    "SOURCES",
    "Autoregressive",
    "DecodeConfig",
    "DecodeState",
    "Departure",
    "GenerationConfig",
    "GenerationResult",
    "HeadTraining",
    "Interrupted",
    "LazyPrefill",
    "Model",
    "ModelConfig",
    "NGram",
    "Params",
    "RopeConfig",
    "RunCheck",
    "StepStats",
    "StreamChunk",
    "TokenSwift",
    "TrainedHeads",
    "check_run",
    "choose_method",
    "compress_prompt",
    "decode",
    "decode_step",
    "enable_compilation_cache",
    "forward",
    "generate",
    "init_params",
    "init_state",
    "load",
    "model_preset",
    "prefill",
    "preset",
    "row_keys",
    "sampling_values",
    "save",
    "stream",
    "train_heads",
    "training_preset",
]
