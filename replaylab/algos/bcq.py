"""Batch-constrained Q-learning for continuous actions (Fujimoto et al., 2019): take the best of the likely actions.

    VAE      |a - decode(s, z)|^2 + w KL(q(z | s, a) || N(0, 1)),   z ~ q(z | s, a)
    critic   (Q_i(s, a) - y)^2, y = r + gamma (1 - terminated) max_j [lambda min_i + (1 - lambda) max_i] Qbar_i(s', a_j)
    actor    -Q_1(s, a + xi(s, a)),   |xi| <= phi,   a = decode(s, z),   z ~ N(0, 1) clipped to [-0.5, 0.5]

The VAE learns which actions the log takes in a state. The a_j are its samples, each moved by the actor xi by at most
phi times half the action range. An action far from those logged is thus never a candidate, however high its estimated
value. A VAE blurs: with the published w = 1/2 it fills the gap between two modes that are close together.

The original updates VAE, critics and actor one after another. Here all gradients are taken at the same parameters, so
one backward pass and one optimiser step do all three: y and the sampled actions carry no gradient, and the critics are
constants in the actor's loss. Each network thus sees the others as they were one update ago. The target networks move
last, towards the new weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces
from replaylab.config import COUNT, FROM_0, RATE, SHARE, Settings, knob
from replaylab.data.episodes import Episodes
from replaylab.data.sample import Store, Transitions
from replaylab.models import draws
from replaylab.models.adam import adam, clip_gradients
from replaylab.models.mlp import MLP, generators, track

LOG_STD = (-4.0, 15.0)  # limits in the VAE's posterior
COLLAPSED = 1e-3  # a KL below this means that the latent carries no information
LATENT_CLIP = 0.5  # latents near 0 decode to likelier actions than the tails


@dataclass
class Config(Settings):
    """Batch-constrained Q-learning."""

    steps: int = knob(300_000, "training updates", COUNT)
    batch_size: int = knob(100, "rows per batch", COUNT)
    lr: float = knob(1e-3, "Adam's learning rate of all networks", RATE)
    hidden: list[int] = knob([400, 300], "widths of the hidden layers of actor and critics", COUNT)
    vae_hidden: list[int] = knob([750, 750], "widths of the hidden layers of the VAE's encoder and decoder", COUNT)
    latent: int = knob(0, "dimensions of the VAE's latent z; 0: twice those of the action", FROM_0)
    kl_weight: float = knob(0.5, "weight of the KL in the VAE's loss; small values separate close modes", FROM_0)
    gamma: float = knob(0.99, "discount factor", SHARE)
    tau: float = knob(0.005, "share by which target networks move towards the networks per update", SHARE)
    phi: float = knob(0.05, "how far the actor may move a sampled action, relative to half its range", FROM_0)
    lmbda: float = knob(0.75, "weight of the smaller of two target values; the larger gets the rest", SHARE)
    samples: int = knob(10, "candidate actions in the next state for the target y", COUNT)
    act_samples: int = knob(100, "candidate actions when acting", COUNT)
    clip: float = knob(10.0, "clip the gradients of actor and critics to this norm; 0: no clipping", FROM_0)
    normalize: bool = knob(True, "standardise observations with the data's mean and deviation")


ACTING = ("act_samples",)

PRESETS: dict[str, dict[str, Any]] = {
    "debug": {
        "steps": 300,
        "batch_size": 32,
        "hidden": [32, 32],
        "vae_hidden": [32, 32],
        "act_samples": 10,
        "eval_episodes": 2,
        "final_episodes": 4,
    },
}


# --- the maths


def kl_to_normal(mean: Tensor, log_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(0, 1)), the mean over rows and dimensions: (seeds, batch, dims) -> (seeds,)."""
    return 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).mean((1, 2))


def soft_min(values: Tensor, lmbda: float) -> Tensor:
    """lambda min + (1 - lambda) max over the two critics: (seeds, 2, batch) -> (seeds, batch)."""
    return lmbda * values.amin(1) + (1 - lmbda) * values.amax(1)


