# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning in one screen: python examples/rollouts.py [CHECKPOINT [STEPS]].

The model learns to use many words that begin with s. Each step samples a group of answers to each
prompt, pays each by its share of different words of that kind, and makes what was paid more than
its group's mean likelier. Weights are swapped, and nothing is compiled anew.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tsjax

PROMPTS = ["Once upon a time", "One day, the", "There was a", "In the morning, a little"]


def reward(text: str) -> float:
    words = text.lower().split()
    return len({word for word in words if word.startswith("s")}) / max(1, len(words))


def main(path: str = tsjax.EMBEDDED, steps: str = "25", group: int = 8) -> None:
    model = tsjax.load(path, dtype="float32")
    optimizer = optax.adam(3e-4)

    @jax.jit
    def learn(params, moments, rollout: tsjax.results.Rollout, advantages):
        def loss(params):
            told = tsjax.log_probs(model.replace(params=params), rollout.tokens, remat=True)
            # The ratio to what it was when it was sampled: its slope is the policy gradient.
            ratio = jnp.exp(jnp.where(rollout.mask, told - rollout.raw, 0))
            return -jnp.sum(rollout.mask * ratio * advantages[:, None]) / jnp.sum(rollout.mask)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(model.params)
    for step in range(int(steps)):
        rollout = tsjax.rollout(
            model, PROMPTS, group=group, seed=jax.random.key(step), max_new_tokens=40
        )
        rewards = np.array([reward(text) for text in rollout.result.text])
        groups = rewards.reshape(-1, group)
        advantages = (groups - groups.mean(1, keepdims=True)) / (
            groups.std(1, keepdims=True) + 0.01
        )
        params, moments = learn(model.params, moments, rollout, jnp.asarray(advantages.ravel()))
        model = model.with_params(params)
        print(f"step {step}: reward {rewards.mean():.3f}", flush=True)
    print(rollout.result.text[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
