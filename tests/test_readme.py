# SPDX-License-Identifier: Apache-2.0
"""The README's promises: its code and commands run, its figures come from committed files."""

import re
import shlex
from pathlib import Path

import helpers
import hf_fixtures
import pytest

from benchmarks import readme_table
from tsjax.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny HuggingFace folder with a tokenizer, for every place a user would put a path."""
    folder = tmp_path_factory.mktemp("readme") / "hf"
    hf_fixtures.make(
        folder, vocab_size=len(helpers.TOKENS), max_position_embeddings=2048, eos_token_id=...
    )
    helpers.save_tokenizer(folder)
    return str(folder)


def test_python_blocks_run(checkpoint, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    code = "\n".join(blocks).replace("path/to/checkpoint", checkpoint).replace("1000", "20")
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "['length']" in out and "{'heads': 0, 'ngrams': " in out


COMMANDS = [line for line in README.splitlines() if line.startswith("tsjax generate")]


@pytest.mark.parametrize("line", COMMANDS)
def test_generate_commands_run(line, checkpoint, capsys):
    argv = shlex.split(line.replace("path/to/checkpoint", checkpoint))[1:]
    assert main([*argv, "--max-new-tokens", "5"]) == 0
    assert "[5 tokens" in capsys.readouterr().err


def test_figures_come_from_committed_results():
    assert readme_table.main(["--check"]) == 0, "run python -m benchmarks readme_table"


def test_file_map_names_every_module():
    (tree,) = re.findall(r"## File map\n\n```\n(.*?)```", README, re.DOTALL)
    for folder in ("tsjax", "pallas_kernels"):
        modules = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
        (lines,) = re.findall(rf"^{folder}/.*\n((?:  .*\n)*)", tree, re.MULTILINE)
        assert set(re.findall(r"^  (\w+\.py) ", lines, re.MULTILINE)) == modules
    folders = set(re.findall(r"^(\w+)/", tree, re.MULTILINE))
    assert all((ROOT / folder).is_dir() for folder in folders)
