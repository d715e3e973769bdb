"""The real environment of MBARC: picture, skip, resets, the ledger, saving and restoring."""

import numpy as np
import pytest

pytest.importorskip("ale_py")
from replaylab import envs
from replaylab.envs import atari_rgb
from replaylab.envs.atari_rgb import PALETTE, AtariRgbVectorEnv, Game
from replaylab.errors import UsageError


def plain_emulator(game):
    from ale_py import ALEInterface, roms

    ale = ALEInterface()
    ale.setInt("random_seed", 0)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path(game))
    ale.reset_game()
    return ale


def test_the_picture_is_every_second_pixel_in_the_consoles_own_colours():
    for name in ("boxing", "freeway", "krull"):
        game = Game(name)
        game.reset(seed=0)
        for i in range(20):
            game.step(i % len(game.actions))
            assert (PALETTE[game.stack[-1]] == game.ale.getScreenRGB()[::2, ::2]).all()
    assert PALETTE.shape == (128, 3) and game.stack.shape == (4, 105, 80) and game.stack.dtype == np.uint8


def test_reset_and_skip_as_written_down_frame_by_frame():
    game, ale = Game("pong"), plain_emulator("pong")  # pong has FIRE
    stack = game.reset(seed=3)
    moves = ale.getMinimalActionSet()
    idle = game.frames - 4 * 5  # FIRE, the action after it, three idle steps
    assert 1 <= idle <= 8 and game.reset_frames == game.frames
    for action in [0] * idle + [1] * 4 + [2] * 4:
        ale.act(moves[action])
    shown = [ale.getScreen()[::2, ::2] >> 1]
    for _ in range(3):
        for _ in range(4):
            ale.act(moves[0])
        shown.append(ale.getScreen()[::2, ::2] >> 1)
    assert (stack == np.stack(shown)).all()  # oldest first, no empty frame
    reward = 0.0
    for action in [3, 2] * 60:
        new, got, over, cut = game.step(action)
        expected = sum(ale.act(moves[action]) for _ in range(4))
        reward += expected
        assert got == expected and not over and not cut
        assert (new[-1] == ale.getScreen()[::2, ::2] >> 1).all()
    assert reward < 0  # it lost points, so rewards were compared


def test_idling_does_nothing_in_games_that_always_act():
    game, ale = Game("backgammon"), plain_emulator("backgammon")  # its first action is FIRE
    assert [action.name for action in game.actions] == ["NOOP", "FIRE", "RIGHT", "LEFT"]
    stack = game.reset(seed=0)
    idle = game.frames - 4 * 5
    for action in [0] * idle + [1] * 4 + [3] * 4 + [0] * 12:  # the emulator's own: RIGHT is its fourth
        ale.act(action)
    assert (stack[-1] == ale.getScreen()[::2, ::2] >> 1).all() and (ale.getRAM() == game.ale.getRAM()).all()


def test_noops_are_spread_over_1_to_8_and_depend_on_the_seed_alone():
    game = Game("freeway")  # no FIRE
    counts, last = [], 0
    for seed in range(40):
        game.reset(seed=seed)
        counts.append(game.reset_frames - last - 12)
        last = game.reset_frames
    assert set(counts) == set(range(1, 9))
    again = Game("freeway")
    first, second = again.reset(seed=7), again.reset()
    game.reset(seed=7)
    assert (game.reset() == second).all() and (game.reset(seed=7) == first).all()


@pytest.mark.parametrize("name", ["boxing", "freeway"])
def test_a_game_is_a_function_of_its_seed_and_its_actions(name):
    used, fresh = Game(name), Game(name)
    for seed in range(3):
        used.reset(seed=seed)
        for i in range(100):
            used.step(i % len(used.actions))
    results = []
    for game in (used, fresh):
        game.reset(seed=5)
        results.append([game.step((7 * i) % len(game.actions))[0] for i in range(100)])
    assert (np.stack(results[0]) == np.stack(results[1])).all()
    assert (used.ale.getRAM() == fresh.ale.getRAM()).all()


