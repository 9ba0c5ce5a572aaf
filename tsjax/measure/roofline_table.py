# SPDX-License-Identifier: Apache-2.0
"""tsjax roofline: what a step reads, how long that takes at least, and what methods promise.

Knows names of models, devices and methods, and how to print. Does not know the arithmetic, which is
methods/roofline.py. No weights are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tsjax.base.checks import check, check_int
from tsjax.base.errors import NoSuchFile
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.held import held_by_text
from tsjax.decoding.method import Method
from tsjax.files.checkpoint import read_config
from tsjax.files.presets import model_preset, model_preset_names, preset, preset_names
from tsjax.files.tensor_names import with_weights
from tsjax.files.weight_files import EMBEDDED
from tsjax.measure.bandwidth import MOST_READ, read_rate
from tsjax.measure.trace import read_bench
from tsjax.methods import Autoregressive, NGram, TokenSwift
from tsjax.methods.auto import choose
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import CPU, GPUS, Device, device_of, estimated
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.roofline import (
    Expected,
    Reads,
    Span,
    expected,
    has_room,
    ideal_speedup,
    promised,
    reads,
)

DEVICES = ("cpu", *(name.replace(" ", "-") for name in GPUS))
PRICED_METHODS = ("plain", "ngram", "tokenswift", "auto")
PAPER_HEADS = 3  # of a preset, which has none of its own
READ_HERE = 1e9  # bytes that a CPU's memory is measured with, at most


class Found(NamedTuple):
    """A method's row.

    Attributes:
      ideal: speed-up by reading alone; None for methods without a fixed number of passes.
      source: of the tokens per step: "by definition", "assumed", "given" or "measured".
      drafts: in words, where Auto chose them.
    """

    name: str
    expected: Expected
    source: str
    ideal: float | None
    drafts: str = ""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Attributes:
    device_name, speed: the device's name, and where its bytes per second come from.
    step: at the run's mean context.
    fits: whether weights and cache at the run's end have room in the device's memory.
    """

    model_name: str
    model: ModelConfig
    device_name: str
    device: Device
    speed: str
    span: Span
    step: Reads
    fits: bool
    methods: tuple[Found, ...]

    @property
    def bound(self) -> float:
        """Seconds of a step at least, at the mean context."""
        return self.step.least / self.device.bytes_per_second

    @property
    def whole(self) -> float:
        """The same if the table of embeddings were read too."""
        return self.step.whole / self.device.bytes_per_second


def roofline_of(
    name: str,
    *,
    prompt: int,
    new: int,
    device: str | None = None,
    batch: int = 1,
    dtype: str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    heads: int | None = None,
    acceptance: Sequence[str] = (),
) -> Roofline:
    """The least times of a run, and what each method is expected to take.

    Args:
      name: a checkpoint, EMBEDDED, or the name of a preset.
      device: one of DEVICES; None for the machine's own.
      weights, cache: how matrices, and keys and values, are held, as for tsjax.load.
      heads: draft heads; None for those of the checkpoint, or the paper's three for a preset.
      acceptance: of drafts, see `tokens_given`.
    """
    check_int(prompt, "--prompt", 1)
    check_int(new, "--new", 1)
    check_int(batch, "--batch", 1)
    if heads is not None:
        check_int(heads, "--heads", 0)
    given = tokens_given(acceptance)
    model = config_of(name, weights, cache)
    if heads is None and name in model_preset_names():
        heads = PAPER_HEADS
    model = dataclasses.replace(model, dtype=dtype or model.dtype)
    model = model if heads is None else model.with_heads(heads)
    span = Span(prompt, new, batch)
    device_name, record, speed = device_named(device, model)

    end, context = prompt + new, span.mean_context
    costs = estimated(model, record, batch)
    if not has_room(model, record, end, batch, in_int8=True):
        costs = costs._replace(int8=None)
    chosen = choose(model, costs, context)
    methods: dict[str, Method] = {
        "plain": Autoregressive(),
        "ngram": NGram.paper(),
        "tokenswift": preset(name).method if name in preset_names() else TokenSwift.paper(),
        "auto": chosen,
    }
    return Roofline(
        model_name=name,
        model=model,
        device_name=device_name,
        device=record,
        speed=speed,
        span=span,
        step=reads(model, context, batch),
        fits=has_room(model, record, end, batch),
        methods=tuple(
            _found(method_name, method, model, costs, record, span, given)._replace(
                drafts=_drafts(chosen) if method is chosen else ""
            )
            for method_name, method in methods.items()
        ),
    )


