"""MBARC's reward model: classify the reward of a transition as -1, 0 or 1.

Nearly all rewards are 0, so a classifier that sees transitions as they come learns to answer 0. MBARC's remedy has two
parts: a head that keeps spatial detail (`MbarcHead`), and sampling that shows it the rare transitions often
(`sampling_weights`). This file has the five sampling strategies, the heads, the focal loss and the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.errors import UsageError
from replaylab.models.layers import convolve, linear, standardize

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
FLOOR = 1e-4  # added to every weight, so that every transition can be drawn
SEGMENTS = 50  # stages from uniform to class-balanced draws in `progressive`


# --- sampling: which transitions the head is shown


def near_reward(rewarded: Tensor, segments: Tensor, terminal: Tensor, before: int, after: int) -> Tensor:
    """Whether the same episode has a reward at most `before` steps later or `after` steps earlier: (rows,)."""
    found = torch.zeros_like(rewarded)
    ends = terminal.long()
    episode = segments.long() * (len(segments) + 1) + ends.cumsum(0) - ends  # a new number after each terminal row
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

    near: zeros at most `window` steps before or after a reward form a class of their own; `backward` counts only those
    after a reward, as the original does. lead-up: the same for zeros at most `window` steps before a reward.
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
    """Share of each of the four categories in the draws. If three masses are given, positive and negative rewards split
    the rewarded one equally. The mass of a category that the data lacks is spread over the others, evenly if those
    have none."""
    if len(masses) not in (3, 4) or min(masses) < 0 or not 0 < sum(masses) < math.inf:
        raise UsageError(f"masses must be three or four numbers of at least 0, not all 0, but are {list(masses)}")
    given = torch.tensor([*masses, 0.0][:4], dtype=torch.float64, device=present.device)
    if len(masses) == 3:
        place = CATEGORIES[classes].index("positive")
        signs = [place, 3]
        given[signs] = given[place] * present[signs] / present[signs].sum().clamp(min=1)
    given = given * present
    given = torch.where(given.sum() > 0, given, present.double())
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
    """Unnormalised probability of drawing each transition: (rows,). `progress` takes `progressive` from uniform draws
    (0) to those of `class-balanced` (1). `online` is uniform."""
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
    """Rows drawn with replacement, on the device of the weights, with torch's global generator: (count,)."""
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
    """All rows of one training phase of the head: (updates, batch). `updates` defaults to the strategy's number."""
    updates = UPDATES.get(strategy, 0) if updates is None else updates
    total = updates * batch
    if strategy != "progressive":
        settings = {"masses": masses, "classes": classes, "window": window, "backward": backward}
        weights = sampling_weights(strategy, rewards, segments, terminal, draws=total, **settings)  # type: ignore[arg-type]
        return draw(weights, total).view(updates, batch)
    each = total // SEGMENTS + 1  # as in the original: the last, fully balanced stage is never reached
    stretches = [
        draw(sampling_weights(strategy, rewards, segments, terminal, progress=t / SEGMENTS), each)
        for t in range(SEGMENTS + 1)
    ]
    return torch.cat(stretches)[:total].view(updates, batch)


# --- from logits to rewards


def correction(rewards: Tensor, drawn: Tensor) -> Tensor:
    """Logit correction for a head trained on the classes `drawn` when they really occur as in `rewards`:
    log p(class in rewards) / p(class in drawn). Every count is raised by one, so that none is 0."""
    real, shown = ((torch.bincount(r.long() + 1, minlength=3) + 1).double() for r in (rewards, drawn))
    return ((real / real.sum()) / (shown / shown.sum())).log().float()


def likeliest(logits: Tensor) -> Tensor:  # (batch, 3) -> (batch,) of -1, 0, 1
    return logits.argmax(1).float() - 1


def expected(logits: Tensor) -> Tensor:  # (batch, 3) -> (batch,)
    chances = logits.softmax(1)
    return chances[:, 2] - chances[:, 0]


# --- losses and scores


def focal_weights(counts: Tensor, beta: float = 0.9999) -> Tensor:
    """Class weights by effective number of samples, (1 - beta) / (1 - beta^n), scaled to a mean of 1."""
    weights = (1 - beta) / (1 - beta ** counts.double().clamp(min=1))
    return (weights * len(counts) / weights.sum()).float()


def focal_loss(logits: Tensor, targets: Tensor, weights: Tensor, gamma: float = 2.0) -> Tensor:
    """Class-balanced focal loss, -w (1 - p)^gamma log p: confident answers count less, rare classes more."""
    log_p = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -(weights[targets] * (1 - log_p.exp()) ** gamma * log_p).mean()


def confusion(predicted: Tensor, actual: Tensor) -> Tensor:
    """Counts of (actual, predicted) over rewards -1, 0, 1: (3, 3)."""
    return torch.bincount((actual.long() + 1) * 3 + predicted.long() + 1, minlength=9).view(3, 3)


def precision_recall(matrix: Tensor) -> dict[str, dict[str, float | int | None]]:
    """Precision, recall and count of each class; None where the denominator is 0."""
    found: dict[str, dict[str, float | int | None]] = {}
    for i, name in enumerate(("negative", "zero", "positive")):
        right, answered, true = (int(n) for n in (matrix[i, i], matrix[:, i].sum(), matrix[i].sum()))
        found[name] = {
            "precision": right / answered if answered else None,
            "recall": right / true if true else None,
            "count": true,
        }
    return found


# --- the heads


class SimpleHead(nn.Module):
    """SimPLe's head: averages the feature maps over all positions, which loses where something happened."""

    def __init__(self, middle: int, final: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(middle + final, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, x_mid: Tensor, x_fin: Tensor, train: bool) -> Tensor:
        means = torch.cat([x_mid.mean((2, 3)), x_fin.mean((2, 3))], 1)
        return linear(self.layers[2], torch.relu(linear(self.layers[0], means))).float()


class MbarcHead(nn.Module):
    """MBARC's head: shrinks the final map to the size of the middle one and reads both at every position."""

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
    """Our head: reads the frames with its own convolutions instead of the world model's maps. Rewards depend on a few
    pixels, which a world model that has hardly learned to predict frames does not keep."""

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
