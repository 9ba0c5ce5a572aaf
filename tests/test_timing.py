# SPDX-License-Identifier: Apache-2.0
"""Calls timed side by side, with a clock that the calls themselves put forward."""

import pytest

from benchmarks.report import interleaved
from tsjax.measure.timing import ratios, summary


class Clock:
    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: float, drift: float = 0.0):
        """A call that takes longer each time by `drift`, and returns how often it was made."""

        def call():
            self.order.append(name)
            self.now += seconds + drift * (self.order.count(name) - 1)
            return self.order.count(name)

        return call


def test_every_second_round_goes_backwards_and_some_do_not_count():
    clock = Clock()
    calls = {"a": clock.taking("a", 4, drift=2), "b": clock.taking("b", 2), "c": lambda: None}
    found = interleaved(calls, 3, warmup=2, clock=clock)
    assert "".join(clock.order[4:]) == "abbaab"
    assert found.seconds == {"a": [8, 10, 12], "b": [2, 2, 2], "c": [0, 0, 0]}
    assert found.results == {"a": [3, 4, 5], "b": [3, 4, 5], "c": [None] * 3}
    assert summary(found.seconds["a"]) == {"median": 10, "min": 8, "max": 12}
    assert ratios(found.seconds["a"], found.seconds["b"])["median"] == 5


def test_a_result_is_waited_for_and_a_slow_call_gets_fewer_rounds():
    clock = Clock()

    class Result:
        def block_until_ready(self):
            clock.now += 3
            return self

    assert interleaved({"late": Result}, 1, clock=clock).seconds == {"late": [3]}
    calls = {"slow": clock.taking("slow", 2), "fast": clock.taking("fast", 0.5)}
    found = interleaved(calls, 6, most=4, clock=clock)
    assert {name: len(times) for name, times in found.seconds.items()} == {"slow": 3, "fast": 6}


def test_errors_end_all_or_one():
    def fail():
        if clock.now > 2:
            raise ValueError("no more")

    clock = Clock()
    calls = {"good": clock.taking("good", 1), "bad": fail}
    found = interleaved(calls, 4, keep_errors=True, clock=clock)
    assert list(found.seconds) == list(found.results) == ["good"]
    assert len(found.seconds["good"]) == 4 and str(found.failed["bad"]) == "no more"
    with pytest.raises(ValueError, match="no more"):
        interleaved(calls, 4, clock=clock)
