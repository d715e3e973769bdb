"""On a GPU dreams run on two streams, and some of their layers in other shapes or kernels of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from replaylab.models.layers import convolve, unfold

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(4, 2, 1), (3, 1, 1), (8, 4, 2)])
@pytest.mark.parametrize("batch", [2, 100])  # as a product, and not
def test_convolutions_are_those_of_the_cpu(kernel, stride, padding, batch):
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    layer, x = nn.Conv2d(8, 16, kernel, stride, padding), torch.randn(batch, 8, 26, 20)
    torch.testing.assert_close(convolve(layer.cuda(), x.cuda()).cpu(), layer.cpu()(x), rtol=1e-4, atol=1e-4)
    up, size = nn.ConvTranspose2d(8, 16, 4, 2, 1), torch.Size([53, 40])
    torch.testing.assert_close(unfold(up.cuda(), x.cuda(), size).cpu(), unfold(up.cpu(), x, size), rtol=1e-4, atol=1e-4)


def test_what_is_stored_while_dreaming_belongs_together():
    """The policy is paid and chooses beside the world: each row of the rollout must still be of one moment."""
    from replaylab.algos import mbarc

    torch.manual_seed(0)
    config = mbarc.Config(
        games=2, hidden=16, compress=3, double=1, bits=16, agents=6, from_start=1, rollout=12, shrink=2
    )
    agent = mbarc.Agent(config, mbarc.spaces("atari-rgb/freeway"), [0], CUDA)
    agent.phases("atari-rgb/freeway")
    agent.recorder.collect(200, agent._at_random)
    agent.replay.commit()
    ppo, world = agent.ppo, agent.copy
    for name, value in ((world.going.weight, 30.0), (agent.policy.heads.policy.weight, 100.0)):
        with torch.no_grad():
            name.mul_(value)  # games that end, and opinions
    for _ in range(6):  # run, captured, replayed
        agent.play(0)
        seen = ppo.observations
        with torch.no_grad():
            outputs = agent.policy(seen[:-1].flatten(0, 1))
        log_probs = outputs[:, :-1].log_softmax(-1).gather(1, ppo.actions.flatten()[:, None])[:, 0]
        torch.testing.assert_close(ppo.log_probs.flatten(), log_probs, rtol=0.05, atol=0.1)
        torch.testing.assert_close(ppo.values[:-1].flatten(), outputs[:, -1], rtol=0.05, atol=0.05)
        goes_on = ppo.ended == 0
        assert goes_on.float().mean() > 0
        assert torch.equal(seen[1:][goes_on][:, :-1], seen[:-1][goes_on][:, 1:])
        with torch.no_grad():  # the reward head reads frames: what it says of each step
            before, newest, taken = seen[:-1][goes_on], seen[1:][goes_on][:, -1], ppo.actions[goes_on]
            paid = agent.dream.worth(*_told(world, before, taken, newest))
        torch.testing.assert_close(ppo.rewards[goes_on], paid, rtol=0.05, atol=0.02)
    assert len(np.unique(ppo.actions.cpu().numpy())) > 1


def _told(world, before, actions, newest):
    logits = world.reward_logits(*world.reward_features(before, actions, newest))
    return logits.argmax(1).float() - 1, logits + world.rarity
