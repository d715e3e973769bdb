"""Proximal policy optimisation (Schulman et al., 2017) for discrete actions, in one file.

    advantage   A_t = sum_k (gamma lambda)^k delta_{t+k},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    policy      -min(ratio A, clip(ratio, 1 - c, 1 + c) A),   ratio = pi(a | s) / pi_old(a | s)
    value       1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)
    total       policy + value_coef value - entropy H(pi)

R = A + V_old. After a terminated step V(s_{t+1}) is 0; after a truncated one the critic bootstraps, once. Rollouts are
written to buffers that are allocated once, and `learn` needs nothing from the host, so it can be captured as one CUDA
graph. `train_vector` is the loop for environments on the host; MBARC has its own for dreams on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.config import COUNT, FROM_0, RATE, SHARE, Settings, knob
from replaylab.fuse import fused
from replaylab.models.adam import adam, clipped_step
from replaylab.models.layers import blocks


@dataclass
class Config(Settings):
    """Proximal policy optimisation."""

    ppo_lr: float = knob(1e-4, "Adam's learning rate of the policy", RATE)
    ppo_clip: float = knob(0.1, "c: how far an update may move the policy's ratios and the values", RATE)
    ppo_epochs: int = knob(4, "passes over each rollout in an update", COUNT)
    ppo_minibatch: int = knob(160, "steps per gradient", COUNT)
    ppo_grad_clip: float = knob(0.5, "clip the policy's gradient to this norm; 0: no clipping", FROM_0)
    entropy: float = knob(0.01, "weight of the entropy bonus; 0: none", FROM_0)
    value_coef: float = knob(0.5, "weight of the critic's loss", FROM_0)
    gamma: float = knob(0.99, "discount factor", SHARE)
    gae_lambda: float = knob(0.95, "lambda of the advantages: 0 looks one step ahead, 1 to the end", SHARE)


# --- the maths


def advantages(
    rewards: Tensor, values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:  # (time, agents), (time + 1, agents), (time, agents) -> (time, agents)
    """Generalised advantage estimation with one (time, time) matrix of weights instead of a loop over time."""
    alive = 1 - ended
    deltas = rewards + gamma * values[1:] * alive - values[:-1]
    past = ended.cumsum(0) - ended  # episodes that ended before each step
    time = torch.arange(len(rewards), device=rewards.device)
    lag = time - time[:, None]  # (from, to)
    decay = torch.where(lag >= 0, (gamma * lam) ** lag.clamp(min=0), 0.0)
    same_game = past[:, None] == past[None]  # (from, to, agents)
    return (decay[..., None] * same_game * deltas).sum(1)


def losses(
    outputs: Tensor,  # (batch, actions + 1): logits and the value
    actions: Tensor,
    old_log_prob: Tensor,
    old_values: Tensor,
    advantage: Tensor,
    returns: Tensor,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy loss, value loss, entropy and, as a metric, an estimate of KL(old policy || policy)."""
    log_probs = F.log_softmax(outputs[:, :-1], -1)
    chosen = log_probs.gather(1, actions[:, None])[:, 0]
    values = outputs[:, -1]
    change = chosen - old_log_prob
    ratio = change.exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    near = old_values + (values - old_values).clamp(-clip, clip)
    value = 0.5 * torch.maximum((values - returns).square(), (near - returns).square()).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return policy, value, entropy, (ratio.detach() - 1 - change.detach()).mean()


# --- networks


class Policy(nn.Module):
    """Observations -> logits and a value, in one matrix. `look` preprocesses each observation once, then `answer`."""

    answer: Callable[[Tensor], Tensor]

    def forward(self, observations: Tensor) -> Tensor:
        return self.answer(self.look(observations))

    def look(self, observations: Tensor) -> Tensor:
        return observations


def orthogonal(layer: nn.Module, gain: float, generator: torch.Generator) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)  # type: ignore[arg-type]
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Heads(nn.Module):
    """Logits start near zero (gain 0.01), so that the first policy is nearly uniform; the value has gain 1."""

    def __init__(self, features: int, actions: int, generator: torch.Generator):
        super().__init__()
        self.policy = orthogonal(nn.Linear(features, actions), 0.01, generator)
        self.value = orthogonal(nn.Linear(features, 1), 1.0, generator)

    def forward(self, features: Tensor) -> Tensor:
        layers = self.policy, self.value  # one joint product is faster than two
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        return F.linear(features, weight, bias)


