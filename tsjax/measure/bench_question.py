# SPDX-License-Identifier: Apache-2.0
"""What `tsjax bench` is asked, and all it needs for that.

Knows flags, checkpoints, texts and prompts. Everything that can be wrong with a question is said
here, before anything runs. Does not know how runs are measured (bench.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tsjax.base.checks import check, check_int, one_of
from tsjax.base.errors import BadValue, NotEnoughMemory, TsjaxError
from tsjax.base.input_files import read_text
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.held import held_by_text
from tsjax.decoding.method import Autoregressive, Method
from tsjax.files.checkpoint import Model, check_dtype, load
from tsjax.files.presets import model_preset, model_preset_names, preset, preset_names
from tsjax.files.tensor_names import with_weights
from tsjax.files.tokenizer import encode
from tsjax.files.whole_files import check_place
from tsjax.host.chat import chat_prompt
from tsjax.host.many import TEXTS
from tsjax.host.memory import available_bytes
from tsjax.host.prompt_files import prompt_of_line, read_lines
from tsjax.host.prompts import encode_text, prompt_row, tokenizer_of
from tsjax.measure import peers
from tsjax.measure.paired_runs import PEERS, PLAIN, SETTINGS, USUAL_SETTINGS, requested
from tsjax.measure.peers import PEER_TOKENS
from tsjax.measure.plots import check_plot
from tsjax.measure.trace import read_trace
from tsjax.methods import METHODS, TokenSwift
from tsjax.model.params import random_params
from tsjax.model.sharding import mesh_of

LENGTHS, NEW_TOKENS, ROUNDS = (512, 2048), 512, 3
DEFAULT = (PLAIN, "auto", "ngram", "tokenswift")
WARM_UP = 1  # rounds
SIMULATED_HEADS = 3  # of a preset, as the paper trains
CHARACTERS = 20  # of a text for each token, at first
BEGINNING = "Once upon a time"
BOUND = "bound"  # the call that reads as many bytes as a plain step


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be measured: the flags of the command, whose help says what they mean.

    Attributes:
      model: a checkpoint; with `simulate` the name of a preset.
      methods: by what was typed of each.
      lengths: of prompts from one text; () with `prompts`.
      peers: whether transformers runs too, where it can.
      simulate: a file with accepted lengths, see `read_trace`.
      quiet: no lines about the time left.
    """

    model: str
    methods: Mapping[str, Method]
    lengths: tuple[int, ...] = LENGTHS
    new_tokens: int = NEW_TOKENS
    rounds: int = ROUNDS
    warm_up: int = WARM_UP
    settings: tuple[str, ...] = USUAL_SETTINGS
    dtype: str | None = None
    weights: str | None = None
    cache: str | None = None
    text: str | None = None
    prompts: str | None = None
    chat: bool = False
    draft_model: str | None = None
    heads: str | None = None
    drafter: str | None = None
    adapter: str | None = None
    exceed_max_positions: bool = False
    peers: bool = True
    peer_tokens: int = PEER_TOKENS
    plot: str | None = None
    simulate: str | None = None
    out: str | None = None
    quiet: bool = False

    def __post_init__(self):
        for flag, values in (("--lengths", self.lengths), ("--settings", self.settings)):
            good = bool(values or self.prompts) and len(set(values)) == len(values)
            check(good, flag, " ".join(map(str, values)), "one or more, each once")
        held = f"with {PLAIN} among them, which the others are held against"
        check(PLAIN in self.methods, "--methods", " ".join(self.methods), held)
        takers = [name for name, one in METHODS.items() if one().takes_draft_model]
        names = {row.partition(":")[0] for row in self.methods}
        if self.draft_model is None:
            with_one = "left out, or with --draft-model PATH"
            check("draft_model" not in names, "--methods", "draft_model", with_one)
        else:
            taken = not names.isdisjoint(takers)
            check(taken, "--draft-model", self.draft_model, f"with --methods {' or '.join(takers)}")
        for length in self.lengths:
            check_int(length, "--lengths", 1)
        check_int(self.new_tokens, "--new-tokens", 1)
        check_int(self.rounds, "--rounds", 1)
        check_int(self.warm_up, "--warm-up", 0)
        check_int(self.peer_tokens, "--peer-tokens", 32)
        for name in self.settings:
            check(name in SETTINGS, "--settings", name, one_of(SETTINGS))
        check(self.prompts is not None or not self.chat, "--chat", True, "with --prompts FILE")
        for flag, given in (
            ("--lengths", self.lengths), ("--text", self.text), ("--plot", self.plot),
            ("--simulate-acceptance", self.simulate),
        ):  # fmt: skip
            check(self.prompts is None or not given, flag, given, "left out with --prompts")
        if self.plot is not None:
            check_plot(self.plot, "--plot")
        if self.out is not None:
            check_place(self.out, "--out")
        if self.simulate is not None:
            names = model_preset_names()
            only = f"with --simulate-acceptance the name of a preset, {one_of(names)}"
            check(self.model in names, "model", self.model, only)
            check(self.text is None, "--text", self.text, "left out, as a preset has no tokenizer")
            alone = "left out, as drafts are simulated"
            for name in ("draft_model", "heads", "drafter", "adapter"):
                given = getattr(self, name)
                check(given is None, f"--{name.replace('_', '-')}", given, alone)


