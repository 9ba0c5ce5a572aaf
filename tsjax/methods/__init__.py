# SPDX-License-Identifier: Apache-2.0
"""The methods of decoding, one file each, and what one of your own is made of: own_method.md."""

# ruff: noqa: I001
import dataclasses
from typing import Any

from tsjax.base.checks import check, one_of
from tsjax.decoding.method import Autoregressive
from tsjax.methods.ngram import NGram
from tsjax.methods.tokenswift import TokenSwift
from tsjax.methods.medusa import Medusa, tree_from_accuracy
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.magicdec import MagicDec
from tsjax.methods.draft_model import DraftModel
from tsjax.methods.triforce import TriForce
from tsjax.methods.auto import Auto
from tsjax.decoding.method import Method, Sizes, DraftPasses, Promise, Measured, Tried
from tsjax.decoding.tree import DraftTree, merge_paths, SOURCES
from tsjax.decoding.state import Verdict, Acceptance

__all__ = [
    "Autoregressive", "NGram", "TokenSwift", "Medusa", "tree_from_accuracy", "LikelyTree",
    "MagicDec", "DraftModel", "TriForce", "Auto", "register_method",
    "Method", "Sizes", "DraftPasses", "Promise", "Measured", "Tried",
    "DraftTree", "merge_paths", "SOURCES", "Verdict", "Acceptance",
]  # fmt: skip

# "tokenswift" by name is Auto; TokenSwift.paper() has the paper's settings.
METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive, "ngram": NGram, "tokenswift": TokenSwift, "medusa": Medusa,
    "likely_tree": LikelyTree, "magicdec": MagicDec, "draft_model": DraftModel,
    "triforce": TriForce, "auto": Auto,
}  # fmt: skip
BY_NAME = {"tokenswift": Auto}  # where a name alone means another one


def register_method(name: str, method: type[Method]) -> None:
    """Makes a method of your own known by a name: to `generate`, its files and the command line."""
    check(isinstance(name, str) and name.isidentifier(), "name", name, "an identifier")
    check(METHODS.get(name, method) is method, "name", name, "free: another method has it")
    is_one = isinstance(method, type) and issubclass(method, Method) and method.__hash__ is not None
    wanted = "a frozen dataclass that extends tsjax.methods.Method"
    check(is_one and dataclasses.is_dataclass(method), "method", method, wanted)
    check(1 <= len(method.sources) <= 8, "sources", method.sources, "one to eight names")
    METHODS[name] = method


def resolve_method(method: Any) -> Method:
    """A method's name or the method itself -> the method."""
    if isinstance(method, str):
        check(
            method in METHODS,
            "method",
            method,
            f"{one_of(METHODS)}; 'autoregressive' is plain decoding",
        )
        return BY_NAME.get(method, METHODS[method])()
    check(isinstance(method, Method), "method", method, f"{one_of(METHODS)} or its dataclass")
    return method
