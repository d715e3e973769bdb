"""Charts without dependencies: inline SVG that takes its colours from the page's style sheet.

Each chart is a <figure>: title, SVG that fills its width, legend, caption. Sizes are chosen so that text stays
readable on a phone 360 pixels wide. Hovering over a bar or a point tells its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaylab.page import Html, escape, number, plain

SIZE = (360, 210)
SMALL = (180, 112)
SQUARE = (280, 278)  # with axes, the plot itself is a square
COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # a second cue beside colour
SHADES = 8
BINS = 40  # of a histogram, at most
LETTER = 6.4  # pixels that a digit of a label needs at most
HUGE, TINY = 1e100, 1e-100  # values beyond are not drawn, spans below are none: arithmetic would over- or underflow


# --- axes


@dataclass(frozen=True)
class Axis:
    """Data from low to high on pixels from start to end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    only: float | None = None  # the one value that there is to tell, if there is but one
    whole: bool = False  # all values are whole numbers, such as epochs

    def at(self, value: Any) -> Any:
        value = np.log10(value) if self.log else np.asarray(value, np.float64)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """(pixel, label) at round numbers."""
        if self.only is not None:
            return [(float(self.at(self.only)), number(self.only))]
        span = self.high - self.low
        if self.log:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            shown = [10.0**p for p in powers[:: max(1, math.ceil(len(powers) / count))]]
            if len(shown) < 2:  # less than two powers in sight
                shown = [m * 10.0**p for p in range(math.floor(self.low), math.ceil(self.high)) for m in (1, 2, 5)]
            return [(float(self.at(v)), number(v)) for v in shown if self.low <= math.log10(v) <= self.high]
        power = max(10.0 ** math.floor(math.log10(span / count)), 1.0 if self.whole else 0.0)
        steps = [m * power for m in (1, 2, 2.5, 5, 10) if not self.whole or m * power % 1 == 0]
        step = next(step for step in steps if step * count >= span * (1 - 1e-9))
        values = np.arange(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1) * step
        return [(float(self.at(v)), label) for v, label in zip(values, _tick_labels(values, step), strict=True)]


def _tick_labels(values: np.ndarray, step: float) -> list[str]:
    """One unit and as many decimals as the step needs."""
    largest = np.abs(values).max(initial=0)
    if largest >= 1e13 or largest < 1e-3:
        return [number(v) if abs(v) > step / 1e3 else "0" for v in values]
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    scale, suffix = next(((s, u) for above, s, u in units if largest >= above), (1.0, ""))
    decimals = next(d for d in range(16) if d == 15 or abs(round(step / scale, d) - step / scale) < 1e-6 * step / scale)
    return [plain(v / scale, decimals) + (suffix if abs(v) > step / 1e3 else "") for v in values]


def _flat(low: float, high: float) -> bool:
    """Whether a range is too narrow to divide."""
    return high - low <= max(1e-9 * max(abs(low), abs(high)), TINY)


def _axis(values: Any, start: float, end: float, *, pad: float = 0.05, log: bool = False, zero: bool = False) -> Axis:
    values = np.asarray(values, np.float64).ravel()
    values = values[np.abs(values) < HUGE]
    values = values[values > TINY] if log else values
    only = float(values[0]) if len(values) and _flat(values.min(), values.max()) and not zero else None
    values = np.log10(values) if log else values
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if _flat(low, high):
        room = 0.1 * abs(low) if abs(low) > TINY else 0.5
        return Axis(low - room, high + room, start, end, log, only)
    room = pad * (high - low)
    low, high = low - (room if low or not zero else 0), high + (room if high or not zero else 0)
    return Axis(low, high, start, end, log, whole=not log and bool((values % 1 == 0).all()))


def _up_ticks(y: Axis) -> list[tuple[float, str]]:
    return y.ticks(max(2, round((y.start - y.end) / 34)))


def _tick(at: float, y: float, label: str, width: int) -> str:
    """A label under its place on a horizontal axis, moved as far as the picture's edge asks."""
    half = LETTER * len(label) / 2
    at = min(max(at, half + 1), width - half - 1)
    return f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="middle">{label}</text>'


