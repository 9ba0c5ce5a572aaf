# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: a frozen, hashable dataclass that a jitted function may take as a constant.

Does not know arrays, checkpoints or where a setting came from. The letters of dimensions are in
typing.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from tsjax.base.checks import check, check_fields, check_float, check_int, one_of, refuse_unknown

DTYPES = ("float32", "bfloat16", "float16", "float64")
CACHES = ("same", "int8")  # in the model's type; in eight bits, which rounds each key and value
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Draft heads: TokenSwift's, each after the one before; Medusa's, side by side, with the model's
# vocabulary matrix; the same, each with a matrix of its own.
HEAD_KINDS = CHAINED, PARALLEL, OWN_VOCABULARY = "chained", "parallel", "parallel_own_vocabulary"
# How a matrix may be stored in few bits: GGUF's names, with the numbers that they stand for.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WEIGHTS = ("float", "int8", "int4", "stored")  # how a loaded model may hold its matrices
WIDE = ""  # the format of what is stored in the model's type
# The matrices of a layer, by the parameter that they lie in; each has a format.
LAYER_MATRICES = {
    "qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",),
}  # fmt: skip
NUM_LAYER_MATRICES = sum(map(len, LAYER_MATRICES.values()))


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
