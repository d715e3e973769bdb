"""Progress lines: what a user reads of the rate and the time left."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from conftest import make_episodes

import replaylab
from replaylab import progress
from replaylab.trainer import Trainer


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


def test_what_comes_after_counts_to_the_end(clock):
    bar = progress.Progress("policy 3/15", 100, file=(out := io.StringIO()), after=600.0)
    bar.update(0)
    clock[0] += 10
    bar.update(20)
    assert out.getvalue() == "policy 3/15 20/100 steps  2.0/s  40s left, 10m40s to the end  \n"


def test_phases_that_repeat_tell_how_long_the_run_takes():
    phases = [SimpleNamespace(name=name, steps=steps) for name, steps in [("world", 30), ("policy", 2)] * 2]

    def after(phase, **paces):
        return Trainer._after(SimpleNamespace(phases=phases, phase=phase, paces=paces))

    assert after(0) is after(1, world=0.1) is None  # what a policy takes is not known yet
    assert after(1, world=0.1, policy=4.0) == 30 * 0.1 + 2 * 4.0
    assert after(2, world=0.1, policy=4.0) == 2 * 4.0
    assert after(3, world=0.1, policy=4.0) is None  # nothing comes after it


def test_a_whole_phase_sets_its_pace(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "_after", lambda self: seen.append(dict(self.paces)))
    log = make_episodes(lengths=(50, 30))
    replaylab.train("mopo", log, preset="debug", out=tmp_path, device="cpu", steps=20)
    (first, second) = seen
    assert first == {} and list(second) == ["dynamics"] and 0 < second["dynamics"] < 60
