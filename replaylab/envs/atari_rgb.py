"""Atari games in colour for world models, with the preprocessing of SimPLe and MBARC.

An action lasts four emulator frames, without sticky actions. The last of them is shown (by option, the brighter pixels
of the last two), every second row and column of it: 105 x 80. A frame has one byte per pixel, the index 0..127 of one
of the console's 128 colours; `PALETTE[frame]` is its RGB. A policy sees the last four frames, oldest first.

A game begins with 1 to 8 idle frames, then FIRE and the action after it if the game has FIRE, then three idle steps to
fill the stack, both in training and in evaluation. It ends at game over or after 18,000 steps, not when a life is lost.
Rewards are the game's own; a learner takes their sign.

An id is `atari-rgb/` and the game's name, with options after commas: `atari-rgb/freeway`, `atari-rgb/pong,pool=max`,
`atari-rgb/boxing,noops=30`. The whole state of a game can be saved and restored. ale-py's own vector environment
supports neither these frames nor saved states, hence one `ALEInterface` per game. It holds Python's lock while it
emulates, so threads would gain nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from replaylab.data.frames import FrameReplay
from replaylab.envs.atari import AtariEnv, game_name
from replaylab.envs.vector import RestingVectorEnv, Step
from replaylab.errors import DataError, UsageError, require

FRAME_SKIP = 4
MAX_STEPS = 18_000  # actions per episode
STACK = 4
NOOPS = 8  # most idle frames at the start
SCREEN = (210, 160)
SHAPE = (105, 80)  # every second pixel of it
POOLS = ("last", "max")
FAMILY = "atari-rgb/"

# the console's NTSC colours: sixteen hues, eight levels of brightness each
_COLOURS = """
000000 4a4a4a 6f6f6f 8e8e8e aaaaaa c0c0c0 d6d6d6 ececec  484800 69690f 86861d a2a22a bbbb35 d2d240 e8e84a fcfc54
7c2c00 904811 a26221 b47a30 c3903d d2a44a dfb755 ecc860  901c00 a33915 b55328 c66c3a d5824a e39759 f0aa67 fcbc74
940000 a71a1a b83232 c84848 d65c5c e46f6f f08080 fc9090  840064 97197a a8308f b846a2 c659b3 d46cc3 e07cd2 ec8ce0
500084 68199a 7d30ad 9246c0 a459d0 b56ce0 c57cee d48cfc  140090 331aa3 4e32b5 6848c6 7f5cd5 956fe3 a980f0 bc90fc
000094 181aa7 2d32b8 4248c8 545cd6 656fe4 7580f0 8490fc  001c88 183b9d 2d57b0 4272c2 548ad2 65a0e1 75b5ef 84c8fc
003064 185080 2d6d98 4288b0 54a0c5 65b7d9 75cceb 84e0fc  004030 18624e 2d8169 429e82 54b899 65d1ae 75e7c2 84fcd4
004400 1a661a 328432 48a048 5cba5c 6fd26f 80e880 90fc90  143c00 355f18 527e2d 6e9c42 87b754 9ed065 b4e775 c8fc84
303800 505916 6d762b 88923e a0ab4f b7c25f ccd86e e0ec7c  482c00 694d14 866a26 a28638 bb9f47 d2b656 e8cc63 fce070
"""
PALETTE = np.array([tuple(bytes.fromhex(colour)) for colour in _COLOURS.split()], np.uint8)  # (128, 3)
BRIGHTNESS = PALETTE @ np.array([0.299, 0.587, 0.114])  # compared by pool=max


def parse(env_id: str) -> tuple[str, dict[str, Any]]:
    """'atari-rgb/Pong,pool=max,noops=30' -> ('pong', {'pool': 'max', 'noops': 30})."""
    name, *settings = env_id.removeprefix(FAMILY).split(",")
    options: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "pool" and value in POOLS:
            options[key] = value
        elif key == "noops" and value.isdecimal() and int(value) > 0:
            options[key] = int(value)
        else:
            raise UsageError(f"'{setting}' in '{env_id}': a game's options are pool=last, pool=max and noops=1, 2, ...")
    return game_name(f"atari/{name}"), options


class Game:
    """One emulator. Counts all frames it runs, and separately those of resets."""

    COUNTERS = ("seed", "played", "elapsed", "frames", "reset_frames", "resets")

    def __init__(self, name: str, pool: str = "last", noops: int = NOOPS):
        ale_py: Any = require("ale_py", "Atari")
        from ale_py import roms

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        path = roms.get_rom_path(name)
        if path is None:
            raise UsageError(f"ale-py has no ROM of '{name}'")
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", 0)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(path)
        if self.ale.getScreenDims() != SCREEN:
            rows, columns = self.ale.getScreenDims()
            raise UsageError(f"{name} shows {rows} x {columns} pixels, a world model takes {SCREEN[0]} x {SCREEN[1]}")
        self.ale.reset_game()
        self.restored = ale_py.ALEState
        self.fresh = self.ale.cloneState(include_rng=True)  # so that a game depends only on its seed and its actions
        # two games act in every frame: idling takes NOOP, which they lack
        self.actions = list(dict.fromkeys([ale_py.Action.NOOP, *self.ale.getMinimalActionSet()]))
        self.fire = "FIRE" in [action.name for action in self.actions]
        self.pool, self.noops = pool, noops
        self.stack = np.zeros((STACK, *SHAPE), np.uint8)
        self.seed = self.played = 0  # seed of the last reset that had one, and games since
        self.elapsed = self.frames = self.reset_frames = self.resets = 0

    def reset(self, seed: int | None = None) -> np.ndarray:
        if seed is not None:
            self.seed, self.played = seed, 0
        before = self.frames
        idle = int(np.random.default_rng([self.seed, self.played]).integers(1, self.noops + 1))
        self.ale.restoreState(self.fresh)
        for _ in range(idle):
            self._frame(0)
        self._show()
        for action in [1, 2] * self.fire + [0] * (STACK - 1):
            self.step(action)
        self.elapsed = 0
        self.played += 1
        self.resets += 1
        self.reset_frames += self.frames - before
        return self.stack.copy()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        reward, older = 0.0, None
        for i in range(FRAME_SKIP):
            if i == FRAME_SKIP - 1 and self.pool == "max":
                older = self._screen()
            reward += self._frame(action)
            if self.ale.game_over():
                break
        self._show(older)
        self.elapsed += 1
        return self.stack.copy(), reward, self.ale.game_over(), self.elapsed >= MAX_STEPS

    def _frame(self, action: int) -> float:
        self.frames += 1
        return float(self.ale.act(self.actions[action]))

    def _screen(self) -> np.ndarray:
        return self.ale.getScreen()[::2, ::2] >> 1

    def _show(self, older: np.ndarray | None = None) -> None:
        frame = self._screen()
        if older is not None:
            frame = np.where(BRIGHTNESS[older] > BRIGHTNESS[frame], older, frame)
        self.stack[:-1] = self.stack[1:]
        self.stack[-1] = frame

    # --- saving

    def state(self) -> dict[str, np.ndarray]:
        saved = self.ale.cloneState(include_rng=True).serialize()
        return {
            "emulator": np.frombuffer(saved, np.uint8).copy(),
            "stack": self.stack.copy(),
            "counters": np.array([getattr(self, name) for name in self.COUNTERS], np.int64),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.ale.restoreState(self.restored(state["emulator"].tobytes()))
        self.stack[:] = state["stack"]
        for name, number in zip(self.COUNTERS, state["counters"], strict=True):
            setattr(self, name, int(number))


class AtariRgbVectorEnv(RestingVectorEnv):
    """Games in parallel that rest when over. Observations (games, 4, 105, 80)."""

    def __init__(self, env_id: str, num_envs: int, **options: Any) -> None:
        name, found = parse(env_id)
        self.games = [Game(name, **(found | options)) for _ in range(max(num_envs, 1))]
        self.num_actions = len(self.games[0].actions)
        seen = Box(0, len(PALETTE) - 1, (STACK, *SHAPE), np.uint8)
        super().__init__(num_envs, seen, Discrete(self.num_actions))

    def _reset(self, ids: np.ndarray, seeds: list[int | None], options: dict) -> tuple[np.ndarray, dict[str, Any]]:
        return np.stack([self.games[i].reset(seed) for i, seed in zip(ids, seeds, strict=True)]), {}

    def _step(self, ids: np.ndarray, actions: np.ndarray) -> Step:
        if ((actions < 0) | (actions >= self.num_actions)).any():
            raise ValueError(f"actions must be 0..{self.num_actions - 1}, got {actions}")
        results = [self.games[i].step(int(action)) for i, action in zip(ids, actions, strict=True)]
        frames, rewards, terminated, truncated = (np.stack(column) for column in zip(*results, strict=True))
        return frames, rewards, terminated, truncated & ~terminated, {}

    @property
    def ledger(self) -> dict[str, int]:
        """All emulator frames so far, and how many of them went into resets (idle frames, FIRE, filling the stack)."""
        frames, resets = sum(g.frames for g in self.games), sum(g.reset_frames for g in self.games)
        return {"frames": frames, "reset_frames": resets, "resets": sum(g.resets for g in self.games)}

    @property
    def resting(self) -> np.ndarray:
        """Which games are over, or have not begun."""
        return ~self._started | self._terminated | self._truncated

    @property
    def showing(self) -> np.ndarray:
        return self._observations.copy()

    @property
    def reset_cost(self) -> int:
        """The most frames that a reset can take, in steps."""
        first = self.games[0]
        return -(-(first.noops + FRAME_SKIP * (2 * first.fire + STACK - 1)) // FRAME_SKIP)

    def state(self) -> dict[str, np.ndarray]:
        """The complete state as arrays; after `load_state` the games continue exactly from there."""
        flags = np.stack([self._terminated, self._truncated, self._started])
        return {"flags": flags} | {f"{i}.{k}": v for i, game in enumerate(self.games) for k, v in game.state().items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        for i, game in enumerate(self.games):
            game.load_state({k: state[f"{i}.{k}"] for k in ("emulator", "stack", "counters")})
            self._observations[i] = game.stack
        self._terminated[:], self._truncated[:], self._started[:] = state["flags"].astype(bool)

    def close_extras(self, **kwargs: Any) -> None:
        self.games.clear()


class Recorder:
    """Plays games and adds the steps to a replay, within a budget of real steps that is never exceeded.

    Games unfinished at the end of an epoch continue in the next one. `strict` counts the cost of resets as well.
    """

    def __init__(
        self, env: AtariRgbVectorEnv, replay: FrameReplay, budget: int, *, strict: bool, shrink: int = 1, seed: int = 0
    ):
        self.env, self.replay, self.budget, self.strict, self.shrink = env, replay, budget, strict, shrink
        self.seeds = [10_000 * (seed + 1) + lane for lane in range(env.num_envs)]  # different from those of evaluation
        self.returns = np.zeros(env.num_envs)  # of the running games
        self.recorded = 0

    def collect(self, steps: int, choose: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """Play `steps` steps, all games together; fewer if the budget runs out. The replay is not committed."""
        began, before, finished = time.monotonic(), self.recorded, list[float]()
        for _ in range(steps // self.env.num_envs):
            if not self.affordable():
                break
            actions = choose(self._restart())
            seen, rewards, terminated, truncated, _ = self.env.step(actions)
            self.returns += rewards
            self.recorded += self.env.num_envs
            for lane, action in enumerate(actions):
                self._room(not self.replay.full(lane))
                frame = seen[lane, -1, :: self.shrink, :: self.shrink]
                self.replay.add(lane, action, rewards[lane], frame, bool(terminated[lane]), bool(truncated[lane]))
            over = terminated | truncated
            finished += self.returns[over].tolist()
            self.returns[over] = 0
        return {
            "steps": self.recorded - before,
            "episodes": len(finished),
            "mean_return": float(np.mean(finished)) if finished else None,
            "seconds": round(time.monotonic() - began, 3),
        }

    def _restart(self) -> np.ndarray:
        """Reset the games that are over, only now that they are needed, and return the observations of all."""
        over = self.env.resting
        if over.any():
            seeds = None if self.recorded else self.seeds
            seen, _ = self.env.reset(seed=seeds, options={"reset_mask": over})
            for lane in np.flatnonzero(over):
                self._room(self.replay.begin(int(lane), seen[lane, :, :: self.shrink, :: self.shrink]))
        return self.env.showing

    def _room(self, there_is: bool) -> None:
        if not there_is:
            raise DataError("the replay is full: games of this kind end after fewer steps than it was made for")

    def affordable(self) -> bool:
        """Whether one more step of every game, with the resets it needs, stays within the budget."""
        wanted = self.recorded + self.env.num_envs
        if self.strict:
            wanted += -(-self.env.ledger["reset_frames"] // FRAME_SKIP)
            wanted += int(self.env.resting.sum()) * self.env.reset_cost
        return wanted <= self.budget

    @property
    def ledger(self) -> dict[str, int]:
        return {"recorded": self.recorded, "budget": self.budget} | self.env.ledger

    def state(self) -> dict[str, np.ndarray]:
        return {"returns": self.returns, "recorded": np.array([self.recorded])} | self.env.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.returns[:], self.recorded = state["returns"], int(state["recorded"][0])
        self.env.load_state(state)


def make(env_id: str, **options: Any) -> AtariEnv:
    return AtariEnv(AtariRgbVectorEnv(env_id, 1, **options))


def make_vec(env_id: str, num_envs: int, **options: Any) -> AtariRgbVectorEnv:
    return AtariRgbVectorEnv(env_id, num_envs, **options)
