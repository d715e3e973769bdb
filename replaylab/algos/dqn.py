"""DQN (Mnih et al., 2015) with double Q-learning and n-step returns, for collecting Atari data.

    target   y = sum_{k<n} gamma^k r_{t+k} + gamma^n Q'(s_{t+n}, argmax_a Q(s_{t+n}, a)); the sum stops at game over
    loss     Huber(Q(s_t, a_t) - y)

The target network Q' follows Q slowly (Polyak averaging). Many games are played in parallel. The replay, a ring on the
device, holds each frame once, and stacks of four are gathered by index. Two functions do all the work: `observe` (put
the newest step into the ring and choose actions) and `learn` (one update). Neither needs the host, so both are captured
as CUDA graphs.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from replaylab.config import COUNT, FROM_0, RATE, SHARE, Settings, Within, knob
from replaylab.errors import UsageError
from replaylab.models.mlp import track
from replaylab.models.pixels import NatureCNN
from replaylab.step import Graph

STACK = 4
WORDS = 84 * 84 // 8  # a frame as 64-bit words: gathering those is eight times less work than gathering bytes


@dataclass
class Config(Settings):
    """DQN."""

    batch_size: int = knob(256, "transitions per update", COUNT)
    replay_ratio: float = knob(
        64.0, "how often each transition is learned from; updates per step are replay_ratio / batch_size", FROM_0
    )
    lr: float = knob(2e-4, "Adam's learning rate", RATE)
    lr_steps: int | None = knob(
        None, "lr falls to a tenth over the second half of so many environment steps; default: all; 0: never"
    )
    adam_eps: float = knob(2e-5, "Adam's epsilon", RATE)
    gamma: float = knob(0.99, "discount factor", SHARE)
    n_step: int = knob(3, "rewards that are summed before the bootstrap", Within(1, 20))
    tau: float = knob(0.005, "share by which the target network moves towards the network per update", SHARE)
    max_grad_norm: float = knob(10.0, "clip the gradient to this norm", RATE)
    epsilon_final: float = knob(0.01, "share of random actions at the end of exploration", SHARE)
    epsilon_steps: int = knob(100_000, "environment steps over which that share falls from 1", COUNT)
    warm_up: int = knob(20_000, "environment steps with random actions before the first update", FROM_0)
    replay_size: int = knob(1_000_000, "frames in the replay", COUNT)
    bf16: bool = knob(True, "compute convolutions in bfloat16 on CUDA")


class Ring:
    """The last `length` steps of every game. Step t of game e lies in slot t % length; all games move together.

    The host writes `inputs` before each `push`: the newest frames, and the outcome of the step that led to them. After
    a truncation (`cut`) the frames start a new episode, and the step before them is not learned from.
    """

    def __init__(self, games: int, length: int, device: torch.device):
        self.games, self.length, self.device = games, length, device
        self.frames = torch.zeros(games * length, WORDS, dtype=torch.int64, device=device)
        self.actions, self.rewards, self.over, self.cut, self.age = (
            torch.zeros(games, length, dtype=kind, device=device)
            for kind in (torch.int64, torch.float32, torch.float32, torch.bool, torch.int64)
        )  # age: frames of the same episode before this one, at most STACK - 1
        self.time = torch.zeros((), dtype=torch.int64, device=device)  # frames pushed so far
        self.inputs = {
            "frames": torch.zeros(games, WORDS, dtype=torch.int64, device=device),
            "rewards": torch.zeros(games, device=device),  # clipped
            "over": torch.zeros(games, device=device),  # game over: no bootstrap
            "cut": torch.zeros(games, dtype=torch.bool, device=device),  # truncated: the next state is unknown
        }
        self.rows = torch.arange(games, device=device) * length
        self.back = torch.arange(STACK - 1, -1, -1, device=device)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; slots that were never used are left out."""
        used = min(int(self.time), self.length)
        return {name: column[:, :used] for name, column in self._columns().items()} | {"time": self.time}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, column in self._columns().items():
            column[:, : state[name].shape[1]].copy_(state[name])
        self.time.copy_(state["time"])

    def _columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in ("actions", "rewards", "over", "cut", "age")}
        return columns | {"frames": self.frames.view(self.games, self.length, WORDS)}

    def push(self) -> Tensor:
        """Append the inputs. Returns the stacks (games, STACK, 84, 84) that end in the newest frames."""
        slot, before = (self.time % self.length)[None], ((self.time - 1) % self.length)[None]
        for name in ("rewards", "over", "cut"):
            getattr(self, name).index_copy_(1, before, self.inputs[name][:, None])
        self.frames.index_copy_(0, self.rows + slot, self.inputs["frames"])
        fresh = (self.inputs["over"] > 0) | self.inputs["cut"]
        age = (self.age.index_select(1, before)[:, 0] + 1).clamp(max=STACK - 1) * ~fresh
        self.age.index_copy_(1, slot, age[:, None])
        self.time += 1
        return self.stacks(torch.arange(self.games, device=self.device), slot.expand(self.games))

    def stacks(self, game: Tensor, slot: Tensor) -> Tensor:  # (batch,), (batch,) -> (batch, STACK, 84, 84) bytes
        rows = self.rows[game][:, None] + (slot[:, None] - self.back) % self.length
        real = self.back <= self.age[game, slot][:, None]
        words = self.frames[rows] * real[..., None]  # blank before an episode's first frame
        return words.view(torch.uint8).view(-1, STACK, 84, 84)

    def sample(self, batch: int, n: int, gamma: float) -> dict[str, Tensor]:
        """A batch of n-step transitions. `weight` is 0 where the episode was truncated within the n steps."""
        # the newest frame, time - 1, has no outcome yet; the oldest stacks may be partly overwritten
        low = (self.time - self.length + STACK - 1).clamp(min=0)
        count = self.time - n - low
        t = low + (torch.rand(batch, device=self.device, dtype=torch.float64) * count).long()
        game = torch.randint(0, self.games, (batch,), device=self.device)
        slot, ahead = t % self.length, (t + n) % self.length
        window = (t[:, None] + torch.arange(n, device=self.device)) % self.length  # (batch, n)
        returns, bootstrap, weight = n_step(
            self.rewards[game[:, None], window],
            self.over[game[:, None], window],
            self.cut[game[:, None], window],
            gamma,
        )
        return {
            "observations": self.stacks(game, slot),
            "actions": self.actions[game, slot],
            "returns": returns,
            "bootstrap": bootstrap,
            "weight": weight,
            "next_observations": self.stacks(game, ahead),
        }


