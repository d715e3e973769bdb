"""Pickles of trajectories: the Decision Transformer's list of dicts, one an episode, and GORMPO's dict of arrays.

A pickle is a program, and Python's unpickler runs it. This reader does not use it: it interprets the few opcodes that
build numbers, strings, containers and NumPy arrays, and refuses all others. The names of functions in the file
are only ever compared, never looked up, so nothing in it can be called.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.ends import id_changes
from replaylab.data.episodes import Episodes
from replaylab.data.formats.common import Options, assemble, check_size, choose, env_from_name, first_bytes
from replaylab.errors import DataError

MAX_OPCODES = 50_000_000
NUMBER = "number of the trajectory"  # a column, beside those of the file


def sniff(path: Path) -> bool:
    start = first_bytes(path, 2)
    return len(start) == 2 and start[0] == 0x80 and start[1] <= 5


def read(path: Path, options: Options) -> Episodes:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise DataError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
            value = _Interpreter().run(stream)
    notes: list[str] = []
    stored = path.stat().st_size
    if isinstance(value, list | tuple) and value:
        arrays = _join(value, stored, options, notes)
        options = replace(options, columns={**options.columns, "episode": [NUMBER]})
    elif isinstance(value, dict):
        arrays, unread = _columns(value, "", stored)
        check_size("the pickle", sum(a.nbytes for a in arrays.values()), stored)
        arrays = _shorten(arrays, _roles(arrays, unread, options), notes)
        notes += [f"{key} holds {what} and is left out" for key, what in unread.items()]
    else:
        raise DataError("the pickle holds neither a list of trajectories nor a dict of arrays")
    return assemble(arrays, options, {**env_from_name(path.stem), "notes": notes})


# --- what was unpickled -> columns


def _columns(value: Mapping[Any, Any], where: str, stored: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of one dict, and what its other entries hold. Lists of numbers, lists or equal arrays are arrays."""
    columns, unread = {}, {}
    for key, item in value.items():
        found = item if isinstance(item, np.ndarray) else f"one {type(item).__name__}"
        if isinstance(item, list | tuple):
            found = _stack(f"{where}{key!s:.40}", item, stored)
        if isinstance(key, str) and isinstance(found, np.ndarray):
            columns[key] = found
        else:
            unread[f"{key!s:.40}"] = found if isinstance(found, str) else "an array, but is no name"
    return columns, unread


def _stack(name: str, items: list | tuple, stored: int) -> np.ndarray | str:
    """A list as an array or, where it cannot be one, what it holds."""
    shape, inner = [len(items)], items
    while inner and isinstance(inner[0], list | tuple) and len(shape) < 8:  # a list can hold itself
        inner = inner[0]
        shape.append(len(inner))
    if not inner:
        return "an empty list"
    # a pickle can name one list many times, so the size is checked before anything unfolds
    check_size(name, math.prod(shape) * getattr(inner[0], "nbytes", 8), stored)
    for length in shape[1:]:
        if not all(isinstance(i, list | tuple) and len(i) == length for i in items):
            return "lists of different lengths"
        items = [number for i in items for number in i]
    for item in items:
        if not isinstance(item, np.ndarray | np.generic | bool | int | float):
            return f"a list of {type(item).__name__}"
    if len({np.shape(i) for i in items}) > 1:
        return "arrays of different shapes"
    return np.asarray(items).reshape(*shape, *np.shape(items[0]))


def _roles(columns: Mapping[str, Any], unread: Mapping[str, str], options: Options) -> dict[str, list[str]]:
    """`choose`, but a column that is there and cannot be read is not called missing."""
    try:
        return choose(list(columns), options.columns)
    except DataError:
        for role, names in choose([*columns, *unread], options.columns).items():
            for name in names:
                if name in unread:
                    raise DataError(f"{role}: '{name}' holds {unread[name]}; only arrays of numbers are read") from None
        raise


