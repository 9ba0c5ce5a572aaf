# SPDX-License-Identifier: Apache-2.0
"""docs/results.md is what the committed figures say."""

from benchmarks import papers, results_page
from benchmarks.table_parts import read


def test_the_page_is_current():
    assert results_page.page() == results_page.PAGE.read_text("utf-8")


def test_every_case_of_the_series_was_run():
    document = read("papers")
    run = {one["case"]: one for one in document["cases"]}
    for case in papers.cases():
        found = run[case.name]
        assert set(found["methods"]) == {"plain", *case.methods}
        assert found["settings"] == dict(case.settings)
        assert found["marks"][-1] == case.new
    assert all(map(papers.same, run.values()))
