# SPDX-License-Identifier: Apache-2.0
"""tsjax: long text generation in JAX, with the same tokens as plain decoding.

The same in float32 and float64; in bfloat16 and float16 drafts may part from it at a near-tie.

The public list. What is not named here may change without notice.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

# Models and checkpoints
from tsjax.checkpoint import Model as Model
from tsjax.checkpoint import load as load
from tsjax.checkpoint import save as save

# Compiled programs on disk
from tsjax.compilation import enable_compilation_cache as enable_compilation_cache

# The prefill that prunes, and prompts that are shortened
from tsjax.compression import compress_prompt as compress_prompt

# Settings
from tsjax.config import GenerationConfig as GenerationConfig
from tsjax.config import ModelConfig as ModelConfig
from tsjax.config import RopeConfig as RopeConfig

# For JAX programs: pure functions of arrays
from tsjax.decoding import decode as decode
from tsjax.decoding import decode_step as decode_step
from tsjax.decoding import init_state as init_state
from tsjax.decoding import prefill as prefill

# Generation
from tsjax.generation import GenerationResult as GenerationResult
from tsjax.generation import StreamChunk as StreamChunk
from tsjax.generation import forward as forward
from tsjax.generation import generate as generate
from tsjax.generation import stream as stream

# Training of draft heads
from tsjax.head_training import HeadTraining as HeadTraining
from tsjax.interrupt import Interrupted as Interrupted
from tsjax.lazy_prefill import LazyPrefill as LazyPrefill

# Methods
from tsjax.methods import Autoregressive as Autoregressive
from tsjax.methods import DecodeConfig as DecodeConfig
from tsjax.methods import NGram as NGram
from tsjax.methods import TokenSwift as TokenSwift
from tsjax.noise import row_keys as row_keys
from tsjax.presets import model_preset as model_preset
from tsjax.presets import preset as preset
from tsjax.presets import training_preset as training_preset

# Runs that were saved
from tsjax.replay import Departure as Departure
from tsjax.replay import RunCheck as RunCheck
from tsjax.replay import check_run as check_run
from tsjax.request import choose_method as choose_method
from tsjax.sampling import sampling_values as sampling_values
from tsjax.state import DecodeState as DecodeState
from tsjax.state import Params as Params
from tsjax.state import StepStats as StepStats
from tsjax.state import init_params as init_params
from tsjax.training import TrainedHeads as TrainedHeads
from tsjax.training import train_heads as train_heads
from tsjax.tree import SOURCES as SOURCES
from tsjax.weight_files import EMBEDDED as EMBEDDED

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
