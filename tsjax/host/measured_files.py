# SPDX-License-Identifier: Apache-2.0
"""Files of what was measured once: in the user's cache folder, named by all that it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pallas_kernels.cache_folder import cache_folder
from tsjax.base.input_files import read_json
from tsjax.files.whole_files import write_text


def measured_file(key: str, ending: str = ".json") -> Path | None:
    """None where nothing is kept."""
    folder = cache_folder()
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    return None if folder is None else folder / "costs" / f"{name}{ending}"


def keep_measured(key: str, content: Any) -> None:
    """Where nothing can be written, the next process measures again."""
    file = measured_file(key)
    if file is not None:
        write_measured(file, {"key": json.loads(key), **content})


def kept_measured(key: str) -> dict[str, Any] | None:
    """None where there is no file of this key, or one that cannot be read."""
    file = measured_file(key)
    if file is None:
        return None
    try:
        kept = read_json(os.fspath(file))
        return kept if kept["key"] == json.loads(key) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_measured(file: Path, content: Any) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content, indent=1))
