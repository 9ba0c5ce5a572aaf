# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Every message names the argument, its value and what would be right."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from tsjax.base.errors import BadType, BadValue


def check(condition: bool, argument: str, value: Any, wanted: str) -> None:
    """Raises the one kind of message this library has for a wrong argument."""
    if not condition:
        shown = str(value) if isinstance(value, numbers.Number) else repr(value)  # also NumPy's
        raise BadValue(f"{argument}={shown} is not valid: {wanted}")


def check_type(value: Any, kind: type, argument: str, wanted: str) -> None:
    """As `check`, for a value of another type."""
    if not isinstance(value, kind):
        raise BadType(f"{argument}={value!r:.80} is not valid: {wanted}")


def one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(map(repr, names))}"


def check_known(value: str | None, argument: str, names: Iterable[str]) -> None:
    """None is not given, which is well."""
    check(value is None or value in names, argument, value, one_of(names))


def check_int(value: Any, name: str, low: int, high: int = 2**31 - 1) -> None:
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    check(ok and int(value) >= low, name, value, f"an integer, at least {low}")
    check(int(value) <= high, name, value, f"an integer, at most {high}")


def check_float(value: Any, name: str, low: float, high: float) -> None:
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
    ok = ok and math.isfinite(value) and low <= float(value) <= high
    bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    bounds = "of any sign" if math.isinf(low) else bounds
    check(bool(ok), name, value, f"a finite number, {bounds}")


def check_fields(
    settings: Any,
    *,
    may_be_0: Sequence[str] = (),
    up_to_1: Sequence[str] = (),
    of_any_sign: Sequence[str] = (),
    prefix: str = "",
) -> None:
    """Checks the fields of a dataclass that are declared as `bool`, `int` or `float`.

    An int is at least 1 unless it `may_be_0`; a float is at least 0 unless it is `of_any_sign`, and
    at most 1 if `up_to_1`.
    """
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if field.type == "bool":
            check(isinstance(value, bool), name, value, "True or False")
        elif field.type == "int":
            check_int(value, name, 0 if field.name in may_be_0 else 1)
        elif field.type == "float":
            least = -math.inf if field.name in of_any_sign else 0.0
            check_float(value, name, least, 1.0 if field.name in up_to_1 else math.inf)


def refuse_unknown(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """An unknown name is an error, never ignored; the nearest known name is offered."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise BadType(f"unknown {what} {name!r}; {hint}")
