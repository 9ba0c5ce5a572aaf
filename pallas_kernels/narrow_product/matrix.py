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

from pallas_kernels.typing import Array, Float, Integer, Shaped

PANEL = 16  # outputs that lie together: as many as a vector of AVX-512 has sums
WIDE = 256  # inputs that share a scale where groups have steps
AT_ONCE = 2**20  # weights that are packed at a time: what lies between stays in a cache
ENTRIES = 32  # of a row, that are rounded together; inputs are stored in whole ones


class Format(NamedTuple):
    """How weights are stored: each is the float32 number scale * (q - zero) + least.

    The product and the sum are rounded to float32. Those of one group share scale and least.

    Attributes:
      bits: of q, an integer from 0 on: 4, 5, 6 or 8.
      zero: the q that stands for `least`, or for 0.
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

    @property
    def bits_of_weight(self) -> float:
        """That are stored, with a weight's share of what its group has."""
        of_group = 8 / self.group + 16 / WIDE if self.two_levels else 16 / self.group
        return self.bits + of_group * (1 + self.with_least)


# The types of GGUF's blocks, with their numbers exactly; of 2 and 3 bits q takes 4.
FORMATS = {
    "Q4_0": Format(4, 8),
    "Q4_1": Format(4, 0, with_least=True),
    "Q5_0": Format(5, 16),
    "Q5_1": Format(5, 0, with_least=True),
    "Q8_0": Format(8, 128),
    "Q2_K": Format(4, 0, group=16, two_levels=True, with_least=True),
    "Q3_K": Format(4, 4, group=16, two_levels=True),
    "Q4_K": Format(4, 0, two_levels=True, with_least=True),
    "Q5_K": Format(5, 0, two_levels=True, with_least=True),
    "Q6_K": Format(6, 32, group=16, two_levels=True),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "steps", "least", "least_steps"),
    meta_fields=("format", "outputs", "inputs"),
)
@dataclasses.dataclass(frozen=True)
class NarrowMatrix:
    """Weights [*outputs, *inputs] of four to eight bits, in groups along the inputs.

    Outputs lie in panels of 16, and of these the weights of a few inputs lie side by side, so that
    a processor multiplies 16 outputs at a time. Panels and groups that are not full have zeros.

    Attributes:
      values: q. uint8 [P, G, 16 * group * bits / 8]. Of a panel and a group: four inputs after
        four, of each output, [group / 4, 16, 4]. With fewer than eight bits eight inputs after
        eight, [group / 8, 16, 4], the first four of them in the lower bits and the others in the
        upper; then for each further bit a bit of each, [group / 8, 2, 16, 4], 64 in 8 bytes.
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

    def numbers(self, *, rounded_twice: bool = True) -> Float[Array, "O I"]:
        """The weights in float32; NumPy's arrays give one of NumPy, with the same bits.

        Without `rounded_twice` XLA may round the sum of a product and `least` once: one pass over
        the weights makes them.
        """
        return self.rows(None, rounded_twice=rounded_twice)[: math.prod(self.outputs)]

    def rows(
        self, outputs: Integer[Array, "n"] | None, *, rounded_twice: bool = True
    ) -> Float[Array, "n I"]:
        """Those of some outputs; None for all, and those that panels have after them."""
        found = self._integers(outputs).astype(np.float32)
        found = found * self._of_each(self.scales, self.steps, outputs)
        if self.least is not None:
            # Taken off, as blocks have it: so are the signs of zeros theirs.
            less = self._of_each(self.least, self.least_steps, outputs, negative=True)
            if rounded_twice and not isinstance(found, np.ndarray):
                found, less = lax.optimization_barrier((found, less))
            found = found - less
        return found[:, : math.prod(self.inputs)]

    def _integers(self, outputs: Integer[Array, "n"] | None) -> Integer[Array, "n stored"]:
        """q - zero in int32."""
        xp: Any = np if isinstance(self.values, np.ndarray) else jnp
        format, some = self.format, self.values.shape[:2]
        end = PANEL * format.group // (1 if format.bits == 8 else 2)
        four = self.values[:, :, :end].reshape(*some, -1, PANEL, 1, 4)
        four = _out_of_panels(four, 3, outputs)  # [n, G, group / 4 or / 8, 1, 4]
        if format.bits < 8:
            four = xp.concatenate([four & 15, four >> 4], axis=3)
        planes = self.values[:, :, end:].reshape(*some, -1, format.group // 8, 2, 8)
        for plane in range(planes.shape[2]):  # 4 bits of each output
            bits = planes[:, :, plane]
            bits = xp.stack([bits & 15, bits >> 4], axis=-1).reshape(*bits.shape[:-1], PANEL)
            bits = _out_of_panels(bits, 4, outputs)[..., None] >> np.arange(4, dtype=np.uint8)
            four = four | (bits & 1) << (4 + plane)
        return four.reshape(len(four), -1).astype(np.int32) - format.zero

    def _of_each(
        self, level: Array, steps: Array | None, outputs: Integer[Array, "n"] | None,
        negative: bool = False,
    ) -> Float[Array, "n stored"]:  # fmt: skip
        xp: Any = np if isinstance(level, np.ndarray) else jnp
        found = _out_of_panels(level, 2, outputs).astype(np.float32)
        if steps is not None:
            found = xp.repeat(found, WIDE // self.format.group, axis=1)
            times = _out_of_panels(steps, 2, outputs).astype(np.float32)
            found = found * (0 - times if negative else times)
        elif negative:
            found = -found
        return xp.repeat(found, self.format.group, axis=1)


def _out_of_panels(
    array: Shaped[Array, "P ..."], axis: int, outputs: Integer[Array, "n"] | None
) -> Shaped[Array, "n ..."]:
    """What each output has; `axis` has those of a panel."""
    if outputs is None:
        apart: Any = jnp.moveaxis if isinstance(array, jax.Array) else np.moveaxis
        array = apart(array, axis, 1)
        return array.reshape(-1, *array.shape[2:])
    index: list[Any] = [slice(None)] * array.ndim
    index[0], index[axis] = outputs // PANEL, outputs % PANEL
    return array[tuple(index)]


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


def empty_parts(format: Format, outputs: int, inputs: int) -> dict[str, np.ndarray]:
    """Arrays for what `packed` takes, row by row."""
    shapes = shapes_of(format, outputs, inputs)
    return {
        name: np.empty((outputs, inputs if name == "values" else shape[1]), dtype)
        for name, (shape, dtype) in shapes.items()
    }


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
    count, width = values.shape
    missing = -count % PANEL, stored_inputs(width) - width
    if any(missing):
        values = np.pad(values, [(0, missing[0]), (0, missing[1])], constant_values=format.zero)
    shape, dtype = shapes_of(format, count, width)["values"]
    panels = np.empty(shape, dtype)
    step = max(1, AT_ONCE // (PANEL * values.shape[1]))
    for first in range(0, len(panels), step):
        some = values[first * PANEL : (first + step) * PANEL]
        panels[first : first + step] = _panels(some, format)

    def of_groups(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        array = np.pad(array, [(0, missing[0]), (0, 0)])
        return np.ascontiguousarray(array.reshape(-1, PANEL, array.shape[1]).swapaxes(1, 2))

    levels = [of_groups(array) for array in (scales, steps, least, least_steps)]
    arrays: list[Any] = [panels, *levels]
    return NarrowMatrix(*arrays, format=format, outputs=tuple(outputs), inputs=tuple(inputs))


def _panels(values: np.ndarray, format: Format) -> np.ndarray:
    """What `NarrowMatrix.values` has of q."""
    words = np.ascontiguousarray(values).view(np.uint32)  # four inputs each
    words = words.reshape(-1, PANEL, words.shape[1]).swapaxes(1, 2)  # [P, I / 4, 16]
    parts: list[Any]
    if format.bits == 8:
        parts = [words]
    else:
        low = words & np.uint32(0x0F0F0F0F)
        parts = [low[:, 0::2] | low[:, 1::2] << 4]
    for plane in range(4, format.bits if format.bits < 8 else 4):
        # The product brings a bit of each byte together, in the order of the bytes.
        bits = (words >> plane & np.uint32(0x01010101)) * np.uint32(0x01020408) >> 24
        bits = bits.astype(np.uint8)
        parts.append(bits[..., 0::2] | bits[..., 1::2] << 4)
    groups = values.shape[1] // format.group
    of_each = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    return np.concatenate([part.reshape(len(words), groups, -1) for part in of_each], axis=2)


def rounded(matrix: Float[np.ndarray, "O I"], name: str) -> dict[str, np.ndarray]:
    """What `packed` takes, of the numbers of "Q8_0" or "Q4_1" that are nearest to these."""
    if name not in ("Q8_0", "Q4_1"):
        raise ValueError(f"rounding to {name!r} is not valid: 'Q8_0' or 'Q4_1'")
    found = empty_parts(FORMATS[name], *matrix.shape)
    step = max(1, AT_ONCE // (8 * matrix.shape[1]))
    for first in range(0, len(matrix), step):
        rows = slice(first, first + step)
        for part, array in _rounded_rows(matrix[rows], FORMATS[name]).items():
            found[part][rows] = array
    return found


def _rounded_rows(matrix: Float[np.ndarray, "n I"], format: Format) -> dict[str, np.ndarray]:
    count, width = matrix.shape
    wide = np.zeros((count, stored_inputs(width)), np.float32)
    wide[:, :width] = matrix
    groups = wide.reshape(count, -1, format.group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    found = {}
    if format.with_least:
        found["least"] = low.astype(np.float16)
        groups -= found["least"][:, :, None].astype(np.float32)
        least, most = 0, 2**format.bits - 1
        scales = (high - found["least"]) / most
    else:
        most = 2 ** (format.bits - 1) - 1
        least, scales = -most, np.maximum(high, -low) / most
    found["scales"] = scales.astype(np.float16)
    step = found["scales"].astype(np.float32)[:, :, None]
    groups /= np.where(step > 0, step, np.float32(1))
    np.clip(np.rint(groups, out=groups), least, most, out=groups)
    groups += format.zero
    found["values"] = wide.astype(np.uint8)[:, :width]
    return found


def check_matrix(matrix: NarrowMatrix, inputs: int) -> None:
    """Refuses what is no matrix for rows of so many inputs."""
    outputs = math.prod(matrix.outputs)
    if math.prod(matrix.inputs) != inputs:
        raise ValueError(
            f"shapes do not fit together: rows [..., {inputs}], weights of {matrix.inputs} inputs"
        )
    if matrix.format.two_levels and inputs % WIDE:
        raise ValueError(f"{inputs} inputs are not valid for {matrix.format}: a multiple of {WIDE}")
    wanted = shapes_of(matrix.format, outputs, inputs)
    for name in ("values", "scales", "steps", "least", "least_steps"):
        array, asked = getattr(matrix, name), wanted.get(name)
        given = None if array is None else (tuple(array.shape), str(array.dtype))
        if given != asked:
            raise ValueError(f"{name} is {given} and not valid: {asked} for {matrix.format}")
