# SPDX-License-Identifier: Apache-2.0
"""A text that the model has read: later runs that begin with it go on from there.

Knows tokens and their cache. Does not know how a run goes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from tsjax.base.checks import check, check_type
from tsjax.base.errors import BadValue
from tsjax.files.checkpoint import Model
from tsjax.host.prefix_files import ReadText, write_prefix
from tsjax.model.cache import KVCache


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What `tsjax.read` returns, and `generate(keep_prefix=True)` in its result.

    It stays valid however often it is used: runs copy it. It belongs to the weights that read it.

    Attributes:
      tokens: the text. The cache has the first `length` of them, all but the last or all.
      length: how many of them a run need not read again.
      is_approximate: whether a lazy prefill read a part of it. Its rows then are not those of a
        whole reading, and tokens that follow may be others, whatever reads them.
    """

    tokens: np.ndarray
    length: int
    cache: KVCache = dataclasses.field(repr=False)
    _model: Model = dataclasses.field(repr=False)
    is_approximate: bool = False

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self.cache.k, *self.cache.v))

    def save(self, path: str | os.PathLike) -> None:
        """Writes or replaces a file that `prefix=` takes in its place, in any process with the same
        model. It holds the text and what the model computed of it. A file that cannot be written
        whole is not there."""
        text = ReadText(self.tokens, self.length, self.cache, self.is_approximate)
        write_prefix(path, self._model, text)

    def shared_with(self, prompts: list[np.ndarray]) -> int:
        """How many of its tokens all prompts begin with. The last token of a prompt is left out, as
        no prefill reads it."""
        shared = self.length
        for prompt in prompts:
            most = min(shared, len(prompt) - 1)
            different = np.flatnonzero(self.tokens[:most] != prompt[:most])
            shared = int(different[0]) if len(different) else most
        return shared


def check_prefix(prefix: Any, model: Model) -> None:
    check_type(prefix, Prefix, "prefix", "what tsjax.read returns, or a file of it")
    read_by = prefix._model.path
    where = f"a prefix of {os.fspath(read_by)!r}" if read_by else "another model's"
    same = prefix._model is model or prefix._model.params is model.params
    check(same, "prefix", where, "one that tsjax.read made with this model: weights differ")
    held, wanted = prefix._model.cfg.cache, model.cfg.cache
    check(held == wanted, "prefix", f"one with cache={held!r}", f"one with cache={wanted!r}")


def check_prefix_is_read_alike(prefix: Prefix | None, length: int, argument: str) -> None:
    """A saved run reads its beginning anew when it goes on, as a whole."""
    if prefix is not None and length and prefix.is_approximate:
        raise BadValue(
            f"{argument} is not valid beside a prefix that a lazy prefill has read: the file has "
            "no cache, and a run that goes on reads the prefix as a whole"
        )
