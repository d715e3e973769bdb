"""Atari: preprocessing and vector semantics, and DQN's arithmetic on cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ale_py")

from replaylab import envs, scores
from replaylab.algos.dqn import DQN, STACK, Config, Ring, n_step
from replaylab.envs import atari
from replaylab.errors import UsageError
from replaylab.models.pixels import NatureCNN

CPU = torch.device("cpu")


# --- environments


def test_names() -> None:
    for name in ("atari/space_invaders", "atari/SpaceInvaders", "space-invaders", "spaceinvaders"):
        assert atari.game_name(name) == "space_invaders"
    with pytest.raises(UsageError, match="did you mean 'breakout'"):
        atari.game_name("atari/brakeout")
    with pytest.raises(UsageError, match="unknown Atari game"):
        atari.game_name("atari/combat")  # for two players
    with pytest.raises(UsageError, match="unknown Atari game"):
        envs.make_vec("atari/brakeout", 1)


def area(image: np.ndarray, size: int = 84) -> np.ndarray:
    """Shrink by area, the slow way: each output pixel is the mean of the rectangle it covers."""

    def weights(length: int) -> np.ndarray:
        edges = np.arange(size + 1) * length / size
        cells = np.arange(length)
        covered = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return covered.clip(0) * size / length

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


def bilinear(image: np.ndarray) -> np.ndarray:
    """By hand: between the two nearest rows and columns of where a pixel's centre falls."""

    def weights(length: int, size: int = 84) -> np.ndarray:
        table = np.zeros((size, length))
        for i in range(size):
            place = max((i + 0.5) * length / size - 0.5, 0.0)
            first, share = int(place), place - int(place)
            table[i, first] += 1 - share
            table[i, min(first + 1, length - 1)] += share
        return table

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


def test_the_original_shrinks_before_it_takes_the_brighter_pixels() -> None:
    import ale_py

    env = atari.make_vec("atari/breakout,sticky=0,resize=bilinear", 2)
    bare = ale_py.ALEInterface()
    bare.setFloat("repeat_action_probability", 0.0)
    bare.loadROM(ale_py.roms.get_rom_path("breakout"))
    bare.reset_game()
    observations, _ = env.reset(seed=[3, 4])
    assert observations.shape == (2, 4, 84, 84) and observations.dtype == np.uint8 and not observations[:, :3].any()
    assert np.abs(observations[0, 3] - bilinear(bare.getScreenGrayscale())).max() <= 1
    meanings, differs = bare.getMinimalActionSet(), 0.0
    for action in (1, 2, 2, 3, 0, 3):
        before, screens, rewards = observations, [], 0
        for _ in range(4):
            rewards += bare.act(meanings[action])
            screens.append(bare.getScreenGrayscale().astype(float))
        observations, got, *_ = env.step(np.array([action, 0]))
        expected = np.maximum(*map(bilinear, screens[-2:]))
        assert np.abs(observations[0, 3] - expected).max() <= 1 and got[0] == rewards
        assert (observations[0, :3] == before[0, 1:]).all()
        differs = max(differs, np.abs(expected - area(np.maximum(*screens[-2:]))).max())
    assert differs > 20  # from Dopamine's
    assert not env.reset(options={"reset_mask": np.array([True, False])})[0][0, :3].any()


def test_preprocessing_is_dopamines() -> None:
    """Against the bare emulator: four frames an action, the brighter of the last two, grey, area resize."""
    import ale_py

    env = atari.make_vec("atari/breakout", 1, sticky=0.0)
    bare = ale_py.ALEInterface()
    bare.setFloat("repeat_action_probability", 0.0)
    bare.loadROM(ale_py.roms.get_rom_path("breakout"))
    bare.reset_game()
    observations, _ = env.reset(seed=[3])
    assert observations.shape == (1, 4, 84, 84) and observations.dtype == np.uint8
    assert not observations[0, :3].any()
    assert np.abs(observations[0, 3] - area(bare.getScreenGrayscale())).max() <= 1
    meanings = bare.getMinimalActionSet()
    for action in (1, 2, 2, 3, 0, 3):
        before = observations
        rewards = 0
        screens = []
        for _ in range(4):
            rewards += bare.act(meanings[action])
            screens.append(bare.getScreenGrayscale().astype(float))
        observations, got, terminated, truncated, _ = env.step(np.array([action]))
        assert np.abs(observations[0, 3] - area(np.maximum(*screens[-2:]))).max() <= 1
        assert (observations[0, :3] == before[0, 1:]).all()
        assert got[0] == rewards and not terminated[0] and not truncated[0]
    env.close()


