"""The levels of a benchmark dataset, as D4RL defines them, from one SAC training.

random          the untrained policy
medium          the first policy whose return is at least a third of the way from the untrained one's to the expert's
medium-replay   everything SAC saw until then
full-replay     everything SAC saw
expert          the finished policy
medium-expert   medium and expert, half and half
mixed           a fifth random, two fifths medium, two fifths expert: a small dataset in which it pays to be selective
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab import envs, scores
from replaylab.algos.sac import SAC
from replaylab.collect.online import Online
from replaylab.data.episodes import Episodes, concatenate
from replaylab.errors import DataError
from replaylab.evaluate import MAX_STEPS
from replaylab.progress import Progress

ROLL_ENVS = 64


def make_level(online: Online, level: str, steps: int, seed: int) -> Episodes:
    if level == "random":
        return _label(roll(online, online.untrained, steps, seed, level), level, {})
    candidate, medium, expert, low, goal = choose(online)
    facts: dict[str, Any] = {
        "candidate": candidate,
        "expert": _point(online, expert, candidate),
        "curve": [[entry["step"], round(entry["returns"][candidate], 1)] for entry in online.curve],
        "training_seconds": online.seconds,
    }
    if level == "full-replay":
        return _label(replay(online, candidate, len(online.curve)), level, facts)
    if level == "expert":
        return _label(roll(online, online.actor(expert, candidate), steps, seed, level), level, facts)
    if medium is None:
        best, last = max(value for _, value in facts["curve"]), facts["expert"]["return"]
        what = f"reached {best:.0f}, under the {goal:.0f} that `medium` needs"
        if best >= goal:
            what = f"ended at {last:.0f}, no better than the {low:.0f} of the untrained policy"
        raise DataError(f"SAC in {online.env_id} {what}: train longer (--train-steps) or with more --candidates")
    facts["medium"] = _point(online, medium, candidate)
    notes = _too_good(online, facts["medium"]["return"], low, goal)
    if level == "medium-replay":
        return _label(replay(online, candidate, medium + 1), level, facts, notes)
    shares: dict[str, list[tuple[int | None, float]]] = {
        "medium": [(medium, 1.0)],
        "medium-expert": [(medium, 0.5), (expert, 0.5)],
        "mixed": [(None, 0.2), (medium, 0.4), (expert, 0.4)],
    }
    parts = []
    for chapter, share in shares[level]:
        actor = online.untrained if chapter is None else online.actor(chapter, candidate)
        parts.append(roll(online, actor, round(share * steps), seed, level))
    return _label(concatenate(parts), level, facts, notes)


def choose(online: Online) -> tuple[int, int | None, int, float, float]:
    """(candidate, medium, expert, low, goal): the candidate with the best last return, the chapters of its medium
    (None: not reached) and expert policies, the return of an untrained policy, and the return that makes a policy
    medium: a third of the way from there to the expert's."""
    returns = np.array([entry["returns"] for entry in online.curve])  # (chapters, candidates)
    candidate = int(returns[-1].argmax())
    curve = returns[:, candidate]
    expert = len(curve) - 1
    low, high = scores.reference(online.env_id) or (online.untrained_return, float(curve[expert]))
    goal = low + max(0.0, high - low) / 3
    above = np.flatnonzero(curve >= goal)
    return candidate, int(above[0]) if len(above) and goal > low else None, expert, low, goal


def _point(online: Online, chapter: int, candidate: int) -> dict[str, float]:
    entry = online.curve[chapter]
    return {"step": entry["step"], "return": entry["returns"][candidate]}


def _too_good(online: Online, medium: float, low: float, goal: float) -> list[str]:
    """A note if learning was so fast that the first saved policy above the goal is far beyond it."""
    way = (medium - low) / (goal - low) / 3
    if way < 2 / 3:
        return []
    return [
        f"`medium` is {way:.0%} of the way to the expert: a --chapter under {online.config.chapter} finds one before"
    ]


def _label(episodes: Episodes, level: str, facts: dict[str, Any], notes: Sequence[str] = ()) -> Episodes:
    summary = {"mean": float(episodes.returns.mean()), "std": float(episodes.returns.std())}
    told = {"level": level, "recipe": facts | {"return": summary}, "notes": [*episodes.meta["notes"], *notes]}
    return replace(episodes, meta=episodes.meta | told)


def _meta(online: Online) -> dict[str, Any]:
    return {
        "env_id": online.env_id,
        "source": f"replaylab collect, SAC in {online.env_id}",
        "licence": "CC0-1.0",
        "action_low": online.spaces.action_low,
        "action_high": online.spaces.action_high,
        "notes": [],
    }


# --- rollouts of a policy


