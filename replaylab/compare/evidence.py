"""Evidence: a run folder -> a small JSON file that can be committed -> benchmarks/RESULTS.md.

    replaylab report runs/* --export benchmarks/results
    replaylab report benchmarks/results --out benchmarks/RESULTS.md

{"format": "replaylab-result-1", "system": "bc", "task": "hopper-medium", "env": "d4rl/hopper", "settings": {...},
 "seeds": [0, 1], "command": "...", "machine": {...}, "date": "2026-11-15", "seconds": 151.2, "steps": 20000,
 "parameters": 70403, "data": {"paths": [...], "rows": 299470, "episodes": 663},
 "scores": [{"settings": {}, "kind": "normalised", "last": [{"seed": 0, "step": 20000, "episodes": 100,
   "mean": 57.0, "std": 11.2, "min": 40.1, "max": 99.8, "return": 1833.2}], "best": [...]}]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import stats
from replaylab.algos import system
from replaylab.compare.gather import NOT_A_SETTING, names_of, read_sweep
from replaylab.compare.tables import plus_minus, protocol, span, told_as
from replaylab.config import default_of
from replaylab.errors import UsageError
from replaylab.page import duration, number
from replaylab.published import ORIGINALS, published
from replaylab.results import Evaluations, read_runs
from replaylab.trainer import Options

FORMAT = "replaylab-result-1"
OPENING = """# Results

Made by `replaylab report benchmarks/results --out benchmarks/RESULTS.md` from the files in `benchmarks/results/`;
nothing here was typed by hand. Scores are those of the last checkpoint, the best one stands beside it for comparison:
normalised (0 random, 100 expert, in Atari a human), mean ± standard error over seeds. Published rows are other
people's numbers under their own protocols, on D4RL's data: beside `X-medium+X-expert`, our mix, stand those for
`X-medium-expert`.
What data this is, learning curves of collecting, and what was tried besides: [NOTES.md](NOTES.md).
"""
HEAD = (
    "system", "settings", "score, last checkpoint", "best checkpoint", "IQM [95 %]", "seeds x episodes", "time",
    "machine", "file",
)  # fmt: skip


def export(run: str | Path, out: str | Path | None = None, *, note: str = "") -> dict[str, Any]:
    """What a run showed, as a small dict; written to `out` where given: a .json file, or a folder for NAME.json."""
    (found,) = read_runs([run])
    config, info = found.config, found.info
    row, task, _ = names_of([found], read_sweep(found.path.parent)[0])[found.path]
    summary = info["data"] if isinstance(info.get("data"), dict) else {}
    result = {
        "format": FORMAT,
        "name": found.path.resolve().name,
        "system": config.get("system"),
        "row": row,
        "task": task,
        "env": config.get("env"),
        "preset": config.get("preset"),
        "settings": _changed(config),
        "seeds": config.get("seeds"),
        "steps": config.get("steps"),
        "parameters": info.get("parameters"),
        "data": {"paths": config.get("data")} | {k: summary[k] for k in ("steps", "rows", "episodes") if k in summary},
        "command": info.get("command"),
        "machine": info.get("machine"),
        "date": str(info.get("finished") or info.get("started") or "")[:10],
        "seconds": info.get("seconds"),
        "status": info.get("status"),
        "note": note,
        "scores": [{"env": group.env, "settings": group.settings, **_score(group)} for group in found.evaluations],
    }
    if out is not None:
        path = Path(out)
        path = path if path.suffix == ".json" else path / f"{result['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that are neither the system's defaults nor the preset's."""
    module = system(str(config.get("system")))
    known = {f.name: default_of(f) for cls in (Options, module.Config) for f in fields(cls)}
    known |= module.PRESETS.get(str(config.get("preset")), {})
    return {k: v for k, v in config.items() if k in known and v != known[k] and k not in NOT_A_SETTING | {"preset"}}


