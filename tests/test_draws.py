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


def test_parts_of_a_batch_meet_the_numbers_of_the_whole(monkeypatch):
    """A batch of six rows with tables of one and of two numbers a row, in one process and in three."""
    keys, step = draws.keys([0, 1]), torch.tensor(4)

    def tables(rows):
        return draws.own(draws.uniforms(keys, step, draws.whole(3 * rows)), [rows, 2 * rows])

    alone, pairs = tables(6)
    assert torch.equal(torch.cat([alone, pairs], 1), draws.uniforms(keys, step, 18))  # nothing is reordered
    for part in range(3):
        monkeypatch.setattr(draws, "part", part)
        monkeypatch.setattr(draws, "parts", 3)
        own = tables(2)
        assert torch.equal(own[0], alone[:, 2 * part : 2 * part + 2])
        assert torch.equal(own[1], pairs[:, 4 * part : 4 * part + 4])
