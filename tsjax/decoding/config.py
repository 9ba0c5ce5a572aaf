# SPDX-License-Identifier: Apache-2.0
"""What a step is compiled for.

Knows a model's config, a method and a way to read prompts. Does not know any but the plain ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tsjax.base.model_config import ModelConfig
from tsjax.decoding.method import Autoregressive, Method, Sizes


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Everything a decode step is compiled for. What changes from call to call is in the state."""

    model: ModelConfig
    method: Method = Autoregressive()
    prefill: Any = None  # a LazyPrefill with its cuts named; None computes the whole prompt
    # Whether the device's kernels leave out the rows that a step does not want: then one pass is
    # there for all widths. Elsewhere each width has its own.
    leaves_out_rows: bool = False

    def __post_init__(self):
        sizes = self.sizes
        if self.prefill is not None:
            self.prefill.check(self.model, self.method, sizes)

    @property
    def sizes(self) -> Sizes:
        return self.method.sizes(self.model)

    @property
    def in_steps(self) -> DecodeConfig:
        """As steps are compiled for it, and what they begin with where no lazy prefill does."""
        return dataclasses.replace(self, method=self.method.in_steps())

    @property
    def rows_ahead(self) -> int:
        """Slots after the longest text that steps may write to in vain."""
        return max(self.sizes.depth, self.prefill.rows_ahead if self.prefill else 0)
