"""Imagined experience: short rollouts of a policy in an ensemble of dynamics, kept in a ring buffer on the device.

    a ~ pi(s),   (s' - s, r) ~ N(mu_i(s, a), sigma_i(s, a)) of a random elite i,   stored reward r - penalty(s, a, s')

Rollouts are short and begin in logged states, so where only the policy leads is never imagined, and it may fall there.
Some rows can therefore be *carried*: they begin in the log's first states, as the policy will, and each rollout takes
them on from where the last one left them.

A rollout is a fixed sequence of kernels, so that one CUDA graph holds it: rows that have terminated are still computed,
but not stored. All randomness (first states, which elite predicts which row, noise) is drawn beforehand as a function
of (seed, number of the rollout). A seed thus imagines the same whichever seeds are trained with it, and resuming needs
no generator state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from replaylab.data.episodes import Episodes
from replaylab.data.sample import Store, Transitions, draw
from replaylab.models.density import Density, join
from replaylab.models.dynamics import Dynamics
from replaylab.models.penalty import ensemble_penalty, linear, penalty
from replaylab.models.standard import divisors
from replaylab.models.termination import Termination

WIDE = 5.0  # predictions may leave the data's range by at most this many times its width


def generator(device: torch.device, seed: int, stream: int, number: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(((seed * 1_000_003 + stream) * 1_000_003 + number) % 2**62)


def pack(normal: Tensor, actions: Tensor, rewards: Tensor, terminated: Tensor, following: Tensor) -> Tensor:
    """Transitions as rows of one table, so that one gather fetches a batch."""
    columns = [normal, actions, rewards[..., None], terminated[..., None].to(rewards.dtype), following]
    return torch.cat(columns, -1)


def unpack(rows: Tensor, observation: int) -> dict[str, Tensor]:
    action = rows.shape[-1] - 2 * observation - 2
    parts = rows.split([observation, action, 1, 1, observation], -1)
    names = ("observations", "actions", "rewards", "terminated", "next_observations")
    batch = dict(zip(names, parts, strict=True))
    return batch | {"rewards": batch["rewards"][..., 0], "terminated": batch["terminated"][..., 0]}


class Logged:
    """The logged transitions on the device. Rows whose next observation is unknown are left out, except terminated
    ones: their `following` is a placeholder, which no bootstrap uses."""

    def __init__(self, episodes: Episodes, device: torch.device):
        store = Store(episodes, device, resident=True)
        usable = Transitions(store, [0], 1)
        rows = usable.rows if usable.rows is not None else torch.arange(len(episodes), device=device)
        self.first = store.observations(torch.as_tensor(episodes.offsets[:-1], device=device))  # of each episode
        self.observations, self.following = store.observations(rows), store.next_observations(rows)
        self.actions, self.rewards, self.terminated = (
            x[rows] for x in (store.actions, store.rewards, store.terminated)
        )

    def table(self, normalize: Callable[[Tensor], Tensor]) -> Tensor:
        return pack(
            normalize(self.observations), self.actions, self.rewards, self.terminated, normalize(self.following)
        )


class LoggedRows:
    """The logged part of each batch."""

    resident = True

    def __init__(self, table: Tensor, seeds: Sequence[int], count: int):
        self.table, self.seeds, self.count = table, list(seeds), count

    def draw(self, start: int, steps: int) -> np.ndarray:
        parts = [draw(len(self.table), (self.count,), seed, 3, start, steps) for seed in self.seeds]
        return np.stack(parts, axis=1)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        return {"rows": self.table[index]}


class Ring:
    """The newest `capacity` rows of each seed. Write position and row count exist only on the device, so that leaving
    out rows does not wait for it."""

    def __init__(self, seeds: int, capacity: int, width: int, device: torch.device):
        self.capacity = capacity
        self.table = torch.zeros(seeds, capacity + 1, width, device=device)  # the last row absorbs rows to drop
        self.next = torch.zeros(seeds, 1, dtype=torch.int64, device=device)
        self.filled = torch.zeros(seeds, 1, dtype=torch.int64, device=device)
        self.first = torch.arange(seeds, device=device)[:, None] * (capacity + 1)

    def add(self, rows: Tensor, valid: Tensor) -> None:  # (seeds, rows, width), (seeds, rows)
        """Append the valid rows, at most `capacity` of them, in order."""
        count = valid.cumsum(1)
        place = torch.where(valid, (self.next + count - 1) % self.capacity, self.capacity)
        self.table.flatten(0, 1).index_copy_(0, (self.first + place).flatten(), rows.flatten(0, 1))
        self.next.copy_((self.next + count[:, -1:]) % self.capacity)
        self.filled.copy_((self.filled + count[:, -1:]).clamp(max=self.capacity))

    def sample(self, uniform: Tensor) -> Tensor:  # (seeds, batch) in [0, 1) -> (seeds, batch, width)
        rows = torch.minimum((uniform * self.filled).long(), self.filled - 1)
        return self.table.flatten(0, 1)[self.first + rows.clamp(min=0)]

    def state(self) -> dict[str, Tensor]:
        most = int(self.filled.max())
        return {"rows": self.table[:, :most].contiguous(), "next": self.next, "filled": self.filled}

    def load(self, state: dict[str, Tensor]) -> None:
        self.table[:, : state["rows"].shape[1]].copy_(state["rows"])
        self.next.copy_(state["next"])
        self.filled.copy_(state["filled"])


class Penalties:
    """The penalty on an imagined reward: from a density, from the ensemble's uncertainty, or from both."""

    def __init__(
        self,
        kind: str = "none",
        coefficient: float = 0.0,
        uncertainty: str = "none",
        uncertainty_coefficient: float = 0.0,
        inputs: str = "nsa",
    ):
        self.kind, self.coefficient, self.inputs = kind, coefficient if kind != "none" else 0.0, inputs
        self.uncertainty = uncertainty if uncertainty_coefficient else "none"
        self.uncertainty_coefficient = uncertainty_coefficient
        self.density: Density | None = None
        self.threshold = torch.zeros(())

    def use(self, density: Density, percentile: float) -> None:
        self.density = density
        self.threshold = torch.tensor(density.threshold(percentile), device=density.mean.device)

    def by_density(
        self, observations: Tensor, actions: Tensor, following: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Penalty, (seeds, rows), and which rows count as penalised: those with a penalty above 0, or, for softplus,
        which is always above 0, those with a density below the threshold."""
        assert self.density is not None
        columns = join(self.inputs, observations, actions, following)
        log_prob = self.density.log_prob(columns.flatten(0, 1)).view(live.shape)
        if self.kind == "linear":  # its cap is a statistic of each seed's live rows
            found = linear(log_prob, self.threshold, live)
        else:
            found = penalty(self.kind, log_prob, self.threshold)
        return found, log_prob < self.threshold if self.kind == "softplus" else found > 0

    def by_ensemble(self, means: Tensor, deviations: Tensor) -> Tensor:  # (seeds, members, rows, columns)
        if self.uncertainty != "aleatoric":  # the other kinds ignore the reward column
            means, deviations = means[..., :-1], deviations[..., :-1]
        return torch.stack([ensemble_penalty(self.uncertainty, m, d) for m, d in zip(means, deviations, strict=True)])


class Imagination:
    """Rollouts of `length` steps from `rows` states of each seed, stored in `ring`: logged states, but for the first
    `carried` rows, which play on from `begins` for at most `most` steps.

    In each step the rows are split among the elites in equal random parts, so that each row passes through one network;
    only the ensemble's own penalty needs all members.
    """

    METRICS = ("penalised", "penalty", "imagined_reward", "imagined_ends", "imagined_wild", "imagined_rows")

    def __init__(
        self,
        seeds: Sequence[int],
        dynamics: Dynamics,
        policy: Callable[[Tensor, Tensor], Tensor],  # normalised observations, noise -> actions
        normalize: Callable[[Tensor], Tensor],
        termination: Termination,
        penalties: Penalties,
        ring: Ring,
        starts: Tensor,  # (logged rows, observation)
        limits: tuple[Tensor, Tensor],  # lowest and highest (observation, reward)
        rows: int,
        length: int,
        actions: int,
        begins: Tensor,  # (episodes, observation)
        carried: int = 0,
        most: int = 0,
    ):
        self.seeds, self.dynamics, self.policy, self.normalize = list(seeds), dynamics, policy, normalize
        self.termination, self.penalties, self.ring = termination, penalties, ring
        self.starts, self.limits = starts, limits
        self.rows, self.length, device = rows, length, starts.device
        count, outputs = len(self.seeds), dynamics.outputs
        self.first = torch.zeros(count, rows, dtype=torch.int64, device=device)
        self.order = torch.zeros(count, length, rows, dtype=torch.int64, device=device)
        self.action_noise = torch.zeros(count, length, rows, actions, device=device)
        self.model_noise = torch.zeros(count, length, rows, outputs, device=device)
        self.sums = torch.zeros(len(self.METRICS), count, device=device)
        self.survivors = torch.zeros(count, device=device)  # rows still live after the first step
        self.begins, self.carried, self.most = begins, carried, most
        self.begin = torch.zeros(count, carried, dtype=torch.int64, device=device)
        self.states = torch.zeros(count, carried, starts.shape[1], device=device)  # where the carried rows are
        self.ages = torch.full((count, carried), most, device=device)  # steps that they have played; at `most` anew

    def prepare(self, number: int) -> None:
        """Draw all the randomness of this rollout."""
        for i, seed in enumerate(self.seeds):
            g = generator(self.starts.device, seed, 1, number)
            self.first[i].random_(0, len(self.starts), generator=g)
            for order in self.order[i]:
                order.copy_(torch.randperm(self.rows, generator=g, device=order.device))
            self.action_noise[i].normal_(generator=g)
            self.model_noise[i].normal_(generator=g)
            if self.carried:
                self.begin[i].random_(0, len(self.begins), generator=g)

    @torch.no_grad()
    def roll(self) -> None:
        """Run the prepared rollout; can be captured as a CUDA graph."""
        self.sums.zero_()
        networks = self.dynamics.networks(elites_only=self.penalties.uncertainty == "none")
        observations = self.starts[self.first]  # (seeds, rows, observation)
        live = torch.ones_like(self.first, dtype=torch.bool)
        if self.carried:
            anew = self.ages >= self.most
            self.ages.masked_fill_(anew, 0)
            observations[:, : self.carried] = torch.where(anew[..., None], self.begins[self.begin], self.states)
        for step in range(self.length):
            order = self.order[:, step]
            live = live.gather(1, order)
            observations = observations.gather(1, order[..., None].expand_as(observations))
            observations, live = self._step(step, observations, live, networks)
            if step == 0:
                self.survivors.copy_(live.sum(1))
        if self.carried:
            self._carry(observations, live)

    def _carry(self, observations: Tensor, live: Tensor) -> None:
        """Note where the first rows are, which have changed places at every step, and whether they go on."""
        origin = self.order[:, 0]
        for step in range(1, self.length):
            origin = origin.gather(1, self.order[:, step])
        place = origin.argsort(1)[:, : self.carried]
        self.states.copy_(observations.gather(1, place[..., None].expand_as(self.states)))
        self.ages.add_(self.length).masked_fill_(~live.gather(1, place), self.most)

    def _step(self, step: int, observations: Tensor, live: Tensor, networks: tuple) -> tuple[Tensor, Tensor]:
        normal = self.normalize(observations)
        actions = self.policy(normal, self.action_noise[:, step])
        predicted, uncertainty = self._predict(observations, actions, self.model_noise[:, step], networks)
        predicted = torch.cat([observations + predicted[..., :-1], predicted[..., -1:]], -1)
        valid = live & ~predicted.isnan().any(-1)
        inside = ((predicted >= self.limits[0]) & (predicted <= self.limits[1])).all(-1)
        predicted = predicted.nan_to_num(nan=0.0).clamp(*self.limits)
        following, rewards = predicted[..., :-1], predicted[..., -1]
        total, below = self._penalty(observations, actions, following, live, uncertainty)
        done = self.termination(observations, actions, following)
        self.ring.add(pack(normal, actions, rewards - total, done, self.normalize(following)), valid)
        kept = torch.stack([below.float(), total, rewards, done.float(), (~inside).float(), torch.ones_like(total)])
        self.sums += torch.where(valid, kept, 0.0).sum(2)
        return following, valid & inside & ~done

    def _predict(self, observations: Tensor, actions: Tensor, noise: Tensor, networks: tuple) -> tuple[Tensor, Tensor]:
        """A sample of (s' - s, r) for each row from its elite, and the ensemble's uncertainty, (seeds, rows)."""
        count, rows = observations.shape[:2]
        inputs, elites = self.dynamics.inputs(observations, actions), self.dynamics.elites.shape[1]
        if self.penalties.uncertainty == "none":
            parts = inputs.view(count * elites, rows // elites, -1)
            mean, deviation = (x.reshape(count, rows, -1) for x in self.dynamics.predict(parts, networks))
            return torch.addcmul(mean, deviation, noise), torch.zeros_like(mean[..., 0])
        members = self.dynamics.members
        everyone = self.dynamics.predict(inputs.repeat_interleave(members, 0), networks)
        means, deviations = (x.view(count, members, rows, -1) for x in everyone)
        seed = torch.arange(count, device=inputs.device)[:, None]
        part = torch.arange(elites, device=inputs.device)
        chosen = [
            x.view(count, members, elites, rows // elites, -1)[seed, self.dynamics.elites, part].view(count, rows, -1)
            for x in (means, deviations)
        ]
        return torch.addcmul(chosen[0], chosen[1], noise), self.penalties.by_ensemble(means, deviations)

    def _penalty(
        self, observations: Tensor, actions: Tensor, following: Tensor, live: Tensor, uncertainty: Tensor
    ) -> tuple[Tensor, Tensor]:
        penalties = self.penalties
        total, below = penalties.uncertainty_coefficient * uncertainty, torch.zeros_like(live)
        if penalties.coefficient:
            found, below = penalties.by_density(observations, actions, following, live)
            total = total + penalties.coefficient * found
        return total, below

    def metrics(self) -> dict[str, Tensor]:
        """Means over the rows of the last rollout and their number, (seeds,) each."""
        rows = self.sums[-1]
        means = self.sums / rows.clamp(min=1)
        found = dict(zip(self.METRICS, means, strict=True)) | {"imagined_rows": rows.clone()}
        if self.carried:
            found["carried_steps"] = torch.where(self.ages < self.most, self.ages, 0).float().mean(1)
        if not self.penalties.coefficient:
            del found["penalised"]
        if not self.penalties.coefficient and self.penalties.uncertainty == "none":
            del found["penalty"]
        return found


@torch.no_grad()
def foretell(
    dynamics: Dynamics,
    policy: Callable[[Tensor], Tensor],  # (seeds, rows, observation) -> actions
    termination: Termination,
    observations: Tensor,  # (rows, observation)
    horizon: int,
) -> tuple[Tensor, Tensor]:
    """Noise-free rollouts of the policy in each elite from these states: the states after `horizon` steps, (seeds,
    elites, rows, observation), and the sums of rewards until then or until termination, (seeds, elites, rows)."""
    count, elites = dynamics.elites.shape
    networks, width = dynamics.networks(elites_only=True), observations.shape[1]
    states = observations.expand(count, elites, -1, -1).flatten(1, 2)  # (seeds, elites * rows, observation)
    far = 50 * dynamics.input_std[:width]  # keeps predictions that diverge finite
    low, high = dynamics.input_mean[:width] - far, dynamics.input_mean[:width] + far
    total, live = torch.zeros_like(states[..., 0]), torch.ones_like(states[..., 0], dtype=torch.bool)
    for _ in range(horizon):
        actions = policy(states)
        inputs = dynamics.inputs(states, actions).view(count * elites, -1, width + actions.shape[-1])
        predicted = dynamics.predict(inputs, networks)[0].reshape(*states.shape[:2], -1)
        following = (states + predicted[..., :-1]).nan_to_num().clamp(low, high)
        total += torch.where(live, predicted[..., -1].nan_to_num(), 0.0)
        live &= ~termination(states, actions, following)
        states = torch.where(live[..., None], following, states)
    return states.unflatten(1, (elites, -1)), total.unflatten(1, (elites, -1))


def widen(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """The data's range, extended by WIDE times its width on both sides; a constant column counts as width 1."""
    width = WIDE * divisors((lowest + highest) / 2, highest - lowest)
    return lowest - width, highest + width