class Agent(nn.Module):
    done: Tensor
    kl: Tensor
    keys: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        spaces.require_vectors("bcq")
        self.config, self.seeds, self.device = config, list(seeds), device
        self.notes: list[str] = []
        sees, acts = spaces.observation_shape[0], spaces.action_dim
        self.latent = config.latent or 2 * acts
        self.normalizer = Normalizer(spaces.observation_shape)
        self.encoder = MLP(generators(seeds), sees + acts, config.vae_hidden, 2 * self.latent)
        self.decoder = MLP(generators(seeds), sees + self.latent, config.vae_hidden, acts)
        self.actor, self.target_actor = (MLP(generators(seeds), sees + acts, config.hidden, acts) for _ in range(2))
        self.critics, self.target_critics = (
            MLP(generators(seeds, copies=2), sees + acts, config.hidden, 1) for _ in range(2)
        )
        low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
        self.register_buffer("center", (high + low) / 2)
        half = (high - low) / 2
        self.register_buffer("scale", torch.where(half > 0, half, 1e-8))  # an action may never vary
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))  # updates so far
        self.register_buffer("kl", torch.ones(len(seeds)))  # KL of the last batch
        self.register_buffer("keys", draws.keys(seeds), persistent=False)
        self.drawn: Tensor | None = None  # latents of acting
        self.targets_of = [(self.target_actor, self.actor), (self.target_critics, self.critics)]
        for target, _ in self.targets_of:
            target.requires_grad_(False)
        self.to(device)
        learned = [self.encoder, self.decoder, self.actor, self.critics]
        self.optimizers = {"all": adam([p for network in learned for p in network.parameters()], config.lr)}

    def phases(self, episodes: Episodes) -> list[Phase]:
        if self.config.normalize:
            self.normalizer.fit(episodes)
        rows = Transitions(Store(episodes, self.device), self.seeds, self.config.batch_size)
        return [Phase("bcq", self.config.steps, rows, self.update, finish=self.finish)]

    # --- networks: standardised observations, actions in [-1, 1]

    def encode(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(torch.cat([observations, actions], -1)).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def decode(self, observations: Tensor, latent: Tensor) -> Tensor:
        return torch.tanh(self.decoder(torch.cat([observations, latent], -1)))

    def perturb(self, actor: MLP, observations: Tensor, actions: Tensor) -> Tensor:
        """The actions moved by at most phi, clipped to their range."""
        moved = actions + self.config.phi * torch.tanh(actor(torch.cat([observations, actions], -1)))
        return moved.clamp(-1, 1)

    def values(self, critics: MLP, observations: Tensor, actions: Tensor) -> Tensor:  # (seeds, 2, batch)
        inputs = torch.cat([observations, actions], -1).repeat_interleave(2, 0)
        return critics(inputs).view(len(self.seeds), 2, -1)

    def first_value(self, observations: Tensor, actions: Tensor) -> Tensor:  # (seeds, batch)
        """Q_1(s, a) with gradients only to the actions."""
        parameters = {name: p.detach()[::2] for name, p in self.critics.named_parameters()}
        inputs = torch.cat([observations, actions], -1)
        return torch.func.functional_call(self.critics, parameters, (inputs,))[..., 0]

    # --- learning

    @torch.no_grad()
    def goal(self, batch: dict[str, Tensor], latent: Tensor) -> Tensor:  # latent (seeds, batch * samples, dims)
        """The critics' target y: the value of the best of several likely actions in the next state."""
        following = self.normalizer(batch["next_observations"]).repeat_interleave(self.config.samples, 1)
        candidates = self.perturb(self.target_actor, following, self.decode(following, latent))
        values = soft_min(self.values(self.target_critics, following, candidates), self.config.lmbda)
        best = values.unflatten(1, (-1, self.config.samples)).amax(-1)
        return batch["rewards"] + self.config.gamma * (1 - batch["terminated"]) * best

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        observations = self.normalizer(batch["observations"])
        actions, size = (batch["actions"] - self.center) / self.scale, observations.shape[1]
        self.done += 1
        sizes = [size, size, size * self.config.samples]
        noise = draws.normals(self.keys, self.done, draws.whole(sum(sizes) * self.latent))
        noise = noise.unflatten(1, (-1, self.latent))
        posterior, _, _ = draws.own(noise, sizes)
        _, proposal, tried = draws.own(noise.clamp(-LATENT_CLIP, LATENT_CLIP), sizes)

        mean, log_std = self.encode(observations, actions)
        rebuilt = self.decode(observations, mean + log_std.exp() * posterior)
        reconstruction, kl = (rebuilt - actions).square().mean((1, 2)), kl_to_normal(mean, log_std)
        self.kl.copy_(kl.detach())

        values = self.values(self.critics, observations, actions)
        critic_loss = (values - self.goal(batch, tried)[:, None]).square().mean(2).sum(1)

        with torch.no_grad():
            likely = self.decode(observations, proposal)
        moved = self.perturb(self.actor, observations, likely)
        actor_loss = -self.first_value(observations, moved).mean(1)

        self.optimizers["all"].zero_grad(set_to_none=True)
        (reconstruction + self.config.kl_weight * kl + critic_loss + actor_loss).sum().backward()
        for network in (self.actor, self.critics):
            clip_gradients(network.parameters(), len(self.seeds), self.config.clip)
        self.optimizers["all"].step()
        for target, network in self.targets_of:
            track(target, network, self.config.tau)
        return {
            "reconstruction": reconstruction.detach(),
            "kl": kl.detach(),
            "critic_loss": critic_loss.detach(),
            "value": values.detach().mean((1, 2)),
            "moved": (moved.detach() - likely).abs().mean((1, 2)),
        }

    def finish(self) -> None:
        if self.kl.max() < COLLAPSED:
            self.notes.append(
                "bcq: the VAE's latent says nothing (KL near 0), so all candidates of a state are alike and the policy "
                "is a clone moved by phi: too few updates, or in one state actions hardly vary; try --kl-weight 0.01"
            )

    # --- acting

    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The candidate with the highest Q_1. Latents are drawn once per seed, not at each call as in the original, so
        that the policy is a function of the observation and more samples only add candidates."""
        seeds, count, tries = len(self.seeds), observations.shape[1], self.config.act_samples
        latent = self._latents(tries).expand(-1, count, -1, -1).flatten(1, 2)
        repeated = self.normalizer(observations).repeat_interleave(tries, 1)
        candidates = self.perturb(self.actor, repeated, self.decode(repeated, latent))
        best = self.first_value(repeated, candidates).view(seeds, count, tries).argmax(-1)
        chosen = candidates.view(seeds, count, tries, -1).gather(2, best[..., None, None].expand(-1, -1, 1, self.acts))
        return self.center + self.scale * chosen[:, :, 0], state

    def _latents(self, tries: int) -> Tensor:  # (seeds, 1, tries, latent)
        if self.drawn is None or self.drawn.shape[2] != tries:
            drawn = draws.normals(self.keys, torch.zeros_like(self.done), tries * self.latent)
            self.drawn = drawn.clamp(-LATENT_CLIP, LATENT_CLIP).view(len(self.seeds), 1, tries, -1)
        return self.drawn

    @property
    def acts(self) -> int:
        return len(self.center)
