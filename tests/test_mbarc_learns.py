"""MBARC from end to end: it learns a game that is small enough for a CPU, in dreams of it.

A ball falls, a paddle has to be under it; eight balls make a game. The next ball starts where the last one tells.
"""

import json

import numpy as np
import pytest

pytest.importorskip("ale_py")
from gymnasium.spaces import Box, Discrete

import replaylab
from replaylab import envs
from replaylab.algos import mbarc
from replaylab.envs.atari_rgb import STACK, AtariRgbVectorEnv
from replaylab.envs.vector import RestingVectorEnv

SIZE, BALLS, REACH = 40, 8, 5
FIELD, BALL, PADDLE = 8, 40, 100  # colours


class Catch:
    """A game as `AtariRgbVectorEnv` plays it."""

    fire, noops, actions = False, 1, range(3)

    def __init__(self):
        self.stack = np.zeros((STACK, SIZE, SIZE), np.uint8)
        self.seed = self.played = self.frames = self.reset_frames = self.resets = 0

    def reset(self, seed=None):
        if seed is not None:
            self.seed, self.played = seed, 0
        rng = np.random.default_rng([self.seed, self.played])
        self.paddle, self.x, self.y, self.balls = int(rng.integers(4, SIZE - 4)), int(rng.integers(2, SIZE - 2)), 2, 0
        for _ in range(STACK):
            self._show()
        self.played += 1
        self.resets += 1
        self.reset_frames += STACK
        self.frames += STACK
        return self.stack.copy()

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + (0, -3, 3)[action], 4, SIZE - 5))
        self.y += 3
        reward = 0.0
        if self.y >= SIZE - 5:
            reward = 1.0 if abs(self.x - self.paddle) <= REACH else -1.0
            self.x, self.y, self.balls = (7 * self.x + 11) % (SIZE - 4) + 2, 2, self.balls + 1
        self._show()
        self.frames += 4
        return self.stack.copy(), reward, self.balls == BALLS, False

    def _show(self):
        self.stack[:-1] = self.stack[1:]
        self.stack[-1] = FIELD
        self.stack[-1, self.y - 1 : self.y + 2, self.x - 1 : self.x + 2] = BALL
        self.stack[-1, SIZE - 3 :, self.paddle - 4 : self.paddle + 5] = PADDLE

    def state(self):
        return {"paddle": np.array([self.paddle])}  # enough for a run that is not resumed


class CatchGames(AtariRgbVectorEnv):
    def __init__(self, num_envs):
        self.games, self.num_actions = [Catch() for _ in range(num_envs)], 3
        RestingVectorEnv.__init__(self, num_envs, Box(0, 127, (STACK, SIZE, SIZE), np.uint8), Discrete(3))


def score(run):
    return np.mean([json.loads(line)["returns"] for line in (run / "eval.jsonl").read_text().splitlines()][-1])


@pytest.mark.slow
def test_it_learns_a_game_in_dreams_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "make_vec", lambda env_id, num_envs, **options: CatchGames(num_envs))
    monkeypatch.setattr(mbarc, "environment", lambda env_id: env_id)
    run = replaylab.train(
        "mbarc", env="atari-rgb/catch", out=tmp_path / "run", device="cpu", preset="small", hidden=16, compress=3,
        double=1, bits=8, random_steps=1600, collect_steps=800, epochs=4, world_steps=300, sampling_decay=400,
        reward_steps=200, reward_shift=1, rollout=25, ppo_updates=50, tripled=[3], ppo_minibatch=100, ppo_lr=1e-3,
        final_episodes=40,
    )  # fmt: skip
    found = json.loads((run / "run.json").read_text())["findings"]
    world, reward = (found[phase]["epochs"][-1]["held_out"] for phase in ("world", "reward"))
    assert world["changed_pixels"] > 0.9 and reward["explained"] > 0.8
    first = found["world"]["epochs"][0]["collected"]["mean_return"]  # by a policy that knows nothing yet
    print(f"from {first} to {score(run)} of {BALLS}; {world['changed_pixels']:.3f}, {reward['explained']:.2f}")
    assert first < 0 and score(run) > 3