def test_finished_games_stand_still() -> None:
    env = envs.make_vec("atari/pong", 2, max_steps=3)
    env.reset(seed=[1, 2])
    env.step(np.array([2, 3]))
    env.reset(options={"reset_mask": np.array([False, True])}, seed=[0, 5])  # the second game is now one step behind
    for _ in range(2):
        seen, _, _, truncated, _ = env.step(np.array([2, 3]))
    assert truncated.tolist() == [True, False]
    later, rewards, terminated, truncated, _ = env.step(np.array([4, 3]))
    assert (later[0] == seen[0]).all() and (later[1] != seen[1]).any()
    assert rewards[0] == 0 and truncated.tolist() == [True, True] and not terminated.any()
    fresh, _ = env.reset(options={"reset_mask": np.array([True, False])}, seed=[1, 0])
    assert not fresh[0, :3].any() and (fresh[1] == later[1]).all()
    assert env.step(np.array([0, 0]))[3].tolist() == [False, True]
    with pytest.raises(ValueError, match=r"0\.\.5"):
        env.step(np.array([6, 0]))
    env.close()


def walk(env: Any, seeds: list[int], steps: int = 25) -> np.ndarray:
    rng = np.random.default_rng(0)
    env.reset(seed=seeds)
    # every game gets the same actions
    return np.stack([env.step(np.full(len(seeds), rng.integers(6)))[0] for _ in range(steps)])


def test_an_episode_depends_on_its_seed_alone() -> None:
    env = atari.make_vec("atari/pong", 2)
    first = walk(env, [7, 8])
    assert (first[:, 0] != first[:, 1]).any()  # sticky actions differ
    assert (walk(env, [8, 7])[:, ::-1] == first).all()  # whatever was played before, and in whichever place
    env.close()


@pytest.mark.parametrize(("sticky", "low", "high"), [(0.25, 0.66, 0.84), (0.0, 1.0, 1.0)])
def test_sticky_actions(sticky: float, low: float, high: float) -> None:
    """The first action after a reset takes effect at once with probability 1 - sticky; before it there was none."""
    exact = atari.engine("breakout", 1, stack=1, sticky=0.0)
    exact.reset()
    wanted = exact.step(np.array([2]))[0]
    env = atari.engine("breakout", 1, stack=1, sticky=sticky)
    env.reset(seed=np.array([1]))
    hits = []
    for _ in range(150):
        env.reset()
        hits.append((env.step(np.array([2]))[0] == wanted).all())
    assert low <= np.mean(hits) <= high


def test_options_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = atari.engine
    monkeypatch.setattr(atari, "engine", lambda *args, **options: asked.append(options) or real(*args, **options))
    envs.make_vec("atari/Pong,sticky=0,noops=30", 1).close()
    envs.make_vec("atari/pong,sticky=0.1", 1, noop_max=7).close()
    envs.make_vec("atari/pong", 1).close()
    assert [{k: v for k, v in options.items() if k != "threads"} for options in asked] == [
        {"sticky": 0.0, "noop_max": 30}, {"sticky": 0.1, "noop_max": 7}, {},
    ]  # fmt: skip
    assert scores.reference("atari/pong,sticky=0,noops=30") == scores.reference("atari/pong")
    for wrong in ("stiky=0", "sticky=2", "noops=-1", "noops", "resize=cubic", ""):
        with pytest.raises(UsageError, match="options are sticky=0 to 1, noops="):
            envs.make_vec(f"atari/pong,{wrong}", 1)


def test_single_environment() -> None:
    env = envs.make("atari/freeway", max_steps=2)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation) and env.action_space.n == 3
    assert env.step(1)[3] is False and env.step(1)[3] is True
    env.close()


def test_human_normalised_scores() -> None:
    assert len(scores.ATARI) == 26
    for env_id in scores.ATARI:
        assert env_id == f"atari/{atari.game_name(env_id)}"  # every one of them can be played
    for name in ("atari/bank_heist", "atari/BankHeist"):
        assert scores.reference(name) == (14.2, 753.1)
    assert scores.normalize("atari/pong", [-20.7, 14.6, 21.0]).round(1).tolist() == [0.0, 100.0, 118.1]
    assert scores.reference("atari/space_war") is None


