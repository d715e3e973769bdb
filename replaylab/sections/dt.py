"""Report of the Decision Transformer: returns asked for, and returns achieved."""

from __future__ import annotations

import numpy as np

from replaylab import charts
from replaylab.page import Html, count, grid, note, number, table
from replaylab.results import Evaluations, Run, dictionary, finite


def sections(run: Run) -> list[tuple[str, Html]]:
    found: dict[tuple[str, str], dict[float, Evaluations]] = {}  # by environment and the other settings
    for group in run.evaluations:
        target = finite(group.settings.get("target"))
        if target is not None:
            others = ", ".join(f"{name} {value}" for name, value in group.settings.items() if name != "target")
            found.setdefault((group.env, others), {})[target] = group
    pictures = [_sweep(run, *key, groups) for key, groups in found.items() if len(groups) > 1]
    if not pictures:
        return []
    about = note(
        "A return-conditioned policy follows what it is asked for where the data shows how. Beyond the data's best "
        "return nothing holds it to the promise."
    )
    return [("Asked and achieved return", Html("".join(pictures) + about))]


def _sweep(run: Run, env: str, others: str, groups: dict[float, Evaluations]) -> Html:
    asked = np.array(sorted(groups))
    last = [[line["returns"] for _, line in groups[a].last().values()] for a in asked]  # [target][seed][episode]
    seeds = [[float(np.mean(returns)) for returns in by_seed] for by_seed in last]
    mean, low, high = (np.array([f(s) for s in seeds]) for f in (np.mean, np.min, np.max))
    ends = np.array([asked[0], asked[-1]])
    series = [charts.Series("achieved", asked, mean, low, high, 0), charts.Series("as asked", ends, ends, style=1)]
    best = finite(dictionary(dictionary(run.info.get("data")).get("return")).get("max"))
    if best is not None:
        series.append(charts.Series("best in the data", ends, np.full(2, best), style=2))
    episodes = max(len(returns) for by_seed in last for returns in by_seed)
    caption = f"Mean over {count(max(map(len, last)), 'seed')}, {count(episodes, 'episode')} a seed and target; "
    caption += "band: lowest to highest seed."
    if env.startswith("atari/"):
        caption += " Asked for in clipped rewards, as the data has them; achieved in the game's own."
    title = f"{env}, {others}" if others else env
    picture = charts.lines(title, series, x_label="return asked for", y_label="return achieved", caption=caption)
    rows = [[number(a), number(m), number(lo), number(hi)] for a, m, lo, hi in zip(asked, mean, low, high, strict=True)]
    return Html(grid([picture]) + table(["Asked", "Achieved", "Lowest seed", "Highest seed"], rows))
