"""Density models: formulas against numbers known otherwise, detection on toys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from replaylab import density
from replaylab.errors import DataError, UsageError
from replaylab.models.density import KINDS, Density, make
from replaylab.models.density.detect import auroc, binned, detection
from replaylab.models.density.diffusion import SIGMA
from replaylab.models.density.kde import log_kernels
from replaylab.models.density.ode import TraceNet, travel

SMALL = {
    "realnvp": {"hidden": (32, 32)},
    "vae": {"hidden": (32, 32), "latent": 2},
    "kde": {},
    "diffusion": {"width": 64, "ode_steps": 12},
    "neuralode": {"width": 32, "ode_steps": 4},
}


def shaken(kind: str, dim: int, scale: float = 0.3) -> Density:
    """A model with random weights everywhere, as if trained on something odd."""
    model = make(kind, dim, seed=1, **SMALL[kind])
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
    return model.requires_grad_(False)


def mixture(rows: int, seed: int) -> torch.Tensor:
    """Three Gaussians in the plane, in units that are far from standard."""
    rng = np.random.default_rng(seed)
    centres = np.array([[0.0, 0.0], [4.0, 0.0], [2.0, 3.5]])
    points = centres[rng.integers(3, size=rows)] + 0.35 * rng.standard_normal((rows, 2))
    return torch.tensor(points * [100.0, 0.01] + [5.0, 7.0], dtype=torch.float32)


# --- formulas


def test_realnvp_inverts_and_its_volume_is_the_jacobians():
    model = shaken("realnvp", 5).double()
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z, log_det = model(x)
    torch.testing.assert_close(model.inverse(z), x)
    jacobians = torch.stack([torch.autograd.functional.jacobian(lambda v: model(v[None])[0][0], row) for row in x])
    torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobians).logabsdet)
    expected = -0.5 * (z.square().sum(1) + 5 * math.log(2 * math.pi)) + log_det
    torch.testing.assert_close(model.log_prob(x), expected)
    assert log_det.abs().min() > 1e-3


@pytest.mark.parametrize("dim", [2, 6, 7])
def test_realnvp_gradients_by_hand_are_right(dim):
    model = make("realnvp", dim, couplings=3, hidden=(8, 4)).double()
    names = [name for name, _ in model.named_parameters()]
    x = torch.randn(5, dim, dtype=torch.double, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def flow(x, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(flow, (x, *model.parameters()))


@pytest.mark.parametrize("kind", ["realnvp", "diffusion", "neuralode", "kde"])
def test_densities_integrate_to_one(kind):
    model = shaken(kind, 2)
    if kind == "kde":
        model.points, model.bandwidth = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor(0.4)
    axis = torch.linspace(-9, 9, 121)
    step = (axis[1] - axis[0]).item()
    mass = model.log_prob(torch.cartesian_prod(axis, axis)).exp()
    assert mass.sum().item() * step**2 == pytest.approx(1, abs=0.01)


def test_closed_trace_is_the_jacobians():
    torch.manual_seed(0)
    net = TraceNet(6, 16).double()
    torch.nn.init.normal_(net.last.weight)
    x, time = torch.randn(5, 6, dtype=torch.float64), torch.full((1, 1), 0.3, dtype=torch.float64)
    output, trace = net.with_trace(x, time, net.mixing())
    torch.testing.assert_close(output, net(x, time))
    for row, found in zip(x, trace, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: net(v[None], time)[0], row)
        torch.testing.assert_close(found, jacobian.trace())


def test_neural_ode_follows_a_linear_flow():
    """dx/dt = A x: x(1) = expm(A) x, and the log of the volume is the trace of A."""
    a = torch.tensor([[0.5, 1.0], [-1.0, 0.2]], dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    arrived, log_det = travel(lambda x, t: (x @ a.T, x.new_full((len(x),), 0.7)), x, 0.0, 1.0, 6)
    torch.testing.assert_close(arrived, x @ torch.linalg.matrix_exp(a).T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log_det, torch.full((4,), 0.7, dtype=torch.float64))
    arrived, _ = travel(lambda x, t: (x * 0 + 3 * t**2, x[:, 0] * 0), x, 1.0, 2.0, 1)  # time reaches the velocity
    torch.testing.assert_close(arrived, x + 7)


def test_neural_ode_loss_has_the_gradient_of_the_volume():
    """GORMPO trained without it: squeezing everything to the origin would then be best."""
    model = shaken("neuralode", 2).double().requires_grad_(True)
    x = torch.randn(64, 2, dtype=torch.float64)
    weight = model.net.last.weight

    def loss() -> torch.Tensor:
        return -model.log_density(x).mean()

    loss().backward()
    gradient, h = weight.grad[0, 0].item(), 1e-5
    with torch.no_grad():
        weight[0, 0] += h
        above = loss().item()
        weight[0, 0] -= 2 * h
        below = loss().item()
    assert gradient == pytest.approx((above - below) / (2 * h), rel=1e-4)


def test_diffusion_with_an_idle_network_is_the_normal_exactly():
    model = make("diffusion", 3, width=8, ode_steps=40).requires_grad_(False)  # its last layer starts at zero
    x = torch.randn(50, 3)
    wide = 1 + SIGMA[0] ** 2
    expected = -0.5 * (x.square() / wide + math.log(2 * math.pi * wide)).sum(1)
    torch.testing.assert_close(model.log_prob(x), expected, rtol=1e-3, atol=1e-3)


def test_diffusion_learns_a_correlated_normal():
    cov = torch.tensor([[1.0, 0.8], [0.8, 1.0]])
    normal = torch.distributions.MultivariateNormal(torch.zeros(2), cov)
    torch.manual_seed(0)
    x, held = normal.sample((8000,)), normal.sample((1000,))
    model = make("diffusion", 2, width=64)
    density.train(model, x, held, steps=600, batch_size=256, lr=3e-3, seed=0)
    with torch.no_grad():
        error = model.log_prob(held) - normal.log_prob(held)
    assert abs(error.mean()) < 0.05 and error.abs().mean() < 0.15


def test_diffusion_draws_rows_like_the_data():
    train, judged = mixture(4000, 0), mixture(1000, 1)
    model = make("diffusion", 2, **SMALL["diffusion"])
    density.train(model, train, judged, 1500, 256, 3e-3, 0)
    drawn = model.sample(3000, evaluations=101)
    away = (drawn - torch.tensor([5.0, 7.0])) / torch.tensor([100.0, 0.01])
    distance, nearest = torch.cdist(away, torch.tensor([[0.0, 0.0], [4.0, 0.0], [2.0, 3.5]])).min(1)
    assert (distance < 3.5 * 0.35).float().mean() > 0.9
    assert ((torch.bincount(nearest, minlength=3) / 3000 - 1 / 3).abs() < 0.06).all()
    # as likely, to the model itself, as rows of the data are
    assert abs(model.log_prob(drawn).mean() - model.log_prob(judged).mean()) < 0.15
    torch.testing.assert_close(drawn, model.sample(3000, evaluations=101))


def test_kde_by_hand_and_by_numpy():
    # two bumps at -1 and 1, h = 0.5, seen from 0: exp(-2) / (0.5 sqrt(2 pi))
    found = log_kernels(torch.zeros(1, 1), torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
    assert found.item() == pytest.approx(-2 - math.log(0.5 * math.sqrt(2 * math.pi)), abs=1e-6)
    rng = np.random.default_rng(0)
    train, x = rng.normal(3, 5, (400, 4)), rng.normal(3, 5, (50, 4))
    model = make("kde", 4, bandwidth=0.4)
    model.standardise(torch.tensor(train))
    model.fit(torch.tensor(train).float(), torch.tensor(x).float())
    z, c = ((a - train.mean(0)) / train.std(0) for a in (x, train))
    kernels = np.exp(-0.5 * np.square(z[:, None] - c[None]).sum(2) / 0.4**2) / (2 * np.pi * 0.4**2) ** 2
    np.testing.assert_allclose(model.log_prob(torch.tensor(x).float()), np.log(kernels.mean(1)), rtol=1e-3, atol=1e-3)


def test_kde_in_blocks_is_the_same_and_the_bandwidth_is_the_likeliest(monkeypatch):
    x, held = torch.randn(3000, 1), torch.randn(2000, 1)
    model = make("kde", 1)
    model.standardise(x)
    model.fit(x, held)
    whole = model.log_prob(held)
    assert 0.08 < model.bandwidth < 0.5  # the best for 3,000 normal points is about 1.06 n^-0.2 = 0.21
    monkeypatch.setattr("replaylab.models.density.kde.BLOCK", 3000 * 7)
    torch.testing.assert_close(model.log_prob(held), whole)


def test_vae_bound_on_a_linear_gaussian():
    """x = w z + b + s eps has a known density; the bound is it when q is the posterior, and below by KL(q | p) else."""
    w, b, s = torch.tensor([1.5, -0.5]), torch.tensor([0.3, 0.1]), 0.6
    true = torch.distributions.MultivariateNormal(b, torch.outer(w, w) + s**2 * torch.eye(2))
    variance = 1 / (1 + w.dot(w) / s**2)  # of the posterior, whose mean is variance * w (x - b) / s^2

    def model(shift: float, samples: int) -> Density:
        vae = make("vae", 2, hidden=(), latent=1, samples=samples).requires_grad_(False)
        decoder, encoder = vae.decoder[0], vae.encoder[0]
        decoder.weight[:] = torch.cat([w, torch.zeros(2)])[:, None]
        raw = torch.logit(torch.tensor((math.log(s) + 5) / 7))  # the deviation is between e^-5 and e^2
        decoder.bias[:] = torch.cat([b, raw.expand(2)])
        encoder.weight[:] = torch.stack([variance * w / s**2, torch.zeros(2)])
        encoder.bias[:] = torch.stack([-variance * w.dot(b) / s**2 + shift, 0.5 * variance.log()])
        return vae

    x = true.sample((20,))
    torch.testing.assert_close(model(0.0, 1).log_prob(x), true.log_prob(x), rtol=1e-4, atol=1e-4)
    kl = 0.5 * 0.4**2 / variance
    elbo = torch.stack([_with_noise(model(0.4, 1), seed).log_prob(x) for seed in range(500)]).mean(0)
    torch.testing.assert_close(elbo, true.log_prob(x) - kl, rtol=0, atol=0.15)
    tight = _with_noise(model(0.4, 5000), 0).log_prob(x)
    torch.testing.assert_close(tight, true.log_prob(x), rtol=0, atol=0.05)


def _with_noise(model: Density, seed: int) -> Density:
    model.noise = torch.randn(model.noise.shape, generator=torch.Generator().manual_seed(seed))
    return model


# --- thresholds and figures of merit


class Ruler(Density):
    def log_density(self, z: torch.Tensor) -> torch.Tensor:
        return z[:, 0]


def test_threshold_interpolates_the_table():
    model = Ruler(1)
    with pytest.raises(DataError, match="no thresholds"):
        model.threshold(1.0)
    model.calibrate(torch.arange(1001.0)[torch.randperm(1001)][:, None])
    assert model.threshold(1.0) == pytest.approx(10)
    assert model.threshold(12.5) == pytest.approx(125)
    assert model.threshold(0.1) == pytest.approx(1) and model.threshold(99.9) == pytest.approx(999)
    with pytest.raises(UsageError, match="percentile"):
        model.threshold(0.05)


def test_scores_that_overflow_are_finite_and_the_lowest():
    found = Ruler(1).log_prob(torch.tensor([[math.nan], [-math.inf], [3.0]]))
    assert found.tolist() == [-1e9, -1e9, 3.0]
    with pytest.raises(DataError, match="training failed"):
        Ruler(1).calibrate(torch.full((5, 1), math.nan))


def test_auroc_by_hand():
    assert auroc([1, 2, 2, 3], [0, 1, 0, 1]) == 3.5 / 4
    assert auroc([5, 6], [1, 0]) == 0 and auroc([6, 5], [1, 0]) == 1 and auroc([1, 1, 1], [1, 0, 0]) == 0.5
    assert math.isnan(auroc([1, 2], [1, 1]))
    found = detection(np.array([-9.0, -1, -1, -5, 3]), np.array([True, True, False, False, False]), threshold=-2)
    assert found == {"auroc": pytest.approx(4.5 / 6), "tpr": 0.5, "tnr": pytest.approx(2 / 3), "accuracy": 0.6}
    shares = binned(np.array([-1e9, -1.0, 2, 4]), np.array([True, False, False, False]), -1.0, bins=4)["shares"]
    assert shares["shifted"] == [1, 0, 0, 0] and sum(shares["real"]) == pytest.approx(1)


# --- learning


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_tells_a_mixture_from_points_beside_it(kind):
    x, held, test = (mixture(n, seed) for seed, n in enumerate((4000, 1000, 1000)))
    model = make(kind, 2, **SMALL[kind])
    curve = density.train(model, x, held, steps=600 if kind == "vae" else 300, batch_size=256, lr=3e-3, seed=0)
    assert not curve or curve[-1]["validation"] > curve[0]["validation"]
    beside = test + torch.tensor([130.0, 0.013])  # 1.3 between centres 4 apart, bumps 0.35 wide
    with torch.no_grad():
        scores = torch.cat([model.log_prob(test), model.log_prob(beside)])
        again = torch.cat([model.log_prob(test), model.log_prob(beside)])
    assert torch.equal(scores, again)
    assert auroc(-scores, np.repeat([0, 1], 1000)) >= 0.95
    assert 0.02 < (scores[:1000] < model.threshold(5.0)).float().mean() < 0.09  # tau lives where the scores live


class Drift(Density):
    """Its loss leads past the best weight."""

    def __init__(self) -> None:
        super().__init__(1)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def log_density(self, z: torch.Tensor) -> torch.Tensor:
        return -(self.weight + 0.05).abs().expand(len(z))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum()


def test_the_best_weights_on_held_out_rows_are_kept():
    model = Drift()
    x = torch.randn(100, 1)
    curve = density.train(model, x, x, steps=20, batch_size=8, lr=1e-2, seed=0)
    seen = [line["validation"] for line in curve]
    assert model.log_prob(x)[0].item() == pytest.approx(max(seen)) and max(seen) > seen[-1] + 0.02


def test_the_same_seed_fits_the_same_model():
    x, held = mixture(1000, 0), mixture(200, 1)
    found = []
    for seed in (0, 0, 1):
        model = make("vae", 2, seed=seed, **SMALL["vae"])
        torch.randn(3)  # whatever else draws from torch's generator
        density.train(model, x, held, steps=20, batch_size=64, lr=1e-3, seed=seed)
        found.append(model.log_prob(held).detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
