"""Diffusion-DICE: an update of the behaviour model, one of values and guidance, and a choice among candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from replaylab.algos import Phase, Spaces, diffusion_dice
from replaylab.bench.common import Rows, Variants, hopper_like, seconds_per_call, time_updates

HOPPER = Spaces([11], "float32", 3, False, [-1.0] * 3, [1.0] * 3)


def _updates(device: torch.device, name: str, what: str, variants: Variants) -> Rows:
    episodes = hopper_like() if device.type == "cuda" else hopper_like(20_000, 40)

    def phase_of(seeds: int, precision: str) -> Phase:
        agent = diffusion_dice.Agent(diffusion_dice.Config(precision=precision), HOPPER, range(seeds), device)
        return next(phase for phase in agent.phases(episodes) if phase.name == name)

    yield from time_updates(phase_of, device, what, variants)


def behavior(device: torch.device) -> Rows:
    what = "diffusion-dice behaviour update, batch 4096"
    yield from _updates(device, "behavior", what, [(1, "auto", "fp32"), (1, "on", "fp32")])


def critic(device: torch.device) -> Rows:
    what = "diffusion-dice critic update, batch 512, 16 copies, 10 Qs"
    variants = [(count, *how) for count in (1, 5) for how in (("auto", "fp32"), ("on", "fp32"), ("on", "bf16"))]
    yield from _updates(device, "critic", what, variants)


def sample(device: torch.device) -> Rows:
    config = diffusion_dice.Config(candidates=64, guidance=4.0)
    agent = diffusion_dice.Agent(config, HOPPER, [0], device).eval()
    for count in (10, 100) if device.type == "cuda" else (10,):
        states = torch.randn(1, count, 11, device=device)

        def answer(states: torch.Tensor = states) -> None:
            agent.act(states)[0].cpu()

        calls, repeats = (50, 5) if device.type == "cuda" else (1, 2)
        spent = seconds_per_call(answer, device, calls, repeats)
        yield f"diffusion-dice choice, {count} states x 64 candidates, result on the host", 1e3 * spent, "ms"


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "dice-behavior": behavior,
    "dice-critic": critic,
    "dice-sample-10x64": sample,
}
