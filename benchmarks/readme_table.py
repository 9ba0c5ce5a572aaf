# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of README and docs from benchmarks/results/: no number is typed by hand.

python -m benchmarks readme_table            rewrites the files between their pairs of markers
python -m benchmarks readme_table --check    exits with 1 if that would change one
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from benchmarks import cpu_tables, expected, front, gpu_tables, papers_tables, real_tables
from benchmarks.table_parts import matching, source, write
from experiments.longcontext import tables


def longcontext_scores() -> str:
    documents = matching("longcontext-*")
    return f"{tables.scores(documents)} Made by {source(*documents)}."


def longcontext_verdict() -> str:
    return tables.verdict_text(matching("longcontext-*"))


SECTIONS = {
    ("docs/decoding.md", "beginnings"): cpu_tables.beginnings,
    ("docs/decoding.md", "starts"): cpu_tables.starts,
    ("docs/using.md", "prefixes"): cpu_tables.texts_read_once,
    ("README.md", "front"): front.table,
    ("docs/results.md", "real-models"): real_tables.gains,
    ("docs/models.md", "narrow"): real_tables.narrow,
    ("docs/models.md", "narrow-cache"): real_tables.narrow_cache,
    ("docs/models.md", "narrow-drafts"): real_tables.narrow_drafts,
    ("docs/results.md", "on-a-cpu"): cpu_tables.on_a_cpu,
    ("docs/results.md", "rows-on-a-cpu"): cpu_tables.rows_on_a_cpu,
    ("docs/methods.md", "auto"): real_tables.auto_by_kind,
    ("docs/methods.md", "at-100k"): expected.at_100k,
    ("docs/results.md", "drafter-chains"): real_tables.drafter_chains,
    ("docs/results.md", "drafter-along"): real_tables.drafter_along,
    ("docs/methods.md", "drafter-compared"): real_tables.drafters_compared,
    ("docs/results.md", "measured"): cpu_tables.measured,
    ("docs/results.md", "papers"): papers_tables.tables,
    ("docs/results.md", "killed"): papers_tables.killed_runs,
    ("docs/lazyllm.md", "longcontext-scores"): longcontext_scores,
    ("docs/lazyllm.md", "longcontext-verdict"): longcontext_verdict,
    ("docs/exactness.md", "exactness"): cpu_tables.verification_rules,
    ("docs/exactness.md", "near-ties"): cpu_tables.near_ties,
    ("docs/exactness.md", "equality"): cpu_tables.equality,
    ("docs/speed.md", "errors"): functools.partial(expected.errors, "h100"),
    ("docs/speed.md", "errors-h200"): functools.partial(expected.errors, "h200"),
    ("docs/speed.md", "run-h200"): gpu_tables.run_on_h200,
    ("docs/kernels.md", "products"): gpu_tables.products,
    ("docs/speed.md", "choices"): expected.choices,
    ("docs/speed.md", "expected-times"): expected.times,
    ("docs/kernels.md", "compiled"): gpu_tables.registers,
    ("docs/kernels.md", "steps"): gpu_tables.steps,
    ("docs/lazyllm.md", "lazy-generation"): gpu_tables.lazy_generation,
    ("docs/speed.md", "expected-narrow"): expected.narrow,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks readme_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true")
    return write(SECTIONS, parser.parse_args(argv).check)
