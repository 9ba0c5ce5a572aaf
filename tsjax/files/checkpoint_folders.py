# SPDX-License-Identifier: Apache-2.0
"""New folders of checkpoints: written whole or not at all, with what goes along with weights.

Does not know what is written into them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

from tsjax.base.errors import AlreadyThere, NoSuchFile
from tsjax.base.input_files import require_file
from tsjax.files.gguf_files import is_gguf
from tsjax.files.tokenizer import load_tokenizer
from tsjax.files.whole_files import check_writable, own_place, path_of

DESCRIPTION = "tsjax.json"

# What a folder may hold beside weights and config.json, and what goes along with the weights.
COMPANIONS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
COMPANIONS += ("merges.txt", "special_tokens_map.json", "added_tokens.json")
COMPANIONS += ("chat_template.jinja", "chat_template.json", "generation_config.json")


def check_new_folder(path: Any, argument: str = "path", *, overwrite: bool) -> str:
    """The place of a folder to write, behind all links; refused before it takes any work where
    something else is there."""
    name = path_of(path, argument, "a folder, which may be new")
    target, wrong = os.path.realpath(name), f"{argument}={name!r} is not valid"
    if os.path.lexists(target):
        names = os.listdir(target) if os.path.isdir(target) else ["a file"]
        if names and not {DESCRIPTION, "config.json", "heads.safetensors"} & set(names):
            raise AlreadyThere(f"{wrong}: it is not a checkpoint folder, and not overwritten")
        if not overwrite:
            remedy = "choose another place, or pass overwrite=True (--overwrite)"
            raise AlreadyThere(f"{wrong}: it exists; {remedy}")
    parent = os.path.dirname(target)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    check_writable(parent, f"{wrong}: a folder in a place that can be written")
    return target


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, *, overwrite: bool) -> Iterator[str]:
    """A temporary folder beside `path`, which takes its place when the block ends without error."""
    target = check_new_folder(path, overwrite=overwrite)
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    fresh = own_place(os.path.join(parent, f".{name}.writing-"))
    old = os.path.join(parent, f".{name}.replaced-{os.getpid()}")
    os.mkdir(fresh)
    try:
        yield fresh
        exists = os.path.lexists(target)
        if exists:
            os.replace(target, old)  # a folder with files in it cannot be replaced in one call
        try:
            os.replace(fresh, target)
        except OSError:
            if exists:
                os.replace(old, target)
            raise
        if exists:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def copy_companions(source: str | None, folder: str) -> None:
    """Puts the tokenizer and what else belongs to it into a new folder."""
    if source is not None and is_gguf(source):
        with contextlib.suppress(NoSuchFile):  # there is none
            load_tokenizer(source).save_pretrained(folder)
        return
    for name in COMPANIONS:
        if source is not None and os.path.exists(file := os.path.join(source, name)):
            require_file(file)
            shutil.copyfile(file, os.path.join(folder, name))
