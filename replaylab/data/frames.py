"""A replay of single frames on the device, for agents that play while they learn.

Each game that is played side by side has a lane, a stretch of rows. A row holds one frame and, where a step was taken
from it, the action, the reward and how the step ended. A segment is a game's unbroken run: the frames that filled its
stack, one row a step, and the frame it ended on. So the stack at row r is the frames r-3 .. r, the frame after it is
r+1, and rows without a step stand between any two segments: nothing that is gathered ever crosses a seam.

    values   v_t = r_t + gamma v_{t+1},   0 behind the last step that is known

What a captured graph draws from are tables of fixed size and device-side counts, refilled in place by `commit`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

COLUMNS = {"actions": np.int8, "rewards": np.int8, "segments": np.int32, "valid": bool, "terminal": bool,
           "truncated": bool}  # fmt: skip


class Table:
    """Rows to draw from: room for all, the first `count` of them in use."""

    def __init__(self, room: int, device: torch.device):
        self.rows = torch.zeros(room, dtype=torch.int64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def fill(self, rows: np.ndarray) -> None:
        self.rows[: len(rows)].copy_(torch.from_numpy(np.ascontiguousarray(rows, np.int64)))
        self.count.fill_(len(rows))

    def draw(self, shape: int | tuple[int, ...]) -> Tensor:
        """Uniform with replacement, from the device's own generator: usable inside a captured graph."""
        size = (shape,) if isinstance(shape, int) else shape
        return self.rows[torch.randint(1 << 62, size, device=self.rows.device) % self.count]


