# SPDX-License-Identifier: Apache-2.0
"""What README and docs promise: code and commands run, links lead on, figures are current."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import helpers
import hf_fixtures
import pytest

from benchmarks import front, readme_table, table_parts
from tsjax.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(page: str) -> list[str]:
    """Every command of its bash blocks, those after && included."""
    lines = "".join(blocks(page, "bash")).splitlines()
    return [part.strip() for line in lines for part in line.split("&&")]


def test_a_newcomer_reads_it_in_one_go():
    assert len(README.splitlines()) <= 120


# --- code and commands ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny HuggingFace folder with a tokenizer, for every place a user would put a path."""
    folder = tmp_path_factory.mktemp("readme") / "hf"
    hf_fixtures.make(
        folder, vocab_size=len(helpers.TOKENS), max_position_embeddings=2048, eos_token_id=...
    )
    helpers.save_tokenizer(folder)
    template = "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_the_three_lines_run(checkpoint, capsys):
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line]) == 3 and "tsjax.EMBEDDED" in code
    code = code.replace("tsjax.EMBEDDED", repr(checkpoint)).replace("200", "20")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) >= 20


@pytest.mark.wide
def test_the_page_about_generation_runs(checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a file
    code = "\n".join(blocks("docs/using.md", "python"))
    code = code.replace("path/to/checkpoint", checkpoint).replace("1000", "20")
    exec(compile(code, "docs/using.md", "exec"), {})
    out = capsys.readouterr().out
    assert "['length']" in out and "{'model': 0, 'ngrams': " in out


@pytest.mark.wide
def test_the_page_about_blocks_runs():
    page = "docs/own_method.md"
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


GENERATE = [line for line in commands("docs/command_line.md") if line.startswith("tsjax generate")]


@pytest.mark.wide
@pytest.mark.parametrize("line", GENERATE)
def test_generate_commands_run(line, checkpoint, capsys):
    argv = shlex.split(line.replace("path/to/checkpoint", checkpoint))[1:]
    assert main([*argv, "--max-new-tokens", "5"]) == 0
    assert "[5 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("line", [*commands("README.md"), *commands("docs/command_line.md")])
def test_every_command_exists(line, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match shlex.split(line):
        case ["pip", "install", "-e", target]:
            extras = re.fullmatch(r"\.(?:\[(\w+)\])?", target)[1]
            assert extras is None or extras in project["optional-dependencies"]
        case ["tsjax", command, *_]:
            with pytest.raises(SystemExit, match="0"):
                main([command, "--help"])
            assert f"tsjax {command}" in capsys.readouterr().out
        case ["python", path, *_]:
            assert (ROOT / path).is_file()
        case [program, *_]:
            assert program == "pytest" or program in project["scripts"]


# --- figures ----------------------------------------------------------------------------------


def test_figures_come_from_committed_results():
    assert readme_table.main(["--check"]) == 0, "run python -m benchmarks readme_table"
    assert table_parts.write({("README.md", "front"): lambda: "another table"}, check=True) == 1
    assert (ROOT / "README.md").read_text() == README


def test_a_row_of_the_front_that_cannot_be_checked_is_refused():
    what = "a call (1.6 tokens per step)"
    for other, ratio in [("0.8 ms", "0.96x"), ("1.7 ms, 9.9 ms", "2.04x, 11.0x"), ("1 ms", "70%")]:
        row = what, "0.9 ms", other, ratio, "a CPU"
        assert front.checked(*row) == row
    for other, ratio in [("0.8 ms", "1.08x"), ("1.7 ms, 9.9 ms", "2.04x, 12.0x"), ("1 ms", "40%")]:
        with pytest.raises(ValueError, match="does not follow from the times"):
            front.checked(what, "0.9 ms", other, ratio, "a CPU")
    with pytest.raises(ValueError, match="compared with itself"):
        front.checked("a call (1.0 tokens per step)", "0.9 ms", "0.8 ms", "0.89x", "a CPU")


# --- links and the map ------------------------------------------------------------------------


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            yield target


def anchors(page: Path) -> set[str]:
    """What a heading's link ends with, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_map_names_every_room():
    (tree,) = blocks("docs/house.md", "")
    (inside,) = re.findall(r"^tsjax/\n((?:  .*\n)*)", tree, re.MULTILINE)
    there = {path for path in (ROOT / "tsjax").iterdir() if path.suffix in (".py", "")}
    names = {path.name + "/" * path.is_dir() for path in there}
    named = set(re.findall(r"^  (\S+)", inside, re.MULTILINE))
    assert named == names - {"__init__.py", "__pycache__/"}
    assert all((ROOT / folder).is_dir() for folder in re.findall(r"^(\w+)/", tree, re.MULTILINE))
