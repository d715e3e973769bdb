"""All verbs except `data`: `build_runs` declares their options, the functions below it run them."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from replaylab.algos import SYSTEMS, system
from replaylab.cli.parser import Parser, add_verb, assignments, data_options, read_options
from replaylab.config import add_acting_arguments, add_arguments
from replaylab.data.read import TOYS
from replaylab.errors import ReplaylabError, UsageError
from replaylab.evaluate import pick_device
from replaylab.page import count
from replaylab.results import settings_text
from replaylab.run import RunFolder

DETECTED = "AUROC {auroc:.3f}, {tpr:.1%} of shifted rows found, {tnr:.1%} of real rows left alone"


def build_runs(verbs: Any, words: Sequence[str]) -> None:
    _build_train(verbs, words)
    _build_density(verbs)
    verb = add_verb(verbs, "eval", "play episodes with a trained policy", _eval)
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    verb.add_argument("--env", help="environment (default: the run's own)")
    verb.add_argument("--episodes", type=int, default=100, help="episodes per seed (default: 100)")
    verb.add_argument("--seed", type=int, help="seed of the first episode (default: 1000)")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument(
        "--target", nargs="+", type=float, metavar="R", help="returns to ask a dt for, played in one batch"
    )
    verb.add_argument("--noise-action", type=float, metavar="S", help="standard deviation of noise on actions")
    verb.add_argument("--noise-transition", type=float, metavar="S", help="standard deviation of noise on observations")
    verb.add_argument("--noise-rate", type=float, metavar="P", help="probability of noise at each step (default: 1)")
    verb.add_argument("--json", action="store_true", help="print the records as JSON")
    if words[:1] == ["eval"]:
        _add_acting(verb, words, several=True)

    verb = add_verb(verbs, "assess", "find out what logs alone can tell about a policy, without a simulator", _assess)
    verb.add_argument("folder", metavar="RUN", help="run folder")  # not `run`: that holds the verb's function
    verb.add_argument(
        "--data", nargs="+", action="extend", metavar="X", help="logs to judge by, best held out (default: its own)"
    )
    verb.add_argument("--quick", action="store_true", help="a smaller estimate, under a minute on a CPU")
    verb.add_argument("--gamma", type=float, help="discount of the estimate (default: the run's own, else 0.99)")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    data_options(verb)

    verb = add_verb(verbs, "report", "write a page about runs, a sweep, or exported results", _report)
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run folders, a sweep's folder, or exported results")
    verb.add_argument(
        "--out", help="the page (default: RUN/report.html; for several runs report.html), or a table: .md or .csv"
    )
    verb.add_argument("--json", action="store_true", help="print the table as JSON instead")
    verb.add_argument("--export", metavar="FOLDER", help="save each run's results there as a small JSON file instead")

    verb = add_verb(verbs, "export", "write a policy to one file that runs without replaylab", _export)
    verb.add_argument("folder", metavar="RUN", help="run folder")  # not `run`: that holds the verb's function
    verb.add_argument("--out", metavar="FILE", help="a .pt2 (PyTorch) or .onnx file (default: RUN/policy.pt2)")
    verb.add_argument("--seed", type=int, help="which of the run's seeds (default: its first)")
    verb.add_argument("--target", type=float, metavar="R", help="the return to ask a dt for (default: the run's own)")
    if words[:1] == ["export"]:
        _add_acting(verb, words, several=False)

    verb = add_verb(verbs, "play", "play in the world that an mbarc run has learned, in the browser", _play)
    verb.add_argument("folder", metavar="RUN", help="run folder")  # not `run`: that holds the verb's function
    verb.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")

    verb = add_verb(verbs, "sweep", "train systems x datasets x seeds x settings, described in one file", _sweep)
    verb.add_argument("file", metavar="FILE", help="YAML: systems, datasets, seeds and settings; see docs/sweep.md")
    verb.add_argument("--out", metavar="D", help="the sweep's folder (default: sweeps/NAME)")
    verb.add_argument("--dry-run", action="store_true", help="only print the plan and the expected time")
    verb.add_argument("--on", choices=["local", "ray"], default="local", help="on this machine, or a Ray cluster")
    verb.add_argument("--address", help="address of the Ray cluster; auto: the one this machine belongs to")
    verb.add_argument("--devices", nargs="+", metavar="DEVICE", help="devices (default: every GPU, else the CPU)")
    verb.add_argument("--per-device", type=int, metavar="N", help="processes that share a device (default: the file's)")
    verb.add_argument("--gpus", type=float, metavar="SHARE", help="on Ray: share of a GPU for each cell")
    verb.add_argument("--data", choices=["path", "store"], help="on Ray: read by path, or once into Ray's object store")

    verb = add_verb(verbs, "bench", "time the hot paths on this machine", _bench)
    verb.add_argument("cases", nargs="*", metavar="CASE", help="what to time (default: everything)")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    verb.add_argument("--against", metavar="PEER", help="also time another package: sb3 or d3rlpy")


def _add_acting(verb: argparse.ArgumentParser, words: Sequence[str], several: bool) -> None:
    """Add the options that change how a policy acts, for the systems of the runs on the command line."""
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), words[1:]))
    named = named or [word for word in words[1:] if RunFolder(word).exists()]
    systems = dict.fromkeys(RunFolder(word).system() for word in named)
    for name in systems:
        module = system(name)
        title = f"how {name} acts" + (" (give several values to try them all)" if several else "")
        add_acting_arguments(verb, module.Config, getattr(module, "ACTING", ()), title, several)
    if not systems:
        verb.epilog = "To see the options of a run's system, name the RUN before --help."


def _build_train(verbs: Any, words: Sequence[str]) -> None:
    verb = add_verb(verbs, "train", "train a system on logged data", None)
    if words[:1] != ["train"]:
        return
    from replaylab.trainer import Options

    systems = verb.add_subparsers(title="systems", required=True, metavar="SYSTEM", parser_class=Parser)
    for name in words[1:2] if words[1:2] and words[1] in SYSTEMS else SYSTEMS:
        module = system(name)
        parser = add_verb(systems, name, (module.__doc__ or name).splitlines()[0].rstrip("."), _train)
        parser.set_defaults(system=name)
        online = getattr(module, "ONLINE", False)  # makes its own data: `train` rejects --data
        data_help = argparse.SUPPRESS if online else "files or folders; several are joined"
        parser.add_argument("--data", nargs="+", action="extend", metavar="X", help=data_help)
        if not online:
            data_options(parser)
        parser.add_argument(
            "--out", metavar="D", help=f"run folder (default: runs/{name}-{'GAME' if online else 'DATA'})"
        )
        parser.add_argument("--preset", help=f"named settings: {', '.join(module.PRESETS)}")
        parser.add_argument("--config", metavar="F", help="YAML file of settings")
        parser.add_argument("--resume", action="store_true", help="continue where the run in this folder stopped")
        parser.add_argument("--overwrite", action="store_true", help="replace the run in this folder")
        add_arguments(parser, module.Config)
        add_arguments(parser, Options)
        parser.add_argument(
            "--seed", dest="seeds", type=int, nargs=1, default=argparse.SUPPRESS, help="the same as --seeds with one"
        )


def _build_density(verbs: Any) -> None:
    density = add_verb(verbs, "density", "measure how likely states and actions are under the data", None)
    inner = density.add_subparsers(title="density verbs", required=True, metavar="VERB", parser_class=Parser)
    verb = add_verb(inner, "fit", "fit a density model, calibrate its threshold, test it on shifted rows", _density_fit)
    verb.add_argument(
        "--data", nargs="+", action="extend", required=True, metavar="X", help="files or folders; several are joined"
    )
    verb.add_argument("--kind", required=True, metavar="realnvp|vae|kde|diffusion|neuralode", help="kind of model")
    verb.add_argument("--out", required=True, metavar="D", help="the model's folder")
    verb.add_argument("--inputs", metavar="sa|nsa|sas", help="model (s, a), (s', a) or (s, a, s') (default: nsa)")
    verb.add_argument("--steps", type=int, metavar="N", help="training updates (default: the kind's own)")
    verb.add_argument("--batch-size", type=int, metavar="N", help="rows per batch (default: 512)")
    verb.add_argument("--lr", type=float, help="Adam's learning rate (default: 0.001)")
    verb.add_argument(
        "--percentile", type=float, metavar="P", help="percentage of validation rows below the threshold (default: 1)"
    )
    verb.add_argument(
        "--distances",
        type=float,
        nargs="+",
        metavar="R",
        help="shifts to test (default: GORMPO's for its robots, else half and one deviation)",
    )
    verb.add_argument(
        "--set", nargs="+", action="extend", metavar="NAME=JSON", help="settings of the kind, such as couplings=8"
    )
    verb.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the split (default: 0)")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--overwrite", action="store_true", help="replace an existing density model")
    data_options(verb)
    verb = add_verb(inner, "score", "measure how likely other data is under a density model", _density_score)
    verb.add_argument("folder", metavar="D", help="the model's folder")
    verb.add_argument("--data", nargs="+", action="extend", required=True, metavar="Y", help="data to score")
    verb.add_argument("--percentile", type=float, metavar="P", help="of the threshold (default: the one from fitting)")
    verb.add_argument("--out", metavar="PAGE", help="also write a page with a histogram")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    data_options(verb)


def train_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `replaylab.train` after the system."""
    from replaylab.train import settings_of

    own = {"data", "out", "preset", "config"} | settings_of(system(args.system))
    flags = {name: hasattr(args, name) for name in ("resume", "overwrite")}
    return {k: v for k, v in vars(args).items() if k in own} | flags | {"data_options": read_options(args)}


