"""Report of MBARC: a film of dream and reality, the reward model's predictions, and the real steps and time spent."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from replaylab import charts
from replaylab.page import Html, count, duration, grid, note, number, table
from replaylab.results import Run, dictionary, finite, or_nan
from replaylab.sections.common import percent, readable

LARGEST_FILM = 20 << 20
REWARDS = ("-1", "0", "+1")
HELD_OUT = "held-out episodes, which never train world or reward model"
UNCORRECTED = " The table has its answers before the correction for the draws; dreams, film and play correct them."
FRESH = "the steps that an epoch collected, before anything was trained on them"


def sections(run: Run) -> list[tuple[str, Html]]:
    parts = [("Dream and reality", _dream), ("Reward model", _reward), ("Real steps and time", _ledger)]
    return [(title, body) for title, show in parts if (body := readable(show, run))]


def _epochs(run: Run, phase: str) -> list[dict[str, Any]]:
    listed = dictionary(dictionary(run.info.get("findings")).get(phase)).get("epochs")
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _judged(run: Run, phase: str) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Which steps -> [(epoch, found), ...]: measured at the end of the phase, or on fresh steps before training."""
    after, before = enumerate(_epochs(run, phase), 1), enumerate(_epochs(run, "world"), 1)
    found = {
        HELD_OUT: [(i, e["held_out"]) for i, e in after if "episodes" in (e.get("held_out") or {})],
        FRESH: [(i, e["fresh"]) for i, e in before if isinstance(e.get("fresh"), dict)],
    }
    return {steps: measured for steps, measured in found.items() if measured}


# --- the film


def _dream(run: Run) -> Html:
    shown = [
        charts.lines(
            "Next frames predicted right",
            [
                _curve("all pixels", measured, "pixels", 0),
                _curve("pixels that changed", measured, "changed_pixels", 1),
                _curve("whole frames", measured, "frames", 2),
            ],
            x_label="epoch",
            caption=f"Share, on {steps}. {_repeated(measured[-1][1])}",
        )
        for steps, measured in _judged(run, "world").items()
    ]
    film = _film(run)
    return Html(film + (grid(shown) if shown else "")) if film or shown else Html("")


def _repeated(last: dict[str, Any]) -> str:
    """What the share of right pixels is worth: most of them never change."""
    told, repeated = (f"{100 * or_nan(last.get(key)):.2f} %" for key in ("pixels", "still_pixels"))
    return f"In the last epoch the model has {told} of all pixels right, repeating the last frame {repeated}."


def _film(run: Run) -> Html:
    path = run.path / "media" / "dream.gif"
    if not path.is_file() or path.stat().st_size > LARGEST_FILM:
        return Html("")
    data = path.read_bytes()
    if not data.startswith((b"GIF87a", b"GIF89a")):
        return Html("")
    source = f"data:image/gif;base64,{base64.b64encode(data).decode()}"
    phases = map(dictionary, dictionary(run.info.get("findings")).values())
    held = any(found.get("filmed") == "held out" for found in phases)
    return Html(
        f'<figure><img alt="reality left, dream right" src="{source}">'
        "<figcaption>Left what happened, right what the world model dreams from the same four frames with the same "
        f"actions, in {'an episode that was held out' if held else 'a stretch that it was trained on'}. A green bar: a "
        "reward; a red one: a negative reward.</figcaption></figure>"
    )


def _curve(name: str, measured: list[tuple[int, dict[str, Any]]], key: str, style: int) -> charts.Series:
    values = [or_nan(found.get(key)) for _, found in measured]
    return charts.Series(name, np.array([float(i) for i, _ in measured]), np.array(values), style=style)


# --- rewards


def _reward(run: Run) -> Html:
    phase = "world" if run.config.get("strategy") == "online" else "reward"
    judged = _judged(run, phase)
    none = "No episode was held out: these models are judged by fresh steps alone, the last ones not at all."
    alone = judged and HELD_OUT not in judged
    return Html("".join(_rewards(run, *part) for part in judged.items()) + (note(none) if alone else ""))


