"""Data damaged on purpose, to test robustness.

`sparsify` removes rows from a region of the data (GORMPO's recipes, see `docs/damage.md`); `corrupt` makes a labelled
test set for density models: clean episodes, then the same ones shifted. Both record what they did in `meta["damage"]`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from replaylab.data.episodes import MAX_NOTES, Episodes, concatenate
from replaylab.errors import DataError, UsageError, nearest

# default of `pca-quadrant`: rows whose observation has a first component below this are in the region
THRESHOLDS = {"hopper": -5.0, "halfcheetah": -20.0, "walker2d": -10.0}


def sparsify(episodes: Episodes, recipe: str, *, seed: int = 0, **params: Any) -> Episodes:
    """Remove rows by one of RECIPES; `params` are its settings.

    An episode ends, truncated, where rows were removed; its final observation is the one that followed in the log.
    """
    if recipe not in RECIPES:
        raise UsageError(f"unknown recipe '{recipe}'{nearest(recipe, RECIPES)}")
    choose = RECIPES[recipe]
    known = list(inspect.signature(choose).parameters)[2:]
    for name in params:
        if name not in known:
            raise UsageError(f"{recipe}: unknown parameter '{name}'{nearest(name, known)}")
    _check_continuous(episodes, recipe)
    check_seed(seed)
    inside, removed, used = choose(episodes, np.random.default_rng(seed), **params)
    if removed.all():
        raise UsageError(f"{recipe} removes all {len(episodes)} rows: make the region smaller")
    record = {"recipe": recipe, "seed": seed, "params": used, "rows": len(episodes)}
    record |= {"in_region": int(inside.sum()), "removed": int(removed.sum())}
    found = []
    if not removed.any():  # say it now: the result is undamaged data
        found = [f"{recipe} removed nothing: {inside.sum()} of {len(episodes)} rows lie in its region"]
        print(f"note: {found[0]}", file=sys.stderr)
    return _recorded(keep_rows(episodes, ~removed), record, found)


def corrupt(
    episodes: Episodes, distance: float, *, seed: int = 0, episodes_count: int = 10, scale: float = 0.1
) -> Episodes:
    """`episodes_count` random episodes unchanged, then the same ones with N(distance, scale²) added to every entry of
    observations and actions, and the actions clipped to their bounds. `extras["ood"]` is true on the shifted rows.

    Final observations are shifted too, so that models of (observation, action) and of (next observation, action) can
    both be tested.
    """
    _check_continuous(episodes, "corrupt")
    if not np.isfinite(distance) or not 0 <= scale < np.inf:
        raise UsageError(f"distance must be a number and scale one from 0 up, not {distance} and {scale}")
    if not 1 <= episodes_count <= episodes.num_episodes:
        raise UsageError(f"cannot pick {episodes_count} episodes: the data has {episodes.num_episodes}")
    check_seed(seed)
    rng = np.random.default_rng(seed)
    picked = np.sort(rng.choice(episodes.num_episodes, episodes_count, replace=False))
    clean = episodes.select(picked)

    def shifted(values: np.ndarray) -> np.ndarray:
        return (values + rng.normal(distance, scale, values.shape)).astype(values.dtype)

    moved = replace(
        clean,
        observations=shifted(clean.observations),
        final_observations=shifted(clean.final_observations),
        actions=np.clip(shifted(clean.actions), *episodes.action_bounds).astype(clean.actions.dtype),
    )
    halves = [
        replace(half, extras=half.extras | {"ood": np.full(len(half), label)})
        for half, label in ((clean, False), (moved, True))
    ]
    both = replace(concatenate(halves), meta=episodes.meta, attachments=episodes.attachments)
    record = {"recipe": "corrupt", "seed": seed, "params": {"distance": distance, "scale": scale}}
    return _recorded(both, record | {"episodes": picked.tolist(), "rows": len(clean)}, [])


def check_seed(seed: int) -> None:
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise UsageError(f"seed must be at least 0, not {seed!r}")


def keep_rows(episodes: Episodes, keep: np.ndarray) -> Episodes:
    """The rows where `keep` (rows,) is true. An episode that loses rows in the middle falls into several: they
    are truncated, and their final observation is the one that followed in the full data."""
    rows = np.flatnonzero(keep)
    ends = (episodes.terminated | episodes.truncated)[rows]
    broken = np.append(np.diff(rows) > 1, rows[-1] < len(episodes) - 1) & ~ends  # the next row was removed
    last = np.flatnonzero(ends | broken)
    whole = ends[last]
    known = ~whole | episodes.final_known[episodes.episode_ids[rows[last]]]
    return replace(
        episodes,
        observations=episodes.observations[rows],
        actions=episodes.actions[rows],
        rewards=episodes.rewards[rows],
        terminated=episodes.terminated[rows],
        truncated=episodes.truncated[rows] | broken,
        offsets=np.concatenate([[0], last + 1]),
        final_observations=episodes.next_observations(rows[last]),
        final_known=known,
        extras={name: column[rows] for name, column in episodes.extras.items()},
    )


# --- recipes: (episodes, rng, settings) -> masks of the rows in the region and of those to remove, all settings used

Choice = tuple[np.ndarray, np.ndarray, dict[str, Any]]


def pca_quadrant(
    episodes: Episodes,
    rng: np.random.Generator,
    threshold: float | None = None,
    action_threshold: float = 0.0,
    keep: float = 0.01,
) -> Choice:
    """Rows with a first principal component below `threshold` in observations and below `action_threshold` in actions
    are kept with probability `keep`; all others stay."""
    _check_share("keep", keep)
    if not np.isfinite(episodes.observations).all() or not np.isfinite(episodes.actions).all():
        raise DataError("pca-quadrant needs finite numbers: `replaylab data info` tells where there are none")
    if threshold is None:
        threshold = _default_threshold(episodes)
    along_obs, obs_axis = first_component(episodes.observations)
    along_act, act_axis = first_component(episodes.actions)
    inside = (along_obs < threshold) & (along_act < action_threshold)
    removed = inside & (rng.random(len(episodes)) >= keep)
    used = {"threshold": float(threshold), "action_threshold": float(action_threshold), "keep": float(keep)}
    return inside, removed, used | {"observation_axis": obs_axis.tolist(), "action_axis": act_axis.tolist()}


def reward_action_box(
    episodes: Episodes,
    rng: np.random.Generator,
    drop: float = 0.75,
    reward: Sequence[float] = (0.5, 1.0),
    action_norm: Sequence[float] = (0.5, 1.0),
    absolute: bool = False,
) -> Choice:
    """Remove the share `drop` of the rows whose reward and action norm lie within the given ranges (inclusive). Ranges
    are quantiles of the data or, with `absolute`, values."""
    _check_share("drop", drop)
    inside = np.ones(len(episodes), bool)
    used: dict[str, Any] = {"drop": float(drop), "absolute": bool(absolute)}
    norms = np.linalg.norm(episodes.actions, axis=1)
    for name, ends, values in (("reward", reward, episodes.rewards), ("action_norm", action_norm, norms)):
        low, high = _range(name, ends, absolute)
        used[name] = [low, high]
        if not absolute:
            low, high = np.quantile(values, [low, high]).astype(values.dtype)  # else rounding may exclude extremes
            used[f"{name}_box"] = [float(low), float(high)]
        inside &= (values >= low) & (values <= high)
    removed = np.zeros(len(episodes), bool)
    rows = np.flatnonzero(inside)
    removed[rng.choice(rows, round(drop * len(rows)), replace=False)] = True
    return inside, removed, used


RECIPES: dict[str, Callable[..., Choice]] = {"pca-quadrant": pca_quadrant, "reward-action-box": reward_action_box}


def first_component(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows,) coordinate of the centred rows along their direction of largest variance, and that direction (dims,).

    The sign of a principal component is arbitrary: here its largest entry (the first of equal ones) is positive.
    """
    centred = values - values.mean(0, dtype=np.float64)
    axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]  # eigenvalues ascend
    largest = np.flatnonzero(np.isclose(np.abs(axis), np.abs(axis).max()))[0]  # equal entries may differ by rounding
    axis = axis * np.sign(axis[largest])
    return centred @ axis, axis