class Prepared(NamedTuple):
    """Attributes:
    beginning: the prompt of all lengths, as far as it is known; the model writes the rest.
    prompts: those of a file by the numbers of their lines, in the place of the beginning.
    draft_model: the second one; None without.
    traces: accepted lengths of each method that drafts; {} for real acceptance.
    left_out: what cannot run, and why.
    """

    question: Question
    model: Model
    draft_model: Model | None
    methods: dict[str, Method]
    beginning: np.ndarray
    prompts: dict[int, np.ndarray]
    text: dict[str, Any]
    traces: dict[str, tuple[int, ...]]
    left_out: tuple[dict[str, Any], ...]

    @property
    def simulated(self) -> bool:
        return self.question.simulate is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts.values()), default=max(self.question.lengths, default=0))

    @property
    def with_bound(self) -> bool:
        return mesh_of(self.model.params) is None


def prepare(question: Question, mesh: jax.sharding.Mesh | None) -> Prepared:
    longest, traces, second = max(question.lengths, default=0), {}, None
    prompts: dict[int, np.ndarray] = {}
    methods = {row: _as_simulated(row, one, question) for row, one in question.methods.items()}
    if question.simulate is not None:
        one_device = "left out with --simulate-acceptance, on one device"
        check(mesh is None, "--mesh", mesh and dict(mesh.shape), one_device)
        traces = read_trace(question.simulate, list(question.methods), "--simulate-acceptance")
        cfg = _shape(question)
        _check_methods(methods, cfg)
        model = Model(random_params(cfg), cfg=cfg)
        words = np.random.default_rng(0).zipf(1.2, longest)  # follow Zipf's law, as in text
        ids = np.minimum(words, cfg.vocab_size - 1).astype(np.int32)
        text = {"name": "random words by Zipf's law"}
        why = "the weights are random ones in memory"
    else:
        how: Any = {"dtype": question.dtype, "weights": question.weights}
        attached = {name: getattr(question, name) for name in ("heads", "drafter", "adapter")}
        model = load(question.model, cache=question.cache, mesh=mesh, **how, **attached)
        if question.draft_model is not None:
            second = load(question.draft_model, **how)
        _check_methods(methods, model.cfg)
        if question.prompts is None:
            ids, text = _beginning(question, model, longest)
        else:
            ids, (prompts, text) = np.zeros(0, np.int32), _prompts(question, model)
        why = peers.why_not(model.path) if mesh is None else "it runs on no mesh"
        why = why if question.adapter is None else "it would run without the adapter"
    # Of those from one text the length is what counts.
    for prompt in [*prompts.values(), *(np.resize(ids, length) for length in question.lengths)]:
        for setting in question.settings:
            new, beyond = question.new_tokens, question.exceed_max_positions
            one = next((one for one in methods.values() if one.takes_draft_model), Autoregressive())
            one = Autoregressive() if second is None else one
            requested(model, prompt, SETTINGS[setting], one, new, beyond, second)
    gone = [{"method": name, "error": why} for name in PEERS if why and question.peers]
    if mesh is not None:
        gone.append({"method": BOUND, "error": "the devices of a mesh read parts of it each"})
    return Prepared(question, model, second, methods, ids, prompts, text, traces, tuple(gone))