def _found(
    name: str,
    method: Method,
    model: ModelConfig,
    costs: Costs,
    device: Device,
    span: Span,
    given: Mapping[str, Any],
) -> Found:
    promise = promised(method, model, costs, span.mean_context)
    positions = promise.positions
    tokens, source = None, "by definition" if name == "plain" else "assumed"
    if name in given:
        kind, value = given[name]
        depth = positions or method.sizes(model).positions or method.sizes(model).depth
        tokens, source = value if kind == "measured" else 1 + value * depth, kind
    elif "" in given and positions:
        tokens, source = 1 + given[""][1] * positions, "given"
    rows = expected(method, model, costs, device, span, tokens)
    ideal = None
    if positions and promise.drafting is not None:
        found = rows.tokens_per_step
        ideal = ideal_speedup(promise, model, span.mean_context, found, span.batch)
    return Found(name, rows, source, ideal)


def _drafts(method: LikelyTree) -> str:
    passes = f"{method.draft_passes} pass{'' if method.draft_passes == 1 else 'es'}"
    kind = " in int8" if method.wants_int8 else ""
    found = [f"{passes} on {method.draft_budget:,} slots{kind}"] if method.draft_passes else []
    return " + ".join([*found, *(["heads"] if method.heads else []), "the text"])


def tokens_given(acceptance: Sequence[str]) -> dict[str, tuple[str, float]]:
    """By a method's name ("given", share of its positions) or ("measured", tokens per step).

    Each is a number, under "" for all that draft from the model; NAME=NUMBER; or a file that
    `tsjax bench` wrote.
    """
    found: dict[str, tuple[str, float]] = {}
    wanted = "a share from 0 to 1, NAME=SHARE with NAME of "
    wanted += f"{', '.join(PRICED_METHODS[1:])}, or a file that tsjax bench wrote"
    for word in acceptance:
        name, equals, value = word.rpartition("=")
        try:
            share = float(value)
        except ValueError:
            check(not equals, "--acceptance", word, wanted)
            measured = read_bench(word, "--acceptance", wanted)
            for method in PRICED_METHODS[1:]:
                steps = [row["tokens_per_step"] for row in measured if row["method"] == method]
                if steps:
                    found[method] = "measured", sum(steps) / len(steps)
            check(bool(found), "--acceptance", word, wanted)
            continue
        known = name in PRICED_METHODS[1:] if equals else True
        check(known and 0 <= share <= 1, "--acceptance", word, wanted)
        found[name] = "given", share
    return found


def config_of(name: str, weights: str | None = None, cache: str | None = None) -> ModelConfig:
    """The shape of a preset, EMBEDDED, or a checkpoint, with its numbers held so."""
    if name in model_preset_names():
        return with_weights(model_preset(name).with_cache(cache), weights, {}, name)
    try:
        return read_config(name, weights, cache)
    except FileNotFoundError as error:
        known = f"{EMBEDDED}, {', '.join(model_preset_names())}"
        raise NoSuchFile(f"{error}; names that need no folder: {known}") from error


def device_named(name: str | None, model: ModelConfig) -> tuple[str, Device, str]:
    """Its name, its record, and where its speed comes from."""
    if name is None:
        here = jax.devices()[0]
        if here.platform != "cpu":
            kind, record = here.device_kind, device_of(here.platform, here.device_kind)
            known = any(all(w in kind.lower() for w in gpu.split()) for gpu in GPUS)
            return kind, record, "of the data sheet" if known else "assumed, an A100's"
    if name not in (None, "cpu"):
        return name, GPUS[str(name).replace("-", " ")], "of the data sheet"
    with jax.default_device(jax.devices("cpu")[0]):
        nbytes = min(reads(model, 0).least, READ_HERE)
        rate = read_rate(nbytes)
    size = f"{min(nbytes, MOST_READ) / 1e6:,.0f} MB"
    speed = f"measured now by summing an array of {size}; its operations per second are assumed"
    return "cpu", CPU._replace(bytes_per_second=rate), speed


# --- what is printed ----------------------------------------------------------------------------


