"""One progress line: what is being done, how far, how fast, and the time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


class Progress:
    """A bar that redraws itself on a terminal; elsewhere, a line after five seconds and then one a minute."""

    def __init__(
        self,
        label: str,
        total: int,
        done: int = 0,
        unit: str = "steps",
        file: TextIO | None = None,
        after: float | None = None,  # seconds of what comes after this, where that is known
    ):
        self.label, self.total, self.done, self.unit, self.after = label, total, done, unit, after
        self.file = file or sys.stderr
        self.live = self.file.isatty()
        self.notes = "starting"
        self.drawn = time.monotonic()
        self.first: tuple[float, int] | None = None  # when the first update came, and what was done then
        self.every = 0.2 if self.live else 5.0  # seconds
        if self.live:
            self._draw()

    def update(self, done: int, **numbers: float) -> None:
        self.done, now = done, time.monotonic()
        if self.first is None:
            self.first, self.notes = (now, done), ""
        if numbers:
            self.notes = "  ".join(f"{name} {v if isinstance(v, int) else f'{v:.4g}'}" for name, v in numbers.items())
        if now - self.drawn >= self.every:
            self.drawn, self.every = now, 0.2 if self.live else 60.0
            self._draw()

    def _line(self) -> str:
        share = self.done / self.total if self.total else 1.0
        bar = f"[{'#' * int(20 * share):20s}] " if self.live else ""
        return f"{self.label} {bar}{self.done}/{self.total} {self.unit}  {self._pace()}{self.notes}"

    def _pace(self) -> str:
        """The rate and the time left, once there are two updates: the first one also compiles, collects or loads."""
        began, before = self.first or (0.0, self.done)
        spent = time.monotonic() - began
        if self.done <= before or spent <= 0:
            return ""
        rate = (self.done - before) / spent
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        left = (self.total - self.done) / rate
        whole = "" if self.after is None else f", {duration(left + self.after)} to the end"
        return f"{speed}/s  {duration(left)} left{whole}  "

    def _draw(self) -> None:
        print(f"\r\033[K{self._line()}" if self.live else self._line(), end="" if self.live else "\n", file=self.file)
        self.file.flush()

    def say(self, text: str) -> None:
        """Print a line of its own above the bar."""
        print(f"\r\033[K{text}" if self.live else text, file=self.file, flush=True)

    def erase(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=self.file, flush=True)

    def close(self) -> None:
        if self.live:
            self._draw()
            print(file=self.file, flush=True)