def _check_methods(methods: Mapping[str, Method], cfg: ModelConfig) -> None:
    """ValueError for a model that lacks what a method needs. Auto takes what there is."""
    for method in methods.values():
        if not method.chooses:
            method.sizes(cfg)


def _as_simulated(row: str, method: Method, question: Question) -> Method:
    if row != "tokenswift" or question.simulate is None:
        return method
    known = question.model in preset_names()  # what a trace was made with
    return preset(question.model).method if known else TokenSwift.paper()


def _shape(question: Question) -> ModelConfig:
    """The shape of a preset, if it fits the question and the memory."""
    cfg = model_preset(question.model).with_heads(SIMULATED_HEADS)
    cfg = dataclasses.replace(cfg, dtype=question.dtype or cfg.dtype)
    check_dtype(cfg.dtype)
    cfg = with_weights(cfg.with_cache(question.cache), question.weights, {}, question.model)
    longest, most = max(question.lengths), cfg.max_positions - question.new_tokens
    fits = longest <= most or question.exceed_max_positions
    wanted = f"at most {most}, as the model has {cfg.max_positions} positions"
    check(fits, "--lengths", longest, f"{wanted}; or --exceed-max-positions")
    needed = held_by_text(cfg, rows=0, slots=0)
    free = available_bytes(jax.devices()[0])
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"not enough memory: the weights of {question.model} in {cfg.dtype} are {needed:,} "
            f"bytes, {free:,} are free; a smaller preset, or --dtype bfloat16"
        )
    return cfg


def _beginning(question: Question, model: Model, longest: int) -> tuple[np.ndarray, dict[str, Any]]:
    if question.text is not None:
        text = read_text(question.text)
        check(bool(text), "--text", question.text, "a file with text")
        ids = encode(model.tokenizer, text[: CHARACTERS * longest])  # a long file takes long
        ids = ids if len(ids) >= longest else encode(model.tokenizer, text)
        enough = f"a text of at least the {longest} tokens of --lengths; it has {len(ids)}"
        check(len(ids) >= longest, "--text", question.text, enough)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return np.asarray(ids[:longest], np.int32), {"name": question.text, "sha256": digest}
    if tokenizer_of(model) is None:
        ids = np.random.default_rng(0).integers(model.cfg.vocab_size, size=16, dtype=np.int32)
        return ids[:longest], {"name": "written by the model after 16 random tokens"}
    ids = encode_text(model, BEGINNING, "prompt")
    return ids[:longest], {"name": f"written by the model after {BEGINNING!r}"}


def _prompts(question: Question, model: Model) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
    """The prompts of a file as ids. A line's own seed and settings do not count."""
    name, found = str(question.prompts), {}
    lines = read_lines(name)
    for number, line in lines.items():
        given: Any = {"prompt": line.rstrip("\r")}
        try:
            if name.endswith(".jsonl"):
                given, _ = prompt_of_line(line)
            if isinstance(given, TsjaxError):
                raise given
            way = next((one for one in TEXTS if given.get(one) is not None), None)
            check(way is not None, "prompt", given, f"with one of {', '.join(TEXTS)}")
            text = given[way]
            if way == "prompt" and question.chat:
                way, text = "messages", [{"role": "user", "content": text}]
            ids = chat_prompt(model, text) if way == "messages" else prompt_row(model, text)
        except TsjaxError as error:
            raise BadValue(f"--prompts={name!r} is not valid: line {number}: {error}") from error
        found[number] = np.asarray(ids, np.int32)
    digest = hashlib.sha256("\n".join(lines.values()).encode("utf-8", "surrogatepass")).hexdigest()
    return found, {"name": name, "sha256": digest, "prompts": len(found), "chat": question.chat}
