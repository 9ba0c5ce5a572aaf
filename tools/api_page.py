# SPDX-License-Identifier: Apache-2.0
"""Writes docs/api.md from the public names of tsjax and pallas_kernels, and their docstrings.

python -m tools.api_page            writes docs/api.md
python -m tools.api_page --check    exits with 1 if that would change it

Reads sources and imports none of them, so the page is the same for every version of Python and jax.
Names, headings and their order are those of tsjax/public.py, the MODULES and pallas_kernels. Knows
how docstrings are written here. Does not know what any name is for.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"
TITLE = """\
# The public names

`import tsjax` has these names (`steps.decode` is `tsjax.steps.decode`), `import pallas_kernels`
those under "Kernels". What is not here may change without notice. This page is made from the
docstrings by `python -m tools.api_page`.
"""
TOP = "tsjax.public"
MODULES = [f"tsjax.{name}" for name in "methods steps blocks training costs results".split()]
HEADINGS = {TOP: "", **dict(zip(MODULES, MODULES, strict=True)), "pallas_kernels": "Kernels"}
DIRECTIVES = ("# ruff:", "# isort:", "# fmt:", "# pyright:")  # comments for tools
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
ITEM = re.compile(r"  ([\w*][\w*, .]*): ")

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


class Source(NamedTuple):
    """A module's file."""

    tree: ast.Module
    lines: list[str]


class Found(NamedTuple):
    """Where a name is defined."""

    node: Definition
    source: Source
    module: str


@functools.cache
def read(module: str) -> Source:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    return Source(ast.parse(text), text.splitlines())


def public_names(package: str) -> list[str]:
    for node in read(package).tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{package} has no __all__")


def by_heading(package: str) -> dict[str, list[str]]:
    """Public names in the order of their imports, under the comments that stand above these."""
    tree, lines = read(package)
    wanted, heading = set(public_names(package)), HEADINGS[package]
    if package in MODULES:
        wanted -= set(public_names(TOP))  # have their entry there
    found: dict[str, list[str]] = {}
    for node in tree.body:
        above = node.lineno - 1
        while above and lines[above - 1].startswith("# "):
            above -= 1
        if isinstance(node, ast.ImportFrom):
            comments = lines[above : node.lineno - 1]
            comments = [line[2:] for line in comments if not line.startswith(DIRECTIVES)]
            heading = " ".join(comments) or heading
            here = [name for alias in node.names if (name := alias.asname or alias.name) in wanted]
        elif isinstance(node, Definition):
            here = [name for name in names_of(node) if name in wanted]
        else:
            continue
        if here:
            found.setdefault(heading, []).extend(here)
    missing = wanted.difference(*found.values())
    if missing:
        raise ValueError(f"{package}.__all__ has {sorted(missing)}, which it does not define")
    return found


def names_of(node: Definition) -> list[str]:
    if not isinstance(node, ast.Assign):
        return [node.name]
    targets = node.targets[0]
    targets = targets.elts if isinstance(targets, ast.Tuple) else [targets]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find(module: str, name: str) -> Found | None:
    """Follows imports to the definition of a name; None where it leaves this repository."""
    source = read(module)
    for node in source.tree.body:
        if isinstance(node, Definition) and name in names_of(node):
            return Found(node, source, module)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    ours = node.module.partition(".")[0] in ("tsjax", "pallas_kernels")
                    return find(node.module, alias.name) if ours else None
    return None


def entry(package: str, name: str, prefix: str) -> str:
    """The part of the page about one name, which users write with the prefix."""
    found = find(package, name)
    if found is None:
        raise ValueError(f"{package}.{name} is not defined in this repository")
    node, source = found.node, found.source
    if isinstance(node, ast.Assign):
        lines = source.lines[node.lineno - 1 : node.end_lineno]
        return f"### {prefix}{name}\n\n" + code(lines)
    owners = [*unlisted_bases(found), found]
    texts = [text for owner in owners if (text := docstring(owner.node))]
    if not texts:
        raise ValueError(f"{package}.{name} is public and has no docstring")
    parts = [f"### {prefix}{name}", code(shape(owners)), *map(prose, texts)]
    parts += [part for owner in owners for part in members(owner, name)]
    return "\n\n".join(part for part in parts if part)


def docstring(node: ast.AST) -> str:
    documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "") if documented else ""


# A base class for this package's own use: its fields are told by each class that has them.
INTERNAL = {"OnPartialCache"}


def unlisted_bases(found: Found) -> list[Found]:
    """Base classes of this repository that are not public: what they have belongs to the class."""
    public = {name for package in HEADINGS for name in public_names(package)}
    bases = []
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else []:
        if isinstance(base, ast.Name) and base.id not in public | INTERNAL:
            inner = find(found.module, base.id)
            if inner is not None:
                bases += [*unlisted_bases(inner), inner]
    return bases


def code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def shape(owners: list[Found]) -> list[str]:
    """A function's signature as it is written, or a class's first line and its public fields."""
    node, lines = owners[-1].node, owners[-1].source.lines
    begin = node.lineno - 1
    if isinstance(node, ast.FunctionDef):
        return lines[begin : node.body[0].lineno - 1]
    return [lines[begin], *(field for owner in owners for field in fields(owner))]


def fields(found: Found) -> Iterator[str]:
    lines = found.source.lines
    for part in found.node.body if isinstance(found.node, ast.ClassDef) else []:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            first = part.lineno - 1
            while lines[first - 1].startswith("    # "):
                first -= 1
            yield from lines[first : part.end_lineno]


def members(found: Found, name: str) -> list[str]:
    """A class's public properties, and its public methods that say what they do."""
    parts = []
    for node in found.node.body if isinstance(found.node, ast.ClassDef) else []:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if decorators & {"property", "functools.cached_property"}:
            what = f": {ast.unparse(node.returns)}" if node.returns else ""
        elif docstring(node):
            what = "(...)"
        else:
            continue
        parts.append(f"**`{name}.{node.name}{what}`** {prose(docstring(node))}".rstrip())
    return parts


def prose(text: str) -> str:
    """A docstring as Markdown: the items of its sections become lists."""
    lines, inside = [], False
    first, *others = text.split("\n")
    if first.rstrip(":") in SECTIONS:  # its items then stand at the margin
        others = ["  " + line for line in others]
    for line in [first, *others]:
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            inside = True
            lines += [f"*{line.rstrip(':')}*", ""]
        elif inside and (item := ITEM.match(line)):
            lines.append(f"- `{item[1]}`: {escaped(line[item.end() :])}")
        elif inside and line.startswith("    "):
            lines.append("  " + escaped(line.strip()))
        else:
            inside &= line.startswith("  ") or not line
            lines.append(escaped(line.strip() if inside else line))
    return "\n".join(lines).strip()


def escaped(text: str) -> str:
    """Text whose stars and angles mean themselves, but for what stands between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<>])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def page() -> str:
    groups = {
        (package, heading): names
        for package in HEADINGS
        for heading, names in by_heading(package).items()
    }
    contents, body = [], []
    for (package, heading), names in groups.items():
        of, about = "", []
        if package in MODULES:
            of, about = package.removeprefix("tsjax.") + ".", [docstring(read(package).tree)]
        links = (f"[{name}](#{(of + name).lower().replace('.', '')})" for name in names)
        contents.append(f"* {heading}: {', '.join(links)}")
        body += [f"## {heading}", *about, *(entry(package, name, of) for name in names)]
    return "\n\n".join([TITLE.rstrip(), "\n".join(contents), *body]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(TARGET.read_text() != page())
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