def convolve(x: Tensor, layer: Any) -> Tensor:
    """ReLU of a strided convolution. The stride divides the kernel size here, so it equals a convolution without stride
    over blocks of pixels: the same sums, in a shape that suits tensor cores. x: the blocks of the image."""
    return F.relu(F.conv2d(x, blocks(layer.weight, layer.stride[0]), layer.bias))


class PixelPolicy(Policy):
    """Stacks of palette frames (batch, stack, height, width), seen in colour, through a convolutional network. Frames
    that are in colour already, (batch, 3 stack, height, width), are taken as they are. On CUDA all but the heads is
    computed in bfloat16."""

    colours: Tensor

    def __init__(self, palette: np.ndarray, stack: int, shape: tuple[int, int], actions: int, seed: int):
        super().__init__()
        self.stack = stack
        g = torch.Generator().manual_seed(seed)
        self.register_buffer("colours", torch.tensor(palette, dtype=torch.float32) / 255, persistent=False)
        sizes = [(3 * stack, 32, 8, 4), (32, 64, 4, 2), (64, 32, 3, 1)]
        height, width = shape
        for *_, kernel, stride in sizes:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if height < 1 or width < 1:
            raise ValueError(f"frames of {shape} are too small for the policy's convolutions")
        self.convolutions: Any = nn.ModuleList(
            orthogonal(nn.Conv2d(i, o, kernel, stride), math.sqrt(2), g) for i, o, kernel, stride in sizes
        )
        self.dense = orthogonal(nn.Linear(32 * height * width, 512), math.sqrt(2), g)
        self.heads = Heads(512, actions, g)

    def look(self, observations: Tensor) -> Tensor:
        """Blocks for the first convolution, (batch, height, width, bytes), so that colours come out channels last."""
        return blocks(observations, self.convolutions[0].stride[0]).movedim(1, 3)

    def answer(self, x: Tensor) -> Tensor:
        first, *others = self.convolutions
        if x.shape[3] == self.stack * first.stride[0] ** 2:
            x = F.embedding(x.int(), self.colours).flatten(3)
        else:
            x = x.float() / 255
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            x = convolve(x.movedim(3, 1), first)
            for layer in others:
                x = convolve(blocks(x, layer.stride[0]), layer)
            x = F.relu(self.dense(x.flatten(1)))
        return self.heads(x.float())  # bfloat16 is too coarse for log-probabilities and values


class VectorPolicy(Policy):
    """Observations (batch, numbers) through two tanh layers; the critic has layers of its own."""

    def __init__(self, inputs: int, actions: int, seed: int, width: int = 64):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def trunk() -> nn.Sequential:
            first, second = (orthogonal(nn.Linear(i, width), math.sqrt(2), g) for i in (inputs, width))
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())

        self.actor, self.critic = trunk(), trunk()
        self.policy = orthogonal(nn.Linear(width, actions), 0.01, g)
        self.value = orthogonal(nn.Linear(width, 1), 1.0, g)

    def answer(self, x: Tensor) -> Tensor:
        return torch.cat([self.policy(self.actor(x)), self.value(self.critic(x))], -1)


