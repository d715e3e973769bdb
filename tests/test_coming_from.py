"""The tables for those who come from the originals name every flag, and send to options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaylab.algos import system
from replaylab.train import settings_of

DOCS = Path(__file__).parent.parent / "docs"
# flags and keys of the originals, from their sources
MOPO = """config algo-name policy_path model_path data_path devid task seeds actor-lr critic-lr gamma tau alpha
    auto-alpha target-entropy alpha-lr dynamics-lr n-ensembles n-elites reward-penalty-coef rollout-length
    rollout-batch-size rollout-freq model-retain-epochs real-ratio dynamics-model-dir penalty_type epoch
    step-per-epoch eval_episodes batch-size terminal_counter logdir log-freq device results_output density_model
    classifier_model_name threshold_percentile action transition noise_rate_action noise_rate_transition loc
    scale_action scale_transition root-dir"""
DICE = """env seed device device_num actor_load_path inference_sample alpha weight_decay batch_size use_lr_schedule
    min_value_lr"""
DICE_YAML = """save_model train_epoch evaluation_interval seed_per_evaluation hidden_dim n_hidden value_lr wt_lr
    diffusion_steps q_ensemble_num M s twin_v filter_type"""
MORE = ("data", "out", "config", "preset", "resume", "noise_rate", "noise_action", "noise_transition")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gormpo", [f"--{flag}" for flag in MOPO.split()]),
        ("diffusion-dice", [f"--{flag}" for flag in DICE.split()] + DICE_YAML.split()),
    ],
)
def test_whoever_comes_from_the_original_finds_every_flag(name, wanted):
    section = (DOCS / f"{name}.md").read_text().split("## Coming from")[1]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    theirs, ours = (" ".join(cell for row in rows for cell in row[first::3]) for first in (0, 1))
    assert [flag for flag in wanted if not re.search(rf"`{flag}[ `]", theirs)] == []
    known = settings_of(system(name)) | set(MORE)
    assert {o for o in re.findall(r"--([a-z][a-z-]*)", ours) if o.replace("-", "_") not in known} == set()
