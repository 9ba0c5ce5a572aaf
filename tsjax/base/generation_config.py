# SPDX-License-Identifier: Apache-2.0
"""What a user may ask of `generate`: frozen, and read from other programs' words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tsjax.base.checks import check, check_fields, check_int, check_type, refuse_unknown
from tsjax.base.errors import BadType, NoSuchFile, NotSupported
from tsjax.base.habits import HABITS, HF_NEUTRAL, NEUTRAL
from tsjax.base.input_files import parsing, read_json

LONGEST_NGRAM = 64  # of no_repeat_ngram_size


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What a user may ask of `generate`, in HuggingFace's names. Greedy by default.

    Processors run in HuggingFace's order: repetition penalty, presence and frequency penalty (of
    generated tokens alone, as in vLLM), no_repeat_ngram_size, min_new_tokens, suppress_tokens,
    those of `logits_processor` and, when sampling, temperature, top_k, top_p, min_p,
    epsilon_cutoff, eta_cutoff. Without do_sample a value that only sampling reads is refused. None
    is the default, and temperature=0 is greedy, whatever else of sampling is said.

    Attributes:
      max_new_tokens: tokens to generate.
      min_new_tokens: bar the stop tokens before this many.
      do_sample: sample instead of taking the most probable token.
      temperature: divide the logits by this.
      top_k: keep the k best tokens; 0 is off (HuggingFace's default is 50).
      top_p: keep the smallest set of tokens with this mass; 1 is off.
      min_p: keep tokens with at least this share of the best one's probability; 0 is off.
      epsilon_cutoff: keep tokens with at least this probability; 0 is off.
      eta_cutoff: as epsilon, but adapted to the entropy; 0 is off.
      min_tokens_to_keep: never truncate to fewer tokens.
      repetition_penalty: above 1 makes recent tokens less likely; 1 is off.
      repetition_window: how many tokens count as recent; all by default.
      presence_penalty: taken off the logits of tokens that were generated before; 0 is off.
      frequency_penalty: the same for each time a token was generated; 0 is off.
      no_repeat_ngram_size: so many tokens never stand together twice; 0 is off.
      suppress_tokens: ids that are never chosen.
      eos_token_id: ids that end the text; the model's own by default.
      stop_strings: strings that end the text.
      seed: the same seed gives the same tokens, whatever the method (in bfloat16 and float16 but
        for near-ties).
      num_return_sequences: answers to each prompt; they differ when sampling.
      logprobs: log-probabilities of the tokens and of so many best ones.
      repetition_detection: end a text that says the same MIN to MAX tokens TIMES times in a row.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    min_tokens_to_keep: int = 1
    repetition_penalty: float = 1.0
    repetition_window: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    eos_token_id: int | tuple[int, ...] | None = None  # None: the model's own; (): never stop
    stop_strings: tuple[str, ...] = ()
    seed: int | tuple[int, ...] = 0  # one for all rows, or one per row; a jax key gives 32 bits
    num_return_sequences: int = 1
    logprobs: int | None = None
    repetition_detection: tuple[int, int, int] | None = None  # (MIN, MAX, TIMES)

    def __post_init__(self):
        # Plain Python values from here on: they are compared, hashed and written to files.
        for name in GENERATION_NAMES:
            value = _plain(getattr(self, name))
            if value is None:
                value = getattr(type(self), name)
            elif name == "suppress_tokens" and not isinstance(value, tuple):
                value = (value,)
            elif name == "stop_strings" and isinstance(value, str):
                value = (value,)
            object.__setattr__(self, name, value)
        if self.temperature == 0 and not isinstance(self.temperature, bool):  # greedy elsewhere
            for name, neutral in {"do_sample": False, **SAMPLING_DEFAULTS}.items():
                object.__setattr__(self, name, neutral)
        shares = ("top_p", "min_p", "epsilon_cutoff", "eta_cutoff")
        may_be_0 = ("min_new_tokens", "top_k", "no_repeat_ngram_size")
        signs = ("presence_penalty", "frequency_penalty")
        check_fields(self, may_be_0=may_be_0, up_to_1=shares, of_any_sign=signs)

        def require(condition: bool, name: str, wanted: str) -> None:
            check(condition, name, getattr(self, name), wanted)

        ngram, most = self.no_repeat_ngram_size, self.max_new_tokens
        require(ngram <= LONGEST_NGRAM, "no_repeat_ngram_size", f"at most {LONGEST_NGRAM}")
        require(self.min_new_tokens <= most, "min_new_tokens", f"at most max_new_tokens={most}")
        window = "a positive number of tokens, or None for the whole context; "
        window += "repetition_penalty=1.0 switches the penalty off"
        require(self.repetition_window != 0, "repetition_window", window)
        for name, least in (("repetition_window", 1), ("logprobs", 0)):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, least)
        penalty = "a positive number; 1.0 switches it off"
        require(self.repetition_penalty > 0, "repetition_penalty", penalty)
        require(self.epsilon_cutoff < 1, "epsilon_cutoff", "in [0, 1); 0 is off")
        require(self.eta_cutoff < 1, "eta_cutoff", "in [0, 1); 0 is off")
        greedy = "1, as greedy answers are all the same; or add do_sample=True (--do-sample)"
        require(self.do_sample or self.num_return_sequences == 1, "num_return_sequences", greedy)
        if (times := self.repetition_detection) is not None:
            good = isinstance(times, tuple) and [type(one) for one in times] == [int] * 3
            good = good and 1 <= times[0] <= times[1] and 2 <= times[2] <= 65536 // times[1]
            wanted = "three integers (min_period, max_period, times): 1 <= min_period <= max_period"
            wanted += ", times >= 2, and max_period * times at most 65536 tokens"
            require(good, "repetition_detection", wanted)
        for name in ("suppress_tokens", "eos_token_id", "seed"):
            value = getattr(self, name)
            for item in value if isinstance(value, tuple) else () if value is None else (value,):
                check_int(item, name, 0, 2**32 - 1)
        strings = self.stop_strings
        are_texts = isinstance(strings, tuple) and all(isinstance(s, str) and s for s in strings)
        require(are_texts, "stop_strings", "a string or a list of non-empty strings")
        unread = "only sampling reads it; add do_sample=True (--do-sample), or leave it out"
        for name, neutral in SAMPLING_DEFAULTS.items():
            require(self.do_sample or getattr(self, name) == neutral, name, unread)

    def replace(self, **changes: Any) -> GenerationConfig:
        """The same with other values; do_sample=False takes those of sampling back."""
        changes = known_settings(changes)
        if not changes.get("do_sample", True):
            changes = {**SAMPLING_DEFAULTS, **changes}
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, source: Any, **changes: Any) -> GenerationConfig:
        """Reads a generation_config.json (path, folder, dict or a transformers GenerationConfig).

        Settings that would choose other tokens and that tsjax does not have are refused by name.
        Settings about caches, other libraries and lengths in another measure (max_length) are
        ignored. So are a file's sampling values where do_sample is off: HuggingFace does not read
        them either.
        """
        changes = known_settings(changes)
        source = source.to_dict() if hasattr(source, "to_diff_dict") else source  # transformers'
        if isinstance(source, Mapping):
            return cls._from_hf_fields(source, changes)
        path = os.fspath(source)
        if os.path.isdir(path):
            path = os.path.join(path, "generation_config.json")
        if not os.path.exists(path):
            raise NoSuchFile(f"no generation config at {path!r}")
        fields = read_json(path)
        with parsing(path):
            return cls._from_hf_fields(fields, changes)

    @classmethod
    def _from_hf_fields(cls, fields: Mapping[str, Any], changes: Mapping[str, Any]):
        sampled = {"do_sample": False, **fields, **changes}["do_sample"]
        fields = {**without_unread({**fields, "do_sample": sampled}), **changes}
        set_to = {name: value for name, value in fields.items() if value is not None}
        unlike = [n for n, value in set_to.items() if value not in HF_NEUTRAL.get(n, (value,))]
        if unlike:
            asked = ", ".join(f"{name}={fields[name]!r}" for name in unlike)
            wanted = "which tsjax does not have; remove the setting or decode with transformers"
            raise NotSupported(f"generation config asks for {asked}, {wanted}")
        known = {name: value for name, value in set_to.items() if name in GENERATION_NAMES}
        if known.get("do_sample"):
            known.setdefault("top_k", 50)  # HuggingFace's default, where the file is silent
        return cls(**known)


GENERATION_NAMES = tuple(field.name for field in dataclasses.fields(GenerationConfig))
SAMPLING_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff", "min_tokens_to_keep",
)  # fmt: skip
SAMPLING_DEFAULTS = {name: getattr(GenerationConfig, name) for name in SAMPLING_NAMES}


def known_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of GenerationConfig, without those of other programs that ask for nothing. Others
    are an error that says what to write instead."""
    kept = {name: value for name, value in settings.items() if not _is_neutral(name, value)}
    for name in kept:
        if name in HABITS:
            raise BadType(f"unknown argument {name!r}: {HABITS[name]}")
    refuse_unknown(list(kept), GENERATION_NAMES, "argument")
    return kept


def _is_neutral(name: str, value: Any) -> bool:
    if name in GENERATION_NAMES or name not in HABITS:
        return False
    return value is None or any(_plain(value) == _plain(one) for one in NEUTRAL.get(name, ()))


def given_config(given: Any) -> GenerationConfig | None:
    """A config as it was given; also one of transformers."""
    if hasattr(given, "to_diff_dict"):
        return GenerationConfig.from_hf(given)
    if given is not None:
        check_type(given, GenerationConfig, "config", "a tsjax.GenerationConfig, or transformers'")
    return given


def without_unread(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the values that only sampling reads, where they ask for greedy tokens. For
    files: in a call such values are refused."""
    unread = () if fields.get("do_sample") else SAMPLING_NAMES
    return {name: value for name, value in fields.items() if name not in unread}


def _plain(value: Any) -> Any:
    """NumPy and JAX scalars and arrays, and lists of them, as Python numbers and tuples."""
    if "key<" in str(getattr(value, "dtype", "")):  # jax's, as a seed: 32 of its bits
        from jax import random, vmap

        value = (vmap(random.bits) if value.ndim else random.bits)(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
