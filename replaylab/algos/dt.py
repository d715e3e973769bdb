"""Decision Transformer (Chen et al., 2021): predict each logged action from the history and the return-to-go.

    return-to-go   R_t = r_t + r_t+1 + ... + r_T
    prediction     a^_t = f(R_t-K+1, s_t-K+1, a_t-K+1, ..., R_t, s_t),   a causal transformer over the last K steps
    loss           |a_t - a^_t|^2 in units of the action box for continuous actions, cross-entropy for discrete ones
    acting         R_1 = the target return, then R_t+1 = R_t - r_t

It is trained on all episodes, good and bad; a high target makes it act as in the good ones. `condition none` drops the
return tokens, which leaves behaviour cloning with a memory. The same code serves vectors and Atari frames. The presets
`gym` (the defaults), `atari` and `pong` carry the paper's numbers. The network itself is in models/gpt.py,
its memory while acting in dt_acting.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces, box_unit
from replaylab.algos.dt_acting import Context
from replaylab.config import COUNT, FROM_0, RATE, SHARE, Settings, Within, knob
from replaylab.data.episodes import Episodes
from replaylab.data.sample import Store, Windows
from replaylab.errors import UsageError
from replaylab.models.adam import adam, clipped_step
from replaylab.models.gpt import STYLES, DecisionTransformer, Frames, Shape
from replaylab.models.mlp import ACTIVATIONS, generators


@dataclass
class Config(Settings):
    """Decision Transformer."""

    steps: int = knob(100_000, "training updates", COUNT)
    batch_size: int = knob(64, "windows per batch", COUNT)
    context: int = knob(20, "K: time steps in a window, and how many the policy remembers when it acts", COUNT)
    condition: str = knob("return", "return: condition on returns; none: cloning with a memory", ("return", "none"))
    mode: str = knob("normal", "delayed: pay the whole return of an episode on its last step", ("normal", "delayed"))
    rtg_scale: float | None = knob(None, "divides returns; default: the environment's, else the largest return", RATE)
    target: float | None = knob(None, "return to aim for; default: the environment's, else the best in the data")
    top_fraction: float = knob(
        1.0, "learn only from the best episodes, up to this fraction of the rows", Within(0, 1, above=True)
    )
    cut_episodes: str = knob(
        "keep",
        "episodes that were cut short, so that their returns are too low; drop: learn from complete episodes only",
        ("keep", "drop"),
    )
    starts: float = knob(
        0.0, "share of windows that start with an episode, where only the return tells what to do", SHARE
    )
    normalize: bool = knob(True, "standardise observations with the mean and deviation of the data")
    width: int = knob(128, "width of the token embeddings", COUNT)
    layers: int = knob(3, "number of transformer blocks", COUNT)
    heads: int = knob(1, "attention heads per block; must divide the width", COUNT)
    activation: str = knob("relu", "activation function in the transformer blocks", ACTIVATIONS)
    dropout: float = knob(0.1, "dropout rate on embeddings, attention and residuals", SHARE)
    style: str = knob("norm", "token embedding: norm as in the paper's Gym code, tanh as in its Atari code", STYLES)
    max_timestep: int = knob(1000, "size of the timestep embedding table; later steps share its last row", COUNT)
    timestep_std: float = knob(
        0.02, "deviation of that table's initial weights in the norm style; the original uses 1", FROM_0
    )
    ahead: float = knob(0.0, "weight of an extra loss: predict the next observation and return-to-go; 0: none", FROM_0)
    lr: float = knob(1e-4, "AdamW's learning rate", RATE)
    betas: list[float] = knob([0.9, 0.999], "AdamW's two decay rates", SHARE)
    weight_decay: float = knob(1e-4, "decoupled weight decay of AdamW", FROM_0)
    decay_on: str = knob("all", "decay all parameters, or weights of matrices and convolutions", ("all", "weights"))
    clip: float = knob(0.25, "clip the gradient of each seed to this norm; 0: no clipping", FROM_0)
    warmup_steps: int = knob(10_000, "updates over which the learning rate rises linearly", FROM_0)
    warmup_tokens: int = knob(0, "the same warm-up in predicted actions; 0: use warmup_steps", FROM_0)
    lr_decay: bool = knob(False, "after the warm-up, let the learning rate fall along a cosine to a tenth")
    final_tokens: int = knob(0, "predicted actions at which that cosine would reach 0; 0: 6/5 of the run", FROM_0)
    temperature: float = knob(0.0, "sampling temperature of discrete actions; 0: take the most likely one", FROM_0)
    top_k: int = knob(0, "sample only among the k most likely discrete actions; 0: among all", FROM_0)
    precision: str = knob("fp32", "in the forward pass of training; fp32 is TF32 on CUDA", ("fp32", "bf16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise UsageError(f"betas takes two numbers below 1, not {' '.join(map(str, self.betas))}")
        if self.ahead and self.context < 2:
            raise UsageError("ahead predicts the next step of a window: context must be at least 2")


_ATARI = {
    "steps": 20_000, "batch_size": 128, "context": 30, "layers": 6, "heads": 8, "activation": "gelu", "style": "tanh",
    "max_timestep": 4096, "lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "decay_on": "weights", "clip": 1.0,
    "warmup_tokens": 10_240, "lr_decay": True, "temperature": 1.0,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "gym": {},  # the defaults
    "strong": {"lr": 8e-4, "lr_decay": True},  # what benchmarks/RESULTS.md shows
    "quick": {"steps": 6_000, "lr": 1e-3, "warmup_steps": 300, "lr_decay": True},  # half an hour on a core
    "atari": _ATARI,  # 5 epochs of 500,000 rows
    "pong": _ATARI | {"steps": 5_000, "batch_size": 512, "context": 50},
    "debug": {
        "steps": 100, "batch_size": 16, "context": 5, "width": 32, "layers": 1, "lr": 1e-3, "warmup_steps": 20,
        "eval_every": -1, "final_episodes": 2,
    },
}  # fmt: skip

SMALLER = {None: "quick", "gym": "quick", "strong": "quick"}  # suggested on a CPU
ACTING = ("temperature", "top_k")
LOOKED_AT = 5000  # frames whose mean and deviation standardise all frames


def usual_preset(episodes: Episodes) -> str | None:
    """The preset for this data when the user names none."""
    if episodes.observations.ndim == 2:
        return None
    return "pong" if (episodes.env_id or "").lower().startswith("atari/pong") else "atari"


# environment family -> (divisor of returns, target return). Gym: from the original code; Atari: from the paper, in
# clipped rewards (its code has 14,000 for Qbert and 1,150 for Seaquest); the others: from CORL.
TARGETS: dict[str, tuple[float, float]] = {
    "hopper": (1000, 3600), "halfcheetah": (1000, 12000), "walker2d": (1000, 5000), "reacher2d": (10, 76),
    "breakout": (1, 90), "qbert": (1, 2500), "pong": (1, 20), "seaquest": (1, 1450),
    "maze2d": (1, 280), "antmaze": (1, 1), "pointmaze": (1, 1),
    "pen": (1, 3100), "door": (1, 2900), "hammer": (1, 12800), "relocate": (1, 4300),
}  # fmt: skip


def scale_and_target(env_id: str | None, returns: np.ndarray) -> tuple[float, float]:
    """From TARGETS, or from the data for an environment that is not in it."""
    words = [w.removeprefix("adroithand") for w in re.split(r"[/_:,-]", (env_id or "").lower())]
    for word in words:
        if word in TARGETS:
            return TARGETS[word]
    return (1.0 if words[0] == "atari" else float(np.abs(returns).max()) or 1.0), float(returns.max())


def whole(episodes: Episodes) -> Episodes:
    """Only episodes that were not cut short: they terminated, or are as long as the longest (the time limit)."""
    lengths = episodes.lengths
    kept = episodes.terminated[episodes.last_rows] | (lengths == lengths.max())
    return episodes.select(np.flatnonzero(kept))


def delayed(episodes: Episodes) -> Episodes:
    """The same episodes with each return paid as one reward on the last row."""
    rewards = np.zeros_like(episodes.rewards)
    rewards[episodes.last_rows] = episodes.returns
    return replace(episodes, rewards=rewards)


def masked_mean(error: Tensor, mask: Tensor) -> Tensor:  # (seeds, batch, steps) twice -> (seeds,)
    return (error * mask).sum(2).sum(1) / mask.sum(2).sum(1).clamp(min=1)  # one sum would use a single CUDA block


class Agent(nn.Module):
    done: Tensor
    center: Tensor
    span: Tensor
    unit: Tensor
    rtg_scale: Tensor
    target: Tensor
    clipped: Tensor
    returns_range: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        seen = tuple(spaces.seen)
        self.pixels = len(seen) == 3
        if len(seen) != 1 and (len(seen) != 3 or seen[1:] != (84, 84) or spaces.observation_dtype != "uint8"):
            raise UsageError(f"dt takes vectors or stacks of 84 x 84 byte frames, not {spaces.observation_dtype}{seen}")
        if config.width % config.heads:
            raise UsageError(f"width must be a multiple of heads ({config.heads}), not {config.width}")
        if self.pixels and config.ahead:
            raise UsageError("ahead predicts vectors, not frames: leave it at 0")
        self.config, self.seeds, self.device, self.discrete = config, list(seeds), device, spaces.discrete
        self.shape = Shape(
            observation=seen, actions=spaces.action_dim, discrete=spaces.discrete, context=config.context,
            width=config.width, layers=config.layers, heads=config.heads, activation=config.activation,
            dropout=config.dropout, style=config.style, max_timestep=config.max_timestep,
            returns=config.condition == "return", ahead=config.ahead > 0, timestep_std=config.timestep_std,
        )  # fmt: skip
        self.stack = spaces.frame_stack
        self.idle = () if spaces.discrete else ACTING
        self.notes: list[str] = []
        self.normalizer = Normalizer([1] if self.pixels else seen)
        self.model = DecisionTransformer(generators(seeds), self.shape)
        if not self.discrete:
            low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
            self.register_buffer("center", (high + low) / 2)
            self.register_buffer("span", (high - low) / 2)
            self.register_buffer("unit", box_unit(self.span), persistent=False)
        # facts about the data that acting needs, so they are saved with the weights
        self.register_buffer("rtg_scale", torch.ones(()))
        self.register_buffer("target", torch.zeros(()))
        self.register_buffer("clipped", torch.zeros(()))  # 1: the data's rewards are clipped to [-1, 1]
        self.register_buffer("returns_range", torch.zeros(2))
        self.register_buffer("done", torch.zeros(()))  # updates so far
        self.to(device)
        self.optimizers = {"model": self._optimizer()}

    def _optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        decayed = {id(p) for p in self.model.decayed()}
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters())}]
        if config.decay_on == "weights":
            parameters = groups[0]["params"]
            groups = [
                {"params": [p for p in parameters if id(p) in decayed]},
                {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
            ]
        for group in groups:
            group["lr"] = torch.tensor(config.lr, device=self.device)
        return adam(groups, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay)

    # --- learning

    def phases(self, episodes: Episodes) -> list[Phase]:
        config = self.config
        if config.condition == "none" and config.target is not None:
            raise UsageError("with `condition none` no return is asked for: leave target out")
        if config.starts and not round(config.starts * config.batch_size):
            raise UsageError(
                f"starts {config.starts:g} of {config.batch_size} windows is none: raise it, or batch_size"
            )
        if config.normalize and isinstance(eye := self.model.embed_state, Frames):
            some = episodes.observations[:: max(1, len(episodes.observations) // LOOKED_AT)]
            eye.look_at(torch.as_tensor(np.array(some)).flatten(0, -3))
        elif config.normalize:
            self.normalizer.fit(episodes)  # statistics of all episodes, also where top_fraction drops some
        scale, target = scale_and_target(episodes.env_id, episodes.returns)
        self.rtg_scale.fill_(config.rtg_scale or scale)
        target = target if config.target is None else config.target
        self.target.fill_(target)
        self.clipped.fill_(bool(episodes.meta.get("reward_clipping")))
        low, high = float(episodes.returns.min()), float(episodes.returns.max())
        self.returns_range.copy_(torch.tensor([low, high]))
        if config.condition == "return" and not low <= target <= high:
            self.notes.append(f"asks for a return of {target:g}; the data has {low:g} to {high:g}")
        episodes = whole(episodes) if config.cut_episodes == "drop" else episodes
        episodes = delayed(episodes) if config.mode == "delayed" else episodes
        store = Store(episodes.top_fraction(config.top_fraction), self.device)
        windows = Windows(store, self.seeds, config.batch_size, config.context, stack=self.stack, starts=config.starts)
        return [Phase("imitate", config.steps, windows, self.update)]

    def rate(self) -> Tensor:
        """The factor on the learning rate in the next update: linear warm-up, then (optionally) a cosine."""
        config = self.config
        labels = config.batch_size * config.context  # predicted actions per update
        warm = config.warmup_tokens / labels if config.warmup_tokens else config.warmup_steps
        done = self.done + 1
        rate = (done / max(warm, 1)).clamp(max=1.0)
        if config.lr_decay:
            final = config.final_tokens / labels if config.final_tokens else 1.2 * config.steps
            along = ((done - warm) / max(final - warm, 1)).clamp(0, 1)
            rate = rate * (0.5 * (1 + torch.cos(math.pi * along))).clamp(min=0.1)
        return rate

    def hidden(self, batch: dict[str, Tensor], keep: slice | None = None) -> Tensor:  # shapes: see models/gpt.py
        states = self.encode(batch["observations"])
        returns = batch["returns_to_go"] / self.rtg_scale
        return self.model(states, self._taken(batch["actions"]), returns, batch["timesteps"], keep)

    def _prepare(self, observations: Tensor) -> Tensor:
        return observations if self.pixels else self.normalizer(observations)

    def _taken(self, actions: Tensor) -> Tensor:
        """Actions as the network reads them: in units of their box."""
        return actions if self.discrete else (actions - self.center) / self.unit

    def encode(self, observations: Tensor) -> Tensor:  # (seeds, batch..., observation) -> (seeds, batch..., width)
        return self.model.encode(self._prepare(observations))

    def predict(self, hidden: Tensor) -> Tensor:  # (seeds, ..., width) at state tokens -> actions, or logits
        output = self.model.head(hidden.flatten(1, -2)).view(*hidden.shape[:-1], -1).float()
        return output if self.discrete else self.center + self.span * torch.tanh(output)

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # (seeds,) each
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            hidden = self.hidden(batch, None if self.config.ahead else self.model.states)
            predicted = self.predict(hidden[..., -2, :] if self.config.ahead else hidden)
        if self.discrete:
            flat = nn.functional.cross_entropy(predicted.flatten(0, 2), batch["actions"].flatten(), reduction="none")
            error = flat.view_as(batch["mask"])
        else:
            error = ((predicted - batch["actions"]) / self.unit).square().mean(-1)
        found = {"loss": masked_mean(error, batch["mask"])}
        if self.config.ahead:
            found["ahead"] = self._ahead(hidden[:, :, :-1, -1].float(), batch)
        return found

    def _ahead(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Squared error of the next (normalised) observation and return-to-go, predicted from the action tokens."""
        flat, mask = hidden.flatten(1, 2), batch["mask"][:, :, 1:]  # only steps that have a successor in the window
        state = self.model.next_state(flat).view(*mask.shape, -1) - self._prepare(batch["observations"])[:, :, 1:]
        togo = self.model.next_return(flat).view(mask.shape) - (batch["returns_to_go"] / self.rtg_scale)[:, :, 1:]
        return masked_mean(state.square().mean(-1) + togo.square(), mask)

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer, rate = self.optimizers["model"], self.rate()
        for group in optimizer.param_groups:
            group["lr"].copy_(self.config.lr * rate)
        self.done += 1
        optimizer.zero_grad(set_to_none=True)
        found = self.loss(batch)
        total = found["loss"] + self.config.ahead * found["ahead"] if self.config.ahead else found["loss"]
        total.sum().backward()
        norms = clipped_step(optimizer, len(self.seeds), self.config.clip)
        return {name: value.detach() for name, value in found.items()} | {"grad_norm": norms}

    # --- acting

    @property
    def targets(self) -> list[float]:
        """The target returns of an evaluation that names none."""
        return [float(f"{float(self.target):.8g}")] if self.config.condition == "return" else []

    def seen_return(self, target: float) -> bool:
        """Whether the data's returns reach this far, in the six digits that are shown."""
        low, given, high = (float(f"{x:.6g}") for x in (self.returns_range[0], target, self.returns_range[1]))
        return low <= given <= high

    def begin(self, batch: int, targets: Sequence[float] = ()) -> Context:
        """The memory before an episode's first step. Several targets split the batch into equal parts, in order."""
        if targets and self.config.condition == "none":
            raise UsageError("this dt was trained with `condition none`: it takes no target")
        wanted = torch.tensor(list(targets or self.targets or [0.0]), device=self.device)
        return Context(self, batch, wanted.repeat_interleave(batch // len(wanted)))

    @torch.no_grad()
    def act(self, observations: Tensor, state: Context | None = None) -> tuple[Tensor, Context]:
        """Actions for (seeds, environments, ...). Pass the rewards to `state.receive` before the next call."""
        context = state or self.begin(observations.shape[1])
        if context.time.shape[1] != observations.shape[1]:
            raise UsageError(f"{observations.shape[1]} observations, but {context.time.shape[1]} before: reset first")
        context.observations.copy_(observations)
        context.answer()
        return context.chosen.clone(), context

    def choose(self, states: Tensor, actions: Tensor, returns: Tensor, timesteps: Tensor, newest: Tensor) -> Tensor:
        """The action for the state in slot `newest`, (seeds, batch), of each window."""
        hidden = self.model(states, self._taken(actions), returns, timesteps, self.model.states)
        places = newest[..., None, None].expand(*newest.shape, 1, hidden.shape[-1])
        predicted = self.predict(hidden.gather(2, places)[:, :, 0])
        return self._choose(predicted) if self.discrete else predicted

    def _choose(self, logits: Tensor) -> Tensor:
        if self.config.temperature == 0:
            return logits.argmax(-1)
        if 0 < self.config.top_k < logits.shape[-1]:
            least = logits.topk(self.config.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        gumbel = -torch.empty_like(logits).exponential_().log()  # argmax(logits + Gumbel noise) is a sample
        return (logits / self.config.temperature + gumbel).argmax(-1)