def roofline_lines(found: Roofline) -> list[str]:
    span, model, step = found.span, found.model, found.step
    rate = found.device.bytes_per_second
    rows = "row" if span.batch == 1 else "rows"
    each = "" if span.batch == 1 else " of each row"
    table = f"{_gb(step.embedding):>10}" if step.embedding else f"{'none':>10}"

    def least(name: str, seconds: float) -> str:
        return f"  {name:48}{1e3 * seconds:8.2f} ms/step{_time(seconds * span.new):>14}"

    said = [
        f"{found.model_name} in {model.dtype}, {span.batch} {rows}, {model.num_draft_heads} draft "
        f"heads, on {found.device_name}: {rate / 1e9:,.0f} GB/s, {found.speed}",
        f"{span.prompt:,} tokens of prompt and {span.new:,} new ones{each}; the mean context is "
        f"{span.mean_context:,.0f} tokens",
        "",
        "Bytes of a step of plain decoding at the mean context",
        f"  {'weights of all layers and the unembedding':48}{_gb(step.weights):>10}",
        f"  {'cache':48}{_gb(step.cache):>10}",
        f"  {'table of embeddings, looked up and not read':48}{table}",
        "",
        f"Least time of plain decoding by memory (bounds){'':13}at the mean{'the whole run':>16}",
        least("weights and cache", found.bound),
        least("all parameters and cache, as papers count", found.whole),
        "",
        f"{'Expected (estimates by the cost model)':40}{'tokens/step':>19}{'ms/token':>10}"
        f"{'bound':>8}{'run':>12}{'speed-up':>10}{'ideal':>8}",
    ]
    plain = found.methods[0].expected.seconds
    for row in found.methods:
        tokens, seconds, bound = row.expected
        steps = f"{tokens:.2f} {row.source}"
        ideal = "" if row.ideal is None else f"{row.ideal:.2f}x"
        said.append(
            f"  {row.name:38}{steps:>19}{1e3 * seconds:10.2f}{1e3 * bound:8.2f}"
            f"{_time(seconds * span.new):>12}{plain / seconds:9.2f}x{ideal:>8}".rstrip()
        )
    said += [
        "",
        *(f"{row.name} would draft by {row.drafts}." for row in found.methods if row.drafts),
        "ms/token, run, speed-up: estimates, calibrated on an H100 and an H200 "
        "(docs/speed.md); means over the run.",
        "bound: if reading the weights and caches of a step's passes were all that takes time, at "
        "these tokens per step.",
        "ideal: speed-up by reading all parameters and caches alone, at the mean context.",
        "assumed: how often drafts are right is taken from the paper and from assumptions; "
        "--acceptance replaces it.",
    ]
    if found.model.is_narrow and found.device is not CPU:
        said.append(
            "No GPU has run the kernel for narrow weights: its time is by counted instructions."
        )
    if found.model.cache == "int8":
        of_cpu = "On a CPU a cache in eight bits gains less time than its bytes say."
        of_gpu = "No GPU has run the kernels for a cache in eight bits."
        said.append(of_cpu if found.device is CPU else of_gpu)
    if not found.fits:
        end = held_by_text(model, span.batch, span.prompt + span.new)
        said.append(
            f"No room: weights and cache are {_gb(end)} at the end, the device has "
            f"{_gb(found.device.memory)}."
        )
    return said


def document(found: Roofline) -> dict[str, Any]:
    """The same for programs; seconds and bytes."""
    span, step, device = found.span, found.step, found.device
    return {
        "model": found.model_name,
        "config": found.model.to_dict(),
        "device": found.device_name,
        "bytes_per_second": device.bytes_per_second,
        "speed": found.speed,
        **span._asdict(),
        "mean_context": span.mean_context,
        "fits": found.fits,
        "step_bytes": step._asdict(),
        "bounds": {
            "step_seconds": found.bound,
            "run_seconds": found.bound * span.new,
            "all_parameters_step_seconds": found.whole,
            "all_parameters_run_seconds": found.whole * span.new,
        },
        "estimates": {
            row.name: {
                "tokens_per_step": row.expected.tokens_per_step,
                "tokens_per_step_are": row.source,
                "seconds_per_token": row.expected.seconds,
                "bound_seconds_per_token": row.expected.least,
                "run_seconds": row.expected.seconds * span.new,
                "speedup": found.methods[0].expected.seconds / row.expected.seconds,
                "ideal_speedup": row.ideal,
                "drafts": row.drafts or None,
            }
            for row in found.methods
        },
    }


def _gb(count: float) -> str:
    if math.isinf(count):
        return "the machine's"
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
