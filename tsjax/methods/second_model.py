# SPDX-License-Identifier: Apache-2.0
"""A second, smaller model that drafts: the tokens it has read, and chains of guesses.

Knows its cache and how it keeps up with a text. Does not know what becomes of its guesses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int
from tsjax.decoding.method import Noise
from tsjax.decoding.processors import NEVER_SEEN
from tsjax.decoding.sampling import best, score_choices
from tsjax.decoding.state import DecodeState
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.partial_cache import DraftCache
from tsjax.model.cache import KVCache, init_cache, write_rows
from tsjax.model.params import Params
from tsjax.model.passes import run_rows
from tsjax.model.transformer import ModelWeights, final_norm, unembed

READ_WIDTH = 64  # rows of a pass that reads
BEHIND = 2  # rows of a chain's first pass: the newest token, and one before it that was not read


class Reader(flax.struct.PyTreeNode):
    """What the second model has read.

    The rule. While the text fits, slot i holds its token i. With a limit, once it no longer does,
    the model goes back: it keeps the first `sinks` tokens and reads the last ones again, half as
    many as there is room for, as if they followed these. So it never meets a position that is
    larger than the limit, and sees half as many tokens or more.

    Attributes:
      kv: slots at `length` and beyond are unspecified. A slot's number is its token's position.
      behind_sinks: [B], the place in the text of the token in slot `sinks`.
      partial: the few tokens that guesses see, up to date but while they are made; None for all.
      sinks: first tokens of the text that stay.
      limit: tokens that are held; the slots after them are for guesses.
    """

    kv: KVCache
    behind_sinks: Int[Array, "B"]
    partial: DraftCache | None
    sinks: int = flax.struct.field(pytree_node=False)
    limit: int = flax.struct.field(pytree_node=False)

    @property
    def read(self) -> Int[Array, "B"]:
        """Tokens of the text up to the last one that was read."""
        length = self.kv.length
        return jnp.where(length > self.sinks, self.behind_sinks + length - self.sinks, length)

    def place(self, slots: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The place in the text of the token that belongs into each slot."""
        return jnp.where(slots < self.sinks, slots, self.behind_sinks[:, None] + slots - self.sinks)


def init_reader(
    settings: OnPartialCache, model: ModelConfig, batch: int, capacity: int, room: int
) -> Reader:
    """A reader of nothing, for texts of up to `capacity` tokens and `room` guesses."""
    limit, partial, rule = capacity, None, settings.draft_choice
    if rule == "streaming":
        limit = min(settings.draft_budget, capacity)
    elif rule != "all":
        partial = settings.new_cache(model, batch, capacity, None, room=room + BEHIND)
    return Reader(
        kv=init_cache(model, batch, limit + max(room + BEHIND, READ_WIDTH)),
        behind_sinks=jnp.full((batch,), settings.num_sinks, jnp.int32),
        partial=partial,
        sinks=settings.num_sinks,
        limit=limit,
    )


