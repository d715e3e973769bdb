"""Reference scores: the table's numbers, the names it understands, the formula."""

import numpy as np
import pytest

from replaylab import scores
from replaylab.errors import UsageError

HOPPER, MAZE = (-20.272305, 3234.3), (30.569041, 303.4857382709002)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("d4rl/hopper", HOPPER),
        ("hopper", HOPPER),
        ("Hopper-v5", HOPPER),
        ("hopper-medium-v2", HOPPER),
        ("hopper_medium_replay-v1", HOPPER),
        ("hopper/medium-v0", HOPPER),
        ("mujoco/hopper/expert-v0", HOPPER),
        ("halfcheetah-medium-expert-v2", (-280.178953, 12135.0)),
        ("Walker2d-v4", (1.629008, 4592.3)),
        ("ant-random-v2", (-325.6, 3879.7)),
        ("antmaze-umaze-v0", (0.0, 1.0)),
        ("D4RL/antmaze/large-diverse-v1", (0.0, 1.0)),
        ("AntMaze_UMaze-v4", None),  # Gymnasium-Robotics' own: 1 for every step at the goal, up to 700
        ("maze2d-large-dense-v1", MAZE),
        ("maze2d-large-v1", (6.7, 273.99)),
        ("maze2d-open-v0", (0.01, 20.66)),
        ("pen-human-v1", (96.262799, 3076.8331017826877)),
        ("AdroitHandDoor-v1", (-56.512833, 2880.5693087298737)),
        ("kitchen-partial-v0", (0.0, 4.0)),
        ("minigrid-fourrooms-v0", (0.01442, 2.89685)),
        ("flow-merge-random-v0", (118.67993, 330.03179)),
        ("carla-town-v0", (-114.81579500772153, 2440.1772022247314)),
        ("AntMaze_UMazeDense-v4", None),
        ("Humanoid-v5", None),
        ("maze2d", None),
        ("hoppers", None),
        ("", None),
    ],
)
def test_reference(name, expected):
    assert scores.reference(name) == expected


def test_normalize():
    assert scores.normalize("hopper", -20.272305) == 0
    assert scores.normalize("hopper-expert-v2", 3234.3) == 100
    np.testing.assert_allclose(scores.normalize("walker2d", [1.629008, 2296.964504, 4592.3]), [0, 50, 100])
    assert scores.normalize("hopper", 1422) == pytest.approx(44.315, abs=1e-3)  # (1422 + 20.27) / 32.5457
    with pytest.raises(UsageError, match="did you mean 'hopper'"):
        scores.normalize("hoper", 1.0)


def test_the_table_is_whole():
    assert len(scores.REFERENCES) == 24
    assert scores.reference("pointmaze-large-diverse") == (0.0, 1.0)
    assert scores.reference("PointMaze_UMaze-v3") is None
    assert all(low < high for low, high in scores.REFERENCES.values())
    sums = (-829.907, 52209.4897), (19161.6, 319192.1)  # nothing else would show a changed digit
    for table, known in zip((scores.REFERENCES, scores.ATARI), sums, strict=True):
        assert [sum(column) for column in zip(*table.values(), strict=True)] == pytest.approx(known, abs=1e-4)


def test_atari_games_whatever_the_frames():
    known = scores.ATARI["atari/bank_heist"]
    assert scores.reference("atari-rgb/bank_heist,pool=max") == scores.reference("atari/BankHeist") == known
    assert scores.reference("atari-rgb/nosuchgame") is None
