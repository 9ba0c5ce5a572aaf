# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step take on a device that is known by its data sheet: a formula.

Knows devices, and the sizes of a model. Does not know methods. Runs nothing: what is measured on
the device in hand is better.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from pallas_kernels import native
from pallas_kernels.narrow_product.matrix import FORMATS
from tsjax.base.model_config import OWN_VOCABULARY, WIDE, ModelConfig
from tsjax.decoding.method import Measured
from tsjax.methods.cost_model import Costs, Int8Costs, Line


class Reach(NamedTuple):
    """What programs reach of a device's data sheet, and what they take beside it.

    Attributes:
      products: (rows, share of the bandwidth) of reading weights; ascending. Rows are padded to the
        next of these tiles, beyond the last to multiples of it.
      product_operations: share of the operations of products.
      tiles: (least, most) rows of a tile of attention, powers of two; the rows of all query heads
        of a kv head share tiles.
      attention_bytes, attention_operations: shares of both.
      wide_operations: share of these that is left for types wider than 16 bits.
      overlaps: whether a part takes the longer of reading and computing, or their sum.
      kernels: (rows, kernels that a layer starts) in passes of up to so many rows; ascending.
      kernel: seconds of a start.
      step: seconds of a step beside its pass: the sampling, the commit, the loop.
      int8_bytes: how many bytes take as long to read as a weight in int8.
      narrow_bytes: as many bytes a narrow weight of the model takes at least.
      token: seconds of a row's choice of a token, for each one of the vocabulary, beside reading
        the scores: of noise and logarithms, where arithmetic is dear.
    """

    products: tuple[tuple[int, float], ...]
    product_operations: float
    tiles: tuple[int, int]
    attention_bytes: float
    attention_operations: float
    wide_operations: float
    overlaps: bool
    kernels: tuple[tuple[float, float], ...]
    kernel: float
    step: float
    int8_bytes: float = 1.0
    narrow_bytes: float = 0.0
    token: float = 0.0


class Device(NamedTuple):
    """A device by its data sheet: operations are those of 16-bit products, without sparsity."""

    bytes_per_second: float
    operations_per_second: float
    memory: float
    reach: Reach


# Calibrated on one run of Llama-3.1-8B on an H100 (of 2026-11-23,
# benchmarks/results/h100/step-llama3.1-8b.json): the shares of products on passes of 8, 16, 64 and
# 101 rows at 4,096 tokens, the shares of attention on what 102,400 more tokens add to passes of 1
# and 64 rows, `step` on a plain step less a pass of one row. One model cannot tell starts of
# kernels from slower reading: the 14 that a layer then had, of 2.2 microseconds, are assumed. So is
# the share of product operations, which no measured pass waits for, to be that of attention. The
# run is older than sampling without waits, the choice of the partial cache by threshold and today's
# n-grams: `step` is rather too long. It is older, too, than the kernels for norms, and for queries
# and keys: `kernels` are those of today's programs (tests/test_aot.py). Of an H200 (of 2026-11-26,
# benchmarks/results/h200) are the share of products of one row, which were padded to eight before,
# and `int8_bytes`, by the products of one row of a layer in its products.json. `narrow_bytes` is by
# counting: a weight of the kernel for narrow products takes eight (of 8 bits, on an A100) to twelve
# instructions (of 4 bits, on an H100), and so 0.9 to 1.25 times as long as a byte.
GPU = Reach(
    products=((1, 0.9), (8, 0.84), (16, 0.81), (64, 0.71), (128, 0.64)),
    product_operations=0.44,
    tiles=(16, 128),
    attention_bytes=0.89,
    attention_operations=0.44,
    wide_operations=1 / 16,
    overlaps=True,
    kernels=((1, 10), (math.inf, 13)),
    kernel=2.2e-6,
    step=2.7e-4,
    int8_bytes=1.5,
    narrow_bytes=1.25,
)
# As that run was: fewer rows than 8 were padded first, which took as long as six kernels more.
GPU_OF_THE_RUN = GPU._replace(products=GPU.products[1:], kernels=((7, 20.1), (math.inf, 14)))
# By words that a device's kind contains, in lower case; the first of these that fits.
GPUS = {
    "a100 40gb": Device(1.555e12, 312e12, 40e9, GPU),
    "a100": Device(2.04e12, 312e12, 80e9, GPU),
    "h100": Device(3.35e12, 989e12, 80e9, GPU),
    "h200": Device(4.8e12, 989e12, 141e9, GPU),
    "l40s": Device(0.864e12, 362e12, 48e9, GPU),
    "rtx 4090": Device(1.008e12, 165e12, 24e9, GPU),
}
# Of the C++ kernels on two cores with AVX-512 and its products of pairs, of 2026-11-27
# (benchmarks/results/cpu/rows.json): bytes on a pass of one row, operations on what further rows
# add. There reading and computing add up. Wider types have half of the operations.
CPU = Device(
    bytes_per_second=3.5e10,
    operations_per_second=1.0e12,
    memory=math.inf,
    reach=Reach(
        products=((1, 1.0),),
        product_operations=1.0,
        tiles=(1, 1),
        attention_bytes=1.0,
        attention_operations=0.9,
        wide_operations=0.5,
        overlaps=False,
        kernels=((math.inf, 0),),
        kernel=0.0,
        step=2e-4,
        int8_bytes=1.5,
        token=8e-9,
    ),
)
MOST_ROWS = 256  # of the passes in an estimated table
# Arrays of float32 that are written or read for each token of the vocabulary and row: logits, and
# twice by what takes a token from them.
LOGITS_PASSES = 3
# A choice of the partial cache on a GPU, as partial_cache.slots_at_once has it; not measured yet:
# scores are written or read so often, this many kernels start per layer, and so many slots are
# copied, the paper's budget.
SCORE_PASSES, CHOICE_KERNELS, CHOSEN_SLOTS = 20, 12, 4096
NGRAM_KERNELS = 40  # entering n-grams and looking them up
# Of a draft of the one-layer drafter, with a quarter of what a chain begins with.
DRAFT_KERNELS = 61


