# SPDX-License-Identifier: Apache-2.0
"""The public list. What is not named here may change without notice.

`tsjax` has these names; this module is loaded, and jax with it, when the first is asked for.
"""

# ruff: noqa: I001
# Models
from tsjax.files.checkpoint import load, save
from tsjax.files.model_in_memory import Model
from tsjax.files.hf_dicts import from_hf, to_hf, save_hf
from tsjax.host.nnx_view import as_nnx
from tsjax.files.weight_files import EMBEDDED
from tsjax.config import ModelConfig, RopeConfig
from tsjax.files.presets import model_preset

# Generation
from tsjax.host.generation import generate, stream
from tsjax.config import GenerationConfig
from tsjax.files.presets import preset
from tsjax.host.result import GenerationResult, RunStats, StreamChunk
from tsjax.host.telling import Progress
from tsjax.host.interrupt import Interrupted
from tsjax.errors import TsjaxError

# Penalties and processors of your own
from tsjax.decoding.processors import LogitsProcessor, token_bias, bad_words, allowed_tokens

# Texts that are given, with gradients
from tsjax.host.scoring import forward, log_probs, score, Scored
from tsjax.decoding.logprobs import LogProbs

# Reinforcement learning: sampled answers as arrays
from tsjax.host.rollouts import rollout, Rollout, FINISH_REASONS
from tsjax.host.tunix import TunixSampler

# Chats, texts that are read once, many prompts
from tsjax.host.conversation import Conversation
from tsjax.host.reading import read
from tsjax.host.prefix import Prefix
from tsjax.host.many import generate_many, Answer

# Methods of decoding
from tsjax.methods import Autoregressive, NGram, TokenSwift, LikelyTree, Auto
from tsjax.methods.medusa import Medusa, tree_from_accuracy
from tsjax.methods import DraftModel, MagicDec, TriForce
from tsjax.host.costs import choose_method
from tsjax.methods.corpus import Corpus
from tsjax.host.corpus_files import read_corpus
from tsjax.methods.auto import Choice
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.decoding.tree import SOURCES

# Methods of your own
from tsjax.decoding.method import Method, Sizes, DraftPasses, Promise, Measured, Tried
from tsjax.decoding.tree import DraftTree, merge_paths
from tsjax.decoding.state import Verdict, Acceptance
from tsjax.methods import register_method

# Long prompts
from tsjax.lazy.prefill import LazyPrefill
from tsjax.host.compression import compress_prompt

# Saved runs
from tsjax.host.replay import check_run, RunCheck, Departure

# Training of draft heads and drafters
from tsjax.training.run import train_heads, TrainedHeads
from tsjax.training.drafter_run import train_drafter, TrainedDrafter
from tsjax.training_config import HeadTraining, DrafterTraining
from tsjax.config import OneLayer
from tsjax.files.presets import training_preset

# For JAX programs: pure functions of arrays
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.start import init_state
from tsjax.decoding.reading import prefill
from tsjax.decoding.step import decode, decode_step
from tsjax.decoding.state import DecodeState, StepStats
from tsjax.decoding.noise import row_keys
from tsjax.decoding.sampling import sampling_values
from tsjax.model.params import Params, init_params, with_int8_drafts

# For other engines: the exact sampler and judge
from tsjax.decoding.blocks import sample, verify, Verified, token_noise, warped_logits

# Compiled programs on disk
from tsjax.host.compilation import enable_compilation_cache

__all__ = [  # noqa: RUF022
    "load", "save", "Model", "from_hf", "to_hf", "save_hf", "as_nnx",
    "EMBEDDED", "ModelConfig", "RopeConfig", "model_preset",
    "generate", "stream", "GenerationConfig", "preset",
    "GenerationResult", "RunStats", "StreamChunk", "Progress", "Interrupted", "TsjaxError",
    "LogitsProcessor", "token_bias", "bad_words", "allowed_tokens",
    "forward", "log_probs", "score", "Scored", "LogProbs",
    "rollout", "Rollout", "FINISH_REASONS", "TunixSampler",
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
    "train_drafter", "TrainedDrafter", "DrafterTraining", "OneLayer",
    "DecodeConfig", "init_state", "prefill", "decode", "decode_step", "DecodeState", "StepStats",
    "row_keys", "sampling_values", "Params", "init_params", "with_int8_drafts",
    "sample", "verify", "Verified", "token_noise", "warped_logits",
    "enable_compilation_cache",
]  # fmt: skip
