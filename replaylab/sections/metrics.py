"""What the curves of training show, in a sentence each: `y_min` tells nothing to those who did not write it."""

from __future__ import annotations

# "phase/name" where it depends on the phase, else the name
MEANING = {
    "clone/loss": "How far the predicted actions are from the logged ones",
    "imitate/loss": "How far the predicted actions are from the logged ones",
    "ahead": "Error of the predicted next observation and return-to-go",
    "grad_norm": "Size of the gradient before it is clipped",
    "density/loss": "What fitting the density minimises; lower is likelier data",
    "validation": "Mean log-density of held-out rows; the weights with the highest are kept",
    "dynamics/loss": "What fitting the ensemble minimises: minus the log-likelihood of the next state and reward",
    "holdout_error": "Squared error of the ensemble's predictions on held-out rows",
    "critic_loss": "How far the critics' values are from their targets",
    "actor_loss": "What the policy minimises: minus the value of its actions, with its entropy",
    "value": "The critics' mean estimate of the discounted return",
    "alpha": "Weight of the policy's entropy beside the reward",
    "entropy": "How random the policy's actions are",
    "penalised": "Share of imagined steps below the density's threshold",
    "penalty": "Mean reward taken off an imagined step, coefficient included",
    "imagined_reward": "Mean reward of an imagined step, before penalties",
    "carried_steps": "Steps that carried rows have played since a first state, on average; 0 for those that begin anew",
    "imagined_ends": "Share of imagined steps at which the episode ends",
    "imagined_wild": "Share of imagined steps beyond the limits of the data, where the episode is cut off",
    "imagined_rows": "Imagined steps in the last rollout",
    "reconstruction": "Error of logged actions rebuilt by the VAE",
    "kl": "Information in the VAE's codes",
    "moved": "How far the actor moves a sampled action",
    "returns_error": "Squared error of the estimated returns",
    "score_loss": "Error of the noise that the diffusion policy finds in noisy logged actions",
    "value_loss": "What fitting V minimises",
    "ensemble_loss": "Error of the critics that choose among candidates",
    "y": "(Q - V) / alpha, mean of a batch: how much better than usual the actions look",
    "y_min": "(Q - V) / alpha, smallest of a batch",
    "y_max": "(Q - V) / alpha, largest of a batch",
    "guide_loss": "What fitting the guidance minimises",
    "energy": "Guidance W, mean of a batch",
    "energy_min": "Guidance W, smallest of a batch",
    "energy_max": "Guidance W, largest of a batch",
    "world/loss": "What the world model minimises: the sum of the parts beside",
    "pixel": "Surprise at the colours of the next frame's pixels",
    "world/value": "Error of the predicted value of the next frame, weighted",
    "prior": "Surprise at the latent bits that tell possible next frames apart, weighted",
    "continue": "Surprise at whether the game goes on",
    "world/reward": "Surprise at the reward",
    "world/accuracy": "Share of the next frame's pixels predicted exactly right",
    "epsilon": "How often it is still shown the true frame instead of its own prediction",
    "reward/loss": "What the reward model minimises",
    "reward/accuracy": "Share of rewards (-1, 0, +1) predicted right",
    "policy_loss": "PPO's clipped objective, negated",
    "policy/value_loss": "Error of the policy's value estimates",
    "divergence": "How far an update moved the policy (approximate KL)",
    "dream_return": "Mean reward collected in a dream",
    "dream_ends": "Share of dreamed steps at which the game ends",
}


def meaning(phase: str, name: str) -> str:
    """A sentence without its stop, or nothing for a name that is not known."""
    return MEANING.get(f"{phase}/{name}") or MEANING.get(name, "")