def leaves_out_rows(platform: str, model: ModelConfig) -> bool:
    """Whether the kernels of a device leave out the rows that a step does not want."""
    return platform == "cpu" and native.serves(model.dtype, head_dim=model.head_dim)


def costs_for(measured: Measured) -> Costs:
    """What the host has measured, or else what the formula gives for its device."""
    device = device_of(measured.platform, measured.device_kind)
    return measured.costs or estimated(measured.model, device, measured.batch)


def device_of(platform: str, kind: str) -> Device:
    """The rates of a jax device by its `platform` and `device_kind`; an A100's for others."""
    if platform == "cpu":
        return CPU
    kind = kind.lower()
    fits = (found for name, found in GPUS.items() if all(word in kind for word in name.split()))
    return next(fits, GPUS["a100"])


class Work(NamedTuple):
    """Bytes that are read (or written, where that counts), and operations, without any padding."""

    bytes: float
    operations: float


def pass_work(
    model: ModelConfig, rows: int, context: float, batch: int = 1, weight_bytes: float | None = None
) -> dict[str, Work]:
    """The work of a pass by its parts: "products", "logits", "attention" and "tokens".

    Args:
      weight_bytes: of each weight that is read, where they are stored in fewer than the model's
        type has, as for drafts.
    """
    layers, vocabulary = _weights(model)
    of_layers, of_vocabulary = _weight_bytes(model)
    if weight_bytes is not None:
        of_layers, of_vocabulary = weight_bytes * layers, weight_bytes * vocabulary
    all_rows, tokens = batch * rows, batch * context
    return {
        "products": Work(of_layers, 2 * all_rows * layers),
        "logits": Work(of_vocabulary, 2 * all_rows * vocabulary),
        "attention": Work(
            tokens * _cache_bytes(model), 2 * rows * model.group_size * tokens * _cached(model)
        ),
        "tokens": Work(4 * LOGITS_PASSES * all_rows * model.vocab_size, 0.0),
    }


def plain_bytes(model: ModelConfig, context: float) -> float:
    """What a step of plain decoding has to read: weights and cache."""
    work = pass_work(model, 1, context)
    return sum(work[part].bytes for part in ("products", "logits", "attention"))


def pass_line(
    model: ModelConfig, device: Device, rows: int, batch: int = 1, weight_bytes: float | None = None
) -> Line:
    """Seconds of a pass by the formula: the sum of its parts, each at what bounds it."""
    reach = device.reach
    work = pass_work(model, rows, 1, batch, weight_bytes)
    if model.is_narrow and weight_bytes is None:
        for part, weights in zip(("products", "logits"), _weights(model), strict=True):
            at_least = reach.narrow_bytes * weights
            work[part] = work[part]._replace(bytes=max(work[part].bytes, at_least))
    share, all_rows = _tile_of(reach, batch * rows)
    padded = all_rows / (batch * rows)

    def seconds(part: str, bytes_share: float, operations_share: float, padding: float) -> float:
        reading = work[part].bytes / (device.bytes_per_second * bytes_share)
        peak = device.operations_per_second * operations_share
        if _size(model) > 2:
            peak *= reach.wide_operations
        computing = padding * work[part].operations / peak
        return max(reading, computing) if reach.overlaps else reading + computing

    def products(part: str) -> float:
        return seconds(part, share, reach.product_operations, padded)

    padding = _attention_tiles(reach, rows * model.group_size) / (rows * model.group_size)
    cache = seconds("attention", reach.attention_bytes, reach.attention_operations, padding)
    tokens = work["tokens"].bytes / device.bytes_per_second
    tokens += reach.token * batch * rows * model.vocab_size
    kernels = next(number for most, number in reach.kernels if batch * rows <= most)
    starts = model.num_layers * kernels * reach.kernel
    return Line(products("products") + products("logits") + tokens + starts, cache)


