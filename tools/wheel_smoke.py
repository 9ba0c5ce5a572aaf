# SPDX-License-Identifier: Apache-2.0
"""Checks a built wheel: ``python -m tools.wheel_smoke dist/tsjax-*.whl``.

The wheel must hold every file of the packages in this checkout and nothing else. It is then
installed in a new environment, which borrows the dependencies of the running one but not its
(editable) tsjax, and used from the root directory.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_AS = {
    "tsjax": "tsjax",
    "pallas_kernels": "pallas_kernels",
    "convert": "tsjax_convert",
    "configs": "tsjax/configs",
}
DATA = (".json", ".typed", ".safetensors", ".md", ".cc", ".h")

IN_THE_WHEEL = """
import importlib, importlib.metadata, importlib.resources, importlib.util, json, sys

assert importlib.metadata.version("tsjax") == importlib.import_module("tsjax").__version__
for name in ("tsjax", "pallas_kernels", "tsjax_convert", "tsjax.configs"):
    file = importlib.import_module(name).__file__
    assert file.startswith(sys.prefix), f"{name} was imported from {file}"
for name in ("convert", "configs", "tests", "benchmarks", "examples", "tools"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a package named {name}"
for file in importlib.resources.files("tsjax.configs").iterdir():
    if file.name.endswith(".json"):
        json.loads(file.read_text(encoding="utf-8"))

import tsjax
from pallas_kernels import native

status = native.status(try_now=True)
assert status.state == "ready" or not status.compiler, status
model = tsjax.load(tsjax.EMBEDDED)
assert model.path.startswith(sys.prefix) and model.cfg.num_draft_heads == 3, model
assert tsjax.generate(model, "Once upon a time", max_new_tokens=8).text.strip()
"""


def expected_files(root: Path) -> set[str]:
    """The names, as installed, of all package files in the checkout at ``root``."""
    files = set()
    for folder, installed in INSTALLED_AS.items():
        for path in (root / folder).rglob("*"):
            if path.suffix == ".py" or path.name.endswith(DATA):
                files.add(f"{installed}/{path.relative_to(root / folder).as_posix()}")
    return files


def differences(wheel_files: set[str], expected: set[str]) -> list[str]:
    found = {name for name in wheel_files if not name.split("/")[0].endswith(".dist-info")}
    return [f"missing from the wheel: {name}" for name in sorted(expected - found)] + [
        f"in the wheel, not in the checkout: {name}" for name in sorted(found - expected)
    ]


def check_installed(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        scripts = Path(folder, "bin")
        python = str(scripts / "python")
        pip = [sys.executable, "-m", "pip", "--python", python]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
        # A folder named in a .pth file is searched last, and its own .pth files (where an editable
        # install lives) are not read.
        new = sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder})
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        Path(new, "dependencies.pth").write_text("\n".join(sorted(borrowed)) + "\n")

        for command in (
            [python, "-c", IN_THE_WHEEL],
            [str(scripts / "tsjax"), "--help"],
            [str(scripts / "tsjax-convert"), "--help"],
        ):
            done = subprocess.run(command, cwd="/", stdout=subprocess.DEVNULL)
            if done.returncode != 0:
                sys.exit(f"failed in the installed wheel: {Path(command[0]).name} {command[1]}")


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    wrong = differences(set(zipfile.ZipFile(wheel).namelist()), expected_files(ROOT))
    if wrong:
        sys.exit("\n".join(wrong))
    check_installed(wheel)
    print(f"{wheel.name}: contents, imports and commands are fine")


if __name__ == "__main__":
    main()
