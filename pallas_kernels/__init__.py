# SPDX-License-Identifier: Apache-2.0
"""Kernels: attention over preallocated caches, and products with weights.

They know jax alone; one folder per operation.

Each folder holds `api.py` (the public function), `reference.py` (its definition) and one file per
implementation.
"""

from pallas_kernels.best_slots.api import best_slots as best_slots
from pallas_kernels.cache_scores.api import cache_scores as cache_scores
from pallas_kernels.gate.api import gated as gated
from pallas_kernels.narrow_product.api import narrow_product as narrow_product
from pallas_kernels.narrow_product.matrix import NarrowMatrix as NarrowMatrix
from pallas_kernels.narrow_rows import NarrowRows as NarrowRows
from pallas_kernels.narrow_rows import narrowed as narrowed
from pallas_kernels.narrow_rows import rounded_rows as rounded_rows
from pallas_kernels.narrow_rows import widened as widened
from pallas_kernels.product.api import product as product
from pallas_kernels.rms_norm.api import add_rms_norm as add_rms_norm
from pallas_kernels.rms_norm.api import rms_norm as rms_norm
from pallas_kernels.rotary.api import rotary_heads as rotary_heads
from pallas_kernels.rotary.api import rotate as rotate
from pallas_kernels.threshold.api import threshold as threshold
from pallas_kernels.tree_attention.api import Ranks as Ranks
from pallas_kernels.tree_attention.api import Summary as Summary
from pallas_kernels.tree_attention.api import decode_attention as decode_attention
from pallas_kernels.tree_attention.api import tree_attention as tree_attention

__all__ = [
    "NarrowMatrix", "NarrowRows", "Ranks", "Summary", "add_rms_norm", "best_slots", "cache_scores",
    "decode_attention", "gated", "narrow_product", "narrowed", "product", "rms_norm",
    "rotary_heads", "rotate", "rounded_rows", "threshold", "tree_attention", "widened",
]  # fmt: skip
