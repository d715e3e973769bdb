"""Tables: CSV (any of , ; tab) and Parquet. A column mapping says which columns are what; numbered ones are guessed.

Every cell that is read must hold a number; an empty or unreadable one is an error that names its column and row.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.formats.common import Options, assemble, check_size, choose, first_bytes
from replaylab.errors import DataError, MissingExtra, require

PIECE = 20_000  # rows of text held at a time
ID = "episode id: "  # before a column's name: its cells as ids, beside their numbers where it has another role too
ADVICE = "encode text, categories and dates as numbers, or choose other columns with --columns ROLE=NAME,NAME"
TRUTH = {"true": True, "false": False, "yes": True, "no": False}


def sniff(path: Path) -> bool:
    return first_bytes(path, 4) == b"PAR1" or (path.is_file() and path.suffix.lower() in (".csv", ".tsv"))


def read(path: Path, options: Options) -> Episodes:
    parquet = first_bytes(path, 4) == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")
    names, columns, roles = _parquet(path, options) if parquet else _csv(path, options)
    notes, used = [], set(_used(names, roles))
    if left := [n or "''" for n in names if n not in used]:
        notes.append(f"columns left out: {', '.join(left[:10])}{' ...' if len(left) > 10 else ''}")
    observed = roles["observations"] + roles.get("next_observations", [])
    columns |= {n: columns[n].astype(np.float64) for n in observed}  # some of them may have been whole numbers
    if len(roles["actions"]) == 1 and columns[roles["actions"][0]].dtype.kind in "iu":
        notes.append("actions are whole numbers and are taken as discrete choices; write amounts as 1.0, not 1")
    if "episode" in roles:
        roles["episode"] = [ID + name for name in roles["episode"]]
    return assemble(columns, replace(options, columns=roles), {"notes": notes})


# --- Parquet


def _parquet(path: Path, options: Options) -> tuple[list[str], dict[str, np.ndarray], dict[str, list[str]]]:
    parquet = require("pyarrow.parquet", "reading Parquet")
    limits = {"thrift_string_size_limit": 10_000_000, "thrift_container_size_limit": 1_000_000}
    with parquet.ParquetFile(path, **limits) as file:
        names = list(file.schema_arrow.names)
        roles = choose(names, options.columns)
        used = _used(names, roles)
        check_size("the table", file.metadata.num_rows * len(used) * 8, path.stat().st_size)
        table = file.read(columns=used, use_threads=False)
        table.validate(full=True)
    return names, _columns(table, roles), roles


def _columns(table: Any, roles: dict[str, list[str]]) -> dict[str, np.ndarray]:
    if not table.num_rows:
        raise DataError("the table has no rows")
    numbers, ids = _numbers_and_ids(roles)
    columns = {name: _arrow(name, table.column(name), False) for name in numbers}
    return columns | {ID + name: _arrow(name, table.column(name), True) for name in ids}


def _arrow(name: str, column: Any, ids: bool) -> np.ndarray:
    """An Arrow column as numbers; a column of equally long lists as a matrix; ids of episodes numbered."""
    types = require("pyarrow.types", "reading tables")
    if column.null_count:
        raise DataError(f"column '{name}', row {_first(column.is_null())} is empty")
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lengths = np.unique(require("pyarrow.compute", "reading tables").list_value_length(column))
        flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
        if len(lengths) != 1 or len(flat) != lengths[0] * len(column):
            raise DataError(f"column '{name}' holds lists of different lengths")
        return _finite(name, flat.reshape(len(column), lengths[0]))
    if ids:
        return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    if types.is_decimal(column.type):
        column = column.cast("float64")
    if types.is_string(column.type) or types.is_large_string(column.type):
        return _finite(name, _numbers(name, column.to_pylist(), 1))
    return _finite(name, column.to_numpy())


# --- CSV


def _csv(path: Path, options: Options) -> tuple[list[str], dict[str, np.ndarray], dict[str, list[str]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline(1 << 20)
        if not first:
            raise DataError("the file is empty")
        delimiter = max(",;\t", key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
    roles = choose(names, options.columns)
    _used(names, roles)  # refuses two columns of one name
    try:
        arrow = require("pyarrow.csv", "reading CSV fast")
    except MissingExtra:
        return names, _csv_plain(path, delimiter, names, roles), roles
    return names, _csv_arrow(arrow, path, delimiter, names, roles), roles


def _csv_arrow(
    arrow: Any, path: Path, delimiter: str, names: list[str], roles: dict[str, list[str]]
) -> dict[str, np.ndarray]:
    text = require("pyarrow", "reading CSV fast").string()  # 01 and 1 are two ids, though one number
    table = arrow.read_csv(
        path,
        read_options=arrow.ReadOptions(use_threads=False, column_names=names, skip_rows=1),
        parse_options=arrow.ParseOptions(delimiter=delimiter),
        convert_options=arrow.ConvertOptions(
            include_columns=_used(names, roles),
            column_types=dict.fromkeys(roles.get("episode", []), text),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    return _columns(table, roles)


def _csv_plain(path: Path, delimiter: str, names: list[str], roles: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """The same without pyarrow, in pieces, so that the text of the whole file is never held."""
    numbers, ids = _numbers_and_ids(roles)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*numbers, *(ID + name for name in ids))}
    seen: dict[str, int] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = (cells for cells in csv.reader(file, delimiter=delimiter) if cells)
        next(lines, None)
        row = 1
        while piece := list(islice(lines, PIECE)):
            for i, cells in enumerate(piece):
                if len(cells) != len(names):
                    raise DataError(f"row {row + i} has {len(cells)} cells, the header {len(names)}")
            text = dict(zip(names, zip(*piece, strict=True), strict=True))
            for name in numbers:
                parts[name].append(_finite(name, _numbers(name, text[name], row), row))
            for name in ids:
                if "" in text[name]:
                    raise DataError(f"column '{name}', row {row + text[name].index('')} is empty")
                parts[ID + name].append(np.array([seen.setdefault(cell, len(seen)) for cell in text[name]]))
            row += len(piece)
    if row == 1:
        raise DataError("the table has no rows")
    return {name: np.concatenate(values) for name, values in parts.items()}


def _numbers(name: str, cells: Sequence[str], row: int) -> np.ndarray:
    """Text -> whole numbers where all are, else floats, else truth; `row` is the first cell's, counted from 1."""
    for convert, dtype in ((int, np.int64), (float, np.float64), (lambda c: TRUTH[c.strip().lower()], bool)):
        try:
            return np.array(list(map(convert, cells)), dtype)
        except (ValueError, OverflowError, KeyError):
            continue
    for i, cell in enumerate(cells):
        try:
            float(cell)
        except ValueError:
            what = f"holds '{cell:.40}', not a number: {ADVICE}" if cell.strip() else "is empty"
            raise DataError(f"column '{name}', row {row + i} {what}") from None
    raise DataError(f"column '{name}' cannot be read as numbers")


def _finite(name: str, values: np.ndarray, row: int = 1) -> np.ndarray:
    if values.dtype.kind not in "fiub":
        raise DataError(f"column '{name}', row {row} holds '{values.flat[0]!s:.40}', not a number: {ADVICE}")
    if values.dtype.kind == "f" and (bad := np.isnan(values)).any():
        raise DataError(f"column '{name}', row {row + _first(bad) - 1} is NaN")
    return values


def _first(mask: Iterable[Any]) -> int:
    """The row, counted from 1, of the first true value."""
    return int(np.asarray(mask, bool).reshape(len(np.asarray(mask)), -1).any(1).argmax()) + 1


def _used(names: list[str], roles: dict[str, list[str]]) -> list[str]:
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{times} columns are named '{name}'")
    return list(dict.fromkeys(name for found in roles.values() for name in found))


def _numbers_and_ids(roles: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """The columns to read as numbers, and those to read as ids of episodes; one may be among both."""
    numbers = [name for role, found in roles.items() if role != "episode" for name in found]
    return list(dict.fromkeys(numbers)), roles.get("episode", [])
