from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.algos import Spaces, bcq, diffusion_dice, gormpo, mopo
from replaylab.data import sample
from replaylab.data.episodes import Episodes, from_rows
from replaylab.data.sample import Store, Transitions, Windows, draw, left_out
from replaylab.errors import DataError
from replaylab.models.imagine import unpack
from replaylab.step import Stepper


@pytest.mark.parametrize("resident", [True, False])
def test_a_row_is_followed_by_its_own_successor(episodes, resident):
    rows = Transitions(Store(episodes, "cpu", resident), [0], 4)
    batch = rows.gather(torch.arange(len(episodes))[None])
    np.testing.assert_allclose(batch["next_observations"][0, :, 0], batch["observations"][0, :, 0] + 1)
    np.testing.assert_array_equal(batch["terminated"][0].numpy() > 0, episodes.terminated)
    np.testing.assert_array_equal(batch["next_observations"][0].numpy(), episodes.next_observations())
    assert rows.resident == resident and left_out(episodes, "dynamics") == []


@pytest.mark.parametrize("room", [True, False])
def test_a_log_is_copied_to_the_device_if_twice_its_size_fits(monkeypatch, episodes, room):
    monkeypatch.setattr(sample, "fits", lambda nbytes, _: room and nbytes == 2 * episodes.nbytes)
    assert Store(episodes, "cpu").resident == room


@pytest.mark.parametrize("piece", [1, 40, 100])
def test_the_log_reaches_the_device_in_pieces(monkeypatch, piece):
    log = make_episodes(lengths=(1, 4, 1, 2))
    monkeypatch.setattr(sample, "PIECE", piece)  # bytes: one row, or a few
    store = Store(log, "cpu", resident=True)
    rows = torch.arange(len(log))
    np.testing.assert_array_equal(store.observations(rows), log.observations)
    np.testing.assert_array_equal(store.next_observations(rows), log.next_observations())


def without_finals(rows: int = 200, length: int = 5, terminated: bool = True) -> Episodes:
    """A log without next observations, rewarded where an episode ends."""
    ends, rng = np.arange(rows) % length == length - 1, np.random.default_rng(0)
    observations = np.column_stack([np.arange(rows), rng.normal(size=rows)]).astype(np.float32)
    actions, rewards = (x.astype(np.float32) for x in (rng.uniform(-1, 1, (rows, 1)), ends * rng.uniform(5, 9, rows)))
    return from_rows(observations, actions, rewards, ends & terminated, ends & (not terminated))


@pytest.mark.parametrize("terminated", [True, False])
def test_rows_without_a_known_successor_are_drawn_only_if_nothing_followed(terminated):
    log = without_finals(10, terminated=terminated)
    drawn = Transitions(Store(log, "cpu"), [0], 64)
    batch = drawn.gather(torch.as_tensor(drawn.draw(0, 50)).reshape(1, -1))
    assert set(range(10)) - set(batch["observations"][0, :, 0].int().tolist()) == (set() if terminated else {4, 9})
    assert batch["next_observations"].isfinite().all()
    assert len(set(Transitions(Store(log, "cpu"), [0], 64, next_observations=False).draw(0, 50).flatten())) == 10
    with pytest.raises(DataError, match="so there is no transition to learn from"):
        Transitions(Store(without_finals(10, length=1, terminated=False), "cpu"), [0], 64)


def agent_of(module, log: Episodes, **settings):
    """An agent and its phases, as the debug preset has them."""
    known = {field.name for field in fields(module.Config)}
    config = {k: v for k, v in (module.PRESETS["debug"] | settings).items() if k in known}
    agent = module.Agent(module.Config(**config), Spaces.of(log), [0], torch.device("cpu"))
    return agent, agent.phases(log)


@pytest.mark.parametrize("module", [bcq, diffusion_dice, mopo, gormpo])
def test_values_learn_from_the_rewards_of_rows_that_end(module):
    phases = agent_of(module, without_finals())[1]
    sampler = phases[-1].sampler
    batch = sampler.gather(torch.as_tensor(sampler.draw(0, 1000)).flatten()[None])
    batch = unpack(batch["rows"], 2) if "rows" in batch else batch
    assert batch["terminated"].mean() == pytest.approx(0.2, abs=0.03) and batch["next_observations"].isfinite().all()


@pytest.mark.parametrize("module", [mopo, gormpo])
def test_models_leave_made_up_successors_out_and_say_so(module):
    agent, _ = agent_of(module, without_finals())
    dynamics = agent.fit.table * torch.cat([agent.dynamics.input_std, agent.dynamics.target_std])
    assert len(dynamics) == 160 and dynamics[:, -1].abs().max() < 1e-3  # no row with a reward
    said = " | ".join(agent.notes)
    assert "dynamics: 40 of 200 rows left out, as the log does not tell what followed them" in said
    assert "it ends 0 of the 160 logged rows that go on; 40 rows that end cannot be checked" in said
    assert ("density: 40 of 200 rows left out" in said) == (module is gormpo)
    with pytest.raises(DataError, match="tells no next observation, so there is no step to learn a model from"):
        agent_of(module, without_finals(length=1))


def test_a_step_model_says_what_it_leaves_out():
    agent, _ = agent_of(diffusion_dice, without_finals(terminated=False), backup="model")
    assert agent.notes == ["models of a step: 40 of 200 rows left out, as the log does not tell what followed them"]


@pytest.mark.parametrize("module", [bcq, diffusion_dice])
def test_a_bandit_needs_no_next_observation(module):
    _, phases = agent_of(module, without_finals(length=1))
    found = Stepper(phases[-1], torch.device("cpu"))
    found.run(0, 2)
    assert all(np.isfinite(values).all() for values in found.read().values())


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


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "final_observations"])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_refused_before_training(tmp_path, column):
    log, out = make_episodes(), tmp_path / "run"
    getattr(log, column)[:2] = np.array([np.inf, -np.inf]).reshape(-1, *[1] * (getattr(log, column).ndim - 1))
    for name in ("bc", "diffusion-dice"):
        with pytest.raises(DataError, match=f"^{column} holds NaN or infinity"):
            replaylab.train(name, log, out=out, preset="debug", device="cpu")
    rewards = np.where(np.arange(len(log)) == 3, -1e300, 0.0)
    with pytest.raises(DataError, match=r"rewards reach 1e\+300, which float32 cannot hold"):
        replaylab.train("bc", replace(make_episodes(), rewards=rewards), out=out, preset="debug", device="cpu")
    assert not out.exists()
