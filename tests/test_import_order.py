# SPDX-License-Identifier: Apache-2.0
"""The one-way order: a room imports from the rows above its own, and no module in circles.

A room is a folder of `tsjax`, a module beside these folders, or another package. The checker reads
sources only (it imports none of them), so it sees imports inside functions too. The tests at the
end feed it small made-up packages, to know that it fails when it should.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room -> row.
ROWS = {
    "pallas_kernels": 0,
    "tsjax.configs": 0,
    "tsjax.base": 1,
    "tsjax.base.errors": -1,
    "tsjax.base.habits": 0,
    "tsjax.base.input_files": 0,
    # Told of from everywhere, from before jax is loaded.
    "tsjax.base.telling": -1,
    "tsjax.base.line_writer": 0,
    "tsjax.model": 2,
    "tsjax.decoding": 3,
    "tsjax.methods": 4,
    "tsjax.lazy": 5,
    "tsjax.files": 6,
    "tsjax.host": 7,
    "tsjax.measure": 8,
    "tsjax.training": 8,
    "tsjax.public": 9,
    "tsjax.steps": 9,
    "tsjax.blocks": 5,
    "tsjax.costs": 9,
    "tsjax.results": 9,
    "tsjax": 10,
    "tsjax.commands": 11,
    "tsjax.__main__": 12,
    "tsjax_convert": 13,
}
FOLDERS = {
    "pallas_kernels": "pallas_kernels",
    "tsjax": "tsjax",
    "tsjax.configs": "configs",
    "tsjax_convert": "convert",
}

# Edges that the rows would allow or forbid, and that are decided by hand.
ALLOWED = {("tsjax.__main__", "tsjax_convert")}  # the command line offers conversion
# A method does not know how its drafts are judged.
FORBIDDEN = {("tsjax.methods", "tsjax.decoding.verification")}

MAY_READ_PICKLES = ("tsjax.files.weight_files",)
MAY_RUN_TORCH = ("tsjax.measure.peers",)  # what tsjax is measured against

PURE_ROWS = range(1, 6)  # no printing, clocks or files
LAZY = set(
    "transformers orbax tensorstore optax safetensors huggingface_hub tqdm matplotlib".split()
)
KERNELS_MAY_IMPORT = {"pallas_kernels", "jax", "numpy", *sys.stdlib_module_names}
# Names for annotations, from jaxtyping where the tests have loaded it.
MAY_KNOW_JAXTYPING = ("pallas_kernels.typing",)


class Module(NamedTuple):
    name: str
    source: str
    is_package: bool = False


class Import(NamedTuple):
    target: str  # a module, or a name inside one
    line: int
    at_import: bool  # runs when the module is imported


def room_of(name: str) -> str | None:
    """The longest known name that a module begins with; `tsjax` is a room of one module."""
    if name in ROWS:
        return name
    parent = name.rpartition(".")[0]
    return None if parent in ("", "tsjax") else room_of(parent)


def is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(module: Module) -> Iterator[Import]:
    """All imports of a module, with relative ones made absolute."""
    package = module.name.split(".")
    if not module.is_package:
        package = package[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node.lineno, at_import)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                yield from walk(child, False)
        elif isinstance(node, ast.If) and is_type_checking(node):
            for child in node.body:
                yield from walk(child, False)
            for child in node.orelse:
                yield from walk(child, at_import)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_import)

    yield from walk(ast.parse(module.source), True)


def calls_of(module: Module) -> Iterator[tuple[str, int]]:
    """The last name of each called function (``path.open(...)`` gives "open"), and its line."""
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node.lineno
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node.lineno


def resolve(target: str, known: set[str]) -> str | None:
    """The known module that ``target`` is, or is a name of; None for third-party targets."""
    if target.split(".")[0] not in {name.split(".")[0] for name in known}:
        return None
    while target not in known and "." in target:
        target = target.rpartition(".")[0]
    return target if target in known else None


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(edges.get(name, ())):
            if cycle := visit(target, [*path, name]):
                return cycle
        done.add(name)
        return None

    for name in sorted(edges):
        if cycle := visit(name, []):
            return cycle
    return None


def violations(modules: list[Module]) -> list[str]:
    known = {module.name for module in modules}
    edges: dict[str, set[str]] = {name: set() for name in known}
    wrong = []
    for module in modules:
        name, room = module.name, room_of(module.name)
        if room is None:
            wrong.append(f"{name} has no row: add it to ROWS in {Path(__file__).name}")
            continue
        row = ROWS[room]
        in_tsjax = name.split(".")[0] == "tsjax"

        for target, line, at_import in imports_of(module):
            where = f"{name}:{line}: imports {target}"
            top = target.split(".")[0]
            if top in ("convert", "configs"):
                wrong.append(f"{where}: installed, it is tsjax_convert or tsjax.configs")
            types_only = top == "jaxtyping" and name in MAY_KNOW_JAXTYPING
            by_rows = in_tsjax and top == "tsjax"
            if row == 0 and top not in KERNELS_MAY_IMPORT and not (types_only or by_rows):
                wrong.append(f"{where}: kernels know jax, numpy and the standard library only")
            knows_torch = name in (*MAY_READ_PICKLES, *MAY_RUN_TORCH)
            if top == "torch" and (at_import or (in_tsjax and not knows_torch)):
                wrong.append(
                    f"{where}: tsjax never imports torch, convert only inside functions; "
                    f"{', '.join(MAY_READ_PICKLES)} may inside functions, for pickled weights, "
                    f"{', '.join(MAY_RUN_TORCH)} to measure it"
                )
            if in_tsjax and at_import and top in LAZY:
                wrong.append(f"{where}: import it in the function that uses it")
            if row in PURE_ROWS and top == "time":
                wrong.append(f"{where}: no clocks below the host")

            other = resolve(target, known)
            if other is None or other == name:
                continue
            edges[name].add(other)
            other_room = room_of(other)
            if (room, other) in FORBIDDEN:
                wrong.append(f"{where}: this pair is forbidden")
            if other_room is None or other_room == room or (name, other_room) in ALLOWED:
                continue
            if ROWS[other_room] >= row:
                wrong.append(f"{where}: row {row} may not import from row {ROWS[other_room]}")

        if row in PURE_ROWS:
            for called, line in calls_of(module):
                if called in ("print", "input", "open"):
                    wrong.append(f"{name}:{line}: no {called}() below the host")

    if cycle := find_cycle(edges):
        wrong.append("imports go in a circle: " + " -> ".join(cycle))
    return wrong


def modules_of_the_tree(root: Path) -> list[Module]:
    modules = []
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([package, *(parts[:-1] if is_package else parts)])
            modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return modules


def test_tree() -> None:
    modules = modules_of_the_tree(ROOT)
    assert set(FOLDERS) <= {module.name for module in modules}
    wrong = violations(modules)
    assert not wrong, "\n".join(wrong)


# The checker itself, on made-up modules.

EMPTY = [
    Module("tsjax", "", is_package=True),
    Module("tsjax.base.checks", ""),
    Module("tsjax.model", "", is_package=True),
    Module("tsjax.model.layers", ""),
    Module("tsjax.model.cache", ""),
    Module("tsjax.decoding", "", is_package=True),
    Module("tsjax.decoding.step", ""),
    Module("tsjax.decoding.verification", ""),
    Module("tsjax.lazy", "", is_package=True),
    Module("pallas_kernels", "", is_package=True),
    Module("pallas_kernels.ops", "", is_package=True),
    Module("pallas_kernels.ops.api", ""),
    Module("tsjax_convert", "", is_package=True),
    Module("tsjax_convert.tables", ""),
]


def check(sources: dict[str, str]) -> str:
    """The violations when some modules (old or new ones) have these sources."""
    modules = {module.name: module for module in EMPTY}
    for name, source in sources.items():
        modules[name] = modules.get(name, Module(name, ""))._replace(source=source)
    return "\n".join(violations(list(modules.values())))


@pytest.mark.parametrize(
    "sources",
    [
        {"tsjax.model.layers": "from .cache import x\nfrom . import y\nimport tsjax.base.checks"},
        {"tsjax.model.layers": "import time_utils, pallas_kernels.ops\nfrom jax import numpy"},
        {"tsjax.base.checks": "import typing\nif typing.TYPE_CHECKING:\n    import tqdm"},
        {"tsjax.host.run": "import time\ndef f():\n    import transformers, tqdm\n    print(1)"},
        {"tsjax.__main__": "from tsjax import load\ndef f():\n    import tsjax_convert.tables"},
        {"tsjax.measure.peers": "def f():\n    import torch, transformers"},
        {"tsjax_convert.tables": "import tsjax, safetensors\ndef f():\n    import torch"},
    ],
)
def test_checker_allows(sources: dict[str, str]) -> None:
    assert check(sources) == ""


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            {"tsjax.base.checks": "from ..model.cache import x"},
            "tsjax.base.checks:1: .* row 1 .* row 2",
        ),
        ({"tsjax.base.checks": "from ..model import cache"}, "row 1 may not import from row 2"),
        ({"tsjax.decoding.step": "import tsjax_convert.tables"}, "row 3 .* row 13"),
        (
            {"tsjax.methods.new": "from tsjax.decoding.verification import accept"},
            "this pair is forbidden",
        ),
        ({"tsjax.new": ""}, "tsjax.new has no row: add it to ROWS in test_import_order.py"),
        (
            {
                "tsjax.model.layers": "import tsjax.model.cache",
                "tsjax.model.cache": "import tsjax.model.layers",
            },
            "circle: tsjax.model.cache -> tsjax.model.layers -> tsjax.model.cache",
        ),
        ({"pallas_kernels.ops": "from tsjax.base.checks import x"}, "row 0 .* row 1"),
        ({"pallas_kernels.ops": "import flax"}, "kernels know jax, numpy"),
        ({"tsjax.model.layers": "def f():\n    import torch.nn"}, "tsjax never imports torch"),
        ({"tsjax_convert.tables": "import torch"}, "convert only inside functions"),
        ({"tsjax.host.run": "import transformers"}, "import it in the function"),
        ({"tsjax": "try:\n    import orbax\nexcept ImportError:\n    pass"}, "tsjax:2: .* orbax"),
        ({"tsjax.model.cache": "def f():\n    from time import time"}, "no clocks"),
        ({"tsjax.lazy.x": "import jax\njax.debug.print('x')"}, r"tsjax.lazy.x:2: no print\(\)"),
        ({"tsjax.model.cache": "def f(p):\n    return p.open()"}, r"no open\(\)"),
    ],
)
def test_checker_refuses(sources: dict[str, str], message: str) -> None:
    assert re.search(message, check(sources))


# --- budgets ----------------------------------------------------------------------------------

MOST_LINES, MOST_LINES_OF_FUNCTION = 500, 90
# Lines of Python in each folder; of "tsjax" those beside its rooms. A change that needs more raises
# the number by hand, and its commit says why. One that needs less lowers it.
MOST_LINES_OF_FOLDER = {
    "tsjax": 450,
    "tsjax/base": 1_390,
    "tsjax/commands": 2_180,
    "tsjax/decoding": 2_925,
    "tsjax/files": 4_900,
    "tsjax/host": 7_610,
    "tsjax/lazy": 1_375,
    "tsjax/measure": 2_005,
    "tsjax/methods": 5_225,
    "tsjax/model": 1_875,
    "tsjax/training": 2_910,
    "pallas_kernels": 4_790,
    "convert": 430,
    "benchmarks": 5_855,
    "experiments": 4_160,
    "tools": 4_520,
    "tests": 28_035,
    "examples": 375,
}


def sources_in(folder: str) -> dict[str, str]:
    paths = (ROOT / folder).glob("*.py" if folder == "tsjax" else "**/*.py")
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def sources_of(folders: Iterable[str]) -> dict[str, str]:
    return {path: text for one in folders for path, text in sources_in(one).items()}


def too_long(sources: dict[str, str]) -> set[str]:
    """Files, and functions as FILE:NAME, that have more lines than they may."""
    found = {path for path, source in sources.items() if source.count("\n") > MOST_LINES}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_FUNCTION:
                    found.add(f"{path}:{node.name}")
    return found


def two_things(sources: dict[str, str]) -> set[str]:
    """Names without an underscore that several modules define at their top."""
    modules: dict[str, set[str]] = {}
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                modules.setdefault(node.name, set()).add(path)
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for name in (part for one in targets if one for part in ast.walk(one)):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    modules.setdefault(name.id, set()).add(path)
    return {name for name, found in modules.items() if len(found) > 1 and name[0] != "_"}


def test_files_and_functions_are_short() -> None:
    assert not too_long(sources_of(MOST_LINES_OF_FOLDER))


def test_one_name_is_one_thing() -> None:
    rooms = [folder for folder in MOST_LINES_OF_FOLDER if folder.startswith("tsjax")]
    assert two_things(sources_of(rooms)) == set()


@pytest.mark.parametrize("folder", MOST_LINES_OF_FOLDER)
def test_no_folder_grows_unseen(folder: str) -> None:
    lines = sum(text.count("\n") for text in sources_in(folder).values())
    assert lines <= MOST_LINES_OF_FOLDER[folder], "raise it by hand, if there is a reason"


def test_every_folder_has_a_budget() -> None:
    counted = sources_of(MOST_LINES_OF_FOLDER)
    for place in (*FOLDERS.values(), "benchmarks", "experiments", "tools", "tests", "examples"):
        for path in (ROOT / place).rglob("*.py"):
            assert place == "configs" or str(path.relative_to(ROOT)) in counted, path


def test_budgets_find_what_is_beyond_them() -> None:
    short = "def f():\n" + "    x = 1\n" * (MOST_LINES_OF_FUNCTION - 1)
    assert too_long({"a.py": short, "b.py": "\n" * MOST_LINES}) == set()
    nested = "class C:\n    async def g(self):\n" + "        x = 1\n" * MOST_LINES_OF_FUNCTION
    found = {"a.py": short + "    y = 1\n", "b.py": "\n" * (MOST_LINES + 1), "c.py": nested}
    assert too_long(found) == {"a.py:f", "b.py", "c.py:g"}
    one = "A, _B = 1, 2\nC: int = 3\nclass D:\n    E = 1\ndef f():\n    G = 1\nfrom a import H\n"
    other = "def A(): ...\n_B = 2\nC = D = 1\nE = G = H = f = 1\n"
    assert two_things({"a.py": one, "b.py": other}) == {"A", "C", "D", "f"}
