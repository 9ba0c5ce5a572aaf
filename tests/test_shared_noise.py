# SPDX-License-Identifier: Apache-2.0
"""Why levels of drafts share the noise of a position: what TriForce's inner loop does instead.

The published loop, told a rejection, samples anew from the middle level's law R instead of from
what the lowest one's law D left of it, and still reports R. Laws are of 50 tokens, drawn at random.
"""

import numpy as np
import pytest

VOCAB, SAMPLES = 50, 100_000


def laws(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the lowest level, the middle one and the whole model: these two are much alike."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((3, VOCAB))
    logits[2] = logits[1] + 0.1 * logits[2]
    shares = np.exp(logits)
    return tuple(shares / shares.sum(axis=1, keepdims=True))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation."""
    return 0.5 * np.abs(one - other).sum()


def published_law(lowest, middle, whole) -> np.ndarray:
    """Of the token that the whole model emits."""
    kept = np.minimum(lowest, middle)
    inner = kept + (1 - kept.sum()) * middle
    passes = np.minimum(1, whole / middle)  # as if the inner token came from `middle`
    left = np.maximum(whole - middle, 0)
    return inner * passes + (1 - (inner * passes).sum()) * left / left.sum()


@pytest.mark.parametrize("seed", range(2))
def test_the_published_inner_loop_is_biased_and_shared_noise_is_not(seed):
    of_levels, rng = laws(seed), np.random.default_rng(seed)
    whole = of_levels[2]
    assert distance(published_law(*of_levels), whole) > 0.1
    noise = rng.gumbel(size=(SAMPLES, VOCAB))
    middle, emitted = (np.argmax(np.log(law) + noise, axis=1) for law in of_levels[1:])
    rounding = 0.4 * np.sqrt(VOCAB / SAMPLES)  # what as many samples of a law differ from it
    assert distance(np.bincount(emitted, minlength=VOCAB) / SAMPLES, whole) < 2 * rounding
    # They agree as often as any coupling may, but for a little: at most 1 - their distance.
    assert np.mean(middle == emitted) > 1 - 2 * distance(of_levels[1], whole)
