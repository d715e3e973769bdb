from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_episodes

from replaylab.data import sample
from replaylab.data.episodes import from_rows
from replaylab.data.sample import Store, Transitions, Windows, draw
from replaylab.errors import DataError


@pytest.mark.parametrize("resident", [True, False])
def test_a_row_is_followed_by_its_own_successor(episodes, resident):
    rows = Transitions(Store(episodes, "cpu", resident), [0], 4)
    batch = rows.gather(torch.arange(len(episodes))[None])
    np.testing.assert_allclose(batch["next_observations"][0, :, 0], batch["observations"][0, :, 0] + 1)
    np.testing.assert_array_equal(batch["terminated"][0].numpy() > 0, episodes.terminated)
    np.testing.assert_array_equal(batch["next_observations"][0].numpy(), episodes.next_observations())


@pytest.mark.parametrize("piece", [1, 40, 100])
def test_the_log_reaches_the_device_in_pieces(monkeypatch, piece):
    log = make_episodes(lengths=(1, 4, 1, 2))
    monkeypatch.setattr(sample, "PIECE", piece)  # bytes: one row, or a few
    store = Store(log, "cpu", resident=True)
    rows = torch.arange(len(log))
    np.testing.assert_array_equal(store.observations(rows), log.observations)
    np.testing.assert_array_equal(store.next_observations(rows), log.next_observations())


def test_rows_without_a_known_successor_are_never_drawn():
    rows = 10
    ends = np.arange(rows) % 5 == 4
    log = from_rows(np.arange(rows)[:, None].astype(float), np.zeros((rows, 1)), np.zeros(rows), ends)
    drawn = Transitions(Store(log, "cpu"), [0], 64)
    batch = drawn.gather(torch.as_tensor(drawn.draw(0, 50)).reshape(1, -1))
    assert set(batch["observations"].flatten().int().tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}
    assert len(set(Transitions(Store(log, "cpu"), [0], 64, next_observations=False).draw(0, 50).flatten())) == rows


def test_draws_depend_on_seed_and_step_alone():
    whole = draw(1000, (8,), 3, 0, 0, 3000)
    np.testing.assert_array_equal(whole[1500:2600], draw(1000, (8,), 3, 0, 1500, 1100))
    rows = Store(make_episodes(), "cpu")
    together, alone = Transitions(rows, [1, 2], 8).draw(7, 5), Transitions(rows, [2], 8).draw(7, 5)
    np.testing.assert_array_equal(together[:, 1:], alone)
    assert not np.array_equal(together[:, 0], together[:, 1])
    assert abs(np.bincount(whole.flatten(), minlength=1000).std() - np.sqrt(24)) < 1  # uniform


def test_windows_by_hand():
    log = make_episodes(lengths=(5, 3))
    windows = Windows(Store(log, "cpu"), [0], 4, length=4)
    batch = windows.gather(torch.tensor([[0, 3, 5]]))  # full, two steps left, three steps left
    assert batch["mask"][0].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["timesteps"][0].tolist() == [[0, 1, 2, 3], [3, 4, 0, 0], [0, 1, 2, 0]]
    assert batch["observations"][0, :, :, 0].tolist() == [[0, 1, 2, 3], [3, 4, 0, 0], [105, 106, 107, 0]]
    r = log.rewards
    expected = [r[5] + r[6] + r[7], r[6] + r[7], r[7], 0]
    np.testing.assert_allclose(batch["returns_to_go"][0, 2], expected, rtol=1e-5)


def test_nan_is_refused_before_training(episodes):
    episodes.observations[3, 1] = np.nan
    with pytest.raises(DataError, match="observations holds NaN"):
        Store(episodes, "cpu")
