"""Minari folders, in both directions, against the real package."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from logs import assert_same, make, notes

from replaylab.data import load, save
from replaylab.data.formats import minari as minari_format
from replaylab.errors import DataError


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    return pytest.importorskip("minari")


def buffers(minari, observe, act, lengths=(3, 2), info=False):
    from minari.data_collector import EpisodeBuffer

    for i, n in enumerate(lengths):
        infos = {"energy": np.arange(n + 1.0), "text": ["a"] * (n + 1)} if info else {}
        terminations = np.arange(n) == (n - 1 if i == 0 else -1)
        yield EpisodeBuffer(
            id=i,
            observations=observe(i, n + 1),
            actions=act(i, n),
            rewards=np.full(n, i + 0.5),
            terminations=terminations,
            truncations=(np.arange(n) == n - 1) & ~terminations,
            infos=infos,
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reads_what_minari_writes(minari, tmp_path):
    from gymnasium import spaces

    minari.create_dataset_from_buffers(
        "hopper/tiny-v0",
        buffer=list(
            buffers(
                minari,
                lambda i, n: np.arange(n * 2, dtype=np.float64).reshape(n, 2) + 100 * i,
                lambda i, n: np.full((n, 1), i, np.float32),
                info=True,
            )
        ),
        observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float64),
        action_space=spaces.Box(-1, 2, (1,), np.float32),
        author="me",
        description="a test",
        algorithm_name="none",
    )
    folder = tmp_path / "root" / "hopper" / "tiny-v0"
    e = load(folder)
    assert e.offsets.tolist() == [0, 3, 5] and e.returns.tolist() == [1.5, 3]
    assert e.observations[:, 0].tolist() == [0, 2, 4, 100, 102] and e.observations.dtype == np.float64
    assert e.final_observations.tolist() == [[6, 7], [104, 105]] and e.final_known.all()
    assert e.terminated.nonzero()[0].tolist() == [2] and e.truncated.nonzero()[0].tolist() == [4]
    assert e.extras["infos/energy"].tolist() == [0, 1, 2, 0, 1] and set(e.extras) == {"infos/energy"}
    assert e.meta["dataset_id"] == "hopper/tiny-v0" and e.meta["description"] == "a test" and e.meta["author"] == ["me"]
    assert e.meta["action_low"] == [-1] and e.meta["action_high"] == [2] and e.env_id == "d4rl/hopper"
    for other in (folder / "data", folder / "data" / "main_data.hdf5"):
        assert load(other).observations.tolist() == e.observations.tolist()


def test_minari_reads_what_we_write(minari, tmp_path):
    for kind in ("float32", "discrete", "pixels"):
        e = make(kind)
        save(e, tmp_path / "root" / "things" / f"{kind}-v3", format="minari")
        theirs = minari.load_dataset(f"things/{kind}-v3")
        assert theirs.total_episodes == 3 and theirs.total_steps == 9
        for ours, episode in zip(e, theirs.iterate_episodes(), strict=True):
            assert episode.observations.dtype == e.observations.dtype
            assert np.array_equal(episode.observations, ours["observations"])
            assert np.array_equal(episode.actions, ours["actions"])
            assert np.array_equal(episode.rewards, ours["rewards"])
            assert np.array_equal(episode.terminations, ours["terminated"])
            assert np.array_equal(episode.truncations, ours["truncated"])
            assert np.array_equal(episode.infos["qpos"], ours["infos/qpos"])
            assert theirs.observation_space.contains(episode.observations[0])
            assert theirs.action_space.contains(episode.actions[0])


def test_minari_keeps_its_own_metadata_through_our_formats(minari, tmp_path):
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    act = lambda i, n: np.arange(n) % 2  # noqa: E731
    observe = lambda i, n: np.zeros((n, 4), np.float32)  # noqa: E731
    with pytest.warns(UserWarning):
        minari.create_dataset_from_buffers("cart/pole-v0", buffer=list(buffers(minari, observe, act)), env=env)
    e = load(tmp_path / "root" / "cart" / "pole-v0")
    assert e.discrete and e.num_actions == 2 and e.env_id == "CartPole-v1"
    store = save(e, tmp_path / "store")
    back = save(load(store), tmp_path / "root" / "back" / "again-v0", format="minari")
    theirs = minari.load_dataset("back/again-v0")
    assert theirs.spec.dataset_id == "cart/pole-v0" and theirs.recover_environment().spec.id == "CartPole-v1"
    assert_same(e, load(back))


def test_dict_observations_join_observation_and_goal(minari, tmp_path):
    from gymnasium import spaces

    def observe(i, n):
        return {
            "achieved_goal": np.full((n, 1), 7.0),
            "desired_goal": np.arange(n, dtype=np.float64)[:, None],
            "observation": np.full((n, 2), float(i)),
        }

    one = spaces.Box(-9, 9, (1,), np.float64)
    space = spaces.Dict({"achieved_goal": one, "desired_goal": one, "observation": spaces.Box(-9, 9, (2,), np.float64)})
    with pytest.warns(UserWarning):
        minari.create_dataset_from_buffers(
            "maze/goal-v0",
            buffer=list(buffers(minari, observe, lambda i, n: np.zeros((n, 1), np.float32))),
            observation_space=space,
            action_space=spaces.Box(-1, 1, (1,), np.float32),
        )
    folder = tmp_path / "root" / "maze" / "goal-v0"
    e = load(folder)
    assert e.observations.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 1, 0], [1, 1, 1]]
    assert e.final_observations.tolist() == [[0, 0, 3], [1, 1, 2]]
    assert e.extras["observation/achieved_goal"].tolist() == [[7]] * 5 and e.env_id is None
    chosen = load(folder, columns={"observations": ["achieved_goal"]})
    assert chosen.observations.tolist() == [[7]] * 5
    with pytest.raises(DataError, match="say which to join"):
        load(folder, columns={"observations": ["nothing"]})


def test_minari_ends_inside_a_group_and_without_flags(tmp_path):
    e = make()
    path = save(e, tmp_path / "x-v0", format="minari")
    (path / "data" / "replaylab.npz").unlink()
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_2/terminations"][...] = [False, True, False, False]
        file["episode_2/truncations"][...] = False
    back = load(path)
    assert back.offsets.tolist() == [0, 3, 5, 7, 9]
    assert back.terminated.nonzero()[0].tolist() == [2, 6] and back.truncated.nonzero()[0].tolist() == [4, 8]
    assert np.array_equal(back.final_observations[2], e.observations[7]) and "split there" in notes(back)


def shorten(file) -> None:
    """One observation too few."""
    del file["episode_1/observations"]
    file["episode_1/observations"] = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.pop("episode_1"), "does not hold episode_0, episode_1"),
        (lambda f: f.pop("episode_2"), "counts 3 episodes, main_data.hdf5 holds 2"),
        (lambda f: f["episode_1"].pop("actions"), "episode_1/actions is missing"),
        (lambda f: f["episode_1"].pop("rewards"), "episode_1/rewards is missing"),
        (shorten, "beside 2 rewards"),
    ],
)
def test_damaged_minari(tmp_path, damage, message):
    path = save(make(), tmp_path / "x-v0", format="minari")
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        damage(file)
    with pytest.raises(DataError, match=message):
        load(path)


def test_minari_metadata_that_lies(tmp_path):
    path = save(make(), tmp_path / "x-v0", format="minari")
    (path / "data" / "replaylab.npz").unlink()
    meta = path / "data" / "metadata.json"
    good = json.loads(meta.read_text())
    box = json.loads(good["action_space"])
    for change, message in [
        ({"total_episodes": 4}, "counts 4 episodes"),
        ({"data_format": "arrow"}, "only hdf5"),
        ({"action_space": "{"}, "action_space is not JSON"),
        ({"action_space": json.dumps(box | {"low": [0, 0, 0]})}, r"x-v0: (action_low|not a readable)"),
        ({"action_space": json.dumps({"type": "Box", "low": [5, 5], "high": [1, 1]})}, "action_low is above"),
    ]:
        meta.write_text(json.dumps(good | change))
        with pytest.raises(DataError, match=message):
            load(path)
    meta.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"metadata\.json is not JSON"):
        load(path)
    meta.unlink()
    with pytest.raises(DataError, match=r"metadata\.json is missing"):
        load(path)


def test_minari_that_is_not_plain(tmp_path):
    path = save(make("pixels"), tmp_path / "x-v0", format="minari")
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for e in range(3):
            n = len(file[f"episode_{e}/rewards"]) + 1
            del file[f"episode_{e}/observations"]
            file[f"episode_{e}/observations"] = np.zeros((n, 500), np.uint8)  # how Minari stores equally long JPEGs
    with pytest.raises(DataError, match="JPEG images are not read"):
        load(path)
    with pytest.raises(DataError, match="names its own columns"):
        load(path, columns={"rewards": "r"})
    (path / "data" / "main_data.hdf5").unlink()
    meta = path / "data" / "metadata.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"data_format": "arrow"}))
    with pytest.raises(DataError, match="arrow is not read"):
        load(path)


def test_long_episodes_are_read_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(minari_format, "PIECE", 0)
    assert_same(make(), load(save(make(), tmp_path / "x-v0", format="minari")))


def test_a_stale_file_of_ours_is_not_used(tmp_path):
    one = save(make(), tmp_path / "a-v0", format="minari")
    two = save(make().select([0]), tmp_path / "b-v0", format="minari")
    (two / "data" / "replaylab.npz").replace(one / "data" / "replaylab.npz")
    e = load(one)
    assert e.num_episodes == 3 and "older than the episodes" in notes(e)