def estimated(model: ModelConfig, device: Device, batch: int) -> Costs:
    """The table by the formula, with every width at which a tile begins or ends."""
    reach = device.reach
    lines = [pass_line(model, device, rows, batch) for rows in range(1, MOST_ROWS + 1)]
    passes = [(1, lines[0])]
    for index in range(1, MOST_ROWS - 1):
        before, here, after = lines[index - 1 : index + 2]
        if any(abs(a - 2 * b + c) > 1e-9 * b for a, b, c in zip(before, here, after, strict=True)):
            passes.append((index + 1, here))
    passes.append((MOST_ROWS, lines[-1]))

    heads = model.num_draft_heads
    share, _ = _tile_of(reach, batch * max(heads, 1))

    def of_heads(weight_bytes: float | None) -> float:
        """The heads' own matrices stay as they are."""
        read = pass_work(model, 1, 0, weight_bytes=weight_bytes)["logits"].bytes
        if model.head_kind == OWN_VOCABULARY:
            read = _size(model) * heads * _weights(model)[1]
        read += _size(model) * heads * model.embed_dim**2
        return read / (device.bytes_per_second * share) + reach.step if heads else 0.0

    of_drafter = drafter_share(model) * lines[0].seconds
    return Costs(
        passes=tuple(passes),
        heads=of_heads(None),
        choice=_choice(model, device, batch),
        suffix=Line(0.1 * reach.step, batch * 64 / device.bytes_per_second),
        ngrams=0.1 * reach.step + NGRAM_KERNELS * reach.kernel,
        overhead=reach.step,
        origin="estimated",
        int8=None
        if model.is_narrow  # it drafts with itself
        else Int8Costs(
            pass_line(model, device, 1, batch, reach.int8_bytes), of_heads(reach.int8_bytes)
        ),
        any_rows=device is CPU and leaves_out_rows("cpu", model),
        one_layer=of_drafter + DRAFT_KERNELS * reach.kernel if of_drafter else 0.0,
    )


def drafter_share(model: ModelConfig) -> float:
    """Weights that a draft of the one-layer drafter reads, for 1 of a pass of the model; 0 without
    one."""
    if model.drafter is None:
        return 0.0
    attention = 3 * model.head_dim * (model.num_heads + model.num_kv_heads)
    # Of the token, of the last row's state, and what it learns in the run, in four bytes.
    square = (2 + 4 / _size(model)) * model.embed_dim
    of_layer = attention + 3 * model.drafter.mlp_dim + square + model.drafter.words
    return model.embed_dim * of_layer / sum(_weights(model))


def _size(model: ModelConfig) -> int:
    """Bytes of an element."""
    return {"float64": 8, "float32": 4}.get(model.dtype, 2)


def _weights(model: ModelConfig) -> tuple[int, int]:
    """Weights that every pass reads: of all layers, and of the vocabulary."""
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    layers = model.num_layers * (attention + 3 * model.embed_dim * model.mlp_dim)
    return layers, model.vocab_size * model.embed_dim


def _weight_bytes(model: ModelConfig) -> tuple[float, float]:
    """What they take."""
    queries, kept = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    # Of q, k, v, o, gate, up and down.
    widths = (queries, kept, kept, queries, model.mlp_dim, model.mlp_dim, model.mlp_dim)
    layers = 0.0
    for layer in range(model.num_layers):
        formats = itertools.chain(*model.formats_of(layer).values())
        layers += sum(n * _bytes_in(name, model) for n, name in zip(widths, formats, strict=True))
    vocabulary = model.vocab_size * model.embed_dim * _bytes_in(model.unembed_format, model)
    return layers * model.embed_dim, vocabulary


def _bytes_in(name: str, model: ModelConfig) -> float:
    """Of a weight in a format."""
    return _size(model) if name == WIDE else FORMATS[name].bits_of_weight / 8


def _cached(model: ModelConfig) -> int:
    """Elements of the cache of one token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim


def _cache_bytes(model: ModelConfig) -> float:
    """What they take; of a narrow one, with each row's power of two."""
    each = _size(model) if model.cache == "same" else 1 + 1 / model.head_dim
    return each * _cached(model)


def _tile_of(reach: Reach, rows: int) -> tuple[float, int]:
    """The share of the bandwidth that products of N rows reach, and the rows of their tiles."""
    for tile, share in reach.products:
        if rows <= tile:
            return share, tile
    tile, share = reach.products[-1]
    return share, -(-rows // tile) * tile


def _attention_tiles(reach: Reach, rows: int) -> int:
    """Rows of the tiles that hold N rows of one kv head."""
    least, most = reach.tiles
    tile = least
    while tile < min(rows, most):
        tile *= 2
    return -(-rows // tile) * tile


def _choice(model: ModelConfig, device: Device, batch: int) -> Line:
    """One reading of the keys for the scores, and what finds the highest ones."""
    reach, cached = device.reach, batch * _cache_bytes(model)
    keys = cached / 2 / (device.bytes_per_second * reach.attention_bytes)
    if not reach.overlaps:  # a CPU orders blocks of them: as long again
        return Line(reach.step, 2 * keys)
    scores = 4 * SCORE_PASSES * batch * model.num_layers * model.num_kv_heads
    copies = 2 * CHOSEN_SLOTS * cached / device.bytes_per_second
    starts = model.num_layers * CHOICE_KERNELS * reach.kernel
    return Line(copies + starts, keys + scores / device.bytes_per_second)
