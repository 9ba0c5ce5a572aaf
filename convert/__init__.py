# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from HuggingFace to tsjax and back, and TokenSwift's draft heads as adapters.

Installed as `tsjax_convert`, with the command `tsjax-convert`; in a checkout also
`python -m convert`.
"""

from tsjax.files.hf_folders import DROP_HEADS as DROP_HEADS
from tsjax.files.hf_folders import MERGE_HEADS as MERGE_HEADS

from .conversion import Written as Written
from .conversion import export_heads as export_heads
from .conversion import to_hf as to_hf
from .conversion import to_tsjax as to_tsjax
from .conversion import verify as verify

__all__ = ["DROP_HEADS", "MERGE_HEADS", "Written"]
__all__ += ["export_heads", "to_hf", "to_tsjax", "verify"]