def _train(args: argparse.Namespace) -> None:
    from replaylab.report import report
    from replaylab.train import train

    path = train(args.system, **train_arguments(args))
    config = RunFolder(path).config()
    device, env, data = str(config.get("device", "auto")), config.get("env"), config.get("data", [])
    unseen = env is None and bool(set(data) - set(TOYS))
    if unseen and getattr(args, "preset", None) == "debug":
        print(f"not assessed, because it is a debug run; to do so: replaylab assess {shlex.quote(str(path))}")
    elif unseen:
        from replaylab.offpolicy import assess, summary

        try:
            print("\n".join(summary(assess(path, quick=pick_device(device).type == "cpu", device=device))))
        except ReplaylabError as error:  # the run itself is finished
            print(f"not assessed: {error}")
    print(f"run folder: {path}\nreport:     {report([path], path / 'report.html')}")


def _assess(args: argparse.Namespace) -> None:
    from replaylab.data.read import load
    from replaylab.offpolicy import assess, summary
    from replaylab.report import report

    data, options, gamma = getattr(args, "data", None), read_options(args), getattr(args, "gamma", None)
    if options and data is None:
        raise UsageError(
            "the run's own data is read as it was for training: name a log with --data to read another way"
        )
    if data is not None and options:  # without options, `assess` reads it like the run's own
        data = load(data, **options)
    found = assess(args.folder, data, quick=hasattr(args, "quick"), gamma=gamma, device=args.device)
    page = report([args.folder], f"{args.folder}/report.html")
    print(json.dumps(found) if hasattr(args, "json") else "\n".join([*summary(found), f"report: {page}"]))


