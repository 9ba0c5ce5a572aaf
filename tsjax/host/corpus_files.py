# SPDX-License-Identifier: Apache-2.0
"""A corpus from files: saved runs, and texts.

Knows which files hold rows of tokens. Does not know how a corpus is drafted from.
"""

from __future__ import annotations

import os

import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import NoSuchFile
from tsjax.base.input_files import read_text
from tsjax.base.telling import doing
from tsjax.files.checkpoint import Model
from tsjax.host.prompts import encode_text
from tsjax.host.saved_run import read_run
from tsjax.methods.corpus import Corpus


def read_corpus(model: Model, *files: str | os.PathLike) -> Corpus:
    """A Corpus of files: runs that `save_to` wrote (.json), their prompts included, and texts.

    Args:
      model: whose tokenizer reads the texts.
    """
    check(bool(files), "files", files, "one file or more")
    rows = []
    with doing("reading the corpus", len(files), "files") as work:
        for count, file in enumerate(files):
            work.done(count)
            name = os.fspath(file)
            if name.endswith(".json"):
                run = read_run(name, "files")
                rows += map(np.concatenate, zip(run.prompts, run.tokens, strict=True))
            else:
                if not os.path.exists(name):
                    raise NoSuchFile(f"files={name!r} is not valid: no such file")
                rows.append(encode_text(model, read_text(name), f"the text of {name!r}"))
        return Corpus(rows)