def _rewards(run: Run, steps: str, measured: list[tuple[int, dict[str, Any]]]) -> Html:
    epoch, last = measured[-1]
    matrix = [[int(cell) for cell in row] for row in last["confusion"]]
    head = ["Reward", *(f"predicted {name}" for name in REWARDS), "Recall", "Precision"]
    rows = []
    for i, name in enumerate(REWARDS):
        told, true = sum(row[i] for row in matrix), sum(matrix[i])
        rates = [percent(matrix[i][i] / whole if whole else None) for whole in (true, told)]
        rows.append([name, *(f"{cell:,}" for cell in matrix[i]), *rates])
    strategy = run.config.get("strategy")
    corrected = strategy != "online" and run.config.get("dream_rewards") == "expected"
    corrected &= run.config.get("fidelity") == "improved"
    episodes = f" of {count(len(last['episodes']), 'episode')}" if "episodes" in last else ""
    about = note(
        f"Strategy {strategy}, epoch {epoch}: {count(int(last['steps']), 'frame')}{episodes}. "
        f"Measured on {steps}. What a dream would have paid for them explains {percent(last.get('explained'))} of the "
        f"variance of the real rewards; below 0 %, always paying the mean reward would be nearer."
        f"{UNCORRECTED if corrected else ''}"
    )
    paid = charts.lines("Rewards explained", [_curve("", measured, "explained", 0)], x_label="epoch")
    curves = []
    for sign, name in (("+1", "positive"), ("-1", "negative")):
        of_class = [(i, found["classes"][name]) for i, found in measured]
        for kind in ("recall", "precision"):
            curve = _curve("", of_class, kind, 0)
            if np.isfinite(curve.y).any():
                curves.append(charts.lines(f"Steps with reward {sign}: {kind}", [curve], x_label="epoch"))
    return Html(table(head, rows) + about + (grid([paid, *curves]) if curves else ""))


# --- real steps, seconds


def _ledger(run: Run) -> Html:
    world, reward, policy = (_epochs(run, phase) for phase in ("world", "reward", "policy"))
    if not world:
        return Html("")
    rows = []
    for i, entry in enumerate(world):
        ledger, collected = entry["ledger"], entry["collected"]
        seconds = [duration(_seconds(phase, i)) for phase in (world, reward, policy)]
        mean = collected.get("mean_return")
        games = f"{number(mean)} ({collected.get('episodes')})" if mean is not None else "–"
        rows.append([i + 1, number(ledger["recorded"]), number(ledger["frames"]), games, *seconds])
    last = world[-1]["ledger"]
    over = " That is over the budget, as --no-strict-budget allows." if last["frames"] > 4 * last["budget"] else ""
    total = sum(filter(None, (_seconds(phase, i) for phase in (world, reward, policy) for i in range(len(phase)))))
    head = [
        "Epoch",
        "Real steps so far",
        "Real frames",
        "Mean return (games)",
        "World model",
        "Reward model",
        "Policy",
    ]
    return Html(
        _played(world)
        + table(head, rows)
        + note(
            f"{number(last['recorded'])} real steps were recorded, of {number(last['budget'])} allowed; "
            f"{count(int(last['resets']), 'reset')} cost {number(last['reset_frames'])} frames more.{over} Returns are "
            "the game's own score, of games that ended while steps were collected. The world model's time includes "
            f"collecting. {duration(total)} in all phases."
        )
    )


def _played(world: list[dict[str, Any]]) -> Html:
    """The learning curve: the policy's score in the real game, over real steps."""
    ended = [e for e in world if finite(e["collected"].get("mean_return")) is not None]
    if len(ended) < 2:
        return Html("")
    steps, means = (np.array([float(x) for x in xs]) for xs in zip(*(
        (e["ledger"]["recorded"], e["collected"]["mean_return"]) for e in ended
    ), strict=True))  # fmt: skip
    games = sum(int(e["collected"]["episodes"]) for e in ended)
    caption = f"Mean return of the games that ended while an epoch collected, {count(games, 'game')} in all."
    curve = charts.Series("", steps, means)
    return grid([charts.lines("Real play", [curve], x_label="real steps", y_label="game score", caption=caption)])


def _seconds(epochs: list[dict[str, Any]], i: int) -> float | None:
    return finite(epochs[i].get("seconds")) if i < len(epochs) else None
