from __future__ import annotations

import torch

from replaylab.models import draws


def test_the_hash_is_splitmix64():
    golden = torch.tensor(draws.GOLDEN)  # its published first outputs for seed 0
    found = [hex(int(draws.mix(golden * i)) % 2**64) for i in (1, 2)]
    assert found == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_numbers_are_normal_and_independent():
    keys = draws.keys([0, 1])
    drawn, later = (draws.normals(keys, torch.tensor(step), 100_000) for step in (5, 6))
    assert drawn.mean(1).abs().max() < 0.01 and (drawn.std(1) - 1).abs().max() < 0.01 and drawn.isfinite().all()
    assert abs(((drawn < 0.5).float().mean()) - 0.6915) < 0.005
    rows = torch.stack([drawn[0], drawn[1], later[0], drawn[0].roll(1)])
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max() < 0.015
    other = draws.normals(draws.keys([0], 1), torch.tensor(5), 100_000)
    assert torch.corrcoef(torch.stack([drawn[0], other[0]]))[0, 1].abs() < 0.015


def test_uniform_numbers_stay_inside():
    drawn = draws.uniforms(draws.keys([3]), torch.tensor(0), 1_000_000)
    assert drawn.abs().max() < 1 and drawn.abs().max() > 0.99999 and abs(drawn.mean()) < 0.003
    assert (torch.histc(drawn, 20, -1, 1) / 50_000 - 1).abs().max() < 0.03


def test_a_seed_does_not_know_its_company():
    alone, together = draws.keys([7]), draws.keys([0, 1, 7])
    step = torch.tensor(9)
    assert torch.equal(draws.uniforms(alone, step, 50), draws.uniforms(together, step, 50)[2:])
