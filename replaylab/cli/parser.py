"""The parser: argparse with one-line errors, and the options for reading data that verbs share."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from replaylab.errors import UsageError, nearest


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, which name the nearest option for a misspelt one."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # -1e3 is not an option

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


def add_verb(verbs: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    return parser


def data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading data")
    group.add_argument("--format", help="file format (default: found from the file)")
    group.add_argument(
        "--columns", nargs="+", action="extend", metavar="NAME=COLUMN[,COLUMN]", help="which column is what"
    )
    group.add_argument("--max-episode-steps", type=int, metavar="N", help="end an episode after N steps")
    group.add_argument("--split", choices=["flags", "discontinuity"], help="ends by flags only, or also at jumps")
    replay = parser.add_argument_group("reading part of a DQN-replay log")
    for option, name, text in (
        ("--num-steps", "max_steps", "about N rows, in whole episodes, spread evenly over its checkpoints"),
        ("--num-buffers", "checkpoints", "only the last N checkpoints"),
        ("--trajectories-per-buffer", "episodes_per_checkpoint", "at most N episodes of each checkpoint"),
    ):
        replay.add_argument(option, dest=name, type=int, metavar="N", help=text)


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    from replaylab.data.read import OPTIONS, PART

    found = {k: getattr(args, k) for k in (*OPTIONS, *PART) if hasattr(args, k)}
    if "columns" in found:
        from replaylab.data.formats.common import parse_columns

        found["columns"] = parse_columns(args.columns)
    return found


def assignments(words: Sequence[str]) -> dict[str, Any]:
    """The NAME=JSON words of a `--set` option as a dictionary."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {word}: expected NAME=JSON, such as keep=0.05 or reward=[0.5,1]") from error
    return found