def _density_fit(args: argparse.Namespace) -> None:
    from replaylab.density import fit

    own = ("inputs", "steps", "batch_size", "lr", "percentile", "distances", "seed", "device")
    given = {k: v for k, v in vars(args).items() if k in own}
    settings = assignments(getattr(args, "set", []))
    if taken := settings.keys() & signature(fit).parameters.keys():
        raise UsageError(f"--set takes settings of the kind of model, and {min(taken)} is not one")
    given |= {"overwrite": hasattr(args, "overwrite"), "data_options": read_options(args)}
    model = fit(args.data, args.kind, args.out, **given, **settings)
    for test in model.report["tests"]:
        print("shifted by {distance:g}: ".format(**test) + DETECTED.format(**test))
    print(f"wrote {args.out}: {args.kind}, threshold {model.report['threshold']:.2f}; see {args.out}/report.html")


def _density_score(args: argparse.Namespace) -> None:
    from replaylab.density import score

    given = {k: v for k, v in vars(args).items() if k in ("percentile", "out", "device")}
    found = score(args.folder, args.data, data_options=read_options(args), **given)
    if hasattr(args, "json"):
        print(json.dumps(found))
        return
    detection = ", " + DETECTED.format(**found) if "auroc" in found else ""
    print(f"{found['rows']} rows, {found['flagged']:.1%} below the threshold {found['threshold']:.2f}{detection}")
    if hasattr(args, "out"):
        print(f"wrote {args.out}")


