"""The verbs of `replaylab data`: look at, convert, damage and collect datasets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from replaylab.cli.parser import Parser, add_verb, assignments, data_options, read_options
from replaylab.config import add_arguments


def build_data(verbs: Any, words: Sequence[str]) -> None:
    data = add_verb(verbs, "data", "look at, convert and make datasets", None)
    inner = data.add_subparsers(title="data verbs", required=True, metavar="VERB", parser_class=Parser)
    verb = add_verb(inner, "list", "list the shipped datasets and the formats that can be read", _data_list)
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb = add_verb(inner, "info", "show counts, returns, ranges and warnings", _data_info)
    verb.add_argument("path", nargs="+", metavar="X", help="files or folders; several are joined")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    data_options(verb)
    verb = add_verb(inner, "plot", "write a page of plots", _data_plot)
    verb.add_argument("path", nargs="+", metavar="X", help="files or folders; several are joined")
    verb.add_argument("--out", default="data.html", help="the page (default: data.html)")
    data_options(verb)
    verb = add_verb(inner, "convert", "convert data to another format", _data_convert)
    verb.add_argument("source", nargs="+", metavar="SRC", help="files or folders; several are joined")
    verb.add_argument("target", metavar="DST", help="the new dataset")
    verb.add_argument("--to", metavar="FORMAT", help="format to write (default: found from DST)")
    verb.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    data_options(verb)
    verb = add_verb(inner, "sparsify", "remove rows on purpose, by a recipe", _data_sparsify)
    verb.add_argument("path", nargs="+", metavar="X", help="files or folders; several are joined")
    verb.add_argument(
        "--recipe", required=True, metavar="pca-quadrant|reward-action-box", help="which rows; see docs/damage.md"
    )
    verb.add_argument("--out", required=True, help="the new dataset")
    verb.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    verb.add_argument(
        "--set", nargs="+", action="extend", metavar="NAME=JSON", help="parameters of the recipe, such as keep=0.05"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    data_options(verb)
    verb = add_verb(inner, "corrupt", "make a labelled test set: episodes and shifted copies of them", _data_corrupt)
    verb.add_argument("path", nargs="+", metavar="X", help="files or folders; several are joined")
    verb.add_argument("--distance", type=float, required=True, help="mean of the noise added to the shifted half")
    verb.add_argument("--out", required=True, help="the new dataset")
    verb.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    verb.add_argument("--episodes", type=int, default=10, help="number of episodes to take (default: 10)")
    verb.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    data_options(verb)
    _build_collect(inner, words)


def _build_collect(inner: Any, words: Sequence[str]) -> None:
    verb = add_verb(inner, "collect", "make a dataset by training or driving a policy in an environment", _data_collect)
    verb.add_argument(
        "env", metavar="ENV", help="hopper, walker2d, Pendulum-v1, atari/pong, pointmaze-medium, antmaze-umaze, ..."
    )
    verb.add_argument("--out", required=True, metavar="D", help="the dataset (with --level all: a folder per level)")
    verb.add_argument("--level", help="random, medium, medium-replay, full-replay, expert, medium-expert, mixed or all")
    verb.add_argument("--steps", type=int, metavar="N", help="rows per dataset (default: 1000000, mazes 300000)")
    verb.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verb.add_argument("--to", metavar="FORMAT", help="format to write (default: found from D; a folder is native)")
    verb.add_argument(
        "--compact", action="store_true", help="make a small file: round to 12 bits (of 23), leave out extra columns"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    if "collect" not in words:  # the modules below need simulators
        return
    if any(word.startswith("pointmaze") for word in words):
        verb.add_argument("--style", choices=["play", "diverse"], help="fixed or random starts and goals")
        verb.add_argument("--noise", type=float, help="standard deviation of the noise on the driver's actions")
    elif any(word.startswith(("antmaze", "d4rl/antmaze")) for word in words):
        from replaylab.collect import antmaze

        add_arguments(verb, antmaze.Config)
    elif any(word.startswith("atari/") for word in words):
        from replaylab.collect import atari

        add_arguments(verb, atari.Config)
    else:
        from replaylab.collect import online

        add_arguments(verb, online.Config)


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

    found = summarize(load(args.path, **read_options(args)))
    print(json.dumps(found) if hasattr(args, "json") else format_summary(found))


def _data_plot(args: argparse.Namespace) -> None:
    from replaylab.data.inspect import plot
    from replaylab.data.read import load

    plot(load(args.path, **read_options(args)), args.out, title=", ".join(args.path))
    print(f"wrote {args.out}")


def _data_convert(args: argparse.Namespace) -> None:
    from replaylab.data.read import load
    from replaylab.data.write import save

    episodes = load(args.source, **read_options(args))
    save(episodes, args.target, format=getattr(args, "to", None), overwrite=hasattr(args, "overwrite"))
    print(f"wrote {args.target}: {_size(episodes)}")


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

    _damage(args, lambda x: sparsify(x, args.recipe, seed=args.seed, **assignments(getattr(args, "set", []))))


def _data_corrupt(args: argparse.Namespace) -> None:
    from replaylab.data.damage import corrupt

    _damage(args, lambda x: corrupt(x, args.distance, seed=args.seed, episodes_count=args.episodes))


def _damage(args: argparse.Namespace, change: Callable[[Any], Any]) -> None:
    from replaylab.data.read import load
    from replaylab.data.write import save

    found = change(load(args.path, **read_options(args)))
    save(found, args.out, overwrite=hasattr(args, "overwrite"))
    print(f"wrote {args.out}: {_size(found)}; {json.dumps(found.meta['damage'][-1])}")


def _size(episodes: Any) -> str:
    from replaylab.page import count

    return f"{count(len(episodes), 'step')}, {count(episodes.num_episodes, 'episode')}"