def n_step(rewards: Tensor, over: Tensor, cut: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """From (batch, n) columns: the discounted sum of rewards up to game over, the factor of the bootstrapped value (0
    after game over), and a weight: 0 where the episode was truncated before it was over."""
    n = rewards.shape[1]
    running = torch.cumprod(1 - over, 1)  # 1 if still running after step k
    reached = torch.cat([torch.ones_like(running[:, :1]), running[:, :-1]], 1)  # the same before step k
    discount = gamma ** torch.arange(n, device=rewards.device)
    weight = 1 - (reached * cut).amax(1)
    return (rewards * reached * discount).sum(1), gamma**n * running[:, -1], weight


class QNetwork(nn.Module):
    def __init__(self, actions: int, bf16: bool):
        super().__init__()
        self.bf16 = bf16
        self.encoder = NatureCNN(STACK)
        self.head = nn.Sequential(nn.Linear(NatureCNN.features, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, frames: Tensor) -> Tensor:  # (batch, STACK, 84, 84) -> (batch, actions)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16 and frames.is_cuda, cache_enabled=False):
            features = self.encoder(frames)
        return self.head(features.float())  # values of actions differ little: bfloat16 is too coarse


class DQN(nn.Module):
    def __init__(self, config: Config, games: int, actions: int, seed: int, device: torch.device):
        super().__init__()
        length = config.replay_size // games
        if length < config.n_step + STACK + 1:
            raise UsageError(f"replay_size {config.replay_size} is too small for {games} games")
        self.config, self.num_actions, self.device = config, actions, device
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.online = QNetwork(actions, config.bf16)
        self.target = deepcopy(self.online).requires_grad_(False)
        self.to(device)
        if device.type == "cuda":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.Adam(
            self.online.parameters(),
            torch.tensor(config.lr, device=device),
            eps=config.adam_eps,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.ring = Ring(games, length, device)
        self.chosen = torch.zeros(games, dtype=torch.int64, device=device)
        self.sums = {name: torch.zeros((), device=device) for name in ("loss", "value", "updates")}
        self.observe = Graph(self._observe, device)
        self.learn = Graph(self._learn, device)

    # --- acting

    @torch.no_grad()
    def _observe(self) -> None:
        """Put the inputs into the ring and choose the next actions, epsilon-greedily."""
        config, ring = self.config, self.ring
        stacks = ring.push()
        steps = (ring.time * ring.games - config.warm_up).clamp(min=0)
        epsilon = (1 - steps / config.epsilon_steps).clamp(min=config.epsilon_final)
        self.chosen.copy_(self._explore(self.online(stacks), epsilon))
        ring.actions.index_copy_(1, ((ring.time - 1) % ring.length)[None], self.chosen[:, None])

    def _explore(self, values: Tensor, epsilon: Tensor | float) -> Tensor:
        random = torch.randint(0, self.num_actions, values.shape[:1], device=values.device)
        return torch.where(torch.rand(len(values), device=values.device) < epsilon, random, values.argmax(1))

    @torch.no_grad()
    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The trained policy on (1, batch, STACK, 84, 84), with 0.1 % random actions as in Dopamine."""
        values = self.online(observations.flatten(0, 1))
        return self._explore(values, 0.001).view(observations.shape[:2]), state

    # --- learning

    def _learn(self) -> None:
        config = self.config
        self.update(self.ring.sample(config.batch_size, config.n_step, config.gamma))

    def update(self, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            best = self.online(batch["next_observations"]).argmax(1, keepdim=True)
            following = self.target(batch["next_observations"]).gather(1, best)[:, 0]
            goal = batch["returns"] + batch["bootstrap"] * following
        values = self.online(batch["observations"]).gather(1, batch["actions"][:, None])[:, 0]
        loss = (batch["weight"] * huber_loss(values, goal, reduction="none")).mean()
        if self.config.lr_steps:
            along = (2 * self.ring.time * self.ring.games / self.config.lr_steps - 1).clamp(0.0, 1.0)
            self.optimizer.param_groups[0]["lr"].copy_(self.config.lr * (1 - 0.9 * along))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        track(self.target, self.online, self.config.tau)
        for name, value in (("loss", loss.detach()), ("value", values.detach().mean()), ("updates", 1)):
            self.sums[name] += value

    def read(self) -> dict[str, float]:
        """Means since the last call. This waits for the device."""
        updates = max(float(self.sums["updates"]), 1.0)
        means = {name: float(total) / updates for name, total in self.sums.items() if name != "updates"}
        for total in self.sums.values():
            total.zero_()
        return means

    # --- on the host

    def give(self, frames: np.ndarray, rewards: np.ndarray, over: np.ndarray, cut: np.ndarray) -> None:
        """Copy frames (games, 84, 84) and the outcome of the step before them into the inputs of `observe`."""
        words = torch.from_numpy(np.ascontiguousarray(frames).reshape(len(frames), -1).view(np.int64))
        results = (rewards.clip(-1, 1).astype(np.float32), over.astype(np.float32), cut)
        columns = (words, *(torch.from_numpy(column) for column in results))
        for target, column in zip(self.ring.inputs.values(), columns, strict=True):
            if self.device.type == "cuda":
                column = column.pin_memory()
            target.copy_(column, non_blocking=True)

    def state(self) -> dict[str, Tensor]:
        state = dict(self.state_dict())
        for index, entries in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{key}": value for key, value in entries.items()}
        return state | {f"ring.{name}": value for name, value in self.ring.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        ring = {name.removeprefix("ring."): value for name, value in state.items() if name.startswith("ring.")}
        self.ring.load_state(ring)
        self.load_state_dict({k: v for k, v in state.items() if not k.startswith(("ring.", "optimizer."))})
        parameters = list(self.online.parameters())
        entries: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                if value.ndim:  # the fused optimiser assumes the parameter's memory format
                    value = torch.empty_like(parameters[int(index)]).copy_(value)
                entries.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict({"state": entries, "param_groups": self.optimizer.state_dict()["param_groups"]})
