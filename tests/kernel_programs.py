# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels touch, found without a GPU: in their lowered programs, and by running
them in NumPy, one program after the other, with every index checked.

Interpretation by Pallas shows no access outside an array: it clamps indices and pads arrays. Part
of the tests that have `pytest.mark.kernels`, so kernels_tested.py reads this file too.
"""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  bfloat16 for NumPy
import numpy as np
import pytest
from jax._src.lib.triton import dialect as triton_dialect  # has no public name
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.narrow_product import triton as narrow_triton
from pallas_kernels.rms_norm import triton as norm_triton
from pallas_kernels.rotary import triton as rotary_triton
from pallas_kernels.tree_attention import triton as attention_triton
from tools import gpu_targets

# --- the lowered program ---------------------------------------------------------------------


def lower_for_cuda(function, *args, target="a100", **static):
    """The program of a function, or of a jitted one, for a GPU that is not there."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    return gpu_targets.lowered(target, jitted, *args, **static)


def kernel_names(text: str) -> set[str]:
    return set(re.findall(r'name = "(tsjax_\w+)"', text))


def find_operations(operation, name: str) -> list:
    """All operations of that name inside one, in order."""
    found = [operation] if operation.name == name else []
    for region in operation.regions:
        for block in region:
            for inner in block:
                found += find_operations(inner.operation, name)
    return found


def unmasked_accesses(lowered) -> dict[str, list[str]]:
    """For each kernel its loads and stores that no mask limits, except the scalar `length`."""
    found = {}
    for call in find_operations(lowered.compiler_ir().operation, "stablehlo.custom_call"):
        if call.attributes["call_target_name"].value != "__gpu$xla.gpu.triton":
            continue
        config = call.attributes["mhlo.backend_config"]
        with ir.Context() as context, ir.Location.unknown():
            triton_dialect.register_dialect(context)
            module = ir.Module.parse(config["ir"].value_bytes).operation
            loads, stores = (find_operations(module, name) for name in ("tt.load", "tt.store"))
            assert len(loads) > 1 and stores, "not the program of a kernel"
            # Operands: load(pointers, mask, other), store(pointers, values, mask).
            bad = [op for op in loads if len(op.operands) < 2 and not is_length(op.operands[0])]
            bad += [op for op in loads if len(op.operands) > 1 and is_constant(op.operands[1])]
            bad += [op for op in stores if len(op.operands) < 3 or is_constant(op.operands[2])]
            found[config["name"].value] = [str(op) for op in bad]
    return found


def is_length(pointer) -> bool:
    """An entry of the kernel's first argument, at the row of the batch that the grid gives."""
    made_by = getattr(pointer.owner, "operation", pointer.owner)
    if "tensor" in str(pointer.type) or getattr(made_by, "name", "") != "tt.addptr":
        return False
    base = made_by.operands[0]
    is_first = isinstance(base, ir.BlockArgument) and base.arg_number == 0
    return is_first and base.owner.owner.name == "tt.func"


def is_constant(mask) -> bool:
    """Does not depend on where the program stands: everything is let through, or nothing."""
    made_by = getattr(mask.owner, "operation", None)
    if made_by is None:
        return False
    if made_by.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return is_constant(made_by.operands[0])
    return made_by.name == "arith.constant"


# --- the same kernels in NumPy ---------------------------------------------------------------


class CheckedArray:
    """What a kernel gets as a ref: an array whose indices are checked, written at most once."""

    def __init__(self, array):
        self.array = np.array(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.written = np.zeros(self.shape, bool)

    def at(self, index, inside):
        """The index without what is masked, after the check."""
        *index, inside = np.broadcast_arrays(*index, inside)
        assert len(index) == len(self.shape)
        for part, size in zip(index, self.shape, strict=True):
            assert ((part >= 0) & (part < size) | ~inside).all(), "outside of its array"
        return tuple(np.where(inside, part, 0) for part in index), inside

    def __getitem__(self, index):
        assert 0 <= int(index) < self.shape[0], "outside of its array"
        return jnp.asarray(self.array[int(index)])


def load(ref, index, inside, other=0):
    at, inside = ref.at(index, inside)
    return jnp.asarray(np.where(inside, ref.array[at], np.asarray(other, ref.dtype)))


def store(ref, index, value, inside):
    at, inside = ref.at((*index,), inside)
    value, at = np.asarray(value), tuple(part[inside] for part in at)
    assert value.dtype == ref.dtype and inside.shape == value.shape
    assert not ref.written[at].any(), "written twice"
    flat = np.ravel_multi_index(at, ref.shape)
    assert len(np.unique(flat)) == len(flat), "written twice"
    ref.array[at], ref.written[at] = value[inside], True


KERNELS = (attention_triton, scores_triton, norm_triton, rotary_triton, narrow_triton)


@contextlib.contextmanager
def in_numpy():
    """Here the kernels run in NumPy; what they do not write is NaN."""
    position = [0, 0, 0]

    def launch(kernel, *arrays, grid, outputs, **_):
        refs = [CheckedArray(array) for array in arrays]
        results = [CheckedArray(np.full(shape, np.nan, dtype)) for shape, dtype in outputs]
        for place in np.ndindex(*grid):
            position[:] = place
            kernel(*refs, *results)
        return [jnp.asarray(result.array) for result in results]

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(pl, "program_id", lambda axis: jnp.int32(position[axis]))
        for module in KERNELS:
            patch.setattr(module, "launch", launch)
            patch.setattr(module, "load", load)
            patch.setattr(module, "store", store)
        yield
