"""The reward model: what was rewarded in a transition, told from a world model's inner maps.

Rewards are -1, 0 or 1 and nearly all are 0, so a head that sees transitions as they come learns to answer 0. MBARC's
answer is in two parts: a head that keeps where things are (`MbarcHead`), and draws that show it the rare frames often
(`sampling_weights`). The five strategies, their numbers of updates, the focal loss and the scores are all here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.errors import UsageError

# strategy -> updates of the head after each phase of the world model; `online` learns within that phase instead
UPDATES = {"online": 0, "class-balanced": 450, "square-root": 475, "progressive": 1000, "mbarc": 1500}
BATCH = 32
CLASSES = ("near", "lead-up")
# classes -> names of the categories, in the order of the masses; a negative reward is always category 3
CATEGORIES = {
    "near": ("far zero", "near zero", "positive", "negative"),
    "lead-up": ("leading up", "positive", "other", "negative"),
}
MASSES = (0.35, 0.05, 0.6)
HEADS = ("mbarc", "simple", "frames")
FLOOR = 1e-4  # added to every weight, so that nothing is impossible
SEGMENTS = 50  # steps from natural to balanced draws in `progressive`


# --- which transitions to show


def near_reward(rewarded: Tensor, segments: Tensor, terminal: Tensor, before: int, after: int) -> Tensor:
    """Whether a rewarded step follows within `before` steps, or came at most `after` steps ago, in one episode."""
    found = torch.zeros_like(rewarded)
    ends = terminal.long()
    episode = segments.long() * (len(segments) + 1) + ends.cumsum(0) - ends  # a new one after each end
    for shift in range(1, min(max(before, after), len(rewarded) - 1) + 1):
        same = episode[shift:] == episode[:-shift]
        if shift <= before:
            found[:-shift] |= same & rewarded[shift:]
        if shift <= after:
            found[shift:] |= same & rewarded[:-shift]
    return found


def categories(
    rewards: Tensor, segments: Tensor, terminal: Tensor, classes: str = "near", window: int = 1, backward: bool = False
) -> Tensor:
    """The category 0..3 of each transition of a buffer, (rows,) each; see CATEGORIES for their names.

    near: zeros at most `window` steps before or after a reward stand apart from the other zeros; `backward` looks
    only at the steps after a reward, as the original does. lead-up: zeros at most `window` steps before a reward.
    """
    rewarded = rewards != 0
    if classes == "near":
        beside = near_reward(rewarded, segments, terminal, 0 if backward else window, window)
        found = torch.where(rewarded, 2, beside.long())
    else:
        leading = near_reward(rewarded, segments, terminal, window, 0)
        found = torch.where(rewarded, 1, torch.where(leading, 0, 2))
    return torch.where(rewards < 0, 3, found)


def masses_of(present: Tensor, masses: Sequence[float], classes: str) -> Tensor:
    """Mass of each of the four categories. Of three masses, the rewarded one is shared equally by positive and negative
    rewards where the data holds both; what is absent gets nothing and the rest share it."""
    if len(masses) not in (3, 4) or min(masses) < 0 or sum(masses) <= 0:
        raise UsageError(f"masses must be three or four numbers of at least 0, not all 0, but are {list(masses)}")
    given = torch.tensor([*masses, 0.0][:4], dtype=torch.float64, device=present.device)
    if len(masses) == 3:
        place = CATEGORIES[classes].index("positive")
        signs = [place, 3]
        given[signs] = given[place] * present[signs] / present[signs].sum().clamp(min=1)
    given = given * present
    return given / given.sum()


def sampling_weights(
    strategy: str,
    rewards: Tensor,  # (rows,) of -1, 0, 1
    segments: Tensor,  # (rows,) which uninterrupted stretch of play a row belongs to
    terminal: Tensor,  # (rows,) booleans
    *,
    draws: int = UPDATES["mbarc"] * BATCH,
    masses: Sequence[float] = MASSES,
    classes: str = "near",
    window: int = 1,
    backward: bool = False,
    progress: float = 0.0,
) -> Tensor:
    """How likely each transition is drawn, up to a factor: (rows,). `progress` is for `progressive`: 0 natural draws,
    1 balanced ones. `online` draws all alike."""
    if strategy not in UPDATES:
        raise UsageError(f"unknown strategy '{strategy}'; known: {', '.join(UPDATES)}")
    if strategy == "mbarc":
        if classes not in CLASSES or window < 1:
            raise UsageError(f"classes must be one of {', '.join(CLASSES)} and window at least 1")
        kind = categories(rewards, segments, terminal, classes, window, backward)
        counts = torch.bincount(kind, minlength=4)
        weights = masses_of(counts > 0, masses, classes) * draws / counts.clamp(min=1)
    else:
        kind = rewards.long() + 1
        counts = torch.bincount(kind, minlength=3).double()
        shares = counts.sqrt() if strategy == "square-root" else counts
        weights = 1 - shares / shares.sum()
        if strategy == "progressive":
            weights = (1 - progress) / 3 + progress * weights
        if strategy == "online":
            weights = torch.ones_like(weights)
    return weights[kind] + FLOOR


def draw(weights: Tensor, count: int) -> Tensor:
    """Rows drawn with replacement on the weights' device, from torch's own generator: (count,)."""
    edges = weights.double().cumsum(0)
    points = torch.rand(count, dtype=torch.float64, device=weights.device) * edges[-1]
    return torch.searchsorted(edges, points, right=True).clamp(max=len(weights) - 1)


def draw_epoch(
    strategy: str,
    rewards: Tensor,
    segments: Tensor,
    terminal: Tensor,
    *,
    updates: int | None = None,
    batch: int = BATCH,
    masses: Sequence[float] = MASSES,
    classes: str = "near",
    window: int = 1,
    backward: bool = False,
) -> Tensor:
    """All rows that one phase of the head's training sees: (updates, batch). `updates` defaults to the strategy's."""
    updates = UPDATES.get(strategy, 0) if updates is None else updates
    total = updates * batch
    if strategy != "progressive":
        settings = {"masses": masses, "classes": classes, "window": window, "backward": backward}
        weights = sampling_weights(strategy, rewards, segments, terminal, draws=total, **settings)  # type: ignore[arg-type]
        return draw(weights, total).view(updates, batch)
    each = total // SEGMENTS + 1  # as the original: its last stretch, all balanced, is never reached
    stretches = [
        draw(sampling_weights(strategy, rewards, segments, terminal, progress=t / SEGMENTS), each)
        for t in range(SEGMENTS + 1)
    ]
    return torch.cat(stretches)[:total].view(updates, batch)


# --- from its answers to rewards


def correction(rewards: Tensor, drawn: Tensor) -> Tensor:
    """What to add to the logits of a head that learnt from rewards `drawn`, so that -1, 0 and 1 are as likely to it as
    they are among `rewards`: the log of how much rarer each is. Each is counted once more, so that none is at 0."""
    real, shown = ((torch.bincount(r.long() + 1, minlength=3) + 1).double() for r in (rewards, drawn))
    return ((real / real.sum()) / (shown / shown.sum())).log().float()


def likeliest(logits: Tensor) -> Tensor:  # (batch, 3) -> (batch,) of -1, 0, 1
    return logits.argmax(1).float() - 1


def expected(logits: Tensor) -> Tensor:  # (batch, 3) -> (batch,)
    chances = logits.softmax(1)
    return chances[:, 2] - chances[:, 0]


# --- losses and scores


def focal_weights(counts: Tensor, beta: float = 0.9999) -> Tensor:
    """Class weights by the effective number of samples, (1 - beta) / (1 - beta^n), scaled to sum to their number."""
    weights = (1 - beta) / (1 - beta ** counts.double().clamp(min=1))
    return (weights * len(counts) / weights.sum()).float()


def focal_loss(logits: Tensor, targets: Tensor, weights: Tensor, gamma: float = 2.0) -> Tensor:
    """Class-balanced focal loss: cross-entropy that counts less where the answer is sure, more where it is rare."""
    log_p = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -(weights[targets] * (1 - log_p.exp()) ** gamma * log_p).mean()


def confusion(predicted: Tensor, actual: Tensor) -> Tensor:
    """Counts of (actual, predicted) over rewards -1, 0, 1: (3, 3)."""
    return torch.bincount((actual.long() + 1) * 3 + predicted.long() + 1, minlength=9).view(3, 3)


def precision_recall(matrix: Tensor) -> dict[str, dict[str, float | int | None]]:
    """Per class; None where there is nothing to divide by."""
    found: dict[str, dict[str, float | int | None]] = {}
    for i, name in enumerate(("negative", "zero", "positive")):
        right, told, true = (int(n) for n in (matrix[i, i], matrix[:, i].sum(), matrix[i].sum()))
        found[name] = {
            "precision": right / told if told else None,
            "recall": right / true if true else None,
            "count": true,
        }
    return found


# --- the heads


class SimpleHead(nn.Module):
    """SimPLe's: means over all positions, so that where something happened is lost."""

    def __init__(self, middle: int, final: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(middle + final, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, x_mid: Tensor, x_fin: Tensor, train: bool) -> Tensor:
        means = torch.cat([x_mid.mean((2, 3)), x_fin.mean((2, 3))], 1)
        return linear(self.layers[2], torch.relu(linear(self.layers[0], means))).float()


class MbarcHead(nn.Module):
    """MBARC's: the final map is folded down to the middle one's size, and both are read position by position."""

    def __init__(self, middle: int, final: int, folds: int, positions: int):
        super().__init__()
        self.middle = nn.Conv2d(middle, final, 1)
        self.final = nn.Conv2d(final, final, 1)
        self.folds = nn.ModuleList(nn.Conv2d(final, final, 4, 2, 1) for _ in range(folds))
        self.layers = nn.Sequential(nn.Linear(2 * final * positions, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, x_mid: Tensor, x_fin: Tensor, train: bool) -> Tensor:
        x = convolve(self.final, x_fin)
        for fold in self.folds:
            x = standardize(torch.relu(convolve(fold, F.dropout2d(x, 0.3, train))))
        both = torch.cat([convolve(self.middle, x_mid), x], 1)
        hidden = torch.relu(linear(self.layers[0], both.flatten(1)))
        return linear(self.layers[2], hidden).float()


class FramesHead(nn.Module):
    """Reads the frames themselves, with convolutions of its own, and not what the world model makes of them: rewards
    hang on few pixels, and a world model that has hardly learnt to draw does not keep them."""

    def __init__(self, inputs: int, actions: int, size: tuple[int, int], width: int = 32):
        super().__init__()
        kinds = [(inputs, width, 8, 4, 2), (width, 2 * width, 4, 2, 1), (2 * width, 2 * width, 4, 2, 1)]
        self.folds = nn.ModuleList(nn.Conv2d(*kind) for kind in kinds)
        for *_, kernel, stride, padding in kinds:
            size = tuple((length + 2 * padding - kernel) // stride + 1 for length in size)  # type: ignore[assignment]
        self.action = nn.Linear(actions, 2 * width)
        self.layers = nn.Sequential(nn.Linear(2 * width * size[0] * size[1], 256), nn.ReLU(), nn.Linear(256, 3))

    def forward(self, seen: Tensor, action: Tensor, train: bool) -> Tensor:  # (batch, h, w, inputs), (batch, actions)
        first, second, third = self.folds
        x = torch.relu(convolve(second, torch.relu(convolve(first, seen.permute(0, 3, 1, 2)))))
        x = torch.relu(convolve(third, 2 * x * linear(self.action, action)[..., None, None].sigmoid()))
        hidden = torch.relu(linear(self.layers[0], x.flatten(1)))
        return linear(self.layers[2], F.dropout(hidden, 0.3, train)).float()


# --- layers in the precision of what they are given: weights may be kept in another


def linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def convolve(layer: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype), layer.stride, layer.padding)


def standardize(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Instance normalisation in plain operations, which a compiler can fuse with what stands around it."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, (2, 3), correction=0, keepdim=True)
    return ((wide - mean) * (variance + eps).rsqrt()).to(x.dtype)
