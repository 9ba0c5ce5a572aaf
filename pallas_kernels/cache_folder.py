# SPDX-License-Identifier: Apache-2.0
"""The folder for what takes long to make and can be made again: one rule for all.

Knows the environment. Makes no folder, and does not know what is kept.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder that TSJAX_CACHE names, else `tsjax` in the user's cache folder.

    None where nothing is to be kept, as TSJAX_CACHE is empty, or where no home is known.
    """
    chosen = os.environ.get("TSJAX_CACHE")
    if chosen is not None:
        return Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else None
    home, caches = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # the specification: a relative one counts for nothing
        return Path(caches) / "tsjax"
    return Path(home) / ".cache" / "tsjax" if os.path.isabs(home) else None