def _join(value: list | tuple, stored: int, options: Options, notes: list[str]) -> dict[str, np.ndarray]:
    """A list of dicts, one an episode -> flat columns and a column of episode numbers."""
    parts: list[dict[str, np.ndarray]] = []
    left: dict[str, str] = {}
    size = 0
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"trajectory {i} is a {type(item).__name__}, not a dict")
        part, unread = _columns(item, f"trajectory {i}: ", stored)
        size += sum(array.nbytes for array in part.values())
        check_size("the pickle", size, stored)
        parts.append(part)
        left = unread | left
    _add_flags(parts, left, options, notes)
    for i, part in enumerate(parts):
        try:
            parts[i] = _with_final(part, _roles(part, left, options))
        except DataError as error:
            raise DataError(f"trajectory {i}: {error}") from error
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    for name in dict.fromkeys(name for part in parts for name in part):
        if name not in shared:
            left.setdefault(name, "nothing in some trajectories")
    notes += [f"{name} holds {what} and is left out" for name, what in left.items() if name not in shared]
    roles = choose(shared, options.columns)
    used = {name for names in roles.values() for name in names}
    lengths = [part[roles["rewards"][0]].shape[0] if part[roles["rewards"][0]].ndim else 0 for part in parts]
    columns = {}
    for name in shared:
        odd = [i for i, part in enumerate(parts) if part[name].shape != (lengths[i], *parts[0][name].shape[1:])]
        if odd and name in used:
            i = odd[0]
            raise DataError(f"trajectory {i}: {name} has shape {parts[i][name].shape} beside {lengths[i]} rewards")
        if odd:
            notes.append(f"{name} has not one value a row and is left out")
        else:
            columns[name] = np.concatenate([part[name] for part in parts])
    number = np.repeat(np.arange(len(parts)), lengths)
    for name in roles.get("episode", []):  # ids in the file can split a trajectory further, but not join two
        id_changes(columns[name], len(number), [])  # refuses what cannot be an id
        kinds, inner = np.unique(columns[name], return_inverse=True)
        number = number * len(kinds) + inner.reshape(-1)
    return columns | {NUMBER: number}


def _add_flags(parts: list[dict[str, np.ndarray]], left: dict[str, str], options: Options, notes: list[str]) -> None:
    """Give each trajectory the flags that others have: where they are not stated, no row ends so."""
    roles = _roles(dict.fromkeys(name for part in parts for name in part), left, options)
    for name in [name for role in ("terminated", "done", "truncated") for name in roles.get(role, [])]:
        like = next(part[name] for part in parts if name in part)
        lack = [i for i, part in enumerate(parts) if name not in part]
        for i in lack:
            rows = len(np.atleast_1d(parts[i].get(roles["rewards"][0], 0)))  # a lack of rewards is told later
            parts[i][name] = np.zeros((rows, *like.shape[1:]), like.dtype)
        if lack:
            notes.append(
                f"trajectories without {name}, which are read as if it were never set: {len(lack)} of {len(parts)}, "
                f"the first is trajectory {lack[0]}"
            )


def _with_final(part: dict[str, np.ndarray], roles: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """A trajectory with one observation more than rewards states its final observation that way."""
    name, reward = roles["observations"][0], part[roles["rewards"][0]]
    observations = part[name]
    if "next_observations" in roles or not reward.ndim or not observations.ndim or len(observations) != len(reward) + 1:
        return part
    return part | {name: observations[:-1], "next_observations": observations[1:]}


def _shorten(arrays: dict[str, np.ndarray], roles: dict[str, list[str]], notes: list[str]) -> dict[str, np.ndarray]:
    """GORMPO's files may lack the last next_observation: then their last row goes."""
    after, rewards = (arrays[roles[r][0]] if r in roles else None for r in ("next_observations", "rewards"))
    if after is None or rewards is None or not rewards.ndim or len(after) != len(rewards) - 1:
        return arrays
    notes.append("there is one next_observation fewer than rows, so the last row is left out")
    return {n: a[: len(after)] if a.ndim and len(a) == len(rewards) else a for n, a in arrays.items()}


# --- a pickle interpreter that can build data and nothing else


@dataclass(frozen=True)
class _Name:
    """A function or class named in the pickle. It stays a name."""

    module: str
    name: str

    @property
    def plain(self) -> str:
        return f"{self.module.replace('numpy._core', 'numpy.core')}.{self.name}"


@dataclass
class _DType:
    """numpy.dtype before its byte order is known."""

    code: str
    order: str = "="

    def build(self) -> np.dtype:
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", self.code) or self.order not in "<>=|":
            raise DataError(f"the pickle holds an array of {self.code!r}, not of numbers")
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class _Array:
    """numpy.ndarray before its content is known. `value` is filled in when the state arrives."""

    value: np.ndarray | None = None


def _make_array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if isinstance(data, str):
        data = data.encode("latin-1")  # Python 2 wrote bytes so
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _DType):
        raise DataError("the pickle holds an array of Python objects")
    if not isinstance(shape, tuple) or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise DataError("the pickle holds an array of an impossible shape")
    kind = dtype.build()
    if math.prod(shape) * kind.itemsize != len(data):
        raise DataError(f"the pickle holds {len(data)} bytes for an array {kind} of shape {shape}")
    return np.frombuffer(data, kind).reshape(shape, order="F" if order == "F" else "C")


