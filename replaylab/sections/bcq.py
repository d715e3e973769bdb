"""Report of BCQ: how well the VAE rebuilds actions, how much of its range the actor uses, how large the values are."""

from __future__ import annotations

from replaylab.page import Html, note, number, table
from replaylab.results import Run, finite, text


def sections(run: Run) -> list[tuple[str, Html]]:
    last = {text(line.get("seed")): line for line in run.metrics if line.get("phase") == "bcq"}
    if not last:
        return []
    phi = finite(run.config.get("phi"))
    rows = []
    for seed, line in last.items():
        error, moved = finite(line.get("reconstruction")), finite(line.get("moved"))
        used = None if moved is None or not phi else 100 * moved / phi
        rows.append(
            [
                seed,
                number(error**0.5 if error and error > 0 else error),
                number(line.get("kl")),
                number(used),
                number(line.get("value")),
            ]
        )
    about = note(
        "At the last step. The error is that of an action rebuilt by the VAE, in half action boxes: where it is large, "
        "the candidates are blurred. Room used: how much of phi the actor moves a sampled action; near 100 % it wants "
        "to leave the log. The mean value is a discounted return and should be near what the data reaches; far above "
        "it the critics dream."
    )
    head = ["Seed", "VAE's error", "KL", "Room used, %", "Mean value"]
    return [("BCQ", Html(table(head, rows) + about))]
