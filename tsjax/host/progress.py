# SPDX-License-Identifier: Apache-2.0
"""Progress bars. Knows tqdm, and nothing of what makes progress."""

from __future__ import annotations

from typing import Any


def progress_bar(wanted: bool, total: int, unit: str, **options: Any) -> Any:
    """A tqdm bar on stderr, which does nothing where it is not wanted."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, dynamic_ncols=True, disable=not wanted, **options)