class _Interpreter:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: Any) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_OPCODES:
                raise DataError("the pickle is an endless program")
            if opcode.name == "STOP":
                return _settle(self.stack.pop())
            self.step(opcode.name, argument)
        raise DataError("the pickle is cut off")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif _LITERALS.fullmatch(name):
            stack.append(argument)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            words = argument.split(" ", 1) if name == "GLOBAL" else [self.stack.pop() for _ in "12"][::-1]
            stack.append(_allowed(*words))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_reduce(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name not in ("PROTO", "FRAME"):
            self.container(name)

    def container(self, name: str) -> None:
        stack = self.stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(map(_settle, self.take(int(name[-1])))))
        elif name == "APPEND":
            _list(stack[-2]).append(_settle(stack.pop()))
        elif name == "SETITEM":
            pair = self.take(2)
            _dict(stack[-1]).update(_pairs(pair))
        elif name in ("APPENDS", "SETITEMS", "LIST", "TUPLE", "DICT"):
            items = self.take(len(stack) - self.marks.pop())
            if name == "APPENDS":
                _list(stack[-1]).extend(map(_settle, items))
            elif name == "SETITEMS":
                _dict(stack[-1]).update(_pairs(items))
            else:
                stack.append(dict(_pairs(items)) if name == "DICT" else _SEQUENCES[name](map(_settle, items)))
        elif name == "POP":
            stack.pop()
        else:
            raise DataError(f"the pickle uses {name}, which data does not need; it was not run")

    def take(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise DataError("the pickle is malformed")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SEQUENCES: dict[str, type] = {"LIST": list, "TUPLE": tuple}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_LITERALS = re.compile(
    r"(INT|BININT[12]?|LONG[14]?|(BIN)?FLOAT|BYTEARRAY8|(SHORT_)?BIN(STRING|UNICODE|BYTES)8?|STRING|UNICODE)"
)
_ALLOWED = {
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "numpy.ndarray",
    "numpy.dtype",
    "collections.OrderedDict",
    "_codecs.encode",  # how protocol 2 writes bytes
}


def _allowed(module: Any, name: Any = "") -> _Name:
    found = _Name(str(module), str(name))
    if found.plain not in _ALLOWED:
        raise DataError(f"the pickle asks for {found.module}.{found.name}, which is not data; nothing was run")
    return found


def _reduce(function: Any, arguments: Any) -> Any:
    """What the named function would have made of its arguments, for the few names that only make data."""
    match (function.plain if isinstance(function, _Name) else None), arguments:
        case "numpy.core.multiarray._reconstruct", (_Name(), _, _):
            return _Array()
        case "numpy.dtype", (str(code), *_):
            return _DType(code)
        case "numpy.core.multiarray.scalar", (dtype, data):
            return _make_array(data, dtype, (), "C")[()]
        case "numpy.core.numeric._frombuffer", (data, dtype, shape, order):
            return _make_array(data, dtype, shape, order)
        case "collections.OrderedDict", ():
            return {}
        case "_codecs.encode", (str(text), "latin1" | "latin-1"):
            return text.encode("latin-1")
    raise DataError("the pickle calls something that is not data; it was not run")


def _build(target: Any, state: Any) -> None:
    match target, state:
        case _Array(), (int(), shape, dtype, fortran, data):
            target.value = _make_array(data, dtype, shape, "F" if fortran else "C")
        case _DType(), (int(), str(order), None, None, None, *_):
            target.order = order
        case _:
            raise DataError("the pickle sets the state of something that is not an array; it was not run")


def _settle(value: Any) -> Any:
    """The array behind a builder, anything else as it is."""
    return value.value if isinstance(value, _Array) else value


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | bytes | int | float | None):  # hashing nested tuples can take for ever
            raise DataError("the pickle holds a dict whose keys are not names")
        yield key, _settle(value)


def _list(value: Any) -> list:
    if not isinstance(value, list):
        raise DataError("the pickle is malformed")
    return value


def _dict(value: Any) -> dict:
    if not isinstance(value, dict):
        raise DataError("the pickle is malformed")
    return value
