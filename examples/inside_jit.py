# SPDX-License-Identifier: Apache-2.0
"""Use the decode step in a JAX program of your own: python examples/inside_jit.py.

`generate` is a host loop around these functions and nothing more. Here one jitted function
prefills, decodes and scores, on a random model.
"""

import functools

import jax
import jax.numpy as jnp

import tsjax

CFG = tsjax.DecodeConfig(
    tsjax.ModelConfig(
        vocab_size=100,
        embed_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=128,
        max_positions=512,
        norm_eps=1e-5,
    )
)


@functools.partial(jax.jit, static_argnames=("new", "cfg"))
def continue_and_count(params, prompts, lengths, wanted, *, new: int, cfg: tsjax.DecodeConfig):
    """How often the token `wanted` occurs in `new` greedy tokens after each prompt."""
    state = tsjax.init_state(prompts, lengths, cfg=cfg, capacity=128, max_length=lengths + new)
    state = tsjax.prefill(params, state, width=16, cfg=cfg)
    state = tsjax.decode(params, state, new, cfg=cfg)
    positions = jnp.arange(state.tokens.shape[1])
    is_new = (positions >= lengths[:, None]) & (positions < state.length[:, None])
    return jnp.sum(is_new & (state.tokens == wanted), axis=1), state.tokens


def main() -> None:
    params = tsjax.init_params(CFG.model, seed=0, scale=0.2)
    prompts = jnp.array([[5, 6, 7, 0], [8, 9, 10, 11]])
    lengths = jnp.array([3, 4])
    counts, tokens = continue_and_count(params, prompts, lengths, 42, new=50, cfg=CFG)
    print("tokens of row 0:", tokens[0, :53])
    print("occurrences of token 42:", counts)


if __name__ == "__main__":
    main()
