"""Diffusion: learns to remove noise of every scale, and scores by the probability-flow equation.

Noisy data, x + sigma eps, has a density for every sigma. The path (Song et al., 2021)

    dx / d ln sigma = x - D(x, sigma),     D the best estimate of the clean row

preserves probability, so log p(x) follows from where x arrives at the largest sigma, where the density is a plain
normal, and from the divergence along the path (`ode.py`). The result is the log-density of the data blurred by the
smallest sigma: deterministic, no noise drawn, exact up to the solver's step.

The network F enters as in Karras et al. (2022), D = x / (1 + sigma^2) + sigma / sqrt(1 + sigma^2) F: its target has
unit variance at every sigma, and F = 0 is right for standardised data that happens to be normal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replaylab.models.density.base import Density, log_normal
from replaylab.models.density.ode import TraceNet, travel
from replaylab.models.solver import plan, solve

SIGMA = (0.02, 20.0)  # of standardised data


class Diffusion(Density):
    def __init__(self, dim: int, width: int = 256, ode_steps: int = 12):
        super().__init__(dim)
        self.net, self.ode_steps = TraceNet(dim, width), ode_steps

    def loss(self, x: Tensor) -> Tensor:
        clean = (x - self.mean) / self.std
        low, high = map(math.log, SIGMA)
        time = low + (high - low) * torch.rand(len(x), 1, device=x.device)  # ln sigma
        sigma = time.exp()
        whole = (1 + sigma.square()).sqrt()
        noisy = clean + sigma * torch.randn_like(clean)
        target = (clean - noisy / whole.square()) * whole / sigma
        return (self.net(noisy / whole, time / 4) - target).square().mean()

    def log_density(self, z: Tensor) -> Tensor:
        mixing = self.net.mixing()

        def motion(x: Tensor, time: float) -> tuple[Tensor, Tensor]:
            sigma = math.exp(time)
            whole = math.sqrt(1 + sigma**2)
            output, trace = self.net.with_trace(x / whole, x.new_full((1, 1), time / 4), mixing)
            keep, mix = (sigma / whole) ** 2, sigma / whole  # x - D = keep x - mix F(x / whole)
            return keep * x - mix * output, keep * self.dim - mix / whole * trace

        low, high = SIGMA
        latent, log_det = travel(motion, z, math.log(low), math.log(high), self.ode_steps)
        whole = math.sqrt(1 + high**2)
        return log_normal(latent / whole) - self.dim * math.log(whole) + log_det

    def denoise(self, x: Tensor, sigma: float) -> Tensor:
        """D for standardised rows."""
        whole = math.sqrt(1 + sigma**2)
        known = min(max(sigma, SIGMA[0]), SIGMA[1])
        output = self.net(x / whole, x.new_full((len(x), 1), math.log(known) / 4))
        return x / whole**2 + sigma / whole * output

    @torch.no_grad()
    def sample(self, rows: int, seed: int = 0, evaluations: int = 51) -> Tensor:
        """Draw rows like those of the data, with `models.solver`: its x = alpha clean + sigma noise is the x here times
        alpha."""
        course = plan(evaluations)
        noise = torch.randn(rows, self.dim, generator=torch.Generator().manual_seed(seed)).to(self.mean.device)

        def guess(x: Tensor, i: int) -> Tensor:
            return self.denoise(x / course.alphas[i], course.sigmas[i] / course.alphas[i])

        return solve(guess, noise, course) * self.std + self.mean
