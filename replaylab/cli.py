"""The command line: argument parsing and printing. Every verb calls one public function."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from replaylab import __version__
from replaylab.algos import SYSTEMS, system
from replaylab.config import add_arguments
from replaylab.errors import ReplaylabError, UsageError, nearest


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake, and the nearest option for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            leaf = _leaf(self, args)
            raise UsageError(f"unknown option {unknown[0]}{nearest(unknown[0], _options(leaf))}")
        return parsed


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _leaf(parser: argparse.ArgumentParser, args: Any) -> argparse.ArgumentParser:
    """The sub-parser that the words of the command line lead to."""
    for word in sys.argv[1:] if args is None else args:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
    return parser


def _add(verbs: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    return parser


def _data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading data")
    group.add_argument("--format", help="file format; found from the file when not given")
    group.add_argument("--columns", nargs="+", metavar="NAME=COLUMN[,COLUMN]", help="columns of a CSV or Parquet file")
    group.add_argument("--max-episode-steps", type=int, metavar="N", help="an episode ends after N steps")
    group.add_argument("--split", choices=["flags", "discontinuity"], help="where unmarked episodes end")
    replay = parser.add_argument_group("reading a part of a DQN-replay log")
    for option, name, text in (
        ("--num-steps", "max_steps", "about so many rows, in whole episodes, evenly from its checkpoints"),
        ("--num-buffers", "checkpoints", "only the last so many checkpoints"),
        ("--trajectories-per-buffer", "episodes_per_checkpoint", "at most so many episodes of a checkpoint"),
    ):
        replay.add_argument(option, dest=name, type=int, metavar="N", help=text)


def _read_options(args: argparse.Namespace) -> dict[str, Any]:
    from replaylab.data.read import PART

    found = {k: getattr(args, k) for k in ("format", "max_episode_steps", "split", *PART) if hasattr(args, k)}
    if hasattr(args, "columns"):
        from replaylab.data.formats.table import parse_columns

        found["columns"] = parse_columns(args.columns)
    return found


def build(words: Sequence[str]) -> Parser:
    parser = Parser(prog="replaylab", description="Learn decisions from logged data.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"replaylab {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=Parser)
    _build_data(verbs, words)
    _build_train(verbs)
    _build_density(verbs)

    verb = _add(verbs, "eval", "play episodes with a trained policy", _eval)
    verb.add_argument("runs", nargs="+", metavar="RUN")
    verb.add_argument("--env", help="environment; default: the run's own")
    verb.add_argument("--episodes", type=int, default=100, help="episodes per seed (default: 100)")
    verb.add_argument("--seed", type=int, help="seed of the first episode")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument(
        "--target", nargs="+", type=float, metavar="R", help="returns to ask a dt for, played in one batch"
    )
    verb.add_argument("--noise-action", type=float, metavar="S", help="deviation of Gaussian noise on actions")
    verb.add_argument("--noise-transition", type=float, metavar="S", help="deviation of noise on observations")
    verb.add_argument("--noise-rate", type=float, metavar="P", help="probability of noise at a step (default: 1)")
    verb.add_argument("--json", action="store_true", help="print the records as JSON")

    verb = _add(verbs, "report", "one self-contained HTML page from run folders", _report)
    verb.add_argument("runs", nargs="+", metavar="RUN")
    verb.add_argument("--out", help="the page (default: RUN/report.html, or report.html for several runs)")
    verb.add_argument("--json", action="store_true", help="print the table as JSON instead")

    verb = _add(verbs, "bench", "time the hot paths on this machine", _bench)
    verb.add_argument("cases", nargs="*", metavar="CASE", help="default: all of them")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--json", metavar="FILE", help="write the figures there too")
    verb.add_argument("--against", metavar="PEER", help="time a peer beside us: sb3")
    return parser


def _build_data(verbs: Any, words: Sequence[str]) -> None:
    data = _add(verbs, "data", "look at, convert and make datasets", None)
    inner = data.add_subparsers(title="data verbs", required=True, metavar="VERB", parser_class=Parser)
    verb = _add(inner, "list", "datasets that ship with replaylab, and the formats it reads", _data_list)
    verb.add_argument("--json", action="store_true")
    verb = _add(inner, "info", "counts, returns, ranges and warnings", _data_info)
    verb.add_argument("path", nargs="+", metavar="X")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    _data_options(verb)
    verb = _add(inner, "plot", "a page of plots", _data_plot)
    verb.add_argument("path", nargs="+", metavar="X")
    verb.add_argument("--out", default="data.html", help="the page (default: data.html)")
    _data_options(verb)
    verb = _add(inner, "convert", "read one format, write another", _data_convert)
    verb.add_argument("source", nargs="+", metavar="SRC")
    verb.add_argument("target", metavar="DST")
    verb.add_argument("--to", metavar="FORMAT", help="format to write; found from DST when not given")
    verb.add_argument("--overwrite", action="store_true")
    _data_options(verb)
    verb = _add(inner, "sparsify", "take rows out on purpose, by a stored recipe", _data_sparsify)
    verb.add_argument("path", nargs="+", metavar="X")
    verb.add_argument("--recipe", required=True, metavar="pca-quadrant|reward-action-box")
    verb.add_argument("--out", required=True)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--set", nargs="+", metavar="NAME=JSON", help="parameters of the recipe, such as keep=0.05")
    verb.add_argument("--overwrite", action="store_true")
    _data_options(verb)
    verb = _add(inner, "corrupt", "a labelled test set: episodes as they are, and the same shifted", _data_corrupt)
    verb.add_argument("path", nargs="+", metavar="X")
    verb.add_argument("--distance", type=float, required=True, help="mean of the noise added to the shifted half")
    verb.add_argument("--out", required=True)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--episodes", type=int, default=10, help="episodes taken (default: 10)")
    verb.add_argument("--overwrite", action="store_true")
    _data_options(verb)
    _build_collect(inner, words)


def _build_collect(inner: Any, words: Sequence[str]) -> None:
    verb = _add(
        inner, "collect", "make a dataset by training a policy, or driving one, in an environment", _data_collect
    )
    verb.add_argument(
        "env", metavar="ENV", help="hopper, walker2d, Pendulum-v1, reacher2d, atari/pong, pointmaze-medium, ..."
    )
    verb.add_argument("--out", required=True, metavar="D", help="the dataset (a folder a level with --level all)")
    verb.add_argument("--level", help="random, medium, medium-replay, full-replay, expert, medium-expert, mixed or all")
    verb.add_argument("--steps", type=int, metavar="N", help="rows of a dataset")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--to", metavar="FORMAT", help="format to write (default: from the name; a folder is native)")
    verb.add_argument(
        "--compact", action="store_true", help="round to 14 bits and leave out extra columns: a small file"
    )
    verb.add_argument("--overwrite", action="store_true")
    if "collect" not in words:  # the rest needs simulators
        return
    if any(word.startswith("pointmaze") for word in words):
        verb.add_argument("--style", choices=["play", "diverse"], help="fixed or random starts and goals")
        verb.add_argument("--noise", type=float, help="deviation of the noise on the driver's actions")
    elif any(word.startswith("atari/") for word in words):
        from replaylab.collect import atari

        add_arguments(verb, atari.Config)
    else:
        from replaylab.collect import online

        add_arguments(verb, online.Config)


def _build_train(verbs: Any) -> None:
    from replaylab.train import Options

    verb = _add(verbs, "train", "train a system on logged data", None)
    systems = verb.add_subparsers(title="systems", required=True, metavar="SYSTEM", parser_class=Parser)
    for name in SYSTEMS:
        module = system(name)
        parser = _add(systems, name, (module.__doc__ or name).splitlines()[0].rstrip("."), _train)
        parser.set_defaults(system=name)
        parser.add_argument(
            "--data", nargs="+", required=True, metavar="X", help="files or folders; several are joined"
        )
        parser.add_argument("--out", metavar="D", help="run folder (default: runs/SYSTEM-DATA)")
        parser.add_argument("--preset", help=f"named settings: {', '.join(module.PRESETS)}")
        parser.add_argument("--config", metavar="F", help="YAML file of settings")
        parser.add_argument("--resume", action="store_true", help="go on where the run folder stopped")
        parser.add_argument("--overwrite", action="store_true", help="start anew in a folder that holds a run")
        add_arguments(parser, module.Config)
        add_arguments(parser, Options)
        _data_options(parser)


def _build_density(verbs: Any) -> None:
    density = _add(verbs, "density", "how likely are states and actions under the data", None)
    inner = density.add_subparsers(title="density verbs", required=True, metavar="VERB", parser_class=Parser)
    verb = _add(inner, "fit", "fit a density model, with thresholds and a test on shifted rows", _density_fit)
    verb.add_argument("--data", nargs="+", required=True, metavar="X", help="files or folders; several are joined")
    verb.add_argument("--kind", required=True, metavar="realnvp|vae|kde|diffusion|neuralode")
    verb.add_argument("--out", required=True, metavar="D", help="the model's folder")
    verb.add_argument("--inputs", metavar="sa|nsa|sas", help="(s, a), (s', a) or (s, a, s') (default: nsa)")
    verb.add_argument("--steps", type=int, metavar="N", help="updates; default: the kind's own")
    verb.add_argument("--batch-size", type=int, metavar="N", help="rows a batch (default: 512)")
    verb.add_argument("--lr", type=float, help="Adam's learning rate (default: 0.001)")
    verb.add_argument(
        "--percentile", type=float, metavar="P", help="of validation rows below the threshold (default: 1)"
    )
    verb.add_argument("--distances", type=float, nargs="+", metavar="R", help="shifts of the test; default: GORMPO's")
    verb.add_argument("--set", nargs="+", metavar="NAME=JSON", help="settings of the kind, such as couplings=8")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--overwrite", action="store_true")
    _data_options(verb)
    verb = _add(inner, "score", "how likely other data is under a density model", _density_score)
    verb.add_argument("folder", metavar="D")
    verb.add_argument("--data", nargs="+", required=True, metavar="Y")
    verb.add_argument("--percentile", type=float, metavar="P", help="default: the one it was fitted with")
    verb.add_argument("--out", metavar="PAGE", help="write a page with a histogram")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    _data_options(verb)


# --- verbs


def _data_list(args: argparse.Namespace) -> None:
    from replaylab.data.read import FORMATS, SAMPLES

    if hasattr(args, "json"):
        print(json.dumps({"samples": {k: str(v) for k, v in SAMPLES.items()}, "formats": sorted(FORMATS)}))
        return
    for name, path in SAMPLES.items():
        print(f"{name:20s} {path}")
    print(f"formats: {', '.join(sorted(FORMATS))}")


def _data_info(args: argparse.Namespace) -> None:
    from replaylab.data.inspect import format_summary, summarize
    from replaylab.data.read import load

    found = summarize(load(args.path, **_read_options(args)))
    print(json.dumps(found) if hasattr(args, "json") else format_summary(found))


def _data_plot(args: argparse.Namespace) -> None:
    from replaylab.data.inspect import plot
    from replaylab.data.read import load

    plot(load(args.path, **_read_options(args)), args.out, title=", ".join(args.path))
    print(f"wrote {args.out}")


def _data_convert(args: argparse.Namespace) -> None:
    from replaylab.data.read import load
    from replaylab.data.write import save

    episodes = load(args.source, **_read_options(args))
    save(episodes, args.target, format=getattr(args, "to", None), overwrite=hasattr(args, "overwrite"))
    print(f"wrote {args.target}: {len(episodes)} steps, {episodes.num_episodes} episodes")


def _data_collect(args: argparse.Namespace) -> None:
    from replaylab.collect import collect

    given = vars(args)
    own = ("env", "out", "level", "steps", "seed", "device", "to", "compact", "overwrite", "run", "debug")
    settings = {k: v for k, v in given.items() if k not in own}
    path = collect(
        args.env,
        args.out,
        level=given.get("level"),
        steps=given.get("steps"),
        seed=args.seed,
        device=args.device,
        overwrite=hasattr(args, "overwrite"),
        format=given.get("to"),
        compact=hasattr(args, "compact"),
        **settings,
    )
    print(f"wrote {path}")


def _data_sparsify(args: argparse.Namespace) -> None:
    from replaylab.data.damage import sparsify

    _damage(args, lambda x: sparsify(x, args.recipe, seed=args.seed, **_assignments(getattr(args, "set", []))))


def _data_corrupt(args: argparse.Namespace) -> None:
    from replaylab.data.damage import corrupt

    _damage(args, lambda x: corrupt(x, args.distance, seed=args.seed, episodes_count=args.episodes))


def _damage(args: argparse.Namespace, change: Callable[[Any], Any]) -> None:
    from replaylab.data.read import load
    from replaylab.data.write import save

    found = change(load(args.path, **_read_options(args)))
    save(found, args.out, overwrite=hasattr(args, "overwrite"))
    print(
        f"wrote {args.out}: {len(found)} steps, {found.num_episodes} episodes; {json.dumps(found.meta['damage'][-1])}"
    )


def _assignments(words: Sequence[str]) -> dict[str, Any]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {word}: expected NAME=JSON, such as keep=0.05 or reward=[0.5,1]") from error
    return found


def _train(args: argparse.Namespace) -> None:
    from replaylab.report import report
    from replaylab.train import settings_of, train

    settings = {k: v for k, v in vars(args).items() if k in settings_of(system(args.system))}
    path = train(
        args.system,
        args.data,
        out=getattr(args, "out", None),
        preset=getattr(args, "preset", None),
        config=getattr(args, "config", None),
        resume=hasattr(args, "resume"),
        overwrite=hasattr(args, "overwrite"),
        data_options=_read_options(args),
        **settings,
    )
    print(f"run folder: {path}\nreport:     {report([path], path / 'report.html')}")


def _density_fit(args: argparse.Namespace) -> None:
    from replaylab.density import fit

    own = ("inputs", "steps", "batch_size", "lr", "percentile", "distances", "seed", "device")
    given = {k: v for k, v in vars(args).items() if k in own} | _assignments(getattr(args, "set", []))
    options = _read_options(args)
    model = fit(args.data, args.kind, args.out, overwrite=hasattr(args, "overwrite"), data_options=options, **given)
    for test in model.report["tests"]:
        print("shifted by {distance:g}: AUROC {auroc:.3f}, found {tpr:.1%}, left alone {tnr:.1%}".format(**test))
    print(f"wrote {args.out}: {args.kind}, threshold {model.report['threshold']:.2f}; see {args.out}/report.html")


def _density_score(args: argparse.Namespace) -> None:
    from replaylab.density import score

    given = {k: v for k, v in vars(args).items() if k in ("percentile", "out", "device")}
    found = score(args.folder, args.data, data_options=_read_options(args), **given)
    if hasattr(args, "json"):
        print(json.dumps(found))
        return
    told = ", AUROC {auroc:.3f}, found {tpr:.1%}, left alone {tnr:.1%}".format(**found) if "auroc" in found else ""
    print(f"{found['rows']} rows, {found['flagged']:.1%} below the threshold {found['threshold']:.2f}{told}")
    if hasattr(args, "out"):
        print(f"wrote {args.out}")


def _eval(args: argparse.Namespace) -> None:
    from replaylab.evaluate import SEED, evaluate, summary

    noise = None
    if hasattr(args, "noise_action") or hasattr(args, "noise_transition"):
        from replaylab.envs.noise import Noise

        rate = getattr(args, "noise_rate", 1.0)
        noise = Noise(
            action_scale=getattr(args, "noise_action", 0.0),
            action_rate=rate,
            transition_scale=getattr(args, "noise_transition", 0.0),
            transition_rate=rate,
        )
    found = []
    for run in args.runs:
        records = evaluate(
            run,
            getattr(args, "env", None),
            episodes=args.episodes,
            seed=getattr(args, "seed", SEED),
            noise=noise,
            device=args.device,
            targets=getattr(args, "target", []),
        )
        for settings in {json.dumps(record["settings"]): record["settings"] for record in records}.values():
            part = [record for record in records if record["settings"] == settings]
            found.append({"run": run, "settings": settings, **summary(part), "records": part})
    if hasattr(args, "json"):
        print(json.dumps(found))
        return
    for row in found:
        interval = "" if row["low"] is None else f" [{row['low']:.1f}, {row['high']:.1f}]"
        error = "" if row["error"] is None else f" ± {row['error']:.1f} s.e."
        print(
            f"{row['run']}{_label(row['settings'])}: {row['env']} {row['score']} {row['mean']:.1f}{error}, "
            f"IQM {row['iqm']:.1f}{interval}, raw return {row['return']:.1f}, "
            f"length {row['length']:.0f}; {row['seeds']} seeds, {row['episodes']} episodes"
        )


def _label(settings: dict[str, Any]) -> str:
    return f" (target {settings['target']:g})" if "target" in settings else ""


def _report(args: argparse.Namespace) -> None:
    from replaylab.report import report, summarize_runs

    if hasattr(args, "json"):
        print(json.dumps(summarize_runs(args.runs)))
        return
    default = f"{args.runs[0].rstrip('/')}/report.html" if len(args.runs) == 1 else "report.html"
    print(f"wrote {report(args.runs, getattr(args, 'out', default))}")


def _bench(args: argparse.Namespace) -> None:
    from replaylab.bench import bench

    bench(
        getattr(args, "cases", []),
        device=args.device,
        json_path=getattr(args, "json", None),
        against=getattr(args, "against", None),
    )


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    debug = "--debug" in words  # allowed anywhere
    try:
        words = [word for word in words if word != "--debug"]
        args = build(words).parse_args(words)
        args.run(args)
        return 0
    except ReplaylabError as error:
        if debug:
            traceback.print_exc()
        print(f"replaylab: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("replaylab: stopped", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `replaylab ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        if debug:
            raise
        print(f"replaylab: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"replaylab: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1