# --- DQN


def test_encoder() -> None:
    encoder = NatureCNN()
    frames = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    assert encoder(frames).shape == (3, NatureCNN.features) == (3, 3136)
    assert sum(p.numel() for p in encoder.parameters()) == 8224 + 32832 + 36928


def test_n_step_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0]] * 5)
    over = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]).float()
    cut = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]).bool()
    returns, bootstrap, weight = n_step(rewards, over, cut, gamma=0.5)
    assert returns[:3].tolist() == [1.75, 1.5, 1.75] and returns[4] == 1.0
    assert bootstrap.tolist() == [0.125, 0.0, 0.0, 0.125, 0.0]
    assert weight.tolist() == [1, 1, 1, 0, 1]  # a cut after game over belongs to the next episode


class Tape:
    """A made-up history of games, pushed into a ring and remembered."""

    def __init__(self, games: int, length: int, steps: int):
        rng = np.random.default_rng(0)
        self.agent = DQN(Config(replay_size=games * length), games, 3, 0, CPU)
        self.frames = rng.integers(1, 256, (steps, games), dtype=np.uint8)
        self.over, self.cut = rng.random((2, steps, games)) < 0.15
        self.over[0], self.cut[0] = False, True  # the very first frames begin episodes
        self.rewards = rng.integers(-3, 4, (steps, games)).astype(float)
        for t in range(steps):
            frames = np.broadcast_to(self.frames[t][:, None, None], (games, 84, 84))
            self.agent.give(frames, self.rewards[t], self.over[t], self.cut[t] & ~self.over[t])
            self.agent.ring.push()

    def stack(self, t: int, game: int) -> list[int]:
        """Frame numbers of the stack at time t, found by walking back."""
        found = []
        alive = True
        for back in range(STACK):
            found.append(int(self.frames[t - back, game]) if alive and t >= back else 0)
            alive &= t >= back and not (self.over[t - back, game] or self.cut[t - back, game])
        return found[::-1]


@pytest.mark.parametrize("steps", [9, 40])  # before and after the ring has wrapped
def test_ring_against_a_plain_model(steps: int) -> None:
    tape = Tape(games=3, length=16, steps=steps)
    ring = tape.agent.ring
    oldest = max(0, steps - 16 + STACK - 1)
    for t in range(oldest, steps):
        found = ring.stacks(torch.arange(3), torch.full((3,), t % 16))[:, :, 5, 5]
        assert found.tolist() == [tape.stack(t, game) for game in range(3)]
    torch.manual_seed(0)
    batch = ring.sample(400, 3, 0.5)
    expected = {}
    for t in range(oldest, steps - 3):
        for game in range(3):
            # what an action brought arrives with the next frame
            columns = [c[t + 1 : t + 4, game] for c in (tape.rewards.clip(-1, 1), tape.over, tape.cut & ~tape.over)]
            numbers = n_step(*(torch.from_numpy(c.astype(np.float32))[None] for c in columns), 0.5)
            key = (*tape.stack(t, game), *tape.stack(t + 3, game))
            expected[key] = [float(n[0]) for n in numbers]
    seen = set()
    for row in range(400):
        key = (*batch["observations"][row, :, 5, 5].tolist(), *batch["next_observations"][row, :, 5, 5].tolist())
        assert [float(batch[k][row]) for k in ("returns", "bootstrap", "weight")] == expected[key]
        seen.add(key)
    assert seen == set(expected)  # every transition is drawn, and no other


def pixel_bandit(agent: DQN, steps: int) -> list[float]:
    """Each frame is bright on one side; naming that side pays 1. Every third answer ends the game."""
    rng, games = np.random.default_rng(1), agent.ring.games
    torch.manual_seed(1)
    side = rng.integers(2, size=games)
    rewards, over, cut = np.zeros(games), np.zeros(games, bool), np.ones(games, bool)
    paid = []
    for step in range(steps):
        frames = np.zeros((games, 84, 84), np.uint8)
        for game in range(games):
            frames[game, :, 42 * side[game] : 42 * side[game] + 42] = 200
        agent.give(frames, rewards, over, cut)
        agent.observe()
        rewards = (agent.chosen.cpu().numpy() == side).astype(float)
        over, cut = np.full(games, step % 3 == 2), np.zeros(games, bool)
        side = rng.integers(2, size=games)
        if step >= 10:
            agent.learn()
        paid.append(float(rewards.mean()))
    return paid


