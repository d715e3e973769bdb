"""The simulated environment: a world model with the interface of a Gymnasium vector environment, on the device.

`reset` starts every agent in a real state from the replay, the last `from_start` agents at the start of a game. `step`
is one call of the model and can be captured as a CUDA graph. Where the model predicts the end of the game, the agent
moves to another real state in the same step. After `length` steps all agents are truncated, and the caller resets:
prediction errors add up, so rollouts are short. The second half of the file compares dreams with reality.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replaylab.data.frames import FrameReplay
from replaylab.fuse import fused
from replaylab.models.reward import confusion, expected, likeliest, precision_recall
from replaylab.models.world import Imagined, Sight, World

OVER = 0.5  # the game ends when the probability that it continues is below this
NEAR = 8  # a pixel is nearly right if each of its intensities, 0 to 255, is off by at most this
MOST_HELD = 0.25  # an episode that would raise the held-out share of steps above this is not chosen


def pictures(frames: Tensor, colours: Tensor, pixels: str) -> Tensor:
    """Palette frames (..., stack, h, w) as the world model takes them: the same, or (..., 3 stack, h, w) in rgb."""
    if pixels == "palette":
        return frames
    return colours.to(torch.uint8)[frames.long()].movedim(-1, -3).flatten(-4, -3)


def real(world: World, replay: FrameReplay, rows: Tensor) -> dict[str, Tensor]:
    """A training batch of real steps for the world model."""
    found = replay.batch(rows)
    following = pictures(found.pop("next_frame")[:, None], world.colours, world.shape.pixels)
    found["next_frames"] = following[:, 0] if world.shape.pixels == "palette" else following
    return found | {"frames": pictures(found["frames"], world.colours, world.shape.pixels)}


class Dreamt(NamedTuple):
    told: Imagined
    seen: Tensor  # the stacks after the step, also of games that ended with it
    terminated: Tensor


class Dream:
    def __init__(
        self,
        world: World,
        replay: FrameReplay,
        agents: int,
        length: int,
        from_start: int = 1,
        expected: bool = False,
        compile: bool | None = None,
    ):
        self.world, self.replay, self.num_envs, self.length = world, replay, agents, length
        self.expected = expected  # pay the expected reward, not the most likely one
        device = replay.device
        compile = device.type == "cuda" if compile is None else compile
        self._look, self._go_on, self._pay = (fused(f, compile) for f in (self._sight, self._onward, self._worth))
        self.channels = 1 if world.shape.pixels == "palette" else 3
        shape = (world.shape.stack * self.channels, *replay.frames.shape[1:])
        self.stacks = torch.zeros((agents, *shape), dtype=torch.uint8, device=device)
        self.at_start = torch.arange(agents, device=device) >= agents - from_start
        self.elapsed = torch.zeros((), dtype=torch.int64, device=device)

    def elsewhere(self) -> Tensor:
        """A real state from the replay for each agent."""
        rows = torch.where(self.at_start, self.replay.starts.draw(self.num_envs), self.replay.steps.draw(self.num_envs))
        return pictures(self.replay.stacks(rows), self.world.colours, self.world.shape.pixels)

    @property
    def single_observation_space(self) -> Any:
        from gymnasium import spaces

        return spaces.Box(0, 255, tuple(self.stacks.shape[1:]), np.uint8)

    @property
    def single_action_space(self) -> Any:
        from gymnasium import spaces

        return spaces.Discrete(self.world.shape.actions)

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        if seed is not None:
            torch.manual_seed(seed)
        self.stacks.copy_(self.elsewhere())
        self.elapsed.zero_()
        return self.stacks, {}

    @torch.no_grad()
    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Observations, rewards, terminated, truncated, infos. The observations are a buffer that the next step
        overwrites."""
        dreamt = self.go_on(self.look(), actions, self.elsewhere())
        truncated = (self.elapsed >= self.length).expand(self.num_envs) & ~dreamt.terminated
        infos = {"final_obs": dreamt.seen, "values": dreamt.told.value}
        return self.stacks, self.pay(dreamt), dreamt.terminated, truncated, infos

    # a step in parts: the policy may choose while the world looks, and what a step pays can be found out later

    @torch.no_grad()
    def look(self) -> Sight:
        return self._look()

    @torch.no_grad()
    def go_on(self, sight: Sight, actions: Tensor, elsewhere: Tensor) -> Dreamt:
        return self._go_on(sight, actions, elsewhere)

    @torch.no_grad()
    def pay(self, dreamt: Dreamt) -> Tensor:
        return self._pay(*dreamt.told.of_interest)

    def _sight(self) -> Sight:
        return self.world.look(self.stacks)

    def _onward(self, sight: Sight, actions: Tensor, elsewhere: Tensor) -> Dreamt:
        told = self.world.imagine(sight, actions)
        newest = told.next_frame.view(self.num_envs, self.channels, *self.stacks.shape[2:])
        seen = torch.cat([self.stacks[:, self.channels :], newest], 1)
        terminated = told.continues < OVER
        self.stacks.copy_(torch.where(terminated[:, None, None, None], elsewhere, seen))
        self.elapsed += 1
        return Dreamt(told, seen, terminated)

    def _worth(self, first: Tensor, second: Tensor) -> Tensor:
        logits = self.world.reward_logits(first, second)
        return self.worth(likeliest(logits), logits + self.world.rarity)

    def worth(self, reward: Tensor, logits: Tensor) -> Tensor:
        """What a step pays whose likeliest reward and corrected logits these are."""
        return expected(logits) if self.expected else reward


