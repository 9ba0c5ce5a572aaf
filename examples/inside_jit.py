# SPDX-License-Identifier: Apache-2.0
"""Use the decode step in a JAX program of your own: python examples/inside_jit.py [CHECKPOINT].

`tsjax.generate` is a host loop around pure functions. Here one jitted function calls them in a loop
of its own: it stops at the first token that is wanted, and counts the steps until then.
"""

import functools
import sys

import jax
import jax.numpy as jnp

import tsjax
from tsjax.steps import DecodeConfig, DecodeState, decode_step, init_state, prefill


@functools.partial(jax.jit, static_argnames=("limit", "cfg"))
def decode_until(params, prompts, lengths, wanted, *, limit: int, cfg: DecodeConfig):
    """Greedy tokens [B, capacity], lengths [B] and steps: until each row has `wanted`, or `limit`.

    A step emits one token or, with a method that drafts, several.
    """
    state = init_state(prompts, lengths, cfg=cfg, capacity=256, max_length=lengths + limit)
    state = prefill(params, state, width=16, cfg=cfg)

    def found(state: DecodeState):
        at = jnp.arange(state.tokens.shape[1])
        new = (at >= lengths[:, None]) & (at < state.length[:, None])
        return jnp.any(new & (state.tokens == wanted), axis=1)

    def unfinished(carry):
        state, steps = carry
        return jnp.any(~found(state) & (state.length < lengths + limit))

    def step(carry):
        state, steps = carry
        return decode_step(params, state, cfg=cfg), steps + 1

    state, steps = jax.lax.while_loop(unfinished, step, (state, jnp.int32(0)))
    return state.tokens, state.length, steps


def main(path: str = tsjax.EMBEDDED, prompt: str = "It was a dark") -> None:
    model = tsjax.load(path, dtype="float32")
    ids = model.tokenizer.encode(prompt)
    wanted = model.tokenizer.encode(".", add_special_tokens=False)[-1]
    prompts, lengths = jnp.asarray([ids]), jnp.asarray([len(ids)])
    for method in (tsjax.methods.Autoregressive(), tsjax.TokenSwift(tree=(1,), num_ngrams=1)):
        cfg = DecodeConfig(model.cfg, method)
        tokens, length, steps = decode_until(
            model.params, prompts, lengths, wanted, limit=60, cfg=cfg
        )
        text = model.tokenizer.decode(tokens[0, : length[0]].tolist(), skip_special_tokens=True)
        print(f"{type(method).__name__}: {int(length[0]) - len(ids)} tokens in {steps} steps")
        print(f"  {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