@torch.no_grad()
def roll(online: Online, actor: dict[str, Tensor], steps: int, seed: int, label: str) -> Episodes:
    """Whole episodes of the sampled policy, at least `steps` rows; its weights are stored with the data."""
    sac = SAC(online.config, online.spaces, [0], torch.device("cpu"))
    sac.actor.load_state_dict({k: v[:1] for k, v in actor.items()})
    count = max(1, min(ROLL_ENVS, steps // 1000))
    env = envs.make_vec(online.env_id, count)
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 1])
    observations = env.reset(seed=[int(s) for s in rng.integers(0, 2**31, count)])[0].astype(np.float32)
    seen: list[tuple[np.ndarray, ...]] = []
    finals: list[list[np.ndarray]] = [[] for _ in range(count)]
    playing, played, length = np.ones(count, bool), np.zeros(count, np.int64), np.zeros(count, np.int64)
    endless = 0  # episodes that had to be cut
    bar = Progress(f"roll out {label}", steps)
    while playing.any():
        actions, log_prob = (v[0].numpy() for v in sac.sample(torch.from_numpy(observations)[None]))
        following, rewards, terminated, truncated, _ = env.step(actions)
        following = following.astype(np.float32)
        length += 1
        cut = (length >= MAX_STEPS) & ~terminated & ~truncated
        truncated = truncated | cut
        seen.append((observations, actions, rewards, terminated, truncated, log_prob, playing.copy()))
        played += playing
        done = (terminated | truncated) & playing
        endless += int((cut & playing).sum())
        length[done] = 0
        for i in np.flatnonzero(done):
            finals[i].append(following[i])
            playing[i] = played[i] < steps / count  # stop at the end of the episode in which the quota is met
        again = done & playing
        observations = following
        if again.any():
            fresh = env.reset(options={"reset_mask": again})[0].astype(np.float32)
            observations = np.where(again[:, None], fresh, following)
        bar.update(min(int(played.sum()), steps))
    bar.close()
    env.close()
    *stacked, mine = (np.stack(column, 1) for column in zip(*seen, strict=True))  # (environments, steps, ...)
    columns = [column[mine] for column in stacked]  # one environment after another
    attachments = {f"metadata/policy/{k}": v for k, v in layers_of(actor).items()}
    notes = [f"{endless} of the episodes were cut after {MAX_STEPS:,} steps: {online.env_id} does not end them"]
    episodes = _episodes(online, columns, np.array([f for stream in finals for f in stream]), attachments)
    return replace(episodes, meta=episodes.meta | {"notes": notes if endless else []})


def layers_of(actor: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The actor's layers by D4RL's names: fc0, fc1, last_fc, last_fc_log_std; weights are (outputs, inputs)."""
    found: dict[str, np.ndarray] = {}
    depth = len(actor) // 2
    for i in range(depth):
        weight, bias = actor[f"layers.{i}.weight"][0].cpu().T.numpy(), actor[f"layers.{i}.bias"][0, 0].cpu().numpy()
        if i < depth - 1:
            found |= {f"fc{i}/weight": weight, f"fc{i}/bias": bias}
        else:
            half = len(weight) // 2
            found |= {"last_fc/weight": weight[:half], "last_fc/bias": bias[:half]}
            found |= {"last_fc_log_std/weight": weight[half:], "last_fc_log_std/bias": bias[half:]}
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


# --- what training saw


def replay(online: Online, candidate: int, chapters: int) -> Episodes:
    """Everything a candidate saw in its first `chapters` chapters, in each one environment after another."""
    parts, cut = [], 0
    mine = slice(candidate * online.config.environments, (candidate + 1) * online.config.environments)
    for chapter in range(chapters):
        rows = online.history(chapter)
        ends = rows["terminated"] | rows["truncated"]
        per_env = np.split(rows["finals"], np.cumsum(ends.sum(1))[:-1])
        names = ("observations", "actions", "rewards", "terminated", "truncated", "log_probs")
        columns = [np.concatenate(list(rows[name][mine])) for name in names]
        parts.append(_episodes(online, columns, np.concatenate(per_env[mine]), {}))
        cut += int(rows["cut"][mine].sum()) if "cut" in rows else 0  # not in trainings begun before it was kept
    episodes = concatenate(parts)
    note = f"{cut} of {episodes.num_episodes} episodes end with a chapter of the training: their returns are not whole"
    return replace(episodes, meta=_meta(online) | {"notes": [note] if cut else []})


def _episodes(
    online: Online, columns: list[np.ndarray], finals: np.ndarray, attachments: dict[str, np.ndarray]
) -> Episodes:
    observations, actions, rewards, terminated, truncated, log_probs = columns
    ends = np.flatnonzero(terminated | truncated)
    return Episodes(
        observations=observations,
        actions=actions,
        rewards=rewards.astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        offsets=np.concatenate([[0], ends + 1]),
        final_observations=finals,
        final_known=np.ones(len(finals), bool),
        extras={"infos/action_log_probs": log_probs.astype(np.float32)},
        attachments=attachments,
        meta=_meta(online),
    )