# --- comparison with reality


def hold_out(replay: FrameReplay, held: np.ndarray, first: int, share: float) -> np.ndarray:
    """The held-out episodes (segments): those `held` so far, and as many of the new ones (from segment `first` on, not
    yet trained on) as it takes for `share` of all steps. None is chosen while there are few episodes.

    A running game would be held out with all its future steps, so it may be chosen only if four or more are played.
    """
    within, over = replay.host["segments"], replay.host["terminal"] | replay.host["truncated"]
    steps = np.bincount(within[replay.host["valid"]], minlength=replay.next_segment)
    new = np.arange(first, len(steps))
    new = new[np.isin(new, within[over]) | (replay.lanes >= 4)]
    for segment in np.random.default_rng(len(steps)).permutation(new):
        before = steps[held].sum()
        if before < share * steps.sum() and before + steps[segment] <= MOST_HELD * steps.sum():
            held = np.append(held, segment)
    return np.sort(held)


@torch.no_grad()
def judge(
    world: World, replay: FrameReplay, rows: np.ndarray, worth: Callable[[Tensor, Tensor], Tensor], size: int = 64
) -> dict[str, Any]:
    """How well the models predict real steps. Rewards: confusion matrix (rows: actual -1, 0, 1; columns: predicted) and
    the share of their variance that the dream's `worth` explains. Pixels, compared as colours: shares exactly right,
    nearly right, and right if the last frame were repeated; of all pixels and of those that changed."""
    matrix = torch.zeros(3, 3, dtype=torch.int64, device=replay.device)
    counts = torch.zeros(7, dtype=torch.int64, device=replay.device)
    error = torch.zeros((), device=replay.device)
    for part in torch.as_tensor(rows, device=replay.device).split(size):
        batch = real(world, replay, part)
        predicted = world.predict(batch["frames"], batch["actions"])
        shown, true = (_rgb(world, frames) for frames in (predicted.next_frame, batch["next_frames"]))
        moved = (world.colours[replay.frames[part].long()] != true).any(-1)
        off = (shown - true).abs().amax(-1)
        right, near = off == 0, off <= NEAR
        found = (right, near, ~moved, moved, right & moved, near & moved, right.flatten(1).all(1))
        counts += torch.stack([which.sum() for which in found])
        matrix += confusion(predicted.reward, batch["rewards"])
        error += (worth(predicted.reward, predicted.reward_logits) - batch["rewards"]).square().sum()
    *whole, moving, moving_right, moving_near, frames = counts.tolist()
    losses, _, gains = matrix.sum(1).tolist()
    spread = losses + gains - (gains - losses) ** 2 / len(rows)  # sum of squared distances from the mean reward
    pixels, near_pixels, still = (count / (len(rows) * replay.frames[0].numel()) for count in whole)
    return {
        "steps": len(rows),
        "confusion": matrix.tolist(),
        "classes": precision_recall(matrix.cpu()),
        "explained": 1 - float(error) / spread if spread else None,
        "pixels": pixels,
        "near_pixels": near_pixels,
        "still_pixels": still,
        "changed_pixels": moving_right / max(moving, 1),
        "near_changed_pixels": moving_near / max(moving, 1),
        "frames": frames / len(rows),
    }


