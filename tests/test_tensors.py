from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from replaylab.errors import DataError
from replaylab.tensors import load_tensors, save_tensors

EXAMPLE = {
    "a.weight": torch.randn(3, 4),
    "b": torch.arange(5),
    "half": torch.randn(7).bfloat16(),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def test_both_directions_with_the_safetensors_package(tmp_path):
    save_tensors(tmp_path / "ours", EXAMPLE)
    save_file(EXAMPLE, tmp_path / "theirs")
    for found in (load_file(tmp_path / "ours"), load_tensors(tmp_path / "theirs"), load_tensors(tmp_path / "ours")):
        assert found.keys() == EXAMPLE.keys()
        for name, tensor in EXAMPLE.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_damaged_files_give_one_kind_of_error(tmp_path):
    save_tensors(tmp_path / "good", EXAMPLE)
    good = (tmp_path / "good").read_bytes()
    rng = random.Random(0)
    outcomes = set()
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(min(len(bad), 600))] = rng.randrange(256)
        bad = bad[: rng.randrange(len(bad))] if rng.random() < 0.3 else bad
        (tmp_path / "bad").write_bytes(bad)
        try:
            load_tensors(tmp_path / "bad")
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    with pytest.raises(DataError):
        load_tensors(tmp_path / "missing")
