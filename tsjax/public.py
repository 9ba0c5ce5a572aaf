# SPDX-License-Identifier: Apache-2.0
"""The names at the top of `tsjax`; others are in `tsjax.methods`, `steps`, `blocks`, `training`,
`costs` and `results`. What none of these name may change without notice.

This module is loaded, and jax with it, when the first name is asked for.
"""

# ruff: noqa: I001
# Models
from tsjax.files.checkpoint import load, save
from tsjax.files.model_in_memory import Model
from tsjax.files.hf_dicts import from_hf, to_hf, save_hf
from tsjax.host.nnx_view import as_nnx
from tsjax.files.weight_files import EMBEDDED
from tsjax.base.model_config import ModelConfig
from tsjax.files.presets import model_preset

# Generation
from tsjax.host.generation import generate, stream
from tsjax.host.many import generate_many
from tsjax.base.generation_config import GenerationConfig
from tsjax.files.presets import preset
from tsjax.host.result import GenerationResult
from tsjax.host.interrupt import Interrupted
from tsjax.base.errors import TsjaxError

# Penalties and processors of your own
from tsjax.decoding.processors import LogitsProcessor, token_bias, bad_words, allowed_tokens

# Texts that are given, with gradients
from tsjax.host.scoring import forward, log_probs, score

# Reinforcement learning: sampled answers as arrays
from tsjax.host.rollouts import rollout
from tsjax.host.tunix import TunixSampler

# Chats, and texts that are read once
from tsjax.host.conversation import Conversation
from tsjax.host.reading import read
from tsjax.host.prefix import Prefix

# Methods of decoding
from tsjax.methods import Auto, TokenSwift, NGram, LikelyTree, DraftModel
from tsjax.methods.corpus import Corpus
from tsjax.host.corpus_files import read_corpus

# Long prompts
from tsjax.lazy.prefill import LazyPrefill
from tsjax.host.compression import compress_prompt

# Saved runs, and compiled programs on disk
from tsjax.host.replay import check_run
from tsjax.host.compilation import enable_compilation_cache

__all__ = [
    "load", "save", "Model", "from_hf", "to_hf", "save_hf", "as_nnx",
    "EMBEDDED", "ModelConfig", "model_preset",
    "generate", "stream", "generate_many", "GenerationConfig", "preset",
    "GenerationResult", "Interrupted", "TsjaxError",
    "LogitsProcessor", "token_bias", "bad_words", "allowed_tokens",
    "forward", "log_probs", "score", "rollout", "TunixSampler",
    "Conversation", "read", "Prefix",
    "Auto", "TokenSwift", "NGram", "LikelyTree", "DraftModel", "Corpus", "read_corpus",
    "LazyPrefill", "compress_prompt",
    "check_run", "enable_compilation_cache",
]  # fmt: skip