def _rgb(world: World, frames: Tensor) -> Tensor:  # frames of the world -> (batch, h, w, 3)
    return world.colours[frames.long()] if world.shape.pixels == "palette" else frames.movedim(1, -1).float()


def exciting_scene(
    world: World, replay: FrameReplay, rows: np.ndarray, steps: int = 50
) -> dict[str, np.ndarray] | None:
    """The last stretch with a reward among these real steps, and the dream of it. None if there are none."""
    starts, length = replay.windows(steps, rows)
    if not length:
        return None
    got = np.concatenate([[0], (replay.host["rewards"].reshape(-1) != 0).cumsum()])
    exciting = starts[got[starts + length] > got[starts]]
    return replayed(world, replay, int((exciting if len(exciting) else starts)[-1]), length)


@torch.no_grad()
def replayed(world: World, replay: FrameReplay, row: int, steps: int) -> dict[str, np.ndarray]:
    """The real steps from a row on, and the dream that starts there and takes the same actions."""
    rows = torch.arange(row, row + steps, device=replay.device)
    stack = pictures(replay.stacks(rows[:1]), world.colours, world.shape.pixels)
    channels = stack.shape[1] // world.shape.stack
    dreamt, rewards = [], []
    for action in replay.actions[rows].long():
        predicted = world.predict(stack, action[None])
        frame = predicted.next_frame.view(1, channels, *stack.shape[2:])
        stack = torch.cat([stack[:, channels:], frame], 1)
        dreamt.append(frame[0])
        rewards.append(likeliest(predicted.reward_logits))
    return {
        "real": replay.next_frames(rows).cpu().numpy(),  # (steps, h, w)
        "dream": torch.stack(dreamt).squeeze(1).cpu().numpy(),  # the same, or (steps, 3, h, w)
        "real_rewards": replay.rewards[rows].cpu().numpy(),
        "dream_rewards": torch.cat(rewards).cpu().numpy(),
    }


def film(scene: dict[str, np.ndarray], palette: np.ndarray, scale: int = 3, fps: int = 15) -> bytes | None:
    """A GIF, reality left, dream right; a green or red bar marks a positive or negative reward. None without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return None
    images: list[Any] = []
    for t in range(len(scene["real"])):
        halves = [_bar(picture, rewards[t]) for picture, rewards in (
            (palette[scene["real"][t]], scene["real_rewards"]),
            (_colour(scene["dream"][t], palette), scene["dream_rewards"]),
        )]  # fmt: skip
        gap = np.zeros((halves[0].shape[0], 2, 3), np.uint8)
        whole = np.concatenate([halves[0], gap, halves[1]], 1).repeat(scale, 0).repeat(scale, 1)
        images.append(Image.fromarray(whole).quantize(256))
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
    return file.getvalue()


def _colour(frame: np.ndarray, palette: np.ndarray) -> np.ndarray:  # -> (h, w, 3)
    return palette[frame] if frame.ndim == 2 else np.moveaxis(frame, 0, -1)


def _bar(picture: np.ndarray, reward: float) -> np.ndarray:
    colours: Sequence[tuple[int, int, int]] = ((24, 24, 24), (40, 200, 90), (220, 50, 40))
    bar = np.empty((3, picture.shape[1], 3), np.uint8)
    bar[:] = colours[int(np.sign(reward))]
    return np.concatenate([picture, bar])
