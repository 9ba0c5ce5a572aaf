# SPDX-License-Identifier: Apache-2.0
"""tsjax: long text generation in JAX, with the same tokens as plain decoding.

The same in float32 and float64; in bfloat16 and float16 drafts may part from it at a near-tie.

The public list. What is not named here may change without notice.
"""

# ruff: noqa: I001
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

# Models
from tsjax.files.checkpoint import load as load, save as save, Model as Model
from tsjax.files.weight_files import EMBEDDED as EMBEDDED
from tsjax.config import ModelConfig as ModelConfig, RopeConfig as RopeConfig
from tsjax.files.presets import model_preset as model_preset

# Generation
from tsjax.host.generation import generate as generate, stream as stream, forward as forward
from tsjax.config import GenerationConfig as GenerationConfig
from tsjax.files.presets import preset as preset
from tsjax.host.result import GenerationResult as GenerationResult
from tsjax.host.result import RunStats as RunStats, StreamChunk as StreamChunk
from tsjax.host.interrupt import Interrupted as Interrupted
from tsjax.errors import TsjaxError as TsjaxError

# Penalties and processors of your own
from tsjax.decoding.processors import LogitsProcessor as LogitsProcessor
from tsjax.decoding.processors import token_bias as token_bias, bad_words as bad_words
from tsjax.decoding.processors import allowed_tokens as allowed_tokens

# Log-probabilities
from tsjax.decoding.logprobs import LogProbs as LogProbs
from tsjax.host.scoring import score as score, Scored as Scored

# Chats, texts that are read once, many prompts
from tsjax.host.conversation import Conversation as Conversation
from tsjax.host.reading import read as read
from tsjax.host.prefix import Prefix as Prefix
from tsjax.host.many import generate_many as generate_many, Answer as Answer

# Methods of decoding
from tsjax.methods import Autoregressive as Autoregressive, NGram as NGram
from tsjax.methods import TokenSwift as TokenSwift, LikelyTree as LikelyTree, Auto as Auto
from tsjax.methods.medusa import Medusa as Medusa, tree_from_accuracy as tree_from_accuracy
from tsjax.methods import DraftModel as DraftModel, MagicDec as MagicDec, TriForce as TriForce
from tsjax.host.costs import choose_method as choose_method
from tsjax.methods.corpus import Corpus as Corpus
from tsjax.host.corpus_files import read_corpus as read_corpus
from tsjax.methods.auto import Choice as Choice
from tsjax.methods.cost_model import Costs as Costs, Int8Costs as Int8Costs, Line as Line
from tsjax.decoding.tree import SOURCES as SOURCES

# Methods of your own
from tsjax.decoding.method import Method as Method, Sizes as Sizes
from tsjax.decoding.method import DraftPasses as DraftPasses, Promise as Promise
from tsjax.decoding.method import Measured as Measured, Tried as Tried
from tsjax.decoding.tree import DraftTree as DraftTree, merge_paths as merge_paths
from tsjax.decoding.state import Verdict as Verdict, Acceptance as Acceptance
from tsjax.methods import register_method as register_method

# Long prompts
from tsjax.lazy.prefill import LazyPrefill as LazyPrefill
from tsjax.host.compression import compress_prompt as compress_prompt

# Saved runs
from tsjax.host.replay import check_run as check_run, RunCheck as RunCheck, Departure as Departure

# Training of draft heads
from tsjax.training.run import train_heads as train_heads, TrainedHeads as TrainedHeads
from tsjax.config import HeadTraining as HeadTraining
from tsjax.files.presets import training_preset as training_preset

# For JAX programs: pure functions of arrays
from tsjax.decoding.config import DecodeConfig as DecodeConfig
from tsjax.decoding.start import init_state as init_state
from tsjax.decoding.reading import prefill as prefill
from tsjax.decoding.step import decode as decode, decode_step as decode_step
from tsjax.decoding.state import DecodeState as DecodeState, StepStats as StepStats
from tsjax.decoding.noise import row_keys as row_keys
from tsjax.decoding.sampling import sampling_values as sampling_values
from tsjax.model.params import Params as Params, init_params as init_params
from tsjax.model.params import with_int8_drafts as with_int8_drafts

# For other engines: the exact sampler and judge
from tsjax.decoding.blocks import sample as sample, verify as verify, Verified as Verified
from tsjax.decoding.blocks import token_noise as token_noise, warped_logits as warped_logits

# Compiled programs on disk
from tsjax.host.compilation import enable_compilation_cache as enable_compilation_cache

try:
    __version__ = _version("tsjax")
except _PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+checkout"

__all__ = [  # noqa: RUF022
    "load", "save", "Model", "EMBEDDED", "ModelConfig", "RopeConfig", "model_preset",
    "generate", "stream", "forward", "GenerationConfig", "preset",
    "GenerationResult", "RunStats", "StreamChunk", "Interrupted", "TsjaxError",
    "LogitsProcessor", "token_bias", "bad_words", "allowed_tokens",
    "LogProbs", "score", "Scored",
    "Conversation", "read", "Prefix", "generate_many", "Answer",
    "Autoregressive", "NGram", "TokenSwift", "Medusa", "tree_from_accuracy", "LikelyTree", "Auto",
    "MagicDec", "DraftModel", "TriForce",
    "Corpus", "read_corpus", "choose_method", "Choice",
    "Costs", "Int8Costs", "Line", "SOURCES",
    "Method", "Sizes", "Promise", "DraftPasses", "Measured", "Tried", "DraftTree", "merge_paths",
    "Verdict", "Acceptance",
    "register_method",
    "LazyPrefill", "compress_prompt",
    "check_run", "RunCheck", "Departure",
    "train_heads", "TrainedHeads", "HeadTraining", "training_preset",
    "DecodeConfig", "init_state", "prefill", "decode", "decode_step", "DecodeState", "StepStats",
    "row_keys", "sampling_values", "Params", "init_params", "with_int8_drafts",
    "sample", "verify", "Verified", "token_noise", "warped_logits",
    "enable_compilation_cache",
]  # fmt: skip