class FrameReplay:
    def __init__(
        self,
        lanes: int,
        rows: int,  # of a lane
        shape: tuple[int, int],
        device: torch.device,
        *,
        stack: int = 4,
        gamma: float = 0.99,
        terminal_reward: bool = True,  # False: the last reward of a game never enters the values, as in the original
    ):
        self.lanes, self.rows, self.stack, self.device = lanes, rows, stack, device
        self.gamma, self.terminal_reward = gamma, terminal_reward
        room = lanes * rows
        self.host = {name: np.zeros((lanes, rows), kind) for name, kind in COLUMNS.items()}
        self.host["segments"].fill(-1)
        self.filled = np.zeros(lanes, np.int64)  # rows in use; the last of them has the newest frame
        self.committed = np.zeros(lanes, np.int64)
        self.next_segment = 0
        self.staged: list[list[np.ndarray]] = [[] for _ in range(lanes)]  # frames not yet on the device
        self.known = np.zeros((lanes, rows), bool)  # steps that were there at the last commit
        self.fresh = np.zeros(0, np.int64)  # steps that came with it

        def column(kind: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((room, *more), dtype=kind, device=device)

        self.frames = column(torch.uint8, *shape)
        self.actions, self.rewards = column(torch.int8), column(torch.int8)
        self.segments = column(torch.int32)
        self.valid, self.terminal, self.truncated = (column(torch.bool) for _ in range(3))
        self.values = column(torch.float32)
        self.ahead = column(torch.int64)  # steps from here to the segment's end, this one included
        self.steps, self.starts = Table(room, device), Table(room, device)  # all steps; first steps of games
        self.offsets = torch.arange(1 - stack, 1, device=device)

    # --- writing, on the host

    def begin(self, lane: int, stack: np.ndarray) -> bool:
        """A game starts, its first stack on show. False: the lane has no room for it."""
        if self.filled[lane] + len(stack) + 1 > self.rows:
            return False
        place = slice(self.filled[lane], self.filled[lane] + len(stack))
        self.host["segments"][lane, place] = self.next_segment
        self.staged[lane] += list(stack.copy())
        self.filled[lane] += len(stack)
        self.next_segment += 1
        return True

    def add(self, lane: int, action: int, reward: float, frame: np.ndarray, terminal: bool, truncated: bool) -> None:
        """A step from the newest frame of a lane. Of the reward only the sign is kept."""
        row = self.filled[lane] - 1
        for name, value in (("actions", action), ("rewards", np.sign(reward)), ("valid", True),
                            ("terminal", terminal), ("truncated", truncated)):  # fmt: skip
            self.host[name][lane, row] = value
        self.host["segments"][lane, row + 1] = self.host["segments"][lane, row]
        self.staged[lane].append(frame.copy())
        self.filled[lane] += 1

    def full(self, lane: int) -> bool:
        return bool(self.filled[lane] >= self.rows)

    def commit(self) -> None:
        """Bring what was written to the device and refill the tables."""
        frames = self.frames.view(self.lanes, self.rows, *self.frames.shape[1:])
        for lane, staged in enumerate(self.staged):
            if staged:
                place = slice(self.committed[lane], self.committed[lane] + len(staged))
                frames[lane, place].copy_(torch.from_numpy(np.stack(staged)))
                staged.clear()
        self.committed[:] = self.filled
        for name, column in self.host.items():
            getattr(self, name).copy_(torch.from_numpy(column.reshape(-1)))
        values, ahead = self._look_ahead()
        self.values.copy_(torch.from_numpy(values.reshape(-1)))
        self.ahead.copy_(torch.from_numpy(ahead.reshape(-1)))
        valid = self.host["valid"]
        first = valid.copy()
        first[:, 1:] &= ~valid[:, :-1]
        self.steps.fill(np.flatnonzero(valid))
        self.starts.fill(np.flatnonzero(first))
        self.fresh = np.flatnonzero(valid & ~self.known)
        self.known = valid.copy()

    def _look_ahead(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and steps left, from the back; all lanes at once. A row without a step cuts both."""
        values = np.zeros((self.lanes, self.rows + 1), np.float32)
        ahead = np.zeros((self.lanes, self.rows + 1), np.int64)
        rewards = self.host["rewards"].astype(np.float32)  # int8 would not hold a return
        if not self.terminal_reward:
            rewards[self.host["terminal"]] = 0
        for row in reversed(range(int(self.filled.max(initial=0)))):
            valid = self.host["valid"][:, row]
            values[:, row] = valid * (rewards[:, row] + self.gamma * values[:, row + 1])
            ahead[:, row] = valid * (1 + ahead[:, row + 1])
        return values[:, :-1], ahead[:, :-1]

    # --- reading, on the device

    def __len__(self) -> int:
        return int(self.host["valid"].sum())

    def stacks(self, rows: Tensor) -> Tensor:  # (...) -> (..., stack, height, width)
        return self.frames[rows[..., None] + self.offsets]

    def next_frames(self, rows: Tensor) -> Tensor:  # (...) -> (..., height, width)
        return self.frames[rows + 1]

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        return {
            "frames": self.stacks(rows),
            "actions": self.actions[rows].long(),
            "next_frame": self.next_frames(rows),
            "rewards": self.rewards[rows].long(),
            "values": self.values[rows],
            "continues": (~self.terminal[rows]).float(),
        }

    def windows(self, length: int, rows: np.ndarray, terminals: bool = True) -> tuple[np.ndarray, int]:
        """Those of the rows from which `length` steps stay inside a segment, and the length: where no segment is that
        long, that of the longest. terminals: such a window may hold the step that ends a game."""
        ahead = np.zeros(len(self.ahead), np.int64)
        ahead[rows] = self.ahead.cpu().numpy()[rows]
        if not terminals:
            last = self.terminal.cpu().numpy()[np.minimum(np.arange(len(ahead)) + ahead - 1, len(ahead) - 1)]
            ahead = np.where(ahead > 0, ahead - last, 0)
        length = min(length, int(ahead.max(initial=0)))
        return (np.flatnonzero(ahead >= length) if length else np.zeros(0, np.int64)), length

    # --- saving

    def state(self) -> dict[str, Tensor]:
        used = int(self.filled.max(initial=0))
        frames = self.frames.view(self.lanes, self.rows, *self.frames.shape[1:])[:, :used]
        about = np.array([self.next_segment, *self.filled], np.int64)
        columns = {k: torch.from_numpy(v[:, :used].copy()) for k, v in self.host.items()}
        return columns | {"frames": frames.contiguous(), "about": torch.from_numpy(about)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        used = state["frames"].shape[1]
        self.frames.view(self.lanes, self.rows, *self.frames.shape[1:])[:, :used].copy_(state["frames"])
        for name, column in self.host.items():
            column[:, :used] = state[name].cpu().numpy()
        self.next_segment, *filled = state["about"].tolist()
        self.filled[:] = self.committed[:] = filled
        self.commit()
