"""MBARC (Model-Based Aware Reward Classification): learn to play an Atari game inside a learned model of it.

    play at random, then in each epoch:
        collect        real steps with the policy
        world model    s_t-3 .. s_t, a_t -> s_t+1      cross-entropy of each pixel (models/world.py)
        reward model   the same -> r_t in {-1, 0, 1}   cross-entropy on drawn transitions (models/reward.py)
        policy         PPO in dreams, short rollouts of the two models that start in real states (models/dream.py)

Real steps are scarce (Atari 100k: 102,400 in all), dreamed steps are free. Rewards are rare, so the strategies differ
in which transitions they show the reward model. The defaults are the recommended preset, `fast`; `paper` has the
paper's counts.

The world and reward models are measured on held-out episodes that never train them, and on newly collected steps before
these train them. Dreams may start in held-out episodes: that trains only the policy, which is not measured there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from replaylab.algos import Phase, Spaces, ppo
from replaylab.algos.mbarc_settings import PRESETS as PRESETS
from replaylab.algos.mbarc_settings import SMALLER as SMALLER
from replaylab.algos.mbarc_settings import Config, check, counters, idle, plan
from replaylab.data.frames import FrameReplay, Table
from replaylab.errors import DataError, UsageError, require
from replaylab.fuse import fused
from replaylab.memory import memory
from replaylab.models import reward
from replaylab.models.dream import Dream, Dreamt, exciting_scene, film, hold_out, judge, real
from replaylab.models.world import World, WorldShape, refresh, snapshot
from replaylab.models.world_training import AVERAGED, RewardTrainer, RunningMean, WorldTrainer
from replaylab.page import count
from replaylab.step import Graph
from replaylab.streams import beside
from replaylab.tensors import under

ONLINE = True
ACTING = ("eval_temperature",)
ROOM = 1.5  # replay rows per real step: each game takes four rows more than it has steps


def environment(env_id: str) -> str:
    """'atari/freeway' -> 'atari-rgb/freeway', the same game with the observations that MBARC takes."""
    family, _, game = env_id.partition("/")
    if family not in ("atari", "atari-rgb") or not game:
        raise UsageError(f"mbarc plays Atari games: name one as atari/GAME, not '{env_id}'")
    require("ale_py", "mbarc")
    from replaylab.envs import atari_rgb

    name, _ = atari_rgb.parse(f"atari-rgb/{game}")
    return "atari-rgb/" + ",".join([name, *game.split(",")[1:]])


def spaces(env_id: str) -> Spaces:
    from replaylab import envs

    env = envs.make_vec(env_id, 1)
    seen, acts = env.single_observation_space, env.single_action_space
    env.close()
    return Spaces(list(seen.shape), "uint8", int(acts.n), True)


class Numbers:
    """A sampler that yields only the number of the update; the update draws its own rows on the device."""

    resident = True

    def draw(self, start: int, steps: int) -> np.ndarray:
        return np.arange(start, start + steps, dtype=np.int64)[:, None]

    def gather(self, indices: Tensor) -> dict[str, Tensor]:
        return {"step": indices}


class Agent(nn.Module):
    trained: Tensor
    copy: World

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        if len(seeds) != 1:
            raise UsageError(f"mbarc trains one seed a run, not {len(seeds)}: start a run for each")
        from replaylab.envs.atari_rgb import PALETTE

        self.config, self.seed, self.device, self.actions = config, int(seeds[0]), device, spaces.action_dim
        self.palette, self.original = PALETTE, config.fidelity == "original"
        stack, *size = spaces.observation_shape
        self.size = (-(-size[0] // config.shrink), -(-size[1] // config.shrink))
        shape = WorldShape(
            spaces.action_dim, *self.size, stack, config.hidden, config.compress, config.double, config.bits,
            config.pixels, len(PALETTE), config.reward_head, config.continue_head, config.fidelity,
        )  # fmt: skip
        with memory("the world model", "hidden", "bits"):
            self.world = World(shape, self.seed, torch.tensor(PALETTE, dtype=torch.float32))
            self.policy = ppo.PixelPolicy(PALETTE, stack, self.size, spaces.action_dim, self.seed)
            self.register_buffer("trained", torch.zeros((), dtype=torch.int64))  # updates of the world model
            self.to(device)
            self.policy_mean = RunningMean(self.policy.parameters(), config.policy_average, every=1, closely=2)
            self.__dict__["copy"] = snapshot(self.world)  # dreams, and is the twin; bypasses nn.Module: not saved
        with memory("what the policy learns from", "agents", "rollout"):
            self.ppo = self._learner()
        self.world_trainer = WorldTrainer(
            self.world, twin=self.copy, online=config.strategy == "online", noise=config.input_noise,
            decay=config.sampling_decay, rollout=config.world_rollout, max_norm=config.world_grad_clip,
            lr=config.world_lr, average=config.average,
        )  # fmt: skip
        self.reward_trainer = RewardTrainer(
            self.world, trunk=self.copy, focal=config.focal, max_norm=config.world_grad_clip,
            shift=0 if self.original else config.reward_shift, average=config.average,
        )  # fmt: skip
        self.optimizers = {"policy": self.ppo.optimizer} | self.world_trainer.optimizers
        self.optimizers |= self.reward_trainer.optimizers
        self.notes = idle(config)
        # findings for the report, one entry per epoch
        self.log: dict[str, Any] = {"world": [], "reward": [], "policy": []}
        self.clock = time.monotonic()

    def _learner(self) -> ppo.PPO:
        channels = self.world.shape.stack * (1 if self.config.pixels == "palette" else 3)
        return ppo.PPO(
            self.policy, self.config, self.config.rollout, self.config.agents, (channels, *self.size), torch.uint8,
            self.device,
        )  # fmt: skip

    def phases(self, env_id: str) -> list[Phase]:
        from replaylab import envs
        from replaylab.envs import atari_rgb

        config = self.config
        check(config)
        env = envs.make_vec(env_id, config.games)
        rows = int(ROOM * counters(config)["real_steps"] / config.games) + 64
        with memory("the replay", "collect-steps", "epochs"):
            self.replay = FrameReplay(
                config.games, rows, self.size, self.device,
                stack=self.world.shape.stack, gamma=config.gamma, terminal_reward=not self.original,
            )  # fmt: skip
        self.recorder = atari_rgb.Recorder(
            env, self.replay, config.budget, strict=config.strict_budget, shrink=config.shrink, seed=self.seed
        )
        if not self.recorder.affordable():
            raise UsageError(f"{config.budget:,} real steps do not pay for the start of the games: raise --budget")
        self.held = np.zeros(0, np.int64)  # held-out episodes: they measure the models and never train them
        self.windows = Table(config.games * rows, self.device)
        with memory("the batches", "world-batch", "reward-batch"):
            self.walk = {name: self._zeros(config.world_batch) for name in ("rows", "left", "limit")}
            self.shown = self._zeros(max(epoch["reward"] for epoch in plan(config)), config.reward_batch)
        self.walk_on = fused(self._walk_on, self.device.type == "cuda")
        expected = config.dream_rewards == "expected" and not self.original
        self.dream = Dream(self.copy, self.replay, config.agents, config.rollout, config.from_start, expected)
        self.dreaming = Graph(self._dream_on, self.device)
        self.seen = torch.as_tensor(env.showing, device=self.device)  # of the real games
        self.chosen = self._zeros(config.games)
        self.choose = Graph(self._choose, self.device)
        found = []
        for epoch, steps in enumerate(plan(config)):
            found += [
                Phase("world", steps["world"], Numbers(), self.update_world, evaluates=False,
                      begin=self._begins_world(epoch), every=AVERAGED, hook=self.world_trainer.mean.follow,
                      finish=lambda: self.finish("world")),
                Phase("reward", steps["reward"], Numbers(), self.update_reward, evaluates=False,
                      begin=self.begin_reward, every=AVERAGED, hook=self.reward_trainer.mean.follow,
                      finish=lambda: self.finish("reward")),
                Phase("policy", steps["policy"], Numbers(), self.update_policy,
                      begin=self.begin_policy, every=1, hook=self.play, finish=lambda: self.finish("policy")),
            ]  # fmt: skip
        return [phase for phase in found if phase.steps > 0]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    # --- real play

    def _shrunk(self, frames: Any) -> Any:
        return frames[..., :: self.config.shrink, :: self.config.shrink]

    def _at_random(self, seen: np.ndarray) -> np.ndarray:
        return torch.randint(self.actions, (len(seen),), device=self.device).cpu().numpy()

    def _by_policy(self, seen: np.ndarray) -> np.ndarray:
        self.seen.copy_(torch.from_numpy(seen))
        self.choose()
        return self.chosen.cpu().numpy().copy()  # on a CPU it would change with the next choice

    @torch.no_grad()
    def _choose(self) -> None:
        self.chosen.copy_(ppo.sample(self.policy(self._shrunk(self.seen)), self.config.temperature))

    # --- the world model

    def _begins_world(self, epoch: int) -> Callable[[], str]:
        def begin() -> str:
            self.clock, before = time.monotonic(), self.replay.next_segment
            refresh(self.copy, self.world)
            if epoch == 0:
                self.recorder.collect(self.config.random_steps, self._at_random)
            found: dict[str, Any] = {"collected": self.recorder.collect(self.config.collect_steps, self._by_policy)}
            if found["collected"]["steps"] < self.config.collect_steps:
                self.notes.append(f"the budget of {self.config.budget:,} real steps, resets included, is spent")
            self.replay.commit()
            if epoch > 0 and len(self.replay.fresh):
                found["fresh"] = judge(self.copy, self.replay, self.replay.fresh, self.dream.worth)
            self.held = hold_out(self.replay, self.held, before, self.config.held_out)
            self.log["world"].append({"epoch": epoch, "ledger": self.recorder.ledger} | found)
            self._lay_out()
            self._begin_walk()
            return _told(found["collected"])

        return begin

    def _steps(self, held: bool = False) -> np.ndarray:
        """Rows of the steps that train the models, or of the held-out steps."""
        host = self.replay.host
        return np.flatnonzero(host["valid"] & (np.isin(host["segments"], self.held) == held))

    def _lay_out(self) -> None:
        """Set where training sequences may start. The original takes only full-length ones that stop before a game's
        end; we also take shorter ones up to the end, so that the model learns how games end."""
        config = self.config
        steps = self._steps()
        starts, self.longest = self.replay.windows(config.world_rollout, steps, terminals=not self.original)
        if self.longest == 0:
            raise DataError("nothing was collected that a world model could be trained on")
        if self.longest < config.world_rollout:
            wanted = f"no game went on for {config.world_rollout} steps"
            self.notes.append(f"{wanted}: the world model's sequences have {self.longest} at most")
        self.windows.fill(starts if self.original else steps)

    def _begin_walk(self) -> None:
        self.walk["left"].zero_()
        self.walk["limit"].fill_(self.longest)
        if not self.original:  # staggered, so that a batch mixes early and late steps
            self.walk["limit"].random_(1, self.longest + 1)
        if self.config.focal:
            counts = np.bincount(self.replay.host["rewards"].flat[self._steps()].astype(int) + 1, minlength=3)
            self.reward_trainer.set_counts(torch.tensor(counts, device=self.device))
            if self.config.strategy == "online":
                self.world_trainer.use_focal_loss(torch.tensor(counts, device=self.device))
                if self.dream.expected:  # steps come as they are, so only the loss's weights are undone
                    self.world.rarity.copy_(-self.reward_trainer.class_weights.log())

    def update_world(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with memory("the world model", "world-batch", "hidden"):
            batch = self.walk_on(self.windows.draw(len(self.walk["left"])))
            trainer = self.world_trainer
            found = trainer.update_teacher(batch) if self.longest == 1 else trainer.update(batch)
        self.trained += 1
        return found

    def _walk_on(self, drawn: Tensor) -> dict[str, Tensor]:
        """The next step of each sequence; those that are over begin anew in the drawn rows."""
        walk, replay = self.walk, self.replay
        first = walk["left"] == 0
        rows = torch.where(first, drawn, walk["rows"])
        left = torch.where(first, torch.minimum(walk["limit"], replay.ahead[drawn]), walk["left"])
        walk["rows"].copy_(rows + 1)
        walk["left"].copy_(left - 1)
        walk["limit"].masked_fill_(first, self.longest)
        return real(self.world, replay, rows) | {"first": first}

    # --- the reward model

    def begin_reward(self) -> None:
        self.clock = time.monotonic()
        refresh(self.copy, self.world)
        config, replay = self.config, self.replay
        rows = torch.as_tensor(self._steps(), device=self.device)
        drawn = reward.draw_epoch(
            config.strategy, replay.rewards[rows].long(), replay.segments[rows].long(), replay.terminal[rows],
            updates=len(self.shown), batch=config.reward_batch, masses=config.masses, classes=config.classes,
            window=config.near, backward=self.original,
        )  # fmt: skip
        self.shown.copy_(rows[drawn])
        if self.dream.expected:
            draws = reward.correction(replay.rewards[rows], replay.rewards[self.shown].flatten())
            self.world.rarity.copy_(draws - self.reward_trainer.class_weights.log())

    def update_reward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = self.shown.index_select(0, batch["step"])[0]
        with memory("the reward model", "reward-batch", "hidden"):
            return self.reward_trainer.update(real(self.world, self.replay, rows))

    # --- the policy

    def begin_policy(self) -> None:
        self.clock = time.monotonic()
        refresh(self.copy, self.world)

    def play(self, k: int) -> dict[str, Tensor]:
        """Dream one rollout into PPO's storage."""
        self.policy_mean.follow(k)
        with memory("the dreams", "agents", "hidden"):
            self.dreaming()
        return {"dream_return": self.ppo.rewards.sum(0).mean()[None], "dream_ends": self.ppo.ended.mean()[None]}

    def _dream_on(self) -> None:
        """While the world looks at a state, the policy is paid for the step before and chooses: neither fills a GPU."""
        self.dream.reset()
        dreamt: Dreamt | None = None
        for _ in range(self.config.rollout):
            choice = beside(partial(self._choose_on, dreamt), self.device)
            sight = self.dream.look()
            dreamt = self.dream.go_on(sight, *choice())
        assert dreamt is not None
        self._receive(dreamt, last=True)
        self.ppo.stop(self.dream.stacks)

    def _choose_on(self, dreamt: Dreamt | None) -> tuple[Tensor, Tensor]:
        if dreamt is not None:
            self._receive(dreamt)
        return self.ppo.act(self.dream.stacks), self.dream.elsewhere()

    def _receive(self, dreamt: Dreamt, last: bool = False) -> None:
        rewards = self.dream.pay(dreamt)
        if self.original and last:  # adds the world model's value, though PPO bootstraps as well
            rewards = rewards + dreamt.told.value * ~dreamt.terminated
        self.ppo.receive(rewards, dreamt.terminated)

    def update_policy(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with memory("the policy", "agents", "ppo-minibatch"):
            return self.ppo.learn()

    def finish(self, phase: str) -> dict[str, Any]:
        """The findings of a phase; the last one of an epoch, which need not be the policy's, adds the film."""
        found = self._finished(phase)
        if phase != [name for name, steps in plan(self.config)[0].items() if steps][-1]:
            return found
        refresh(self.copy, self.world)
        held = len(self.held) > 0
        scene = exciting_scene(self.copy, self.replay, self._steps(held))
        made = film(scene, self.palette) if scene else None
        if scene and made is None:
            self.notes.append("no film of the dream: it takes Pillow (pip install pillow)")
        return found | ({"dream.gif": made, "filmed": "held out" if held else "trained on"} if made else {})

    def _finished(self, phase: str) -> dict[str, Any]:
        """The findings of a phase so far, one entry per epoch."""
        found: dict[str, Any] = {"seconds": round(time.monotonic() - self.clock, 3)}
        means = {"world": self.world_trainer.mean, "reward": self.reward_trainer.mean, "policy": self.policy_mean}
        means[phase].settle()
        if phase != "policy" and len(rows := self._steps(held=True)):
            refresh(self.copy, self.world)
            found["held_out"] = {"episodes": self.held.tolist()} | judge(self.copy, self.replay, rows, self.dream.worth)
        if phase != "world":  # the entry of `world` was started when collecting
            self.log[phase].append({})
        self.log[phase][-1] |= found
        return {"epochs": self.log[phase]}

    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        outputs = self.policy(self._shrunk(observations.flatten(0, 1)))
        heat = self.config.eval_temperature
        actions = ppo.sample(outputs, heat) if heat > 0 else outputs[:, :-1].argmax(-1)
        return actions.view(observations.shape[:2]), state

    # --- saving

    def training_state(self) -> dict[str, Tensor]:
        parts = {
            "replay": self.replay.state(),
            "real": {name: torch.as_tensor(value) for name, value in self.recorder.state().items()},
            "walk": self.walk,
            "policy": self.policy_mean.state(),
            "world": self.world_trainer.training_state(),
            "reward": self.reward_trainer.training_state(),
        }
        log = self.log | {"clock": time.monotonic() - self.clock}
        about = torch.frombuffer(bytearray(json.dumps(log).encode()), dtype=torch.uint8)
        flat = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        ours = {"shown": self.shown, "held": torch.as_tensor(self.held)}
        return flat | ours | {"log": about}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        self.replay.load_state(under("replay.", state))
        self.recorder.load_state({name: value.cpu().numpy() for name, value in under("real.", state).items()})
        for name, value in under("walk.", state).items():
            self.walk[name].copy_(value)
        self.policy_mean.load_state(under("policy.", state))
        self.world_trainer.load_training_state(under("world.", state))
        self.reward_trainer.load_training_state(under("reward.", state))
        self.shown.copy_(state["shown"])
        self.held = state["held"].cpu().numpy()
        self.log = json.loads(state["log"].cpu().numpy().tobytes())
        self.clock = time.monotonic() - self.log.pop("clock")
        self._lay_out()
        refresh(self.copy, self.world)  # they agree, but for the reward head in its own phase, which does not use it


def _told(collected: dict[str, Any]) -> str:
    """What an epoch collected. A long game may have begun under an earlier policy than the one that ended it."""
    steps, ended = f"collected {collected['steps']:,} real steps", collected["episodes"]
    if not ended:
        return f"{steps}, no game ended"
    return f"{steps}, {count(ended, 'game')} ended with {collected['mean_return']:,.1f} points on average"