class Text(NamedTuple):
    """The known tokens of a state, and guesses after them.

    Attributes:
      tokens, length: the known ones; beyond `length` unspecified.
      guesses, count: what follows them.
    """

    tokens: Int[Array, "B C"]
    length: Int[Array, "B"]
    guesses: Int[Array, "B A"]
    count: Int[Array, "B"]

    @property
    def end(self) -> Int[Array, "B"]:
        return self.length + self.count

    def at(self, places: Int[Array, "B T"]) -> Int[Array, "B T"]:
        known = jnp.take_along_axis(self.tokens, places, axis=1, mode="clip")
        if not self.guesses.shape[1]:
            return known
        after = places - self.length[:, None]
        guessed = jnp.take_along_axis(self.guesses, jnp.maximum(after, 0), axis=1, mode="clip")
        return jnp.where(after < 0, known, guessed)

    def followed_by(self, tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> Text:
        """With the first `count` of `tokens` as further guesses."""
        b = jnp.arange(tokens.shape[0])[:, None]
        slots = self.count[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        guesses = self.guesses.at[b, slots].set(tokens, mode="drop")
        return self._replace(guesses=guesses, count=self.count + count)


def known_text(state: DecodeState, room: int) -> Text:
    none = jnp.zeros((state.root.shape[0], room), jnp.int32)
    return Text(state.tokens, state.length, none, jnp.zeros_like(state.length))


def kept_up(
    reader: Reader,
    settings: OnPartialCache,
    weights: ModelWeights,
    tokens: Int[Array, "B C"],
    upto: Int[Array, "B"],
    number: int,
    *,
    cfg: ModelConfig,
) -> Reader:
    """Having read the first `upto` tokens of a text, but perhaps the last, which `guess` reads.

    `number` is that of `guess`.
    """
    causal = jnp.tril(jnp.ones((READ_WIDTH, READ_WIDTH), bool))
    steps = jnp.arange(READ_WIDTH, dtype=jnp.int32)[None]
    none = jnp.zeros((tokens.shape[0], 0), jnp.int32)

    def is_full(reader: Reader) -> Bool[Array, "B"]:
        return reader.sinks + upto - reader.behind_sinks > reader.limit

    def is_behind(reader: Reader):
        return jnp.any((reader.read < upto - (BEHIND - 1)) | is_full(reader))

    def read(reader: Reader) -> Reader:
        sinks, back = reader.sinks, is_full(reader)
        again = upto - (reader.limit - sinks + 1) // 2
        reader = reader.replace(
            kv=reader.kv.replace(
                length=jnp.where(back, jnp.minimum(reader.kv.length, sinks), reader.kv.length)
            ),
            behind_sinks=jnp.where(back, again, reader.behind_sinks),
        )
        slots = reader.kv.length[:, None] + steps
        text = Text(tokens, upto, none, jnp.zeros_like(upto))
        places = reader.place(slots)
        rows = run_rows(weights, reader.kv, text.at(places), slots, causal, cfg=cfg)
        kv = write_rows(reader.kv, rows.k, rows.v, reader.kv.length, after=rows.hidden)
        new = jnp.sum(places < upto[:, None], axis=1, dtype=jnp.int32)
        return reader.replace(kv=kv.replace(length=reader.kv.length + new))

    reader = lax.while_loop(is_behind, read, reader)
    if reader.partial is None:
        return reader

    params, most = Params(weights), number + BEHIND
    partial = settings.caught_up(cfg, params, reader.partial, reader.kv, tokens, most)
    return reader.replace(partial=partial)


def guess(
    reader: Reader,
    weights: ModelWeights,
    state: DecodeState,
    text: Text,
    noise: Noise,
    number: int,
    rows_that_guess: Bool[Array, "B"],
    *,
    cfg: ModelConfig,
) -> tuple[Reader, Int[Array, "B {number}"]]:
    """The next tokens of a text as the second model would choose them, one after the other.

    The reader has read all but at most the last BEHIND tokens; then all of them and the guesses but
    the last. Of rows that do not guess, the reader stays.
    """
    end, guesses, begun, partial = text.end, [], reader.kv.length, reader.partial
    slots = reader.kv.length[:, None] + jnp.arange(BEHIND, dtype=jnp.int32)
    tokens, causal = text.at(reader.place(slots)), jnp.tril(jnp.ones((BEHIND, BEHIND), bool))
    newest = jnp.clip(end - 1 - reader.read, 0, BEHIND - 1)
    kv = reader.kv
    for index in range(number):
        seen = kv if partial is None else partial
        rows = run_rows(weights, seen, tokens, slots, causal, cfg=cfg)
        kv = write_rows(kv, rows.k, rows.v, kv.length, after=rows.hidden)
        kv = kv.replace(length=kv.length + newest + 1)
        if partial is not None:
            partial = write_rows(partial, rows.k, rows.v, partial.length, after=rows.hidden)
            partial = partial.replace(length=partial.length + newest + 1)
            if index == 0:  # the newest token that is known asks for what is chosen next
                partial = partial.replace(query=of_rows(rows.query, newest))
        hidden = of_rows(rows.hidden, newest)[:, None]
        chosen = next_tokens(
            weights, state, hidden, text.count[:, None], text.guesses, noise, cfg=cfg
        )
        guesses.append(chosen)
        text = text.followed_by(chosen, jnp.ones_like(text.count))
        tokens, slots = chosen, kv.length[:, None]
        causal, newest = jnp.ones((1, 1), bool), jnp.zeros_like(newest)
    length = jnp.where(rows_that_guess, kv.length, begun)
    reader = reader.replace(kv=kv.replace(length=length))
    if partial is not None and reader.partial is not None:  # what guesses wrote is unspecified
        reader = reader.replace(partial=partial.replace(length=reader.partial.length))
    return reader, jnp.concatenate(guesses, axis=1)


def of_rows(arrays: Any, index: Int[Array, "B"]):
    """Of arrays [B, T, ...] the row `index` of each batch row."""
    b = jnp.arange(index.shape[0])
    return jax.tree.map(lambda x: x[b, index], arrays)


def forgotten(reader: Reader, upto: Int[Array, "B"]) -> Reader:
    """As if it had read no further than the first `upto` tokens: what came after was wrong."""
    length = reader.kv.length - jnp.maximum(reader.read - upto, 0)
    return reader.replace(kv=reader.kv.replace(length=length))


def next_tokens(
    weights: ModelWeights,
    state: DecodeState,
    hidden: Float[Array, "B T D"],
    depths: Int[Array, "B T"],
    guesses: Int[Array, "B A"],
    noise: Noise,
    *,
    cfg: ModelConfig,
) -> Int[Array, "B T"]:
    """The token that a model chooses after each row, as plain decoding would if it were the model.

    Row t comes after the first depths[b, t] of the guesses.
    """
    logits = fitted(unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg), noise.shape[2])
    index = jnp.arange(guesses.shape[1], dtype=jnp.int32)[None, None]
    positions = state.length[:, None, None] + index
    at = jnp.where(index < depths[..., None], positions, NEVER_SEEN)
    ancestors = jnp.broadcast_to(guesses[:, None], at.shape), at
    depths = jnp.minimum(depths, noise.shape[1] - 1)
    scores = score_choices(logits, state.text, depths, noise, state.sampling, ancestors)
    return best(scores).astype(jnp.int32)


def fitted(logits: Float[Array, "B T W"], vocab: int) -> Float[Array, "B T {vocab}"]:
    """For a vocabulary of another size: what it lacks is never chosen."""
    more = vocab - logits.shape[2]
    if more <= 0:
        return logits[..., :vocab]
    return jnp.pad(logits, ((0, 0), (0, 0), (0, more)), constant_values=-jnp.inf)


def second_of(params: Params, model: ModelConfig | None) -> tuple[ModelWeights, ModelConfig]:
    """The second model's weights and config. ValueError where there is none."""
    if model is None or params.draft_model is None:
        raise BadValue(
            "a second model is missing: tsjax.generate(..., draft_model=tsjax.load(...)); in steps "
            "of your own params.replace(draft_model=...), and the method's `model` is its config"
        )
    return params.draft_model, model
