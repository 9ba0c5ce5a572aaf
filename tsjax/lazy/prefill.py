# SPDX-License-Identifier: Apache-2.0
"""LazyPrefill: how a prompt is read by its important tokens, and how that wraps a step.

Knows stages and revivals, and the step that it wraps. Decoding knows no more of it than the
functions of this class.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Memory, Method, Sizes
from tsjax.decoding.sampling import step_noise
from tsjax.decoding.state import DecodeState
from tsjax.decoding.step import Decide, commit, decode_step
from tsjax.decoding.verification import judge
from tsjax.lazy.completing import complete_some, slots_by_position
from tsjax.lazy.rereading import reread_made
from tsjax.lazy.revival import (
    lacking_tokens,
    revive_where_due,
    run_root,
    something_comes_back,
    tokens_until_choice,
)
from tsjax.lazy.settings import LazySettings
from tsjax.lazy.stages import choose_stage, fill_stage, note_committed, tokens_to_fill
from tsjax.lazy.state import LazyPlan, init_prompt
from tsjax.methods.partial_cache import DraftCache
from tsjax.model.params import Params

# Passes of a few tokens, or of one, between two looks at whether Ctrl-C was pressed. No pass is
# narrower, so one program reads all.
ONE_BY_ONE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyPrefill(LazySettings):
    __doc__ = LazySettings.__doc__

    def plan(self, model: ModelConfig) -> LazyPlan:
        return LazyPlan(self, model)

    def for_reading(self) -> LazyPrefill:
        """The same without what matters to decoding alone."""
        return dataclasses.replace(self, revive="never", choose_every=None, revive_rows=1)

    def check(self, model: ModelConfig, method: Method, sizes: Sizes) -> None:
        """Refuses what a model's layers or a method's drafts do not allow."""
        if isinstance(self.keep, str):
            raise BadValue(
                f"keep={self.keep!r} is not valid here: tsjax.generate names the cuts by the "
                "length of the prompt; LazyPrefill.resolved(model.cfg, tokens) does the same"
            )
        layers, shown = model.num_layers, dict(self.keep)
        for layer in shown:
            most = f"but the model has {layers} layers: at most {layers - 1}"
            check(layer < layers, "keep", shown, f"a cut after layer {layer}, {most}")
        random = "a cut before the first layer needs scores='random', as nothing attends there"
        check(0 not in shown or self.scores == "random", "keep", shown, random)
        if self.revive == "on_demand" and sizes.width > 1:
            raise BadValue(
                f"revive='on_demand' is not valid with method={type(method).__name__}: each "
                "new token then chooses what it sees, so none can be judged ahead; use "
                "revive='in_batches', 'background' or 'never', or method='autoregressive'"
            )

    @property
    def rows_ahead(self) -> int:
        """Slots after the longest text that a revival may write to in vain."""
        return 0 if self.revive == "never" else self.revive_rows

    def begin(self, state: DecodeState, prompt_capacity: int, model: ModelConfig) -> DecodeState:
        """The state with no row in any layer yet, and room for prompts of `prompt_capacity`."""
        batch, capacity = state.tokens.shape
        _check_prompts(state, prompt_capacity, capacity)
        absent = jnp.broadcast_to(state.kv.length, (model.num_layers, batch))
        prompt = self.init(model, state.prompt_length, prompt_capacity, capacity)
        return state.replace(kv=state.kv.replace(absent=absent), prompt=prompt)

    def begin_memory(self, memory: Memory) -> Memory:
        """What a method begins with, its draft caches for layers that lack tokens."""

        def begun(part):
            return part.with_absent() if isinstance(part, DraftCache) else part

        return jax.tree.map(begun, memory, is_leaf=lambda part: isinstance(part, DraftCache))

    def init(self, model: ModelConfig, prompt_length, prompt_capacity: int, capacity: int):
        return init_prompt(self.plan(model), prompt_length, prompt_capacity, capacity)

    def parts(self, model: ModelConfig, known) -> list:
        plan = self.plan(model)
        return [tokens_to_fill(plan, stage, known) for stage in range(len(plan.stages))]

    def check_width(self, state: DecodeState, width: int) -> None:
        """Each stage's passes, up to the longest prompt, have to fit."""
        most = state.prompt.capacity
        fits = -(-(most - 1) // width) * width <= state.kv.capacity
        wanted = f"passes through up to {most} prompt tokens would not fit into the capacity"
        check(fits, "width", width, f"{wanted} {state.kv.capacity}")

    def read_part(
        self, params: Params, state: DecodeState, *, part: int, width: int, cfg: DecodeConfig
    ) -> DecodeState:
        return fill_stage(self.plan(cfg.model), params, state, part, width)

    def finish_part(
        self, params: Params, state: DecodeState, *, part: int, cfg: DecodeConfig
    ) -> DecodeState:
        plan = self.plan(cfg.model)
        return state if part == plan.last_stage else choose_stage(plan, params, state, part)

    def most_made_at_once(self, width: int) -> int:
        """How many tokens a pass of `reread_made` may take, at most `width`."""
        if self.revive == "on_demand":
            return min(width, ONE_BY_ONE)
        if self.revive == "in_batches":
            return min(width, ONE_BY_ONE * self.tokens_between_choices)
        return width

    def read_made(
        self, params: Params, state: DecodeState, start, *, width: int, cfg: DecodeConfig
    ) -> DecodeState:
        return reread_made(self.plan(cfg.model), params, state, start, width)

    def complete(
        self, params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig
    ) -> DecodeState:
        return complete_some(self.plan(cfg.model), params, state, width)

    def slots_of_layers(self, state: DecodeState, *, cfg: DecodeConfig) -> dict[int, jax.Array]:
        """For each layer whose rows are not in the order of the text, where its tokens are."""
        plan = self.plan(cfg.model)
        found = zip(plan.stages[1:], slots_by_position(plan, state), strict=True)
        return {layer: slots for layers, slots in found for layer in layers}

    def step(
        self, params: Params, state: DecodeState, *, cfg: DecodeConfig, decide: Decide
    ) -> DecodeState:
        """One step of decoding, and what it takes to keep the prompt's tokens where they belong."""
        plan, inner = self.plan(cfg.model), dataclasses.replace(cfg, prefill=None)
        if self.revive == "on_demand":
            state, after = _choosing_step(plan, params, state, inner, decide)
        else:
            if self.revive != "never":
                state = self.choose(params, state, cfg=cfg)
                state = state.replace(room=tokens_until_choice(plan, state))
            after = decode_step(params, state, cfg=inner, decide=decide)
        return self.noted(state, after, cfg=cfg)

    @property
    def chooses_between_steps(self) -> bool:
        """Whether tokens come back before a step, rather than within it or not at all."""
        return self.revive in ("in_batches", "background")

    def choose(self, params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
        """What comes back before a step, where that is due."""
        return revive_where_due(self.plan(cfg.model), params, state)

    def is_choice_due(self, state: DecodeState, *, cfg: DecodeConfig):
        return something_comes_back(self.plan(cfg.model), state)

    def between_choices(self) -> LazyPrefill:
        """The same for steps before which nothing comes back."""
        return _BetweenChoices(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def run_root(self, params: Params, state: DecodeState, *, cfg: DecodeConfig):
        """What a step of plain decoding does before it judges; see `noted` for what comes after."""
        return run_root(self.plan(cfg.model), params, state)

    def noted(self, before: DecodeState, after: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
        """The state `after` a step, which knows where the rows are that it wrote."""
        depth = cfg.sizes.depth
        prompt = note_committed(self.plan(cfg.model), before, depth, after=after.kv.length)
        return after.replace(prompt=prompt)

    def is_reviving(self, model: ModelConfig, state: DecodeState) -> bool:
        """Whether a row that still runs lacks tokens that come back in the background."""
        if self.revive != "background":
            return False
        return bool(jnp.any(lacking_tokens(self.plan(model), state) & state.running[:, None]))


class _BetweenChoices(LazyPrefill):
    def choose(self, params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
        return state


def _choosing_step(
    plan: LazyPlan, params: Params, state: DecodeState, cfg: DecodeConfig, decide: Decide
) -> tuple[DecodeState, DecodeState]:
    """A step of plain decoding whose root chooses what it sees of the prompt; the state before the
    token is committed, and after."""
    noise = step_noise(state.row_key, state.length, 0, cfg.model.vocab_size, state.sampling)
    _, root = cfg.method.draft(cfg.model, params, state, noise)
    state, rows = run_root(plan, params, state)
    verdict = judge(params.model, state, root, rows, noise, cfg)
    return state, commit(state, root, *decide(state, root, verdict))


def _check_prompts(state: DecodeState, prompt_capacity: int, capacity: int) -> None:
    """Refuses what `tsjax.steps.prefill` would not read. Lengths that are traced pass: a run that
    is resumed has longer ones, and calls `read_made` after the prefill."""
    most = f"at most the capacity {capacity}"
    check(0 < prompt_capacity <= capacity, "prompt_capacity", prompt_capacity, most)
    if isinstance(state.prompt_length, Tracer) or isinstance(state.length, Tracer):
        return
    longest = int(jnp.max(state.prompt_length))
    enough = f"at least the {longest} tokens of the longest prompt"
    check(longest <= prompt_capacity, "prompt_capacity", prompt_capacity, enough)
    if bool(jnp.any(state.length != state.prompt_length)):
        raise BadValue(
            f"length={state.length} is not valid with a lazy prefill: a run begins after its prompt"
        )
