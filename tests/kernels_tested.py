# SPDX-License-Identifier: Apache-2.0
"""Whether these kernels, with this jax on this kind of machine, have been tested already.

Their tests take as long as half of the others, and they change seldom. `pytest --kernels record`
runs them and notes in goldens/kernels_tested.json what was tested when all have passed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "goldens" / "kernels_tested.json"


def what_is_tested() -> list[str]:
    """The kernels and their tests, as a digest; the release of jax; the machine."""
    from pallas_kernels import native

    files = [*(ROOT / "pallas_kernels").rglob("*.*"), *ROOT.glob("tests/*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        is_code = path.suffix in (".py", ".cc", ".h", ".json") and path.is_file()
        if is_code and (path.parent.name != "tests" or "pytest.mark.kernels" in path.read_text()):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    release = ".".join(jax.__version__.split(".")[:2])
    return [digest.hexdigest()[:16], release, platform.machine(), native.status().state]


def are_known() -> bool:
    return FILE.exists() and what_is_tested() in json.loads(FILE.read_text(encoding="utf-8"))


def record() -> None:
    """Adds what is tested; what was noted of other kernels goes."""
    new = what_is_tested()
    old = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    entries = sorted([new, *(one for one in old if one[0] == new[0] and one != new)])
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
