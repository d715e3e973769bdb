"""The command line: argument parsing and printing. Every verb calls one public function."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from replaylab import __version__
from replaylab.cli.data import build_data
from replaylab.cli.parser import Parser
from replaylab.cli.runs import build_runs
from replaylab.errors import ReplaylabError


def build(words: Sequence[str]) -> Parser:
    description = "Learn policies from logged data, and find out how good they are."
    parser = Parser(prog="replaylab", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"replaylab {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=Parser)
    build_data(verbs, words)
    build_runs(verbs, words)
    return parser


class StandardError(io.TextIOBase):
    """Standard error for as long as somebody reads it. After that its text goes nowhere, and the work goes on."""

    def __init__(self) -> None:
        self.stream = sys.stderr or io.StringIO()  # None: it was closed from the start

    @property
    def encoding(self) -> str:  # type: ignore[override]  # libraries ask for it
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Callable[..., Any], *what: str) -> None:
        try:
            do(*what)
        except BrokenPipeError:
            _unplug(self.stream.fileno())


def _unplug(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def main(argv: list[str] | None = None) -> int:
    with contextlib.redirect_stderr(StandardError()):
        return _main(sys.argv[1:] if argv is None else argv)


def _main(words: list[str]) -> int:
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
        _unplug(1)
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
