"""Damaged files of every format: a reader either succeeds or raises DataError, within bounded memory and time.

Each reader runs in a process of its own, so that a crash inside a C library (HDF5, Arrow) is a failed test with a seed
and not the end of the test run. It is a new one, not a fork: other tests may have left threads that hold locks. `SEED`
in a failure reproduces the file: damage(sample, random.Random(SEED)).
"""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import zipfile
from pathlib import Path

import pytest
from logs import samples

from replaylab.data import load
from replaylab.data.formats import table
from replaylab.errors import DataError, ReplaylabError

KINDS = ["native", "minari", "npz", "flat npz", "d4rl", "hdf5", "list", "dict", "csv", "plain csv"]
KINDS += ["parquet", "dqn-replay"]
MEMORY = 2 << 30  # bytes a reader may add
LARGEST = 100 << 20  # bytes that any array it returns may have
PATIENCE = 30  # seconds a file may take
NUMBERS = [0, 1, 2, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, insert, repeat and splice, a few times; and edit numbers, in binary and in text."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        if not out:
            break
        at, size = rng.randrange(len(out)), rng.choice([1, 1, 2, 4, 8, 16, 64])
        match rng.randrange(9):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + size] = rng.randbytes(size)
            case 2:
                del out[at : at + (size if rng.random() < 0.8 else len(out))]
            case 3:
                out[at:at] = rng.randbytes(size)
            case 4:
                out[at:at] = out[at : at + size] * rng.choice([1, 2, 50])
            case 5:
                there = rng.randrange(len(out))
                out[at : at + size] = out[there : there + size]
            case 6:
                width = rng.choice([1, 2, 4, 8])
                value = rng.choice(NUMBERS) & (2 ** (8 * width) - 1)
                out[at : at + width] = struct.pack("<Q", value)[:width]
            case 7:
                digits = [m.span() for m in re.finditer(rb"\d+", bytes(out))]
                if digits:
                    start, stop = rng.choice(digits)
                    out[start:stop] = rng.choice([b"-1", b"0", b"9" * 12, b"1e9", b"NaN", b"Infinity", b"null", b""])
            case 8:
                names = [m.span() for m in re.finditer(rb"[a-z_<|]{2,}", bytes(out))]
                if names:
                    (a, b), (c, d) = rng.choice(names), rng.choice(names)
                    out[a:b] = out[c:d]
    return bytes(out)


def damage_inside(data: bytes, rng: random.Random) -> bytes:
    """Damage one member of a zip archive and pack it again, so that its checksum is right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        victim = rng.choice(old.namelist())
        for name in old.namelist():
            new.writestr(name, damage(old.read(name), rng) if name == victim else old.read(name))
    return out.getvalue()


def damage_unzipped(data: bytes, rng: random.Random) -> bytes:
    """The same for a gzip file."""
    return gzip.compress(damage(gzip.decompress(data), rng), 1)


INSIDE = {".npz": damage_inside, ".gz": damage_unzipped}


def victims(sample: Path) -> list[Path]:
    return [sample] if sample.is_file() else sorted(p for p in sample.rglob("*") if p.is_file())


def attempt(sample: Path, work: Path, seed: int) -> str:
    """Damage one file of the sample and load it. '' for success or DataError, else what went wrong."""
    rng = random.Random(seed)
    victim = rng.choice(victims(sample))
    target = work / victim.relative_to(sample.parent)
    data = target.read_bytes()
    inside = INSIDE.get(victim.suffix, damage) if rng.random() < 0.7 else damage
    target.write_bytes(inside(data, rng))
    try:
        episodes = load(work / sample.name, max_episode_steps=rng.choice([None, None, 3]))
        arrays = [episodes.observations, episodes.actions, *episodes.extras.values(), *episodes.attachments.values()]
        if max(a.nbytes for a in arrays) > LARGEST:
            return "an array of more than 100 MiB came out of a file of a few kB"
        episodes.next_observations()
        assert len(episodes.returns) == episodes.num_episodes
    except DataError as error:
        return "" if "\n" not in str(error) else f"a DataError of several lines: {error!r}"
    except ReplaylabError as error:
        return f"{error!r}"
    except BaseException:
        return traceback.format_exc()
    finally:
        target.write_bytes(data)
        for extraction in work.rglob(".replaylab"):
            shutil.rmtree(extraction)
    return ""


def child(kind: str, sample: Path, work: Path, seeds: range) -> None:
    """Runs in the new process: one line a seed, so that the parent knows which file was the last."""
    if kind == "plain csv":  # as on a machine without pyarrow
        table._csv_arrow = lambda arrow, *rest: table._csv_plain(*rest)
    load(work / sample.name)  # the sample itself is good, and what is imported late is imported now
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        signal.alarm(PATIENCE)
        os.write(1, f"{seed}\n".encode())
        if problem := attempt(sample, work, seed):
            os.write(1, f"SEED {seed}: {problem}\n".encode())
            os._exit(1)
    os._exit(0)


def run(kind: str, folder: Path, seeds: range) -> None:
    sample = samples(folder / "good")[kind.removeprefix("plain ")]
    work = folder / "work"
    work.mkdir()
    if sample.is_dir():
        shutil.copytree(sample, work / sample.name)
    else:
        shutil.copy(sample, work)
    words = [sys.executable, __file__, kind, str(sample), str(work), str(seeds.start), str(seeds.stop)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    code, said = done.returncode, done.stdout
    if code < 0:
        seed = [word for word in said.split() if word.isdigit()][-1]
        pytest.fail(f"{kind}: SEED {seed} ended the process with {signal.Signals(-code).name}")
    assert code == 0, f"{kind}: {said[said.rfind('SEED') :]}"
    assert said.split()[-1] == str(seeds[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind, tmp_path):
    run(kind, tmp_path, range(60))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_damaged_files(kind, tmp_path):
    run(kind, tmp_path, range(1000, 11_000))


if __name__ == "__main__":
    kind, sample, work, start, stop = sys.argv[1:]
    child(kind, Path(sample), Path(work), range(int(start), int(stop)))