def _eval(args: argparse.Namespace) -> None:
    from replaylab.evaluate import SEED, evaluate, summary

    noise = None
    if hasattr(args, "noise_rate") and not (hasattr(args, "noise_action") or hasattr(args, "noise_transition")):
        raise UsageError("--noise-rate needs --noise-action or --noise-transition")
    if hasattr(args, "noise_action") or hasattr(args, "noise_transition"):
        from replaylab.envs.noise import Noise

        rate = getattr(args, "noise_rate", 1.0)
        noise = Noise(
            action_scale=getattr(args, "noise_action", 0.0),
            action_rate=rate,
            transition_scale=getattr(args, "noise_transition", 0.0),
            transition_rate=rate,
        )
    found: list[dict[str, Any]] = []

    def show(run: str, records: list[dict[str, Any]]) -> None:
        for settings in {json.dumps(record["settings"]): record["settings"] for record in records}.values():
            part = [record for record in records if record["settings"] == settings]
            found.append({"run": run, "settings": settings, **summary(part), "records": part})
            if not hasattr(args, "json"):
                print(_line(found[-1]), flush=True)

    for run in args.runs:
        acting = getattr(system(RunFolder(run).system()), "ACTING", ())
        evaluate(
            run,
            getattr(args, "env", None),
            episodes=args.episodes,
            seed=getattr(args, "seed", SEED),
            noise=noise,
            device=args.device,
            targets=getattr(args, "target", []),
            acting={name: getattr(args, name) for name in acting if hasattr(args, name)},
            told=partial(show, run),
        )
    if hasattr(args, "json"):
        print(json.dumps(found))


def _line(row: dict[str, Any]) -> str:
    label = f" ({shown})" if (shown := settings_text(row["settings"])) else ""
    interval = "" if row["low"] is None else f" [{row['low']:.1f}, {row['high']:.1f}]"
    error = "" if row["error"] is None else f" ± {row['error']:.1f} s.e."
    return (
        f"{row['run']}{label}: {row['env']} {row['score']} {row['mean']:.1f}{error}, "
        f"IQM {row['iqm']:.1f}{interval}, raw return {row['return']:.1f}, "
        f"length {row['length']:.0f}; {count(row['seeds'], 'seed')}, {count(row['episodes'], 'episode')}"
    )


def _sweep(args: argparse.Namespace) -> None:
    from replaylab.sweep import run

    names = ("out", "address", "devices", "per_device", "gpus", "data")
    given = {k: getattr(args, k) for k in names if hasattr(args, k)}
    found = run(args.file, dry_run=hasattr(args, "dry_run"), on=args.on, **given)
    undone = {"failed": [*found.failed], "left": found.left}
    if any(undone.values()) and not hasattr(args, "dry_run"):  # `sweep && report` must not show half a table
        summary = "; ".join(f"{len(names)} {how}: {', '.join(names)}" for how, names in undone.items() if names)
        raise ReplaylabError(f"of {count(found.cells, 'cell')}, {summary}")


def _report(args: argparse.Namespace) -> None:
    from replaylab import compare
    from replaylab.report import report, summarize_runs

    first, alone, out = Path(args.runs[0]), len(args.runs) == 1, getattr(args, "out", None)
    if len(given := [name for name in ("out", "json", "export") if hasattr(args, name)]) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are different reports: give only one")
    if hasattr(args, "export"):
        for path in compare.export(args.runs, args.export):
            print(f"wrote {path}")
    elif hasattr(args, "json"):
        if alone and compare.holds_results(first):
            raise UsageError(f"the files in {first} are JSON already: leave out --json")
        print(json.dumps(summarize_runs(args.runs)))
    elif alone and compare.holds_results(first):
        print(f"wrote {compare.write_results(first, out)}")
    elif (alone and (first / "sweep.json").exists()) or (out and Path(out).suffix.lower() != ".html"):
        print(f"wrote {compare.compare(first if alone else args.runs, out)}")
    else:
        print(f"wrote {report(args.runs, out or (first / 'report.html' if alone else 'report.html'))}")


def _export(args: argparse.Namespace) -> None:
    from replaylab.export import export

    acting = getattr(system(RunFolder(args.folder).system()), "ACTING", ())
    given = {name: getattr(args, name) for name in ("out", "seed", "target", *acting) if hasattr(args, name)}
    print(f"wrote {export(args.folder, **given)}")


def _play(args: argparse.Namespace) -> None:
    from replaylab.play import play

    play(args.folder, args.port, args.device)


def _bench(args: argparse.Namespace) -> None:
    from replaylab.bench import bench

    bench(
        getattr(args, "cases", []),
        device=args.device,
        json_path=getattr(args, "json", None),
        against=getattr(args, "against", None),
    )