def test_pool_max_takes_the_brighter_of_the_last_two_frames():
    last, brighter = Game("pong"), Game("pong", pool="max")
    a, b = last.reset(seed=0), brighter.reset(seed=0)
    for i in range(30):
        a, b = last.step(i % 6)[0], brighter.step(i % 6)[0]
        assert (atari_rgb.BRIGHTNESS[b[-1]] >= atari_rgb.BRIGHTNESS[a[-1]]).all()
    assert (a != b).any()


def test_the_ledger_counts_every_frame_that_the_emulator_ran():
    env = AtariRgbVectorEnv("atari-rgb/boxing", 2)
    env.reset(seed=0)
    at_start = [game.ale.getFrameNumber() for game in env.games]
    for _ in range(25):
        env.step(np.array([1, 2]))
    assert env.ledger["frames"] - env.ledger["reset_frames"] == 2 * 25 * 4
    ran = [game.ale.getFrameNumber() for game in env.games]
    assert [b - a for a, b in zip(at_start, ran, strict=True)] == [100, 100]
    before = env.ledger
    env.reset(options={"reset_mask": np.array([True, False])})
    after = env.ledger
    assert after["resets"] == before["resets"] + 1
    extra = after["frames"] - before["frames"]
    assert 21 <= extra <= 28 and after["reset_frames"] - before["reset_frames"] == extra


def test_time_limit_and_standing_still(monkeypatch):
    monkeypatch.setattr(atari_rgb, "MAX_STEPS", 5)
    env = envs.make_vec("atari-rgb/freeway", 2)
    env.reset(seed=0)
    for i in range(5):
        seen, _, terminated, truncated, _ = env.step(np.array([1, 1]))
        assert (truncated == (i == 4)).all() and not terminated.any()
    frames = env.ledger["frames"]
    again, *_ = env.step(np.array([1, 1]))
    assert env.ledger["frames"] == frames and (again == seen).all()
    env.reset(options={"reset_mask": np.array([True, False])})
    assert env.step(np.array([1, 1]))[3].tolist() == [False, True]


def test_saved_and_put_back_it_goes_on_exactly():
    env = AtariRgbVectorEnv("atari-rgb/boxing", 2)
    env.reset(seed=[4, 9])
    actions = np.random.default_rng(0).integers(0, 18, (80, 2))
    for a in actions[:40]:
        env.step(a)
    other = AtariRgbVectorEnv("atari-rgb/boxing", 2)
    other.load_state(env.state())
    for a in actions[40:]:
        for left, right in zip(env.step(a)[:4], other.step(a)[:4], strict=True):
            assert (left == right).all()
    assert (env.reset()[0] == other.reset()[0]).all() and env.ledger == other.ledger


def test_names_and_options():
    assert atari_rgb.parse("atari-rgb/BankHeist,pool=max,noops=30") == ("bank_heist", {"pool": "max", "noops": 30})
    pong = envs.make_vec("atari-rgb/pong,pool=max", 1)
    assert pong.games[0].pool == "max"
    with pytest.raises(UsageError, match="did you mean 'freeway'"):
        envs.make_vec("atari-rgb/freewya", 1)
    with pytest.raises(UsageError, match="air_raid shows 250 x 160 pixels, a world model takes 210 x 160"):
        envs.make_vec("atari-rgb/air_raid", 1)
    with pytest.raises(UsageError, match=r"pool=min.*options are pool=last"):
        envs.make_vec("atari-rgb/pong,pool=min", 1)
    env = envs.make("atari-rgb/pong")
    assert env.reset(seed=0)[0].shape == env.observation_space.shape == (4, 105, 80)
    assert env.step(0)[0].dtype == np.uint8
    with pytest.raises(ValueError, match=r"actions must be 0\.\.5"):
        env.step(6)
