"""Progress lines: what a user reads of the rate and the time left."""

from __future__ import annotations

import io

import pytest

from replaylab import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_first_update_does_not_count_for_the_time_left(clock):
    """It compiles or collects for minutes: counted, it would promise days."""
    bar = progress.Progress("world 1/15", 1001, file=(out := io.StringIO()))
    clock[0] += 90
    bar.update(1)
    assert out.getvalue() == "world 1/15 1/1001 steps  \n"
    clock[0] += 50
    bar.update(501)  # within a minute of the last line
    clock[0] += 50
    bar.update(601, loss=0.25)
    assert out.getvalue().splitlines()[1:] == ["world 1/15 601/1001 steps  6.0/s  1m07s left  loss 0.25"]


def test_a_resumed_phase_counts_from_where_it_goes_on(clock):
    bar = progress.Progress("policy", 2000, done=1000, file=(out := io.StringIO()))
    bar.update(1010)
    clock[0] += 10
    bar.update(1510)
    assert out.getvalue() == "policy 1510/2000 steps  50/s  9.8s left  \n"


def test_a_terminal_shows_what_is_starting(clock):
    bar = progress.Progress("dynamics", 10, file=(out := Terminal()))
    assert out.getvalue().endswith("dynamics [                    ] 0/10 steps  starting")
    clock[0] += 1
    bar.update(1)
    clock[0] += 1
    bar.update(5)
    assert out.getvalue().endswith("dynamics [##########          ] 5/10 steps  4.0/s  1.2s left  ")