def sample(outputs: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Actions drawn from softmax(logits / temperature), as the argmax of logits / temperature + Gumbel noise."""
    logits = outputs[..., :-1]
    return (logits / temperature - torch.empty_like(logits).exponential_().log()).argmax(-1)


# --- playing and learning


class PPO:
    """A policy, its optimiser and buffers for rollouts of `steps` x `agents` steps."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        steps: int,
        agents: int,
        shape: tuple[int, ...],
        kind: torch.dtype,
        device: torch.device,
    ):
        self.policy, self.config, self.steps, self.agents = policy.to(device), config, steps, agents
        self.minibatch = min(config.ppo_minibatch, steps * agents)

        def column(kind: torch.dtype, length: int = steps, *more: int) -> Tensor:
            return torch.zeros((length, agents, *more), dtype=kind, device=device)

        self.observations = column(kind, steps + 1, *shape)  # the last row is the state after the rollout
        self.actions = column(torch.int64)
        self.log_probs, self.rewards, self.ended = (column(torch.float32) for _ in range(3))
        self.values = column(torch.float32, steps + 1)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.optimizer = adam(policy.parameters(), config.ppo_lr, eps=1e-5)
        cuda = device.type == "cuda"  # compiled: a few kernels instead of a hundred
        self.choose, self.look, self.objective = (fused(f, cuda) for f in (self._choose, policy.look, self._objective))

    @torch.no_grad()
    def act(self, observations: Tensor) -> Tensor:
        """Choose actions and store observation, action, log-probability and value."""
        actions, log_probs, values = self.choose(observations)
        for column, value in ((self.observations, observations), (self.actions, actions),
                              (self.log_probs, log_probs), (self.values, values)):  # fmt: skip
            column.index_copy_(0, self.cursor, value[None])
        return actions

    def _choose(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.policy(observations)
        actions = sample(outputs)
        log_probs = F.log_softmax(outputs[:, :-1], -1).gather(1, actions[:, None])[:, 0]
        return actions, log_probs, outputs[:, -1]

    @torch.no_grad()
    def receive(self, rewards: Tensor, ended: Tensor) -> None:
        """Store the result of a step. `ended`: do not bootstrap after it (terminated, or the reward includes it)."""
        self.rewards.index_copy_(0, self.cursor, rewards.float()[None])
        self.ended.index_copy_(0, self.cursor, ended.float()[None])
        self.cursor.add_(1)

    @torch.no_grad()
    def stop(self, observations: Tensor) -> None:
        """End the rollout in these states; the next one overwrites it."""
        self.observations[-1].copy_(observations)
        self.cursor.zero_()

    def learn(self) -> dict[str, Tensor]:
        """One update: `ppo_epochs` passes over the rollout in shuffled minibatches. Metrics of shape (1,)."""
        config = self.config
        with torch.no_grad():
            self.values[-1].copy_(self.policy(self.observations[-1])[:, -1])
            advantage = advantages(self.rewards, self.values, self.ended, config.gamma, config.gae_lambda)
            returns = (advantage + self.values[:-1]).flatten()
            advantage = advantage.flatten()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-5)
        played = (self.actions.flatten(), self.log_probs.flatten(), self.values[:-1].flatten(), advantage, returns)
        seen = self.look(self.observations[:-1].flatten(0, 1))
        sums: list[Tensor] = []
        for order in torch.rand(config.ppo_epochs, len(returns), device=returns.device).argsort(1):
            for start in range(0, len(order) - self.minibatch + 1, self.minibatch):
                loss, found = self.objective(seen, played, order[start : start + self.minibatch])
                self._step(loss)
                sums.append(found)
        mean = torch.stack(sums).mean(0)
        names = ("policy_loss", "value_loss", "entropy", "divergence")
        return {name: mean[i : i + 1] for i, name in enumerate(names)}

    def _objective(self, seen: Tensor, played: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, Tensor]:
        """The total loss of some rows of the rollout, and its parts."""
        actions, log_probs, values, advantage, returns = (column[rows] for column in played)
        outputs, config = self.policy.answer(seen[rows]), self.config
        found = losses(outputs, actions, log_probs, values, advantage, returns, config.ppo_clip)
        total = found[0] + config.value_coef * found[1] - config.entropy * found[2]
        return total, torch.stack(found).detach()

    def _step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clipped_step(self.optimizer, 1, self.config.ppo_grad_clip)


def train_vector(
    ppo: PPO, env: Any, updates: int, device: torch.device, seed: int = 0, until: float = math.inf
) -> list[float]:
    """Train in a vector environment that waits for a reset when done (`envs.make_vec`). Gives the returns of finished
    episodes. `until`: stop when the mean of the last twenty is that high.
    """

    def on_device(values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=ppo.observations.dtype, device=device)

    seen, _ = env.reset(seed=seed)
    running, finished = np.zeros(ppo.agents), list[float]()
    for _ in range(updates):
        for _ in range(ppo.steps):
            actions = ppo.act(on_device(seen))
            seen, rewards, terminated, truncated, _ = env.step(actions.cpu().numpy())
            running += rewards
            over = terminated | truncated
            if truncated.any():  # bootstrap: the critic's value stands in for the rest
                with torch.no_grad():
                    rest = ppo.policy(on_device(seen))[:, -1].cpu().numpy()
                rewards = rewards + ppo.config.gamma * rest * (truncated & ~terminated)
            ppo.receive(torch.as_tensor(rewards, device=device), torch.as_tensor(over, device=device))
            if over.any():
                finished += running[over].tolist()
                running[over] = 0
                seen, _ = env.reset(options={"reset_mask": over})
        ppo.stop(on_device(seen))
        ppo.learn()
        if np.mean(finished[-20:] or [-math.inf]) >= until:
            break
    return finished