def small(**changes: Any) -> Config:
    settings = {"batch_size": 16, "lr": 1e-3, "warm_up": 80, "epsilon_steps": 400, "replay_size": 800}
    return Config(**settings | {"tau": 0.02, "gamma": 0.5, "adam_eps": 1e-4, "n_step": 1} | changes)


def test_learns_a_pixel_bandit() -> None:
    agent = DQN(small(), 8, 2, 0, CPU)
    paid = pixel_bandit(agent, 150)
    assert np.mean(paid[:10]) < 0.75 and np.mean(paid[-20:]) > 0.9
    greedy, _ = agent.act(agent.ring.push()[None])
    assert greedy.shape == (1, 8)


def test_the_learning_rate_falls_to_a_tenth() -> None:
    agent = DQN(small(lr_steps=400), 8, 2, 0, CPU)
    rate = agent.optimizer.param_groups[0]["lr"]
    pixel_bandit(agent, 24)  # 192 of 400 steps
    assert float(rate) == pytest.approx(1e-3)
    pixel_bandit(agent, 13)  # 296
    assert float(rate) == pytest.approx(1e-3 * (1 - 0.9 * 0.48), rel=0.05)
    pixel_bandit(agent, 40)
    assert float(rate) == pytest.approx(1e-4)


def test_update_moves_the_value_to_the_goal() -> None:
    agent = DQN(small(), 4, 3, 0, CPU)
    frames = torch.randint(0, 256, (2, STACK, 84, 84), dtype=torch.uint8)
    batch = {
        "observations": frames,
        "next_observations": frames,
        "actions": torch.tensor([0, 2]),
        "returns": torch.tensor([1.0, -1.0]),
        "bootstrap": torch.zeros(2),
        "weight": torch.tensor([1.0, 0.0]),
    }
    before = agent.online(frames)[1, 2].item()
    target = agent.target(frames).clone()
    for _ in range(40):
        agent.update(batch)
    values = agent.online(frames)
    assert abs(values[0, 0].item() - 1) < 0.1
    assert abs(values[1, 2].item() + 1) > 0.5, f"a row of weight 0 was learned from {before}"
    moved = (agent.target(frames) - target)[0, 0]
    assert 0 < moved < values[0, 0] - target[0, 0]  # the target network follows, behind


def test_state_round_trip() -> None:
    def play(reload: bool) -> torch.Tensor:
        agent = DQN(small(), 4, 2, 0, CPU)
        pixel_bandit(agent, 20)
        if reload:
            state = {name: value.clone() for name, value in agent.state().items()}
            agent = DQN(small(), 4, 2, 9, CPU)
            agent.load_state(state)
        pixel_bandit(agent, 15)
        return torch.cat([p.flatten() for p in agent.online.parameters()])

    assert torch.equal(play(reload=False), play(reload=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_equals_eager() -> None:
    def play(capture: bool) -> torch.Tensor:
        agent = DQN(small(bf16=False), 8, 2, 0, torch.device("cuda"))
        agent.observe.capture = agent.learn.capture = capture
        pixel_bandit(agent, 40)
        return torch.cat([p.flatten() for p in agent.online.parameters()])

    torch.testing.assert_close(play(True), play(False), rtol=1e-3, atol=1e-4)


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="replay_size"):
        DQN(Config(replay_size=10), 4, 2, 0, CPU)
    with pytest.raises(UsageError, match="n_step"):
        DQN(Config(n_step=0), 4, 2, 0, CPU)


def test_oldest_stacks_are_never_sampled() -> None:
    ring = Ring(1, 12, CPU)
    ring.time.fill_(30)  # slots hold times 18..29
    ring.age.fill_(STACK - 1)
    ring.frames[:] = torch.tensor([[(24 + i if i < 6 else 12 + i)] for i in range(12)])
    drawn = ring.sample(300, 2, 1.0)["observations"].view(300, STACK, -1)[:, :, 0]
    assert set(drawn[:, 0].tolist()) == set(range(18, 25)) and (drawn[:, -1] - drawn[:, 0] == 3).all()
