"""The reference pages, made from the code when the site is built (a hook of mkdocs; see mkdocs.yml).

`reference-cli.md` lists every verb and option of the parsers, `reference-python.md` the public names with their
signatures and docstrings. To look at them without building: python docs/reference.py
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

# module -> its public names; None: those in __all__
PUBLIC: dict[str, tuple[str, ...] | None] = {
    "replaylab": None,
    "replaylab.sweep": ("run", "read_plan"),
    "replaylab.compare": ("compare", "export", "results_markdown", "gather"),
    "replaylab.stats": (
        "iqm", "mean_and_error", "bootstrap_interval", "summarize_scores", "aggregate", "performance_profile",
        "probability_of_improvement",
    ),
    "replaylab.scores": ("reference", "normalize"),
    "replaylab.published": ("published",),
}  # fmt: skip
# words that make the parser show options which it builds only when they are asked for
WORDS = (["train"], ["data", "collect", "hopper"], [])


# --- command line


def cli_page() -> str:
    from replaylab.cli import build

    parts = ["# Command line", "", "Every verb, every option, with its default. Made from the code."]
    verbs: dict[str, str] = {}
    for words in WORDS:
        for parser in _leaves(build(words)):
            text = _verb(parser)
            if len(text) > len(verbs.get(parser.prog, "")):  # with its options rather than without
                verbs[parser.prog] = text
    return "\n\n".join(["\n".join(parts), *(verbs[name] for name in sorted(verbs))]) + "\n"


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner and "run" in parser._defaults and parser._defaults["run"] is not None:
        yield parser
    for action in inner:
        for child in dict.fromkeys(action.choices.values()):
            yield from _leaves(child)


def _verb(parser: argparse.ArgumentParser) -> str:
    lines = [f"## {parser.prog}", "", parser.description or ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if not actions:
            continue
        title = group.title if group.title not in ("options", "optional arguments") else ""
        lines += ["", f"**{title}**" if title else "", "", "| | |", "|---|---|"]
        lines += [f"| `{_option(parser, action)}` | {_cell(action.help or '')} |" for action in actions]
    return "\n".join(lines)


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    if not action.option_strings:
        return formatter._format_args(action, action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    return (
        names
        if action.nargs == 0
        else f"{names} {formatter._format_args(action, action.metavar or action.dest.upper())}"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|").replace("<", "&lt;")


# --- Python


def python_page() -> str:
    parts = ["# Python", "", "Public names, with their signatures. Made from the code."]
    for name, chosen in PUBLIC.items():
        module = importlib.import_module(name)
        parts += ["", f"## {name}", "", _text(module)]
        for item in chosen or module.__all__:
            parts += ["", *_item(f"{name}.{item}", getattr(module, item))]
    return "\n".join(parts) + "\n"


def _item(name: str, value: Any) -> list[str]:
    lines = [f"### {name.split('.')[-1]}", "", "```text", f"{name}{_signature(value)}", "```", "", _text(value)]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for key, member in vars(value).items():
            called = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if key.startswith("_") or not (inspect.isfunction(called) or isinstance(member, property)):
                continue
            shown = "" if isinstance(member, property) else _signature(called)
            lines += ["", f"- `.{key}{shown}`  {' '.join(_text(member).split())}"]
    return lines


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return ""


def _text(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "").replace("<", "&lt;")


# --- the hook


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in (("reference-cli.md", cli_page()), ("reference-python.md", python_page())):
        files.append(File.generated(config, name, content=content))
    return files


if __name__ == "__main__":
    print(cli_page(), python_page(), sep="\n")
