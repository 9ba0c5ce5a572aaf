# SPDX-License-Identifier: Apache-2.0
"""A matrix of narrow weights: which numbers it holds, how they are stored, how they are rounded.

Knows arrays of NumPy and jax. Does not know products, files or models.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.typing import Array, Float, Integer

PANEL = 16  # outputs that lie together: as many as a vector of AVX-512 has sums
WIDE = 256  # inputs that share a scale where groups have steps
ENTRIES = 32  # of a row, that are rounded together; inputs are stored in whole ones


class Format(NamedTuple):
    """How weights are stored: each is the float32 number scale * (q - zero) + least.

    The product and the sum are rounded to float32. Those of one group share scale and least.

    Attributes:
      bits: of q, an integer from 0 on: 4 or 8.
      zero: the q of a weight that is its least.
      group: inputs that share a scale: 32 or 16.
      two_levels: whether a scale is float32(of WIDE inputs, a float16) * (of the group, an int8);
        else it is a float16. So is least.
      with_least: whether there is one; it is 0 elsewhere.
    """

    bits: int
    zero: int
    group: int = 32
    two_levels: bool = False
    with_least: bool = False


# The types of GGUF's blocks. Their numbers are kept exactly; of 5 and 6 bits q takes 8.
FORMATS = {
    "Q4_0": Format(4, 8),
    "Q4_1": Format(4, 0, with_least=True),
    "Q5_0": Format(8, 16),
    "Q5_1": Format(8, 0, with_least=True),
    "Q8_0": Format(8, 128),
    "Q2_K": Format(4, 0, group=16, two_levels=True, with_least=True),
    "Q3_K": Format(4, 4, group=16, two_levels=True),
    "Q4_K": Format(4, 0, two_levels=True, with_least=True),
    "Q5_K": Format(8, 0, two_levels=True, with_least=True),
    "Q6_K": Format(8, 32, group=16, two_levels=True),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "steps", "least", "least_steps"),
    meta_fields=("format", "outputs", "inputs"),
)
@dataclasses.dataclass(frozen=True)
class NarrowMatrix:
    """Weights [*outputs, *inputs] of four or eight bits, in groups along the inputs.

    Outputs lie in panels of 16, and of these the weights of a few inputs lie side by side, so that
    a processor multiplies 16 outputs at a time. Panels and groups that are not full have zeros.

    Attributes:
      values: q. uint8 [P, G, 16 * group * bits / 8]. Of a panel and a group: four inputs after
        four, of each output, [group / 4, 16, 4]; with four bits eight inputs after eight,
        [group / 8, 16, 4], the first four of them in the lower bits and the others in the upper.
      scales: float16 [P, G, 16]; with two levels [P, I / 256, 16].
      steps: int8 [P, G, 16] with two levels, else None.
      least, least_steps: as `scales` and `steps`; None without.
      format: which numbers these are.
      outputs, inputs: the axes of the matrix.
    """

    values: Integer[Array, "P G bytes"]
    scales: Float[Array, "P S 16"]
    steps: Integer[Array, "P G 16"] | None
    least: Float[Array, "P S 16"] | None
    least_steps: Integer[Array, "P G 16"] | None
    format: Format
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def width(self) -> int:
        """Inputs that are stored."""
        return self.values.shape[1] * self.format.group

    def numbers(self) -> Float[Array, "O I"]:
        """The weights in float32; NumPy's arrays give one of NumPy, with the same bits."""
        xp: Any = np if isinstance(self.values, np.ndarray) else jnp
        found = integers(self).astype(np.float32) * self._of_each(self.scales, self.steps)
        if self.least is not None:
            least = self._of_each(self.least, self.least_steps)
            if xp is jnp:  # or XLA might round once, where the definition rounds twice
                found, least = lax.optimization_barrier((found, least))
            found = found + least
        return found[: math.prod(self.outputs), : math.prod(self.inputs)]

    def _of_each(self, level: Array, steps: Array | None) -> Float[Array, "O I"]:
        xp: Any = np if isinstance(level, np.ndarray) else jnp
        found = level.astype(np.float32)
        if steps is not None:
            found = xp.repeat(found, WIDE // self.format.group, axis=1)
            found = found * steps.astype(np.float32)
        return xp.repeat(found.swapaxes(1, 2).reshape(-1, found.shape[1]), self.format.group, axis=1)


def integers(matrix: NarrowMatrix) -> Integer[Array, "O I"]:
    """q - zero in int32 of each output and input that is stored."""
    values, format = matrix.values, matrix.format
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    panels, groups, _ = values.shape
    four = values.reshape(panels, groups, -1, PANEL, 1, 4)
    if format.bits == 4:
        four = xp.concatenate([four & 15, four >> 4], axis=4)
    rows = four.transpose(0, 3, 1, 2, 4, 5).reshape(panels * PANEL, -1)
    return rows.astype(np.int32) - format.zero


def shapes_of(format: Format, outputs: int, inputs: int) -> dict[str, tuple[tuple, str]]:
    """Shape and type of the arrays of a matrix, by their names; of those that are there."""
    panels, groups = -(-outputs // PANEL), stored_inputs(inputs) // format.group
    scales = (panels, inputs // WIDE if format.two_levels else groups, PANEL), "float16"
    steps = (panels, groups, PANEL), "int8"
    found = {
        "values": ((panels, groups, PANEL * format.group * format.bits // 8), "uint8"),
        "scales": scales,
        "steps": steps if format.two_levels else None,
        "least": scales if format.with_least else None,
        "least_steps": steps if format.two_levels and format.with_least else None,
    }
    return {name: one for name, one in found.items() if one is not None}


def stored_inputs(inputs: int) -> int:
    return -(-inputs // ENTRIES) * ENTRIES


def packed(
    format: Format,
    outputs: tuple[int, ...],
    inputs: tuple[int, ...],
    values: np.ndarray,
    scales: np.ndarray,
    steps: np.ndarray | None = None,
    least: np.ndarray | None = None,
    least_steps: np.ndarray | None = None,
) -> NarrowMatrix:
    """A matrix of NumPy's arrays from q [O, I] and what its groups have, [O, groups] each."""
    O, I = values.shape
    missing = -O % PANEL, stored_inputs(I) - I
    if any(missing):
        values = np.pad(values, [(0, missing[0]), (0, missing[1])], constant_values=format.zero)
    if format.bits == 4:
        eight = values.reshape(len(values), -1, 2, 4)
        values = (eight[:, :, 0] | eight[:, :, 1] << 4).reshape(len(values), -1)
    words = np.ascontiguousarray(values).view(np.uint32).reshape(-1, PANEL, values.shape[1] // 4)
    groups = stored_inputs(I) // format.group
    panels = np.ascontiguousarray(words.swapaxes(1, 2)).view(np.uint8).reshape(len(words), groups, -1)

    def of_groups(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        array = np.pad(array, [(0, missing[0]), (0, 0)])
        return np.ascontiguousarray(array.reshape(-1, PANEL, array.shape[1]).swapaxes(1, 2))

    of_each = [of_groups(array) for array in (scales, steps, least, least_steps)]
    return NarrowMatrix(panels, *of_each, format, tuple(outputs), tuple(inputs))


def rounded(matrix: Float[np.ndarray, "O I"], name: str) -> dict[str, np.ndarray]:
    """What `packed` takes, of the numbers of "Q8_0" or "Q4_1" that are nearest to these."""
    O, I = matrix.shape
    wide = np.pad(matrix.astype(np.float32), [(0, 0), (0, stored_inputs(I) - I)])
    groups = wide.reshape(O, -1, FORMATS[name].group)
    if name == "Q8_0":
        scales = (np.abs(groups).max(axis=2) / 127).astype(np.float16)
        least, most, zero = None, 127, 128
        shifted = groups
    elif name == "Q4_1":
        least = groups.min(axis=2).astype(np.float16)
        scales = ((groups.max(axis=2) - least) / 15).astype(np.float16)
        most, zero = 15, 0
        shifted = groups - least[:, :, None].astype(np.float32)
    else:
        raise ValueError(f"rounding to {name!r} is not valid: 'Q8_0' or 'Q4_1'")
    step = scales[:, :, None].astype(np.float32)
    q = np.rint(shifted / np.where(step > 0, step, np.float32(1)))
    q = np.clip(q, -min(zero, most), most) + zero
    found = {"values": q.astype(np.uint8).reshape(O, -1)[:, :I], "scales": scales}
    return found if least is None else found | {"least": least}


def check_matrix(matrix: NarrowMatrix, inputs: int) -> None:
    """Refuses what is no matrix for rows of so many inputs."""
    outputs = math.prod(matrix.outputs)
    if math.prod(matrix.inputs) != inputs:
        raise ValueError(
            f"shapes do not fit together: rows [..., {inputs}], weights of {matrix.inputs} inputs"
        )
    wanted = shapes_of(matrix.format, outputs, inputs)
    for name in ("values", "scales", "steps", "least", "least_steps"):
        array, asked = getattr(matrix, name), wanted.get(name)
        given = None if array is None else (tuple(array.shape), str(array.dtype))
        if given != asked:
            raise ValueError(f"{name} is {given} and not valid: {asked} for {matrix.format}")
