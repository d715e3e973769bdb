from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from replaylab.algos import Phase
from replaylab.errors import UsageError
from replaylab.models import termination
from replaylab.models.dynamics import WORST, Dynamics, Fit, decays, slopes, soft_clamp
from replaylab.step import Stepper

CPU = torch.device("cpu")


def linear_world(rows=600, observation=2, action=1, seed=0, noise=0.05):
    """(s, a) and (s' - s, r) of a linear world with noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, observation + action, generator=g)
    weights = torch.randn(observation + action, observation + 1, generator=g)
    return x, x @ weights + noise * torch.randn(rows, observation + 1, generator=g)


def make_fit(seeds=(0,), members=3, elites=2, hidden=(16, 16), x=None, y=None, **settings):
    if x is None:
        x, y = linear_world()
    model = Dynamics(seeds, y.shape[1] - 1, x.shape[1] - y.shape[1] + 1, hidden, members, elites)
    return Fit(model, seeds, x, y, **{"batch_size": 64, "max_epochs": 4, "lr": 3e-3} | settings)


def run(fit, epochs, first=0):
    """`epochs` epochs as the trainer runs them; whether it stopped."""
    stepper = Stepper(Phase("dynamics", fit.steps, fit, fit.update), CPU)
    for epoch in range(first, first + epochs):
        fit.hook(epoch * fit.batches)
        if fit.stop():
            return True
        stepper.run(epoch * fit.batches, fit.batches)
    return False


# --- formulas


def test_the_loss_by_hand():
    """Bounds so wide that they do nothing: (1 / 1 + 0) and (4 / 4 + ln 4), the mean of the two."""
    raw, target = torch.tensor([[[[1.0, 0.0, 0.0, math.log(4)]]]]), torch.tensor([[[[0.0, 2.0]]]])
    loss, slope, low, high = slopes(raw, target, torch.tensor([[[[-30.0]]]]), torch.tensor([[[[30.0]]]]))
    assert loss.item() == pytest.approx((1 + 1 + math.log(4)) / 2)
    # 2 e / v / 2 for the means; (1 - e^2 / v) / 2 = 0 for both logarithms
    torch.testing.assert_close(slope[0, 0, 0], torch.tensor([1.0, -0.5, 0, 0]), atol=1e-6, rtol=0)
    assert low.abs().sum() < 1e-6 and high.abs().sum() < 1e-6


def test_the_soft_clamp_by_hand():
    low, high = torch.tensor(-10.0), torch.tensor(0.5)

    def slow(raw):
        between = 0.5 - math.log1p(math.exp(0.5 - raw))
        return -10 + math.log1p(math.exp(between + 10))

    for raw in (-12.0, -9.0, -3.0, 0.0, 0.4, 3.0, 8.0):
        assert soft_clamp(torch.tensor(raw), low, high).item() == pytest.approx(slow(raw), rel=1e-4, abs=1e-4)
    far = soft_clamp(torch.tensor([-1e4, 1e4]), low, high)
    assert far.tolist() == pytest.approx([-10.0, 0.5], abs=1e-3)


def test_decay_of_each_layer():
    assert decays(5) == [2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4]
    assert decays(3) == [2.5e-5, 5e-5, 1e-4] and decays(2) == [2.5e-5, 1e-4] and decays(1) == [1e-4]


def test_an_update_is_the_whole_loss_of_the_spec():
    """Gradients of our shortcut against those of the loss written out, one member and seed at a time."""
    ours, theirs = make_fit((3, 4)), make_fit((3, 4))
    ours.hook(0)
    batch = ours.gather(torch.tensor([0]))
    metrics = ours.update(batch)
    model = theirs.model
    total, by_seed = 0.0, []
    mean, logvar = model(batch["inputs"])
    for seed in range(2):
        losses = []
        for member in range(3):
            error = (mean[seed, member] - batch["targets"][seed, member]) ** 2
            losses.append((error * torch.exp(-logvar[seed, member])).mean() + logvar[seed, member].mean())
        by_seed.append(sum(losses) / 3)
        total = total + sum(losses)
    for layer, cost in zip(model.net.layers, [2.5e-5, 5e-5, 1e-4], strict=True):
        total = total + cost * layer.weight.square().sum()  # no half
    total = total + 0.01 * model.max_logvar.sum() - 0.01 * model.min_logvar.sum()
    total.backward()
    torch.testing.assert_close(metrics["loss"], torch.stack(by_seed).detach())
    for parameter, expected in zip(ours.parameters, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
    costs = [2 * c * w for c, w in zip([2.5e-5, 5e-5, 1e-4], theirs.weights, strict=True)]
    assert all(c.abs().max() > 1e-6 for c in costs)  # large enough that the comparison above would notice


# --- rows


def test_members_see_bootstrap_samples_and_no_held_out_row():
    fit = make_fit((0, 1))
    assert fit.holdout.shape == (2, 120)  # a fifth; a thousand at most
    big = make_fit(x=torch.randn(6000, 3), y=torch.randn(6000, 3))
    assert big.holdout.shape == (1, 1000)
    for seed in range(2):
        held = set(fit.holdout[seed].tolist())
        samples = [set(s.tolist()) for s in fit.samples[seed]]
        assert all(not held & s for s in samples) and samples[0] != samples[1]
        assert all(0.55 < len(s) / 480 < 0.72 for s in samples)  # 1 - 1/e of the rows, each some times
    assert set(fit.holdout[0].tolist()) != set(fit.holdout[1].tolist())


def test_an_epoch_goes_once_through_the_sample():
    fit = make_fit(batch_size=50)
    fit.shuffle(0)
    first = fit.order.clone()
    for member in range(3):
        seen = first[:, 0, member].flatten()
        expected = np.bincount(fit.samples[0, member].numpy(), minlength=600)
        assert (np.bincount(seen[:480].numpy(), minlength=600) == expected).all()
        assert torch.equal(seen[480:], seen[:20])  # the last batch is filled up
    fit.shuffle(1)
    assert not torch.equal(first, fit.order)
    fit.shuffle(0)
    assert torch.equal(first, fit.order)


def test_inputs_are_standardised_and_predictions_are_not():
    x, y = linear_world()
    x[:, 0] = x[:, 0] * 50 + 7
    x[:, 1] = 3.0  # constant
    fit = make_fit(x=x, y=y * 1000 + 5)
    inputs = fit.table[:, :3]
    torch.testing.assert_close(inputs.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs[:, [0, 2]].std(0, correction=0), torch.ones(2), atol=1e-3, rtol=0)
    assert (inputs[:, 1] == 0).all()
    model = fit.model
    raw, networks = model.inputs(x[:5, :2], x[:5, 2:]), model.networks(elites_only=False)
    mean, deviation = model.predict(raw.expand(3, 5, 3), networks)
    within, logvar = model(raw.expand(1, 3, 5, 3))
    torch.testing.assert_close(mean, within[0] * model.target_std + model.target_mean)
    torch.testing.assert_close(deviation, (0.5 * logvar[0]).exp() * model.target_std)
    assert mean.abs().max() > 5
    plain = make_fit(x=x, y=y, scale_targets=False)
    torch.testing.assert_close(plain.table[:, 3:], y)


# --- training


def test_it_learns_the_world_and_is_calibrated():
    fit = make_fit((0, 1), max_epochs=60, lr=1e-2, patience=5)
    run(fit, 60)
    found = fit.finish()
    noise = 0.05**2
    for seed in range(2):
        assert min(found["error"][seed]) < 3 * noise < found["error_of_the_mean"][seed] / 50
        assert found["elites"][seed] == sorted(np.argsort(found["error"][seed])[:2].tolist())
        for share, wanted in (("50", 0.5), ("80", 0.8), ("95", 0.95)):
            assert abs(found["coverage"][share][seed] - wanted) < 0.17
    assert found["holdout_rows"] == 120


def test_a_snapshot_is_kept_where_a_member_improves_by_one_per_cent():
    fit = make_fit((0, 1))
    fit.hook(0)
    assert (fit.best < WORST).all() and (fit.stale == 0).all()
    before, kept = fit.best.clone(), [k.clone() for k in fit.kept]
    fit.best *= 1.005  # what comes is better, but by less than 1 %
    fit.hook(fit.batches)
    torch.testing.assert_close(fit.best, before * 1.005)
    assert fit.stale.tolist() == [1, 1]
    fit.best[1, 2] = before[1, 2] * 1.02
    with torch.no_grad():
        for p in fit.model.net.parameters():
            p *= 1.0001  # so that copies can be told from the old ones
        fit.model.max_logvar += 0.25
    fit.hook(2 * fit.batches)
    assert fit.stale.tolist() == [2, 0]
    for now, old, p in zip(fit.kept, kept, fit.model.net.parameters(), strict=True):
        assert torch.equal(now[:5], old[:5]) and torch.equal(now[5], p[5])
    bounds = fit.kept_bounds[:, :, 1].flatten(0, 1)[:, 0, 0]  # highest logvar of the six members
    torch.testing.assert_close(bounds, torch.tensor([0.5] * 5 + [0.75]))


def test_early_stop_counts_for_each_seed_and_restores_the_best():
    fit = make_fit((0, 1), patience=2, max_epochs=50)
    fit.hook(0)
    fit.best[0] = 0.0001  # seed 0 cannot improve any more
    kept = [k[:3].clone() for k in fit.kept]
    stepper = Stepper(Phase("dynamics", fit.steps, fit, fit.update), CPU)
    for epoch in range(1, 4):
        stepper.run((epoch - 1) * fit.batches, fit.batches)
        fit.hook(epoch * fit.batches)
    assert fit.stale[0] >= 2 and fit.stale[1] == 0 and not fit.stop()
    fit.best[0] = 1e9  # it has ended: even a better one is no longer taken
    fit.hook(4 * fit.batches)
    assert fit.best[0, 0] == 1e9 and fit.epochs.tolist() == [2, 4]
    fit.best[1] = 1e-9
    fit.hook(5 * fit.batches)
    fit.hook(6 * fit.batches)
    assert fit.stop()
    fit.finish()
    for p, k in zip(fit.model.net.parameters(), kept, strict=True):
        assert torch.equal(p[:3], k)


def test_elites_are_the_best_and_only_they_are_asked():
    fit = make_fit((0, 1), members=4, elites=2)
    fit.hook(0)
    fit.stale += 5
    fit.best.copy_(torch.tensor([[4.0, 1, 3, 2], [1, 2, 3, 4]]))
    fit.finish()
    assert fit.model.elites.tolist() == [[1, 3], [0, 1]]
    layers, low, high = fit.model.networks(elites_only=True)
    rows = [1, 3, 4 + 0, 4 + 1]
    assert torch.equal(layers[0][0], fit.model.net.layers[0].weight[rows]) and low.shape == high.shape == (4, 1, 3)
    again = Dynamics((0, 1), 2, 1, (16, 16), 4, 2)
    again.load_state_dict(fit.model.state_dict())
    assert again.elites.tolist() == [[1, 3], [0, 1]]  # a reload keeps them


def test_a_seed_does_not_depend_on_its_neighbours():
    alone, beside = make_fit((4,), patience=2, max_epochs=12), make_fit((3, 4), patience=2, max_epochs=12)
    run(alone, 12), run(beside, 12)
    one, two = alone.finish(), beside.finish()
    assert one["epochs"][0] == two["epochs"][1] and one["elites"][0] == two["elites"][1]
    np.testing.assert_allclose(one["error"][0], two["error"][1], rtol=0.02)


@pytest.mark.parametrize("cut", [1, 5])
def test_resume_is_exact(cut):
    whole, first = make_fit((0, 1)), make_fit((0, 1))
    for fit in (whole, first):
        fit.hook(0)
        Stepper(Phase("d", fit.steps, fit, fit.update), CPU).run(0, fit.batches)
        fit.hook(fit.batches)
        stepper = Stepper(Phase("d", fit.steps, fit, fit.update), CPU)
        stepper.run(fit.batches, cut if fit is first else fit.batches)
    rest = make_fit((0, 1))
    rest.model.load_state_dict(first.model.state_dict())
    rest.optimizer.load_state_dict(first.optimizer.state_dict())
    rest.load({k: v.clone() for k, v in first.state().items()})
    Stepper(Phase("d", rest.steps, rest, rest.update), CPU).run(rest.batches + cut, rest.batches - cut)
    a, b = (fit.finish() for fit in (whole, rest))
    assert a == b
    for p, q in zip(whole.model.state_dict().values(), rest.model.state_dict().values(), strict=True):
        assert torch.equal(p, q)


def test_an_ensemble_of_other_layers_is_not_taken():
    """Where layers are as wide as the output, those that both have are of one shape."""
    ours, theirs = (Dynamics([0], 3, 1, hidden, 2, 1) for hidden in ([8], [8, 8]))
    for mine, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(UsageError, match="another number of layers"):
            mine.take(other.state_dict(), [0])


# --- terminations


def ends(name, *states):
    following = torch.tensor(states)[:, None]  # (seeds, rows, observation)
    return termination.find(name)(following, following, following)[:, 0].tolist()


def test_terminations_at_known_states():
    rest = [0.0] * 9
    assert ends("hopper", [1.2, 0.0, *rest], [0.7, 0, *rest], [1.2, 0.2, *rest], [1.2, -0.2, *rest]) == [0, 1, 1, 1]
    assert ends("hopper", [1.2, 0, *rest[:-1], -101.0], [1.2, 0, *rest[:-1], math.nan], [150.0, 0, *rest]) == [1, 1, 0]
    assert ends("walker2d", [1.2, 0.9, *rest], [0.8, 0, *rest], [2.0, 0, *rest], [1.2, -1.0, *rest]) == [0, 1, 1, 1]
    assert ends("walker2d", [1.2, 0, *rest[:-1], 100.0], [1.2, 0, *rest]) == [1, 0]
    assert ends("halfcheetah", [-5.0, 3.0], [99.0, -101.0], [math.nan, 0]) == [0, 1, 1]
    assert ends("ant", [0.2, 0], [1.0, 5.0], [0.19, 0], [1.01, 0], [0.5, math.inf]) == [0, 0, 1, 1, 1]
    for name in ("none", "pendulum", "abiomed"):
        assert ends(name, [1e9, -1e9]) == [0]


def test_environments_are_recognised_by_name():
    for name in ("d4rl/hopper", "Hopper-v5", "mujoco/hopper/medium-v0", "hopper_medium"):
        assert termination.family(name) == "hopper"
    assert termination.family("OfflineHopperVelocity-v0") == "hopper"
    assert {termination.family(n) for n in ("heart-pump", "heart_pump-v1", "HeartPump")} == {"abiomed"}
    assert termination.family("HalfCheetah-v2") == "halfcheetah" and termination.family("Pendulum-v1") == "pendulum"
    assert [termination.family(n) for n in ("InvertedPendulum-v4", "maze/umaze", None, "none")] == [None] * 4


def test_a_function_of_the_user(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "def high(s, a, following):\n    assert s.ndim == a.ndim == 2\n    return following[:, 0] > 1\n"
        "def broken(s, a, following):\n    raise ValueError('two\\nlines')\n"
        "def numbers(s, a, following):\n    return following[:, 0]\n"
        "def one(s, a, following):\n    return (following[:, 0] > 1).any()\n"
        "def leaves(s, a, following):\n    raise SystemExit(3)\n"
        "def writes(s, a, following):\n    following.zero_()\n    return following[:, 0] > 1\n"
        "known = 3\n"
    )
    rows = torch.tensor([[[0.0, 0], [2, 0]]])
    assert termination.find(f"{file}:high")(rows, rows, rows).tolist() == [[False, True]]
    flat = rows[0]
    complaints = {"broken": "failed: ValueError: two lines", "numbers": "returned torch.float32", "one": "of shape"}
    complaints["leaves"] = "failed: SystemExit: 3"
    for name, complaint in complaints.items():
        with pytest.raises(UsageError, match=complaint) as error:
            termination.find(f"{file}:{name}")(flat, flat, flat)
        assert "\n" not in str(error.value) and "boolean for each row" in str(error.value)
    termination.find(f"{file}:writes")(flat, flat, flat)
    assert flat.tolist() == [[0.0, 0], [2, 0]]  # it wrote in a copy
    monkeypatch.chdir(tmp_path)
    assert termination.absolute(f"{file.name}:high") == f"{file}:high" and termination.absolute("hopper") == "hopper"
    for name, complaint in (
        (f"{file}:nothing", "cannot be imported"),
        (f"{tmp_path}/no.py:f", "no file"),
        ("no_such_module:f", "cannot be imported"),
        (f"{file}:known", "not a function"),
        ("hoper", "did you mean 'hopper'"),
    ):
        with pytest.raises(UsageError, match=complaint):
            termination.find(name)
    assert termination.find("replaylab.models.termination:never")(flat, flat, flat).tolist() == [False, False]
