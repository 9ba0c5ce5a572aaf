# SPDX-License-Identifier: Apache-2.0
"""Products with narrow weights by XLA's own for GPUs: of many rows, as in prefills."""

from __future__ import annotations

from pallas_kernels.narrow_product.matrix import NarrowMatrix
from pallas_kernels.product import xla


def narrow_product(rows, matrix: NarrowMatrix):
    """As `api.narrow_product`, with weights rounded to the rows' type and written to memory."""
    return xla.product(rows, matrix.numbers(rounded_twice=False).astype(rows.dtype))
