"""Scores that others have published, as data, each with its protocol.

They stand beside ours in comparisons, marked as published. Nobody's protocol is ours: a score of another dataset
version, of a best checkpoint or of one seed says so in `protocol`. A spread is a standard deviation over seeds, which
is larger than a standard error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replaylab.data.formats import SUFFIXES
from replaylab.scores import reference

_CORL = "D4RL v2, last checkpoint, mean ± std, 4 seeds"
_D3RLPY = "D4RL v2, last checkpoint, mean ± std, 10 seeds, one target return, before its return-to-go fix of 2024-06"
_ORK = "D4RL v2, mean ± its own spread, 4 seeds"
_DT_PAPER = "paper, Table 2; D4RL, last checkpoint, mean and spread over 3 seeds"
_DICE_PAPER = "paper, Table 1; D4RL v2, end of training, mean ± std, 5 seeds (columns of others: their own protocols)"
_GORMPO = (
    "repository's files, Jan 2026 code (signed tanh, no clamp); D4RL v2, mean ± population std, 3 seeds (few rows: 2), "
    "1000 epochs; MBPO on halfcheetah-medium: the second of two triples, the first has 52.9"
)
_MBARC = "100k interactions, return of the best checkpoint, 1 seed"
_ATARI_100K = "100k interactions, mean return over seeds"
_ATARI_100K_5 = "100k interactions, mean return over 5 seeds"


@dataclass(frozen=True)
class Published:
    label: str  # the algorithm, as its source calls it
    source: str
    protocol: str
    system: str | None  # ours that it is to be held against, if we have one
    kind: str  # "normalised" or "return"
    scores: dict[str, tuple[float, float | None]]  # dataset -> mean, spread

    @property
    def name(self) -> str:
        return f"{self.label} ({self.source})"


def canonical(dataset: str) -> str:
    """`hopper-medium` for hopper_medium-v2, mujoco/hopper/medium-v0, hopper-medium.hdf5 and the like;
    `hopper-medium-expert` for hopper-medium+hopper-expert."""
    if dataset.lower().startswith("atari/"):
        return dataset.lower()
    name = re.sub(r"[/_:]", "-", re.sub(r"\.\w+$", "", dataset.lower()))
    name = re.sub(r"^(d4rl|mujoco)-", "", re.sub(r"-v\d+$", "", name))
    return re.sub(r"^(.+)-medium\+\1-expert$", r"\1-medium-expert", name)


def dataset_name(path: str | Path) -> str:
    """What to call a dataset: its file's name, with the folder's where that is the environment (hopper/medium-v0)."""
    path = Path(path)
    name, above = path.stem if path.suffix in SUFFIXES else path.name, path.parent.name
    return f"{above}-{name}" if reference(above) and not reference(name) else name


def published(datasets: Iterable[str], systems: Iterable[str] | None = None) -> list[Published]:
    """What is known about these datasets (or Atari games), of these systems of ours or of everything."""
    wanted, ours = {canonical(d) for d in datasets}, None if systems is None else set(systems)
    return [p for p in PUBLISHED if wanted & p.scores.keys() and (ours is None or p.system in ours)]


def _read(source: str, protocol: str, systems: dict[str, str], kind: str, text: str) -> Iterator[Published]:
    """A table of words: a column for each algorithm, `mean±spread`, `mean` or `-` in a cell."""
    (_, *labels), *rows = (line.split() for line in text.strip().splitlines())
    for i, label in enumerate(labels):
        cells = {name: cells[i].split("±") for name, *cells in rows if cells[i] != "-"}
        scores = {name: (float(c[0]), float(c[1]) if len(c) > 1 else None) for name, c in cells.items()}
        yield Published(label, source, protocol, systems.get(label), kind, scores)


PUBLISHED = [
    *_read(
        "CORL",
        _CORL,
        {"BC": "bc", "10%BC": "bc", "DT": "dt"},
        "normalised",
        """
        dataset                    BC         10%BC      DT         TD3+BC     IQL        ReBRAC     EDAC
        halfcheetah-medium         42.4±0.2   42.5±0.7   42.2±0.3   48.1±0.2   48.3±0.2   64±0.7     67.7±1
        halfcheetah-medium-replay  35.7±2.3   23.6±7     38.9±0.5   44.8±0.6   44.5±0.2   51.2±0.3   62.1±1.1
        halfcheetah-medium-expert  56±7.4     90.1±2.5   91.6±1     90.8±6     94.7±0.5   103.8±3    104.8±0.6
        hopper-medium              53.5±1.8   55.5±7.3   65.1±1.6   60.4±3.5   67.5±3.8   102.3±0.2  101.7±0.3
        hopper-medium-replay       29.8±2.1   70.4±8.7   81.8±6.9   64.4±21.5  97.4±6.4   95±6.5     99.7±0.8
        hopper-medium-expert       52.3±4     111.2±1    110.4±0.3  101.2±9.1  107.4±7.8  109.5±2.3  105.2±10.1
        walker2d-medium            63.2±16.2  67.3±5.2   67.6±2.5   82.7±4.8   80.9±3.2   85.8±0.8   93.4±1.4
        walker2d-medium-replay     21.8±10.2  54.4±6.3   59.9±2.7   85.6±4     82.2±3     84.3±2.3   87.1±2.8
        walker2d-medium-expert     99±16      108.7±0.3  107.1±1    110±0.4    111.7±0.9  111.9±0.4  114.8±0.7
        """,
    ),
    *_read(
        "d3rlpy-benchmarks",
        _D3RLPY,
        {"DT": "dt"},
        "normalised",
        """
        dataset                    DT
        halfcheetah-medium         42.6±0.3
        halfcheetah-medium-replay  38.4±1.4
        halfcheetah-medium-expert  56.5±9.2
        hopper-medium              60.4±2.3
        hopper-medium-replay       79.6±6.9
        hopper-medium-expert       108.9±2.4
        walker2d-medium            67.4±10.9
        walker2d-medium-replay     56.8±13.2
        walker2d-medium-expert     108.4±0.5
        """,
    ),
    *_read(
        "OfflineRL-Kit",
        _ORK,
        {"MOPO": "mopo"},
        "normalised",
        """
        dataset                    MOPO       COMBO      MOBILE
        halfcheetah-medium         72.4±4.2   71.9±8.5   75.8±0.8
        halfcheetah-medium-replay  72.1±3.8   66.5±6.5   71.9±3.2
        halfcheetah-medium-expert  83.6±12.5  98.2±0.2   100.9±1.5
        hopper-medium              62.8±38.1  84.7±9.3   103.6±1
        hopper-medium-replay       92.7±20.7  90.1±25.2  105.1±1.3
        hopper-medium-expert       74.6±44.2  108.8±2.6  112.5±0.2
        walker2d-medium            84.1±3.2   83.9±2     88.3±2.5
        walker2d-medium-replay     85.9±5.3   89.4±6.4   90.5±1.7
        walker2d-medium-expert     108.2±4.3  110±0.2    114.5±2.2
        """,
    ),
    *_read(
        "Decision Transformer paper",
        _DT_PAPER,
        {"DT": "dt", "BC": "bc"},
        "normalised",
        """
        dataset                    DT         BC
        halfcheetah-medium-expert  86.8±1.3   59.9
        hopper-medium-expert       107.6±1.8  79.6
        walker2d-medium-expert     108.1±0.2  36.6
        reacher2d-medium-expert    89.1±1.3   73.3
        halfcheetah-medium         42.6±0.1   43.1
        hopper-medium              67.6±1     63.9
        walker2d-medium            74±1.4     77.3
        reacher2d-medium           51.2±3.4   48.9
        halfcheetah-medium-replay  36.6±0.8   4.3
        hopper-medium-replay       82.7±7     27.6
        walker2d-medium-replay     66.6±3     36.9
        reacher2d-medium-replay    18±2.4     5.4
        """,
    ),
    *_read(
        "Diffusion-DICE paper",
        _DICE_PAPER,
        {"Diffusion-DICE": "diffusion-dice"},
        "normalised",
        """
        dataset                    Diffusion-DICE  Diff-QL    IDQL   QGPO
        halfcheetah-medium         60±0.6          51.1±0.5   51     54.1±0.4
        hopper-medium              100.2±3.2       90.5±4.6   65.4   98±2.6
        walker2d-medium            89.3±1.3        87±0.9     82.5   86±0.7
        halfcheetah-medium-replay  49.2±0.9        47.8±0.3   45.9   47.6±1.4
        hopper-medium-replay       102.3±2.1       101.3±0.6  92.1   96.9±2.6
        walker2d-medium-replay     90.8±2.6        95.5±1.5   85.1   84.4±4.1
        halfcheetah-medium-expert  97.3±0.6        96.8±0.3   95.9   93.5±0.3
        hopper-medium-expert       112.2±0.3       111.1±1.3  108.6  108±2.5
        walker2d-medium-expert     114.1±0.5       110.1±0.3  112.7  110.7±0.6
        """,
    ),
    *_read(
        "GORMPO repository",
        _GORMPO,
        {
            "MBPO": "mopo",
            "KDE": "gormpo",
            "VAE": "gormpo",
            "RealNVP": "gormpo",
            "DDPM": "gormpo",
            "NeuralODE": "gormpo",
        },
        "normalised",
        """
        dataset                    MBPO      KDE        VAE        RealNVP    DDPM       NeuralODE
        halfcheetah-medium         65.6      46.3±2.8   67.3±0.7   64.1±5.6   10.7±8.8   56±8
        halfcheetah-medium-replay  0.8±0.8   1.6±0.6    39.7±23.6  9.6±11.4   18.1±24.4  0.7±0.3
        halfcheetah-medium-expert  79.9±3.6  84±10.7    83.6±6.1   75.5±8.5   -          61.5±7
        hopper-medium              10.3±3.6  17.3±8.9   12.9±9.2   11.4±7.8   16.5±9.8   14.1±13.4
        hopper-medium-replay       37.6±4.7  48.2±34.2  22.1±8.6   67.6±24.6  25.4±5.5   12.9±12.9
        hopper-medium-expert       13.1±8.5  1.8±0      2.4±0.3    3±1.6      1.8±1      5.9±1.3
        walker2d-medium            3.4±2.9   3.1±1.7    6.4±1.2    1.1±2.4    2.1±2.9    -0.1±0.4
        walker2d-medium-replay     2.8±3     6.3±4.9    3±4.1      6.7±6      0.5±0.9    9.9±0.4
        walker2d-medium-expert     -0.2      -0.2       -0.2       -0.3       -0.2       -0.1
        """,
    ),
    *_read(
        "MBARC README",
        _MBARC,
        {"MBARC": "mbarc"},
        "return",
        """
        dataset                MBARC
        atari/alien            380
        atari/amidar           56.8
        atari/assault          582.3
        atari/asterix          718.3
        atari/bank_heist       40.3
        atari/chopper_command  1020
        atari/demon_attack     547.7
        atari/freeway          23.8
        atari/frostbite        218.7
        atari/gopher           520
        atari/hero             2323.5
        atari/jamesbond        71.7
        atari/kangaroo         380
        atari/krull            3332.4
        atari/qbert            356.7
        atari/seaquest         248
        atari/up_n_down        2905
        """,
    ),
    *_read(
        "IRIS repository",
        _ATARI_100K,
        {},
        "return",
        """
        dataset                SimPLe   IRIS
        atari/alien            616.9    420
        atari/amidar           74.3     143
        atari/assault          527.2    1524.4
        atari/asterix          1128.3   853.6
        atari/bank_heist       34.2     53.1
        atari/battle_zone      4031.2   13074
        atari/boxing           7.8      70.1
        atari/breakout         16.4     83.7
        atari/chopper_command  979.4    1565
        atari/crazy_climber    62583.6  59324
        atari/demon_attack     208.1    2034.4
        atari/freeway          16.7     31.1
        atari/frostbite        236.9    259.1
        atari/gopher           596.8    2236.1
        atari/hero             2656.6   7037.4
        atari/jamesbond        100.5    462.7
        atari/kangaroo         51.2     838.2
        atari/krull            2204.8   6616.4
        atari/kung_fu_master   14862.5  21760
        atari/ms_pacman        1480     999.1
        atari/pong             12.8     14.6
        atari/private_eye      35       100
        atari/qbert            1288.8   745.7
        atari/road_runner      5640.6   9614.6
        atari/seaquest         683.3    661.3
        atari/up_n_down        3350.3   3546.2
        """,
    ),
    *_read(
        "STORM and DIAMOND repositories",
        _ATARI_100K_5,
        {},
        "return",
        """
        dataset                STORM    DIAMOND
        atari/alien            983.6    744.1
        atari/amidar           204.8    225.8
        atari/assault          801      1526.4
        atari/asterix          1028     3698.5
        atari/bank_heist       641.2    19.7
        atari/battle_zone      13540    4702
        atari/boxing           79.7     86.9
        atari/breakout         15.9     132.5
        atari/chopper_command  1888     1369.8
        atari/crazy_climber    66776    99168
        atari/demon_attack     164.6    288.1
        atari/freeway          0        33.3
        atari/frostbite        1316     274.1
        atari/gopher           8239.6   5897.9
        atari/hero             11044.3  5621.8
        atari/jamesbond        509      427.4
        atari/kangaroo         4208     5382.2
        atari/krull            8412.6   8610.1
        atari/kung_fu_master   26182    18714
        atari/ms_pacman        2673.5   1958.2
        atari/pong             11.3     20.4
        atari/private_eye      7781     114.3
        atari/qbert            4522.5   4499.3
        atari/road_runner      17564    20673
        atari/seaquest         525.2    551.2
        atari/up_n_down        7985     3856.3
        """,
    ),
]


# What the originals take on one H200 (torch 2.11), in milliseconds: their own loops on the shapes of our bench cases.
ORIGINALS: dict[str, tuple[str, float]] = {
    "dt-hopper-train": ("kzl/decision-transformer", 23.0),
    "dt-hopper-act": ("kzl/decision-transformer, one environment", 5.0),
    "dt-atari-train": ("kzl/decision-transformer", 37.3),
    "dt-atari-act": ("kzl/decision-transformer, one environment", 11.0),
    "dynamics-epoch": ("GORMPO", 6058.0),
    "rollout-50kx5": ("GORMPO", 637.0),
    "sac-update": ("GORMPO", 12.9),
    "realnvp-train": ("GORMPO", 16.8),
    "realnvp-score-50k": ("GORMPO", 5.6),
    "dice-behavior": ("Diffusion-DICE", 58.9),
    "dice-critic": ("Diffusion-DICE", 27.3),
    "dice-sample-10x64": ("Diffusion-DICE", 93.9),
    "mbarc-world-train": ("MBARC", 66.6),
    "mbarc-sim-step": ("MBARC", 206.9),
    "mbarc-ppo-update": ("MBARC", 136.4),
    "mbarc-ppo-iteration": ("MBARC", 11_076.0),
}