def _frame(x: Axis, y: Axis, x_label: str, y_label: str, size: tuple[int, int], count: int = 5) -> str:
    """Grid, tick labels and axis names."""
    parts = [f'<text class="name" x="2" y="11">{escape(y_label)}</text>']
    for at, label in _up_ticks(y):
        parts.append(f'<path class="grid-line" d="M{x.start:.1f} {at:.1f}H{x.end:.1f}"/>')
        parts.append(f'<text x="{x.start - 5:.1f}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    for at, label in x.ticks(count):
        parts.append(_tick(at, y.start + 14, label, size[0]))
    parts.append(f'<path class="axis" d="M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"/>')
    parts.append(f'<text class="name" x="{x.end:.1f}" y="{size[1] - 3}" text-anchor="end">{escape(x_label)}</text>')
    return "".join(parts)


def _heights(size: tuple[int, int], x_label: str, y_label: str) -> tuple[float, float]:
    """Pixels of the plot's bottom and top."""
    return size[1] - (32 if x_label else 18), 22 if y_label else 8


def _widths(size: tuple[int, int], y: Axis) -> tuple[float, float]:
    """Pixels of the plot's left and right: the labels of the vertical axis must fit beside it."""
    longest = max((len(label) for _, label in _up_ticks(y)), default=0)
    return max(44, 9 + LETTER * longest), size[0] - 12


def figure(title: str, body: str, size: tuple[int, int], *, caption: str = "", legend: str = "") -> Html:
    width, height = size
    svg = f'<svg viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title>{body}</svg>'
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return Html(f"<figure><h3>{escape(title)}</h3>{svg}{legend}{below}</figure>")


def nothing(message: str) -> Html:
    """An honest empty state."""
    return Html(f'<p class="nothing">{escape(message)}</p>')


# --- charts


@dataclass(frozen=True)
class Series:
    name: str  # empty: the only one, which needs no legend
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None  # a band around y
    high: np.ndarray | None = None
    style: int = 0  # which colour and dash: the same thing looks the same in every chart

    @property
    def colour(self) -> str:
        return f"c{self.style % COLOURS}"

    @property
    def dash(self) -> str:
        return DASHES[self.style % len(DASHES)]


def lines(
    title: str, series: Sequence[Series], *, x_label: str = "", y_label: str = "", caption: str = "", log: bool = False
) -> Html:
    """Curves with bands. Values that cannot be drawn (NaN, infinity; zero and below on a log axis) leave a gap."""
    shown = [v for s in series for v in (s.y, s.low, s.high) if v is not None]
    y = _axis(np.concatenate(shown), *_heights(SIZE, x_label, y_label), log=log)
    x = _axis(np.concatenate([s.x for s in series]), *_widths(SIZE, y), pad=0.02)
    parts = [_frame(x, y, x_label, y_label, SIZE)]
    parts += [_band(s, x, y) for s in series]  # bands first, so that no band hides a line
    parts += [_line(s, x, y) for s in series]
    legend = "".join(
        f'<li><svg viewBox="0 0 24 8" aria-hidden="true"><path class="line {s.colour}" '
        f'stroke-dasharray="{s.dash}" d="M1 4H23"/></svg>{escape(s.name)}</li>'
        for s in series
        if s.name
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    return figure(title, "".join(parts), SIZE, caption=caption, legend=legend)


def _pieces(s: Series, columns: Sequence[np.ndarray], y: Axis) -> list[np.ndarray]:
    """Runs of indices at which every column can be drawn."""
    good = np.ones(len(s.x), bool)
    for column in columns:
        good &= (np.abs(column) < HUGE) & ((column > TINY) if y.log else True)
    edges = np.flatnonzero(np.diff(good.astype(np.int8))) + 1
    return [run for run in np.split(np.arange(len(s.x)), edges) if len(run) and good[run[0]]]


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _line(s: Series, x: Axis, y: Axis) -> str:
    parts, points = [], []
    for run in _pieces(s, [s.x, s.y], y):
        path = _points(x.at(s.x[run]), y.at(s.y[run]))
        parts.append(f'<path class="line {s.colour}" stroke-dasharray="{s.dash}" d="M{path}"/>')
        points += list(run)
    for i in points if len(s.x) <= 24 else []:
        tip = f"{escape(s.name)} {number(s.y[i])} at {number(s.x[i])}"
        at = f'cx="{x.at(s.x[i]):.1f}" cy="{y.at(s.y[i]):.1f}"'
        parts.append(f'<circle class="{s.colour}" {at} r="2.4"><title>{tip}</title></circle>')
    return "".join(parts)


def _band(s: Series, x: Axis, y: Axis) -> str:
    if s.low is None or s.high is None:
        return ""
    parts = []
    for run in _pieces(s, [s.x, s.low, s.high], y):
        there, low, high = x.at(s.x[run]), y.at(s.low[run]), y.at(s.high[run])
        if len(run) == 1:  # a lone point has no width: draw its interval as a line
            parts.append(f'<path class="line {s.colour}" d="M{there[0]:.1f} {low[0]:.1f}V{high[0]:.1f}"/>')
        else:
            outline = f"{_points(there, low)} {_points(there[::-1], high[::-1])}"
            parts.append(f'<path class="band {s.colour}" d="M{outline}z"/>')
    return "".join(parts)


def bin_values(values: Any, within: tuple[float, float] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(counts, edges) of the values that can be drawn; whole numbers get whole bins where they fit.

    `within` widens the range, so that empty room shows as such.
    """
    values = np.asarray(values, np.float64).ravel()
    values = values[np.abs(values) < HUGE]
    if not len(values):
        return np.zeros(1, np.int64), np.array([0.0, 1.0])
    low, high = values.min(), values.max()
    if within:
        low, high = min(low, within[0]), max(high, within[1])
    elif high - low < BINS and abs(low) < 1e9 and (values == np.round(values)).all():
        return np.histogram(values, np.arange(low - 0.5, high + 1))
    if _flat(low, high):
        room = 0.05 * abs(low) if abs(low) > TINY else 0.5
        return np.histogram(values, 1, (low - room, high + room))
    if within:
        return np.histogram(values, BINS, (low, high))
    spread = np.subtract(*np.quantile(values, [0.75, 0.25]))  # Freedman and Diaconis
    wanted = (high - low) / (2 * spread / len(values) ** (1 / 3)) if spread > 0 else BINS
    fewest = min(24, 5 + len(values) // 10)
    return np.histogram(values, int(min(max(wanted, fewest), BINS)))


def histogram(
    title: str,
    counts: Any,
    edges: Any,
    *,
    x_label: str = "",
    y_label: str = "",
    caption: str = "",
    size: tuple[int, int] = SIZE,
) -> Html:
    counts, edges = np.asarray(counts, np.float64), np.asarray(edges, np.float64)
    y = _axis([0, max(counts.max(initial=0), 1e-9)], *_heights(size, x_label, y_label), zero=True)
    x = _axis(edges, *_widths(size, y), pad=0.0)
    bottom = y.start
    gap = 0.5 if len(counts) > 1 else 0
    parts = [_frame(x, y, x_label, y_label, size, 5 if size[0] > 200 else 3)]
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            a, b, h = x.at(low) + gap, x.at(high) - gap, y.at(count)
            h = min(h, bottom - 1)  # the rarest value still shows
            parts.append(
                f'<path class="bar c0" d="M{a:.1f} {bottom:.1f}V{h:.1f}H{max(b, a + 0.5):.1f}V{bottom:.1f}z">'
                f"<title>{number(low)} to {number(high)}: {number(count)}</title></path>"
            )
    return figure(title, "".join(parts), size, caption=caption)


def bars(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
    *,
    styles: Sequence[int] | None = None,
    x_label: str = "",
    caption: str = "",
) -> Html:
    """Horizontal bars from zero, each under its own label so that long names fit; a whisker from low to high."""
    low, high = ([math.nan if v is None else v for v in (ends or [None] * len(values))] for ends in (low, high))
    row, width = 36, SIZE[0]
    height = row * len(values) + 34
    x = _axis([*values, *low, *high], 8, width - 14, zero=True)
    parts = []
    for at, label in x.ticks():
        parts.append(f'<path class="grid-line" d="M{at:.1f} 4V{height - 32}"/>')
        parts.append(_tick(at, height - 19, label, width))
    parts.append(f'<text class="name" x="{width - 12}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>')
    for i, (label, value, a, b) in enumerate(zip(labels, values, low, high, strict=True)):
        y = i * row
        parts.append(f'<text class="label" x="8" y="{y + 14}">{escape(_shorten(str(label), 50))}</text>')
        if abs(value) < HUGE:
            colour = f"c{(styles[i] if styles else i) % COLOURS}"
            path = f"M{x.at(0):.1f} {y + 19}H{x.at(value):.1f}v13H{x.at(0):.1f}z"
            parts.append(f'<path class="bar {colour}" d="{path}"><title>{number(value)}</title></path>')
        if abs(a) < HUGE and abs(b) < HUGE:
            caps = "".join(f"M{x.at(v):.1f} {y + 21}v9" for v in (a, b))
            parts.append(f'<path class="whisker" d="M{x.at(a):.1f} {y + 25.5}H{x.at(b):.1f}{caps}"/>')
    parts.append(f'<path class="axis" d="M{x.at(0):.1f} 4V{height - 32}"/>')
    return figure(title, "".join(parts), (width, height), caption=caption)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def density(
    title: str,
    x: np.ndarray,
    y: np.ndarray,
    colour: np.ndarray,
    labels: tuple[str, str, str] = ("", "", ""),
    *,
    caption: str = "",
    bins: int = 44,
    within: tuple[float, float] | None = None,
    scale: tuple[float, float] | None = None,
) -> Html:
    """Points as a grid of cells: the more points the more opaque, coloured by the mean of `colour` in the cell.

    within: both axes' range, in a square, and scale: the colours' range, for pictures that are to be compared.
    """
    good = (np.abs(x) < HUGE) & (np.abs(y) < HUGE) & (np.abs(colour) < HUGE)
    x, y, colour = x[good], y[good], colour[good]
    if not len(x):
        return nothing(f"{title}: no finite values to show")
    x_label, y_label, colour_label = labels
    size = SQUARE if within else (SIZE[0], 300)
    up = _axis(y if within is None else within, *_heights(size, x_label, y_label), pad=0.02)
    across = _axis(x if within is None else within, *_widths(size, up), pad=0.02)
    left, right, bottom, top = across.start, across.end, up.start, up.end
    edges = [np.linspace(a.low, a.high, bins + 1) for a in (across, up)]
    counts = np.histogram2d(x, y, edges)[0]
    means = np.histogram2d(x, y, edges, weights=colour)[0] / np.maximum(counts, 1)
    low, high = np.quantile(means[counts > 0], [0.02, 0.98]) if scale is None else scale
    shade = np.clip((means - low) / (high - low) if high > low else np.zeros_like(means), 0, 0.999)
    shade = (shade * SHADES).astype(int)
    opacity = np.ceil(4 * np.log1p(counts) / np.log1p(counts.max())).astype(int)  # 0 is empty, 4 is the fullest
    parts = [_frame(across, up, x_label, y_label, size)]
    w, h = (right - left) / bins, (bottom - top) / bins
    for s, o in sorted({(s, o) for s, o in zip(shade.flat, opacity.flat, strict=True) if o}):
        cells = np.argwhere((shade == s) & (opacity == o))
        path = "".join(f"M{left + i * w:.1f} {bottom - j * h:.1f}v{-h:.1f}h{w:.1f}v{h:.1f}z" for i, j in cells)
        parts.append(f'<path class="cell v{s}" opacity="{0.25 + 0.1875 * o:.2f}" d="{path}"/>')
    steps = "".join(f'<i class="v{s}"></i>' for s in range(SHADES))
    legend = f'<p class="scale">{escape(colour_label)} {number(low)} <span>{steps}</span> {number(high)}</p>'
    return figure(title, "".join(parts), size, caption=caption, legend=legend)
