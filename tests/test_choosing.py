# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.md says what the cost model says today, and its memory is counted by hand."""

from benchmarks import choosing


def test_the_table_is_current():
    assert choosing.main(["--check"]) == 0, "run python -m benchmarks choosing"


def test_memory_is_weights_and_cache():
    (line,) = [line for line in choosing.table() if line.startswith("| llama3.1-8b |")]
    # 8.03e9 parameters; 32 layers of 8 kv heads of 128, keys and values, for 106,496 tokens.
    assert f"| {8.03 * 2:.1f} GB | {2 * 32 * 8 * 128 * 2 * 106_496 / 1e9:.1f} GB |" in line
    assert "no room" in line.split(" | ")[3]  # on a card of 24 GB
