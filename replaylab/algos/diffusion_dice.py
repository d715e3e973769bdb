"""Diffusion-DICE (Mao et al., 2024): guide a diffusion policy with values learned from logged actions only.

    behaviour   a score network for the logged actions: grad log pi_D(a_t | s) at noise level t
    values      V minimises E[f*(y) + V / alpha] with y = (Q - V) / alpha; Q -> r + gamma V(s')   (models/sdice.py)
    weights     w = f*'(y) = pi*(a | s) / pi_D(a | s), how much likelier the optimal policy takes a logged action
    guidance    W(a_t, t, s) = log E[w | a_t, s]; score + grad W is the score of the optimal policy
    acting      draw `candidates` actions with score + guidance * grad W, then select the one with the highest Q

Guidance keeps the candidates near the data, so Q has to rank only actions of a kind it was trained on. Behaviour and
values do not depend on each other: they are trained in turn, together, or in separate runs. All settings of acting can
be changed after training (`diffusion_dice_acting.py`). The networks are in `models/score.py`, the sampler is in
`models/solver.py`. With `--backup model` Q is not learned but computed one step ahead (`diffusion_dice_foresight.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces, box_unit
from replaylab.algos.diffusion_dice_acting import Sampling, sampling
from replaylab.algos.diffusion_dice_foresight import Foresight
from replaylab.algos.diffusion_dice_returns import UsualReturn
from replaylab.algos.diffusion_dice_settings import ACTING as ACTING
from replaylab.algos.diffusion_dice_settings import PRESETS as PRESETS
from replaylab.algos.diffusion_dice_settings import SMALLER as SMALLER
from replaylab.algos.diffusion_dice_settings import Config, idle_settings, returns_steps, usual_guidance
from replaylab.data.episodes import Episodes
from replaylab.data.rewards import name_of, tuned_rewards
from replaylab.data.sample import Later, Numbered, Pair, Store, Transitions, left_out
from replaylab.errors import UsageError
from replaylab.models.adam import adam
from replaylab.models.draws import keys, normal, own, uniforms, whole
from replaylab.models.mlp import MLP, generators, track
from replaylab.models.score import GuideNet, ScoreNet
from replaylab.models.sdice import TWINS, Critics, Value, guide_loss, spread, value_loss, weights
from replaylab.models.solver import LAST, blend
from replaylab.models.termination import family, same_family
from replaylab.run import RunFolder
from replaylab.tensors import under

RETURNS_LR = 1e-3  # learning rate of the estimate b(s) of the data's return
LOOKED_AT = 600  # actions of each kind in the plot of a bandit


def usual_preset(episodes: Episodes) -> str | None:
    """The preset for this data, by its name, when the user names none."""
    name = name_of(episodes)
    for word, preset in (("toy-bandit", "toy"), ("antmaze", "antmaze"), ("pointmaze", "maze")):
        if word in name:
            return preset
    robot = family(episodes.env_id)
    if robot == "halfcheetah" and "expert" not in name and not episodes.terminated.any():
        return "runner"
    return "locomotion" if robot in ("hopper", "walker2d", "ant", "halfcheetah") else None


def needs(config: Config) -> list[str]:
    """Run folders that a new run needs; a resumed one has its own copy."""
    return [] if config.behavior is None else [config.behavior]


def counters(config: Config) -> dict[str, int]:
    """The number of updates of each part in a whole run."""
    found = {} if config.stage == "critic" else {"behavior_steps": config.behavior_steps}
    if config.stage != "behavior":
        found |= {"returns_steps": returns_steps(config), "critic_steps": config.critic_steps}
    return found


class Agent(nn.Module):
    low: Tensor
    high: Tensor
    usual_guidance: Tensor
    returns_done: Tensor
    behavior_done: Tensor
    critic_done: Tensor
    behavior_keys: Tensor
    critic_keys: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        spaces.require_vectors("diffusion-dice")
        self.config, self.seeds, self.device = config, list(seeds), device
        self.notes = idle_settings(config)
        self.sizes = spaces.observation_shape[0], spaces.action_dim
        self.by_advantage = config.advantage and config.ensemble > 0
        self.exact = config.returns_exact or config.backup == "data"
        self.normalizer = Normalizer(spaces.observation_shape)
        self._networks()
        self.register_buffer("low", torch.tensor(spaces.action_low))
        self.register_buffer("high", torch.tensor(spaces.action_high))
        self.register_buffer("usual_guidance", torch.ones(()))
        self.register_buffer("returns_done", torch.zeros((), dtype=torch.int64))
        for part in ("behavior", "critic"):  # updates so far, and the keys of the random numbers
            self.register_buffer(f"{part}_done", torch.zeros((), dtype=torch.int64))
            self.register_buffer(f"{part}_keys", keys(seeds, part == "critic"), persistent=False)
        self.to(device)
        self._set_box()
        self.register_load_state_dict_post_hook(lambda agent, _: agent._set_box())
        self.optimizers = self._optimizers()
        self.samplings: dict[tuple, Sampling] = {}
        self.data_actions: Tensor | None = None  # a sample, if the data has one state and can be plotted

    @property
    def idle(self) -> tuple[str, ...]:
        """Acting settings that have no effect on a behaviour model alone."""
        of_selecting = ("guidance", "candidates", "filter", "temperature", "aggregate", "clip_actions")
        return of_selecting if self.guide is None else ()

    def _networks(self) -> None:
        config, (state, action) = self.config, self.sizes
        qs = TWINS + config.ensemble
        drawn = [generators([seed], 1 + qs) for seed in self.seeds]
        own, of_qs = [first for first, *_ in drawn], [g for _, *rest in drawn for g in rest]
        self.score = ScoreNet(own, state, action, config.behavior_width)
        self.average = copy.deepcopy(self.score).requires_grad_(False) if config.behavior_ema else None
        self.guide: GuideNet | None = None
        self.foresight: Foresight | None = None
        if config.stage == "behavior":
            return
        original = config.fidelity == "original"
        self.guide = GuideNet(own, state, action, config.guide_hidden, balanced=not original)
        if config.backup == "model":
            self.foresight = Foresight(config, self.seeds, state, action)
            return
        if config.returns_steps:
            one = generators([0])  # depends on the data alone, so all seeds share it
            hidden = config.hidden
            self.returns = Value(one, state, hidden) if self.exact else MLP(one, state, hidden, 1)
        self.value = Value(own, state, config.hidden)
        shape = (len(self.seeds), state + action, config.hidden)
        self.critics = Critics(of_qs, *shape, original, config.critic_norm, config.twins == "min")

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        config = self.config

        def make(net: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
            trained = [p for p in net.parameters() if p.requires_grad]
            return adam(trained, torch.tensor(rate, device=self.device), weight_decay=decay)

        found = {"score": make(self.score, config.behavior_lr, 0.0)}
        if self.guide is None:
            return found
        if returns_steps(config):
            found["returns"] = make(self.returns, RETURNS_LR, 0.0)
        values = {"value": self.foresight.value} if self.foresight else {"value": self.value, "critics": self.critics}
        for name, net in values.items():
            found[name] = make(net, config.value_lr, config.weight_decay)
        found["guide"] = make(self.guide, config.guide_lr, config.weight_decay)
        return found

    # --- learning

    def behavior_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Denoising score matching: the score times sigma of a noisy action should be minus the noise in it."""
        config, actions = self.config, self.scaled(batch["actions"])
        time, noise = self._noise(self.behavior_keys, self.behavior_done, actions)
        alpha, sigma = blend(time)
        condition = self.score.condition(time, self.seen(batch["observations"]))
        output = self.score.body(alpha * actions + sigma * noise, condition)
        error = output.detach() + noise
        if config.behavior_lr_decay:
            self._set_rates({"score": config.behavior_lr}, 0.0, self.behavior_done, config.behavior_steps)
        self._descend("score", output, error * (2 / error.shape[1]))  # sum over action dimensions, mean over rows
        if self.average is not None:
            track(self.average, self.score, 1 - config.behavior_ema)
        self.behavior_done += 1
        return {"score_loss": error.square().sum(-1).mean(1)}

    def critic_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One update of the values, then of the guidance, whose weights w come from the values."""
        config, actions = self.config, self.scaled(batch["actions"])
        states, following = self.seen(batch["observations"]), self.seen(batch["next_observations"])
        if config.lr_decay:
            rates = {"value": config.value_lr, "guide": config.guide_lr}
            rates |= {"critics": config.value_lr} if self.foresight is None else {}
            self._set_rates(rates, config.min_lr, self.critic_done, config.critic_steps)
        if self.foresight is None:
            y, found = self._learn_values(batch, states, actions, following)
        else:
            y, found = self.foresight.learn(self._descend, batch, states, following)
        with self._precision():
            output = self.energies(states, actions).float()
        energy = output.detach()
        g_loss, slope = guide_loss(energy, weights(y, config.least_weight))
        self._descend("guide", output, slope)
        self.critic_done += 1
        return found | {"guide_loss": g_loss} | spread("energy", energy.flatten(1))

    def _learn_values(
        self, batch: dict[str, Tensor], states: Tensor, actions: Tensor, following: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Update V, then Q towards the new V, then the target networks, in the original's order. Returns y after these
        updates, and metrics; the y among them is the one before, from which V learned."""
        config, size = self.config, actions.shape[1]
        value = self.value(states)
        v_loss, slope, before = value_loss(value.detach(), self._target(states, actions), config.alpha)
        self._descend("value", value, slope)
        with torch.no_grad():
            values = self.value(torch.cat([following, states], 1))
            goal = batch["rewards"]
            if config.backup == "values":
                goal = goal + config.gamma * (1 - batch["terminated"]) * values[:, :size]
        with self._precision():
            q = self.critics(states, actions)
        q_loss, slope = self.critics.loss(q.detach(), goal, values[:, size:] if self.by_advantage else None)
        self._descend("critics", q, slope)
        self.critics.track(config.tau)
        if self.by_advantage:
            y = q.detach()[:, TWINS:].mean(1) / config.alpha
        else:
            y = (self._target(states, actions) - values[:, size:]) / config.alpha
        found = {"value_loss": v_loss, "critic_loss": q_loss[:, :TWINS].sum(1), "value": values[:, size:].mean(1)}
        if config.ensemble:
            found["ensemble_loss"] = q_loss[:, TWINS:].mean(1)
        return y, found | spread("y", before)

    def energies(self, states: Tensor, actions: Tensor) -> Tensor:
        """W of noisy copies of the actions, (seeds, batch, copies); the copies of one row share their time t."""
        assert self.guide is not None
        config = self.config
        time, noise = self._noise(self.critic_keys, self.critic_done, actions, config.noise_copies, config.time_power)
        alpha, sigma = blend(time)
        noise = noise.view(*actions.shape[:2], -1, actions.shape[-1])
        noisy = (alpha * actions)[:, :, None] + sigma[:, :, None] * noise
        return self.guide.body(noisy.flatten(1, 2), self.guide.condition(time, states)).view(noisy.shape[:3])

    def both_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        other = {k.removeprefix("second."): v for k, v in batch.items() if k.startswith("second.")}
        return self.behavior_update(batch) | self.critic_update(other)

    def returns_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._set_rates({"returns": RETURNS_LR}, 0.0, self.returns_done, self.config.returns_steps)
        estimate, error = self.usual.error(batch["observations"], batch["row"])
        self._descend("returns", estimate, error * (2 / error.shape[1]))
        self.returns_done += 1
        return {"returns_error": error.square().mean(1).expand(len(self.seeds))}

    # --- what the updates share

    def seen(self, observations: Tensor) -> Tensor:
        return self.normalizer(observations) if self.config.normalize else observations

    def scaled(self, actions: Tensor) -> Tensor:
        return (actions - self.center) / self.unit

    def _set_box(self) -> None:
        """Center and unit of the actions, as the networks read and draw them: the noise of the diffusion suits numbers
        of about 1. The unit is half the box, rounded to a power of four: [-1, 1] and its like stay as they are."""
        half = box_unit((self.high - self.low) / 2)
        self.center, self.unit = (self.high + self.low) / 2, torch.exp2(2 * (torch.log2(half) / 2).round())

    @staticmethod
    def _noise(
        key: Tensor, done: Tensor, actions: Tensor, copies: int = 1, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """A diffusion time per row, (seeds, batch, 1), and noise for its copies, (seeds, batch * copies, action)."""
        members, batch, width = actions.shape
        drawn = uniforms(key, done, whole(batch * (1 + copies * width)))
        times, noise = own(drawn, [batch, batch * copies * width])
        time = LAST + (1 - LAST) * ((1 + times) / 2) ** power
        return time.view(members, batch, 1), normal(noise).view(members, -1, width)

    @torch.no_grad()
    def _target(self, states: Tensor, actions: Tensor) -> Tensor:
        with self._precision():
            return self.critics.target(states, actions)

    def _precision(self) -> torch.autocast:
        """Applies to the matrix products of Q and guidance; sums, losses and V are always float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _descend(self, name: str, output: Tensor, slope: Tensor) -> None:
        """One optimiser step, given the gradient of the loss with respect to a network's output."""
        self.optimizers[name].zero_grad(set_to_none=True)
        output.backward(slope)
        self.optimizers[name].step()

    def _set_rates(self, rates: dict[str, float], least: float, done: Tensor, steps: int) -> None:
        """Let learning rates fall along a cosine, down to `least`."""
        cosine = (1 + torch.cos(done * (math.pi / steps))) / 2
        # runs in every update, so a shared rate is computed once
        now = {rate: min(rate, least) + max(rate - least, 0.0) * cosine for rate in set(rates.values())}
        for name, rate in rates.items():
            self.optimizers[name].param_groups[0]["lr"].copy_(now[rate])

    # --- acting

    def judge(self, states: Tensor, actions: Tensor) -> Tensor:
        """Each Q of scaled actions in standardised states: (seeds, judges, rows)."""
        if self.foresight is None:
            return self.critics.judge(states, actions)
        raw = states * self.normalizer.std + self.normalizer.mean if self.config.normalize else states
        return self.foresight.judge(raw, self.center + self.unit * actions, self.seen)

    @property
    def acting_score(self) -> ScoreNet:
        return self.score if self.average is None else self.average

    @property
    def effort(self) -> int:
        """Rough cost of an action in network passes; evaluations that ask often then ask less often."""
        return 2 * self.config.candidates

    @torch.no_grad()
    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return sampling(self, observations.shape[1])(observations), state

    @torch.no_grad()
    def findings(self) -> dict[str, Any]:
        """For the report: the guidance weight. If the data has one state and two-dimensional actions, also the actions
        of each way of acting with their Q (first seed), to plot."""
        kept, many = self.config, self.config.candidates
        usual = float(self.usual_guidance) if kept.guidance is None else kept.guidance
        found: dict[str, Any] = {"guidance": usual}
        if self.data_actions is None:
            return found
        ways = {"selection alone": (0.0, many), "guidance alone": (usual, 1), "both": (usual, many)}
        shown = {"data": self.data_actions}
        for name, (guidance, candidates) in ways.items():
            self.config = replace(kept, guidance=guidance, candidates=candidates)
            shown[name] = self.act(self.only_state.expand(len(self.seeds), LOOKED_AT, -1))[0]
        self.config = kept
        for name, actions in shown.items():
            states = self.seen(self.only_state.expand(len(self.seeds), len(actions[0]), -1))
            q = self.judge(states, self.scaled(actions)).mean(1)
            columns = torch.cat([actions, q[..., None]], -1)[0].cpu().double().numpy()
            found[name] = np.round(columns, 3).tolist()  # rows of (x, y, Q)
        return found

    # --- the phases

    def phases(self, episodes: Episodes) -> list[Phase]:
        config = self.config
        if config.normalize:
            self.normalizer.fit(episodes)
        self.usual_guidance.fill_(usual_guidance(name_of(episodes)))
        self.env_id = episodes.env_id
        if self.sizes[1] == 2 and (episodes.observations == episodes.observations[:1]).all():
            few = torch.tensor(episodes.actions[:LOOKED_AT], dtype=torch.float32, device=self.device)
            self.data_actions = few.expand(len(self.seeds), -1, -1)
            self.only_state = torch.tensor(episodes.observations[0], dtype=torch.float32, device=self.device)
        if config.stage != "behavior":
            episodes = replace(episodes, rewards=tuned_rewards(episodes, config.rewards, config.fidelity == "original"))
        store = Store(episodes, self.device)
        rows = Transitions(store, self.seeds, config.behavior_batch, next_observations=False)
        behavior = Phase("behavior", config.behavior_steps, rows, self.behavior_update)
        if config.stage == "behavior":
            return [behavior]
        rows = Transitions(store, self.seeds, config.batch_size, stream=1)
        critic = Phase("critic", config.critic_steps, rows, self.critic_update)
        if config.stage == "critic":
            found = [critic]
        elif config.schedule == "in-turn":
            behavior.evaluates = False
            found = [behavior, critic]
        else:
            found = self._together(behavior, critic)
        found[-1].finish = self.findings
        found = [*self._before(episodes, store), *found]
        if config.stage == "critic":
            if RunFolder(str(config.behavior)).exists():
                self._load_behavior()  # now: a mismatch must raise before any folder is touched
            else:
                found[0].begin = self._load_behavior  # not called when resuming: the run has its own copy
        return found

    def _before(self, episodes: Episodes, store: Store) -> list[Phase]:
        """The phase that comes before the values: models of a step, or the estimate b(s) of the data's return."""
        config = self.config
        if self.foresight is not None:
            phase = self.foresight.phase(episodes, self.device)
            self.notes += left_out(episodes, "models of a step")
            self.optimizers["dynamics"] = phase.sampler.optimizer
            return [phase]
        if not config.returns_steps:
            return []

        def estimate(observations: Tensor) -> Tensor:
            return self.returns(self.seen(observations)).view(1, -1)

        self.usual = UsualReturn(estimate, episodes, store, config, self.exact)
        rows = Numbered(store, [0], config.batch_size, stream=2, next_observations=False)
        phase = Phase("returns", config.returns_steps, rows, self.returns_update, evaluates=False)
        phase.finish = self.usual.shape
        return [phase]

    def training_state(self) -> dict[str, Tensor]:
        return {} if self.foresight is None else self.foresight.training_state()

    def load_training_state(self, tensors: dict[str, Tensor]) -> None:
        """Shaped rewards are not in the checkpoint, so they are computed again."""
        if 0 < returns_steps(self.config) <= self.returns_done:
            self.usual.shape()
        if self.foresight is not None:
            self.foresight.load_training_state(tensors)

    def _together(self, behavior: Phase, critic: Phase) -> list[Phase]:
        """One update for both as long as both last, then the longer one alone; each draws the same as in turn."""
        shared = min(behavior.steps, critic.steps)
        both = Phase("both", shared, Pair(behavior.sampler, critic.sampler), self.both_update)
        longer = max(behavior, critic, key=lambda phase: phase.steps)
        rest = Phase(longer.name, longer.steps - shared, Later(longer.sampler, shared), longer.update)
        return [both, rest] if rest.steps else [both]

    def _load_behavior(self) -> None:
        """Load the behaviour model of another run: that of the same seed, or the only one there is."""
        run = RunFolder(str(self.config.behavior)).require()
        members, stored = run.places(self.seeds, alone=True), run.weights()
        found = under("average." if "average.out.bias" in stored else "score.", stored)
        if "out.bias" not in found:
            raise UsageError(f"{run.path} holds no behaviour model of diffusion-dice")
        if run.info().get("status") == "failed":
            raise UsageError(f"{run.path} failed: {run.info().get('error')}")
        theirs = found["state.weight"].shape[1], found["out.bias"].shape[-1]
        if theirs != self.sizes:
            raise UsageError(
                f"{run.path} was trained on states of {theirs[0]} numbers and actions of {theirs[1]}, "
                f"this data has {self.sizes[0]} and {self.sizes[1]}"
            )
        same_family(str(run.path), (run.info().get("data") or {}).get("env_id"), self.env_id)
        if run.config().get("normalize") != self.config.normalize:
            raise UsageError(f"{run.path} was trained with another setting of normalize")
        try:
            for net in (self.score, self.average):
                if net is not None:
                    net.load_state_dict({k: v[members] for k, v in found.items()})
        except RuntimeError as error:
            width = run.config().get("behavior_width")
            raise UsageError(f"{run.path} has another width: pass --behavior-width {width}") from error
        self.normalizer.load_state_dict(under("normalizer.", stored))  # the model must see states as in its training,
        self.low.copy_(stored["low"])  # and scale actions as there
        self.high.copy_(stored["high"])
        self._set_box()
        done, steps = int(stored["behavior_done"]), run.config()["behavior_steps"]
        if done < steps and run.config()["stage"] != "critic":  # a critic run has a copy of a finished one
            self.notes.append(f"the behaviour model of {run.path} was stopped at update {done:,} of {steps:,}")
