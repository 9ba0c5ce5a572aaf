# SPDX-License-Identifier: Apache-2.0
"""The text of a PTX module with one kernel, as instructions with their operands.

Knows the syntax that LLVM and Triton write. Knows no instruction: what they mean, and which there
are, is in `operations`. A statement of another form is an error, never left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Address(NamedTuple):
    """[base + offset]; the base is a register, or the name of a parameter or of shared memory."""

    base: str
    offset: int


# A register, label or other name; the bits of a constant; several operands in braces; an address.
Operand = str | int | tuple | Address


class Instruction(NamedTuple):
    """Attributes:
    opcode: with all that follows its points, as "ld.global.v4.b32".
    guard: the register of the predicate, if any.
    negated: runs where the predicate is false.
    line: in the text of the module, from 1.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    text: str
    line: int


class Kernel(NamedTuple):
    """Attributes:
    threads: of one block.
    registers: name -> type, as "b32" or "pred".
    shared: names of arrays in shared memory whose size the launch gives.
    labels: name -> index of the instruction that follows.
    """

    name: str
    params: tuple[str, ...]
    threads: int
    registers: dict[str, str]
    shared: tuple[str, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


class SyntaxFault(ValueError):
    """Text that is not understood."""


ENTRY = re.compile(
    r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)(?:, 1)*\s*\{(.*)\}\s*", re.DOTALL
)
HEAD = re.compile(
    r"(\.version [\d.]+|\.target \w+|\.address_size 64"
    r"|\.extern \.shared \.align \d+ \.b8 \w+\[\];|\s)*"
)
PARAM = re.compile(r"\.param \.u64(?: \.ptr)?(?: \.global)?(?: \.align \d+)? (\w+)")
STATEMENT = re.compile(
    r"(?P<space>\s*)"
    r"(?:(?P<label>\$?\w+):|(?P<brace>[{}])|(?P<text>[^;{}]+(?:\{[^{}]*\}[^;{}]*)*);|$)"
)
INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
REGISTERS = re.compile(r"\.reg \.(\w+)\s+([%\w]+)<(\d+)>")
OPERAND = re.compile(r"\s*(\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+?)\s*(?:,|$)")


def parse(text: str) -> Kernel:
    plain = re.sub(r"//[^\n]*", "", text)
    found = ENTRY.search(plain)
    if not found or found.end() != len(plain.rstrip("\0")):
        raise SyntaxFault("not a module with one kernel, of a fixed number of threads")
    head = plain[: found.start()]
    if not HEAD.fullmatch(head):
        raise SyntaxFault(f"not understood before the kernel: {HEAD.sub('', head, count=1)[:80]!r}")
    name, params, threads, body = found.groups()
    line = 1 + plain.count("\n", 0, found.start(4))
    registers, code, labels = _read_body(body, line)
    return Kernel(
        name=name,
        params=tuple(_read_params(params)),
        threads=int(threads),
        registers=registers,
        shared=tuple(re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];", head)),
        code=tuple(code),
        labels=labels,
    )


def _read_params(text: str) -> Iterator[str]:
    for param in filter(None, map(str.strip, text.split(","))):
        found = PARAM.fullmatch(param)
        if not found:
            raise SyntaxFault(f"parameter {param!r}: not a pointer")
        yield found[1]


def _read_body(body: str, line: int):
    """Registers, instructions and labels. Names that a brace declares end with it."""
    registers: dict[str, str] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]  # of each open brace: a name -> its name in `registers`
    at, braces = 0, 0
    while at < len(body):
        found = STATEMENT.match(body, at)
        if not found:
            raise SyntaxFault(f"line {line}: not understood: {body[at:].strip()[:80]!r}")
        line, at, text = line + found["space"].count("\n"), found.end(), found["text"] or ""
        if found["label"]:
            labels[found["label"]] = len(code)
        elif found["brace"] == "{":
            scopes.append(dict(scopes[-1]))
            braces += 1
        elif found["brace"]:
            scopes.pop()
        elif declared := REGISTERS.fullmatch(text):
            kind, prefix, count = declared.groups()
            for name in (f"{prefix}{index}" for index in range(int(count))):
                scopes[-1][name] = f"{name}@{braces}" if len(scopes) > 1 else name
                registers[scopes[-1][name]] = kind
        elif text:
            code.append(_read_instruction(text, line, scopes[-1]))
        line += found[0].count("\n") - found["space"].count("\n")
    return registers, code, labels


def _read_instruction(text: str, line: int, names: dict[str, str]) -> Instruction:
    text = " ".join(text.split())
    found = INSTRUCTION.fullmatch(text)
    if not found:
        raise SyntaxFault(f"line {line}: not an instruction: {text!r}")
    negated, guard, opcode, rest = found.groups()
    try:
        operands = tuple(_read_operands(rest, names))
    except ValueError as error:
        raise SyntaxFault(f"line {line}: {error}: {text!r}") from None
    guard = names.get(guard, guard)
    return Instruction(opcode, operands, guard, bool(negated), text, line)


def _read_operands(text: str, names: dict[str, str]) -> Iterator[Operand]:
    at = 0
    while at < len(text):
        found = OPERAND.match(text, at)
        if not found:
            raise ValueError("operands that are not understood")
        at = found.end()
        yield _read_operand(found[1], names)


def _read_operand(text: str, names: dict[str, str]) -> Operand:
    if text[0] == "{":
        return tuple(_read_operand(part.strip(), names) for part in text[1:-1].split(","))
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(names.get(base, base), int(offset or "0", 0))
    if text[:2] in ("0f", "0d"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.removesuffix("U"), 0)
    if not re.fullmatch(r"[%$]?\w+(\.[xyz])?", text):
        raise ValueError(f"operand {text!r}")
    return names.get(text, text)
