# SPDX-License-Identifier: Apache-2.0
"""The static settings: frozen, hashable dataclasses that a jitted function may take as constants.

Knows the shape of a model and what a user may ask of `generate`; what one may ask of training is in
training_config.py. Does not know arrays, checkpoints or where a setting came from. Every message
names the argument, its value and what would be right. The letters of dimensions are in typing.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tsjax.errors import BadType, BadValue, NoSuchFile, NotSupported
from tsjax.habits import HABITS, HF_NEUTRAL, NEUTRAL
from tsjax.input_files import parsing, read_json

LONGEST_NGRAM = 64  # of no_repeat_ngram_size
DTYPES = ("float32", "bfloat16", "float16", "float64")
CACHES = ("same", "int8")  # in the model's type; in eight bits, which rounds each key and value
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Draft heads: TokenSwift's, each after the one before; Medusa's, side by side, with the model's
# vocabulary matrix; the same, each with a matrix of its own.
HEAD_KINDS = CHAINED, PARALLEL, OWN_VOCABULARY = "chained", "parallel", "parallel_own_vocabulary"


def check(condition: bool, argument: str, value: Any, wanted: str) -> None:
    """Raises the one kind of message this library has for a wrong argument."""
    if not condition:
        shown = str(value) if isinstance(value, numbers.Number) else repr(value)  # also NumPy's
        raise BadValue(f"{argument}={shown} is not valid: {wanted}")


def check_type(value: Any, kind: type, argument: str, wanted: str) -> None:
    """As `check`, for a value of another type."""
    if not isinstance(value, kind):
        raise BadType(f"{argument}={value!r:.80} is not valid: {wanted}")


def one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(map(repr, names))}"


def check_known(value: str | None, argument: str, names: Iterable[str]) -> None:
    """None is not given, which is well."""
    check(value is None or value in names, argument, value, one_of(names))


# How a matrix may be stored in few bits: GGUF's names, with the numbers that they stand for.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WEIGHTS = ("float", "int8", "int4", "stored")  # how a loaded model may hold its matrices
WIDE = ""  # the format of what is stored in the model's type
# The matrices of a layer, by the parameter that they lie in; each has a format.
LAYER_MATRICES = {
    "qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",),
}  # fmt: skip
NUM_LAYER_MATRICES = sum(map(len, LAYER_MATRICES.values()))


def check_int(value: Any, name: str, low: int, high: int = 2**31 - 1) -> None:
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    check(ok and int(value) >= low, name, value, f"an integer, at least {low}")
    check(int(value) <= high, name, value, f"an integer, at most {high}")


def check_float(value: Any, name: str, low: float, high: float) -> None:
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
    ok = ok and math.isfinite(value) and low <= float(value) <= high
    bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    bounds = "of any sign" if math.isinf(low) else bounds
    check(bool(ok), name, value, f"a finite number, {bounds}")


def check_fields(
    settings: Any,
    *,
    may_be_0: Sequence[str] = (),
    up_to_1: Sequence[str] = (),
    of_any_sign: Sequence[str] = (),
    prefix: str = "",
) -> None:
    """Checks the fields of a dataclass that are declared as `bool`, `int` or `float`.

    An int is at least 1 unless it `may_be_0`; a float is at least 0 unless it is `of_any_sign`, and
    at most 1 if `up_to_1`.
    """
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if field.type == "bool":
            check(isinstance(value, bool), name, value, "True or False")
        elif field.type == "int":
            check_int(value, name, 0 if field.name in may_be_0 else 1)
        elif field.type == "float":
            least = -math.inf if field.name in of_any_sign else 0.0
            check_float(value, name, least, 1.0 if field.name in up_to_1 else math.inf)


def refuse_unknown(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """An unknown name is an error, never ignored; the nearest known name is offered."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise BadType(f"unknown {what} {name!r}; {hint}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` chooses which of the other fields are read."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it (already resolved)

    def __post_init__(self):
        check(self.kind in ROPE_KINDS, "rope kind", self.kind, f"one of {', '.join(ROPE_KINDS)}")
        check_fields(self, may_be_0=("original_max_positions",), prefix="rope ")
        check(self.theta > 0, "rope theta", self.theta, "a positive number")
        check(self.factor > 0, "rope factor", self.factor, "a positive number")
        if self.kind in ("llama3", "yarn"):
            wanted = f"rope kind {self.kind!r} needs the context length the model was trained with"
            length = self.original_max_positions
            check(length > 0, "rope original_max_positions", length, wanted)
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            check(high > low, "rope high_freq_factor", high, f"larger than low_freq_factor={low}")


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """The shape of a drafter: a decoder layer of the model's own heads that reads what the model
    has computed. `tsjax train-drafter` makes one; a published head of EAGLE-3 is one.

    Attributes:
      mlp_dim: of its feed-forward part.
      words: how many tokens it can say, the most frequent ones; others it cannot draft.
      taps: after how many of the model's layers it reads.
      window: tokens that it sees, the last ones.
      rope: its own rotary embedding: distances are at most the window.
      token_in_state: whether a token's embedding goes into the state, taps are normed, and the
        last row's state is turned into the next: so are those that tsjax trains, and EAGLE-3's not.
      norm_before_residual: whether its layer adds to the normed state in place of the state.
      accuracy: how often each of its drafts in a row was right when those before were, on held-out
        text; () if nobody has measured it. It changes no token.
    """

    mlp_dim: int
    words: int
    taps: tuple[int, ...]
    window: int = 512
    rope: RopeConfig = RopeConfig()
    token_in_state: bool = True
    norm_before_residual: bool = False
    accuracy: tuple[float, ...] = ()

    def __post_init__(self):
        check_fields(self, prefix="drafter ")
        for name in ("taps", "accuracy"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for tap in self.taps:
            check_int(tap, "drafter taps", 0)
        check(bool(self.taps), "drafter taps", self.taps, "numbers of layers, at least one")
        for share in self.accuracy:
            check_float(share, "drafter accuracy", 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Families differ by the flags at the end and nothing else."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    num_draft_heads: int = 0  # that came with the checkpoint
    family: str = "llama"  # only used to name the architecture on export
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # The share of held-out tokens that is each draft head's best guess; () if nobody has measured
    # it. It tells method="tokenswift" what the heads are worth and changes no token.
    head_accuracy: tuple[float, ...] = ()
    head_kind: str = CHAINED  # of the draft heads: one of HEAD_KINDS
    drafter: OneLayer | None = None  # that came with the checkpoint
    # Of each layer the formats of LAYER_MATRICES; one entry stands for all, () for wide layers.
    layer_formats: tuple[tuple[str, ...], ...] = ()
    unembed_format: str = WIDE  # with another it has an array of its own, also if it is tied
    cache: str = "same"  # how keys and values of committed tokens are held: one of CACHES

    def __post_init__(self):
        check_fields(self, may_be_0=("num_draft_heads",))
        check(self.head_kind in HEAD_KINDS, "head_kind", self.head_kind, one_of(HEAD_KINDS))
        check(self.norm_eps > 0, "norm_eps", self.norm_eps, "a small positive number")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, for rotary embeddings")
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check(self.cache in CACHES, "cache", self.cache, one_of(CACHES))
        heads, kv_heads = self.num_heads, self.num_kv_heads
        check(heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of num_heads={heads}")
        shares = tuple(self.head_accuracy)
        for share in shares:
            check_float(share, "head_accuracy", 0.0, 1.0)
        wanted = f"a share from 0 to 1 for each of {self.num_draft_heads} heads, or ()"
        check(len(shares) in (0, self.num_draft_heads), "head_accuracy", shares, wanted)
        object.__setattr__(self, "head_accuracy", shares)
        if self.drafter is not None:
            taps, most = self.drafter.taps, self.num_layers
            check(max(taps) <= most, "drafter taps", taps, f"at most the model's num_layers={most}")
        formats = tuple(map(tuple, self.layer_formats))
        object.__setattr__(self, "layer_formats", formats)
        names = {len(layer) for layer in formats}
        enough = len(formats) in (0, 1) or len(formats) >= self.num_layers
        wanted = f"{NUM_LAYER_MATRICES} formats for each layer, or for all"
        check(enough and names <= {NUM_LAYER_MATRICES}, "layer_formats", formats, wanted)
        for name in {self.unembed_format, *(name for layer in formats for name in layer)}:
            check(name in (*FORMATS, WIDE), "format", name, one_of((*FORMATS, WIDE)))

    def formats_of(self, layer: int) -> dict[str, list[str]]:
        """Of each of LAYER_MATRICES."""
        some = self.layer_formats or ((WIDE,) * NUM_LAYER_MATRICES,)
        names = iter(some[layer if len(some) > 1 else 0])
        return {place: [next(names) for _ in parts] for place, parts in LAYER_MATRICES.items()}

    @property
    def is_narrow(self) -> bool:
        """Whether a matrix is stored in few bits."""
        return any({self.unembed_format, *itertools.chain(*self.layer_formats)})

    @property
    def as_wide(self) -> ModelConfig:
        """The same model with all matrices in its type."""
        return dataclasses.replace(self, layer_formats=(), unembed_format=WIDE)

    def with_cache(self, cache: str | None) -> ModelConfig:
        """The same model with keys and values held so; None as they are."""
        return dataclasses.replace(self, cache=self.cache if cache is None else cache)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def with_heads(self, count: int, kind: str = CHAINED) -> ModelConfig:
        """The same model with `count` other draft heads, of which nothing else is known."""
        kind = kind if count else CHAINED
        return dataclasses.replace(self, num_draft_heads=count, head_kind=kind, head_accuracy=())

    @property
    def alone(self) -> ModelConfig:
        """The model without draft heads and drafter."""
        return dataclasses.replace(self.with_heads(0), drafter=None)

    def to_dict(self) -> dict[str, Any]:
        """Without the kind of heads where it is the first one, without a drafter or formats where
        there are none, and without a cache of the model's type, as files had it before others."""
        is_wide = not self.is_narrow
        left_out = {
            "head_kind": self.head_kind == CHAINED, "drafter": self.drafter is None,
            "layer_formats": is_wide, "unembed_format": is_wide, "cache": self.cache == "same",
        }  # fmt: skip
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if not left_out.get(name)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(list(fields), known, "model config field")
        drafter = fields.get("drafter")
        if drafter is not None:
            drafter = OneLayer(**{**drafter, "rope": RopeConfig(**drafter["rope"])})
        rope = RopeConfig(**fields.get("rope", {}))
        return cls(**{**fields, "rope": rope, "drafter": drafter})


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
