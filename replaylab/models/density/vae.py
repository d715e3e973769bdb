"""Variational autoencoder with a Gaussian decoder whose variance is learned, scored by a bound on log p(x).

With z_i ~ q(z | x), the importance-weighted bound (Burda et al., 2016)

    log p(x) >= E log 1/k sum_i p(x | z_i) p(z_i) / q(z_i | x)

is the ELBO for k = 1 and rises to log p(x) as k grows. Scoring uses the same k draws of noise for every row, saved
with the weights, so a row's score is the same in every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from replaylab.models.density.base import Density, log_normal, network

LOG_STD = (-5.0, 2.0)  # of the decoder, on standardised columns
TRAINING_SAMPLES = 4


class VAE(Density):
    noise: Tensor

    def __init__(self, dim: int, latent: int = 16, hidden: Sequence[int] = (256, 256), samples: int = 16):
        super().__init__(dim)
        self.latent = latent
        self.encoder = network([dim, *hidden, 2 * latent])
        self.decoder = network([latent, *hidden[::-1], 2 * dim])
        self.register_buffer("noise", torch.randn(samples, latent))

    def decode(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of p(x | z)."""
        mean, raw = self.decoder(latent).chunk(2, -1)
        low, high = LOG_STD
        return mean, low + (high - low) * torch.sigmoid(raw)

    def log_weight(self, x: Tensor, mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
        """log p(x | z) + log p(z) - log q(z | x) at z = mean + std noise, one for each row."""
        latent = mean + log_std.exp() * noise
        centre, spread = self.decode(latent)
        log_likelihood = log_normal((x - centre) * torch.exp(-spread)) - spread.sum(-1)
        return log_likelihood + log_normal(latent) - (log_normal(noise) - log_std.sum(-1))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(x).chunk(2, -1)
        return mean, log_std.clamp(-8, 3)

    def log_density(self, z: Tensor) -> Tensor:
        posterior = self.encode(z)
        return _bound(torch.stack([self.log_weight(z, *posterior, noise) for noise in self.noise]))  # saves memory

    def loss(self, x: Tensor) -> Tensor:
        """Minus the bound with a few fresh draws: with one, the ELBO, training lingers where the latent is unused."""
        z = self.blur(x)
        noise = torch.randn(TRAINING_SAMPLES, len(x), self.latent, device=x.device)
        return -_bound(self.log_weight(z, *self.encode(z), noise)).mean()


def _bound(log_weights: Tensor) -> Tensor:  # (samples, rows) -> (rows,)
    return log_weights.logsumexp(0) - math.log(len(log_weights))