# --- helpers


def _recorded(episodes: Episodes, record: dict[str, Any], notes: list[str]) -> Episodes:
    meta = episodes.meta
    kept = [*meta.get("notes", []), *notes][:MAX_NOTES]
    return replace(episodes, meta=meta | {"damage": [*meta.get("damage", []), record], "notes": kept})


def _check_continuous(episodes: Episodes, what: str) -> None:
    for name, column in (("observations", episodes.observations), ("actions", episodes.actions)):
        if column.ndim != 2 or column.dtype.kind != "f":
            raise UsageError(f"{what} needs vectors of real numbers; {name} are {column.dtype} {column.shape[1:]}")


def _check_share(name: str, share: float) -> None:
    if not isinstance(share, Real) or not 0 <= share <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {share}")


def _range(name: str, ends: Sequence[float], absolute: bool) -> tuple[float, float]:
    pair = np.ndim(ends) == 1 and len(ends) == 2 and all(isinstance(end, Real) for end in ends)
    if not pair or not ends[0] <= ends[1] or not (absolute or 0 <= ends[0] <= ends[1] <= 1):
        what = "two rising numbers" if absolute else "two rising quantiles from 0 to 1"
        raise UsageError(f"{name} must be {what}, not {ends}")
    return float(ends[0]), float(ends[1])


def _default_threshold(episodes: Episodes) -> float:
    words = re.split(r"[-_/]", (episodes.env_id or "").lower())
    for family, threshold in THRESHOLDS.items():
        if family in words:
            return threshold
    what = f"'{episodes.env_id}'" if episodes.env_id else "data that names no environment"
    raise UsageError(
        f"pca-quadrant has no threshold for {what}: pass threshold=L, the first component of the "
        f"observations below which rows are removed; known: {', '.join(THRESHOLDS)}"
    )