def _score(group: Evaluations) -> dict[str, Any]:
    key = "normalized" if group.normalized else "returns"

    def about(seed: Any, step: int) -> dict[str, Any]:
        line = group.lines[step][seed]
        scores = np.asarray(line[key], np.float64)
        told = {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
        told |= {"return": np.mean(line["returns"])}
        rounded = {k: round(float(v), 4) for k, v in told.items()}
        return {"seed": json.loads(seed), "step": step, "episodes": len(scores), **rounded}

    last = [about(seed, step) for seed, (step, _) in group.last().items()]
    steps = {seed: [s for s in group.lines if seed in group.lines[s]] for seed in group.seeds}
    top = {seed: max(at, key=lambda s: float(np.mean(group.lines[s][seed][key]))) for seed, at in steps.items()}
    kind = "normalised" if group.normalized else "return"
    return {"kind": kind, "last": last, "best": [about(seed, step) for seed, step in top.items()]}


# --- the evidence


def results_markdown(folder: str | Path) -> str:
    """The whole text, from a folder's result files (a section a task) and its bench-*.json. Others are left alone."""
    results, benches = [], []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON: {error}") from error
        if isinstance(found, dict) and found.get("format") == FORMAT:
            results.append(found | {"file": path.name})
        elif path.name.startswith("bench-") and isinstance(found, dict):
            benches.append(found)
    if not results:
        raise UsageError(f"{folder} holds no result files: make some with `replaylab report RUN --export {folder}`")
    tasks = list(dict.fromkeys(r["task"] for r in results))
    parts = [_section(task, [r for r in results if r["task"] == task]) for task in sorted(tasks)]
    return "\n".join([OPENING, *parts, *([_speed(benches)] if benches else []), _machines(results)])


def holds_results(folder: str | Path) -> bool:
    """Whether a folder is one of result files."""
    return any(f'"format": "{FORMAT}"' in path.read_text()[:200] for path in Path(folder).glob("*.json"))


def _speed(benches: Sequence[dict[str, Any]]) -> str:
    """Figures of `replaylab bench`, machine by machine. A case's first figure is of the shape at which its original was
    timed, on an H200: that one stands beside it."""
    lines = ["## Speed", ""]
    machines = [tuple(bench["machine"][key] for key in ("device", "cores", "torch")) for bench in benches]
    for machine in dict.fromkeys(machines):
        device, cores, torch = machine
        rows = [r for bench, m in zip(benches, machines, strict=True) if m == machine for r in bench["rows"]]
        lines += [f"### {f'{cores} cores' if device == 'cpu' else device}, torch {torch}", ""]
        lines += ["| case | what | figure | the original there |", "|---|---|---|---|"]
        originals = dict(ORIGINALS) if "H200" in device else {}
        for row in rows:
            whose, figure = originals.pop(row["case"], ("", 0.0)) if row["unit"] == "ms" else ("", 0.0)
            beside = f"{figure:g} ms ({whose})" if whose else ""
            lines.append(f"| `{row['case']}` | {row['what']} | {row['figure']:,.4g} {row['unit']} | {beside} |")
        lines.append("")
    return "\n".join(lines)


def _section(task: str, results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"## {task}",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
    ]
    for result in sorted(results, key=lambda r: (str(r["system"]), str(r["row"]), r["name"])):
        asked = sorted(result["scores"], key=lambda score: -float(score["settings"].get("target", 0)))
        lines += [_row(result, score) for score in asked]
    kinds = {score["kind"] for r in results for score in r["scores"]}
    for p in published([task]):
        known = told_as(p, task, *kinds) if len(kinds) == 1 else None
        if known:
            mean, spread = known
            told = number(mean) if spread is None else f"{mean:.4g} ± {spread:.4g}"
            lines.append(f"| *published:* {p.name} | {protocol(p, kinds)} | {told} | | | | | | |")
    lines += ["", "```", *dict.fromkeys(str(r["command"]) for r in results), "```"]
    lines += [f"- {r['name']}: {r['note']}" for r in results if r.get("note")]
    return "\n".join(lines) + "\n"


def _row(result: dict[str, Any], score: dict[str, Any]) -> str:
    last, best = ([line["mean"] for line in score[which]] for which in ("last", "best"))
    low, high = stats.bootstrap_interval([[v] for v in last]) if len(last) > 1 else (np.nan, np.nan)
    settings = [
        f"`{k} {_plain(v)}`" for k, v in result["settings"].items() if k not in ("final_episodes", "eval_every")
    ]
    preset = [f"preset {result['preset']}"] if result.get("preset") else []
    machine = result.get("machine") or {}
    where = f"{machine.get('cores', '?')} cores" if machine.get("device") == "cpu" else str(machine.get("device", "?"))
    reached = min(line["step"] for line in score["last"])
    cut = "" if result["status"] == "finished" else f" (step {reached:,}, {result['status']})"
    game = f" (game score {np.mean([line['return'] for line in score['last']]):.4g})" if _plays_atari(score) else ""
    cells = [
        ", ".join([result["row"], *(f"{k} {_plain(v)}" for k, v in score["settings"].items())]),
        ", ".join(preset + settings),
        f"**{_mean(last)}**" + ("" if score["kind"] == "normalised" else " (return)") + game + cut,
        _mean(best),
        f"{float(stats.iqm(last)):.1f}" + ("" if np.isnan(low) else f" [{low:.1f}, {high:.1f}]"),
        f"{len(last)} x {span([line['episodes'] for line in score['last']], 'episode').split(' episode')[0]}",
        duration(result["seconds"]),
        where,
        f"[{result['file']}](results/{result['file']})",
    ]
    return f"| {' | '.join(cells)} |"


def _plays_atari(score: dict[str, Any]) -> bool:
    """Papers on Atari tell the game's own score."""
    return score["kind"] == "normalised" and str(score["env"]).startswith("atari")


def _mean(values: Sequence[float]) -> str:
    mean, error = stats.mean_and_error(values)
    return plus_minus(mean, None if np.isnan(error) else error)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _machines(results: Sequence[dict[str, Any]]) -> str:
    """Hardware and dates, each once."""
    keys = ("device", "cpu", "cores", "memory_gib", "python", "torch", "gymnasium", "mujoco", "ale_py")
    told = dict.fromkeys(
        ", ".join(f"{k} {machine[k]}" for k in keys if k in machine)
        for machine in (r.get("machine") or {} for r in results)
    )
    dates = sorted({r["date"] for r in results if r.get("date")})
    ends = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else "".join(dates)
    return "\n".join(["## Machines", "", *(f"- {line}" for line in told if line), "", f"Run on {ends}."]) + "\n"
