# SPDX-License-Identifier: Apache-2.0
"""For other engines: the exact sampler, and the judge of drafts."""

# Pure functions of arrays, which can be jitted and sharded by whoever calls them. They know logits
# and positions; no model, no cache and no method.

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsjax.base.checks import check, refuse_unknown
from tsjax.base.errors import Failed
from tsjax.base.generation_config import SAMPLING_NAMES, GenerationConfig
from tsjax.base.typing import Array, Int, accumulation_dtype
from tsjax.decoding.noise import position_noise, row_keys
from tsjax.decoding.sampling import best_with_score, sampling_values, warp
from tsjax.decoding.tree import DraftTree
from tsjax.decoding.verification import accept

__all__ = ["sample", "verify", "Verified", "token_noise", "warped_logits"]


class Verified(NamedTuple):
    """What `verify` returns.

    Attributes:
      tokens: [B, J + 1] int32, the tokens that follow the root: accepted drafts, and one more that
        is the model's own. Beyond `count` unspecified.
      count: [B] int32, how many of them count: at least 1.
      path: [B, J + 1] int32, the nodes whose rows of the cache are to be kept, the root first;
        beyond `count` unspecified.
    """

    tokens: Int[Array, "B J+1"]
    count: Int[Array, "B"]
    path: Int[Array, "B J+1"]


def token_noise(seeds, repeats, positions, vocab_size: int, dtype: Any = jnp.float32) -> jax.Array:
    """Gumbel noise [B, T, V] of the tokens at absolute positions [B, T].

    It follows from seed, repeat, position and token alone: the same whatever runs beside it.

    Args:
      seeds, repeats: [B] integers, as all from 0 to 2**32 - 1; the repeat tells apart rows of one
        prompt and one seed.
      dtype: of the logits that it is added to; those of another type are other draws.
    """
    keys = row_keys(_words(seeds, "seeds", "[B]"), _words(repeats, "repeats", "[B]"))
    return position_noise(keys, _words(positions, "positions", "[B, T]"), vocab_size, dtype)


def sample(logits, seeds, repeats, positions, **settings: Any) -> jax.Array:
    """The tokens [B, T] int32 that tsjax draws from logits [B, T, V] for absolute positions [B, T].

    A token is the argmax of the logits, divided by the temperature and truncated, plus
    `token_noise`. So it does not depend on batch, chunk, device or method, but for the logits' last
    bits. Where the best of them is NaN or infinite there is no token: that is a RuntimeError, and
    under jit, which cannot raise, the token is -1.

    Args:
      logits: [B, T, V], penalties already in them.
      seeds, repeats, positions: see `token_noise`.
      settings: temperature, top_k, top_p, min_p, epsilon_cutoff, eta_cutoff, min_tokens_to_keep:
        Python numbers, as of GenerationConfig.
    """
    logits = _logits(logits)
    warped = warped_logits(logits, **settings)
    noise = token_noise(seeds, repeats, positions, logits.shape[2], warped.dtype)
    check(noise.shape == logits.shape, "positions", np.shape(positions), f"{logits.shape[:2]}")
    tokens = _best(warped + noise)
    _refuse_broken(tokens == -1)
    return tokens


def warped_logits(logits, **settings: Any) -> jax.Array:
    """Logits as `sample` has them before the noise: for `verify`."""
    refuse_unknown(list(settings), SAMPLING_NAMES, "argument")
    logits, config = _logits(logits), GenerationConfig(do_sample=True, **settings)
    wanted = "a positive number; greedy tokens are those of the best logits"
    check(config.do_sample, "temperature", settings.get("temperature"), wanted)
    values = sampling_values(config, (), logits.shape[2], logits.dtype)
    return warp(logits.astype(accumulation_dtype(logits.dtype)), values)


def verify(tree: DraftTree, logits, noise=None) -> Verified:
    """One decision for each node of a draft tree, and the walk along those that were drafted.

    What it emits is what `sample` would have drawn one by one, or argmax without noise, whatever
    the tree; -1 or a RuntimeError as there.

    Args:
      tree: see `merge_paths`.
      logits: [B, T, V], of what comes after each node: as `warped_logits` gives them.
      noise: [B, J + 1, V] `token_noise` of the positions after the root, one for each depth; None
        for greedy tokens.
    """
    logits = _logits(logits)
    nodes, levels = tree.tokens.shape, tree.path.shape[2]
    check(logits.shape[:2] == nodes, "logits", logits.shape, f"[B, T, V] for {nodes} nodes")
    if noise is not None:
        wanted = (nodes[0], levels, logits.shape[2])
        check(noise.shape == wanted, "noise", noise.shape, f"{wanted}, one for each depth")
        # Of another type it is other noise.
        check(noise.dtype == logits.dtype, "noise", noise.dtype, f"{logits.dtype} as the logits")
        logits = logits + jnp.take_along_axis(noise, tree.depths[..., None], axis=1)
    target = _best(logits)
    accepted = accept(tree, target)
    tokens = jnp.take_along_axis(target, accepted.path, axis=1)
    _refuse_broken((tokens == -1) & (jnp.arange(levels) <= accepted.count[:, None]))
    return Verified(tokens, accepted.count + 1, accepted.path)


def _best(scores: jax.Array) -> jax.Array:
    score, token = best_with_score(scores)
    return jnp.where(score < jnp.inf, token.astype(jnp.int32), -1)


def _refuse_broken(broken: jax.Array) -> None:
    """Where values are known: [B, T], whose scores are NaN or infinite."""
    if isinstance(broken, Tracer) or not broken.is_fully_addressable or not broken.any():
        return
    row, place = np.argwhere(np.asarray(broken))[0]
    raise Failed(f"no token follows in row {row}, place {place}: the best logit is NaN or infinite")


def _words(values: Any, name: str, shape: str) -> jax.Array:
    """Integers that are words of 32 bits. Of what is traced or elsewhere only the type is known."""
    hidden = any(
        isinstance(x, jax.Array) and (isinstance(x, Tracer) or not x.is_fully_addressable)
        for x in jax.tree.leaves(values)
    )
    found = jnp.asarray(values) if hidden else np.asarray(values)
    wanted = f"{shape} integers, at least 0 and at most {2**32 - 1}"
    good = found.ndim == shape.count(",") + 1 and np.issubdtype(found.dtype, np.integer)
    short = not hidden and found.size < 9
    check(good, name, found.tolist() if short else f"{found.dtype} {found.shape}", wanted)
    if not hidden:
        for value in map(int, (found.min(initial=0), found.max(initial=0))):
            check(0 <= value < 2**32, name, value, wanted)
    return jnp.asarray(found, jnp.uint32)


def _logits(logits) -> jax.Array:
    logits = jnp.asarray(logits)
    floats = logits.ndim == 3 and jnp.issubdtype(logits.dtype, jnp.floating)
    check(floats, "logits", f"{logits.shape} of type {logits.dtype}", "[B, T, V] floats")
    return logits
