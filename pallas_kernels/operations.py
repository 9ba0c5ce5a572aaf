# SPDX-License-Identifier: Apache-2.0
"""The operations of this package, and which implementations they have on a platform."""

from __future__ import annotations

from pallas_kernels import native, triton
from pallas_kernels.cache_scores.api import IMPLEMENTATIONS as CACHE_SCORES
from pallas_kernels.dispatch import serving
from pallas_kernels.gate.api import implementations as gates
from pallas_kernels.narrow_product.api import IMPLEMENTATIONS as NARROW_PRODUCT
from pallas_kernels.product.api import IMPLEMENTATIONS as PRODUCT
from pallas_kernels.rms_norm.api import implementations as rms_norms
from pallas_kernels.rotary.api import implementations as rotary_heads
from pallas_kernels.threshold.api import IMPLEMENTATIONS as THRESHOLD
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS as TREE_ATTENTION

OPERATIONS = {
    "tree_attention": TREE_ATTENTION,
    **{f"cache_scores, {mode}": CACHE_SCORES[mode] for mode in CACHE_SCORES},
    "product": PRODUCT,
    "narrow_product": NARROW_PRODUCT,
    "rms_norm": rms_norms(eps=0.0),
    "add_rms_norm": rms_norms(eps=0.0, adds=True),
    "rotary_heads": rotary_heads("float32"),
    "gated": gates("float32"),
    "threshold": THRESHOLD,
}


def implementations(platform: str) -> dict[str, tuple[str, ...]]:
    """For each operation the names of those that serve "cpu", "cuda", ..., the first choice first.

    A case that one refuses goes to the next. Kernels for CPUs are compiled here if need be, and
    left out where this machine cannot have them; so are those for GPUs that are switched off.
    """
    without_native = platform == "cpu" and native.status(try_now=True).state != "ready"

    def absent(operation: str) -> set[str]:
        folder = operation.split(",")[0].removeprefix("add_")
        off = {"triton"} if triton.switched_off(folder) else set()
        return off | ({"native"} if without_native else set())

    def present(operation: str, choices) -> tuple[str, ...]:
        names = dict.fromkeys(one.name for one in serving(choices, platform))
        return tuple(name for name in names if name not in absent(operation))

    return {name: present(name, choices) for name, choices in OPERATIONS.items()}
