# SPDX-License-Identifier: Apache-2.0
"""Attention kernels over preallocated caches. Knows jax alone; one folder per operation.

Each folder holds `api.py` (the public function), `reference.py` (its definition) and one file per
implementation.
"""

from pallas_kernels.cache_scores.api import cache_scores as cache_scores
from pallas_kernels.tree_attention.api import Ranks as Ranks
from pallas_kernels.tree_attention.api import Summary as Summary
from pallas_kernels.tree_attention.api import decode_attention as decode_attention
from pallas_kernels.tree_attention.api import tree_attention as tree_attention

__all__ = ["Ranks", "Summary", "cache_scores", "decode_attention", "tree_attention"]
