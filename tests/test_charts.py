"""Charts: labels inside the picture, one value is one tick, pictures that are to be compared have the same scales."""

import re

import numpy as np
import pytest
from pages import check_page

from replaylab import charts


def one(x, y, **settings):
    return charts.lines("t", [charts.Series("", np.array(x, float), np.array(y, float))], **settings)


def labels(chart):
    """(x, anchor, text) of every text."""
    return re.findall(r'<text [^>]*?x="([-\d.]+)"[^>]*?text-anchor="(\w+)">([^<]+)<', chart)


def test_labels_stay_inside_the_picture():
    width = charts.SIZE[0]
    made = [
        one([0, 1000], [-0.00095, -0.00085]),
        charts.histogram("t", [1, 2], [0, 500, 1000]),
        charts.bars("t", ["a"], [100000.0]),
    ]
    for chart in made:
        for x, anchor, text in labels(chart):
            reach = charts.LETTER * len(text) * (0.5 if anchor == "middle" else 1)
            assert float(x) - reach >= 0 and float(x) + (reach if anchor == "middle" else 0) <= width, text


def test_one_value_has_one_tick():
    shown = [text for _, _, text in labels(one([54], [-80]))]
    assert shown == ["-80", "54"]
    assert next(text for _, _, text in labels(one([1, 2, 3], [0, 0, 0]))) == "0"
    assert "0.01" in [text for _, _, text in labels(one([1, 2], [0.01, 0.01], log=True))]


@pytest.mark.parametrize("count", [2, 5, 40])
@pytest.mark.parametrize("last", [2, 3, 4, 7, 15, 1000])
def test_whole_numbers_have_whole_ticks(last, count):
    found = [label for _, label in charts._axis(range(1, last + 1), 0, 100).ticks(count)]
    assert found and all(float(label.replace("k", "e3")).is_integer() for label in found)


def test_densities_with_the_same_scales():
    x = np.array([-1.0, 0, 1])
    settings = {"within": (-2.0, 2.0), "scale": (0.0, 5.0)}
    wide = charts.density("t", 2 * x, 2 * x, np.array([0.0, 2, 5]), **settings)
    narrow = charts.density("t", x / 2, x / 2, np.array([4.9, 4.9, 4.9]), **settings)
    assert labels(wide) == labels(narrow)
    assert re.findall('class="scale">.*?</p>', wide) == re.findall('class="scale">.*?</p>', narrow)
    assert 'class="cell v7"' in narrow and 'class="cell v0"' not in narrow


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (-2.9, 8, ["-2.5", "0", "2.5", "5", "7.5"]),
        (0.1, 0.32, ["0.1", "0.15", "0.2", "0.25", "0.3"]),
        (0, 2000, ["0", "500", "1000", "1500", "2000"]),
        (0, 100_000, ["0", "20k", "40k", "60k", "80k", "100k"]),
        (0, 2_000_000, ["0", "0.5M", "1M", "1.5M", "2M"]),
    ],
)
def test_ticks_are_round_and_inside(low, high, labels):
    ticks = charts.Axis(low, high, 0, 100).ticks()
    assert [label for _, label in ticks] == labels
    assert all(-0.01 <= at <= 100.01 for at, _ in ticks)


def test_log_ticks():
    assert [label for _, label in charts.Axis(-2, 1, 0, 100, log=True).ticks()] == ["0.01", "0.1", "1", "10"]
    assert len(charts.Axis(0.05, 0.9, 0, 100, log=True).ticks()) == 2  # 2 and 5


def test_histogram_bins():
    counts, edges = charts.bin_values([0, 1, 1, 3, np.nan, np.inf])
    assert counts.tolist() == [1, 2, 0, 1] and edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5]
    counts, edges = charts.bin_values([0.5, 0.6], within=(-1, 1))
    assert edges[0] == -1 and edges[-1] == 1 and counts.sum() == 2
    for odd in ([], [np.nan], [7.0] * 9, [1e17, 1e17 + 16], [0, 1e-320], [-1e99, 1e99], [1e-300, 0.0]):
        counts, edges = charts.bin_values(odd)
        assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [np.nan, 1.0, np.inf], [1e300, -1e300, 2], [0, 1e-320], [-5, -4]], ids=repr
)
@pytest.mark.parametrize("log", [False, True])
def test_charts_survive_odd_values(tmp_path, values, log):
    y = np.array(values, np.float64)
    series = charts.Series("<b>", np.arange(len(y), dtype=np.float64), y, y - 1, y + 1)
    pieces = [charts.lines("t", [series], log=log), charts.bars("t", ["x"] * len(y), values, values, [None] * len(y))]
    pieces += [charts.histogram("t", *charts.bin_values(y)), charts.density("t", y, y, y)]
    (tmp_path / "page.html").write_text("".join(pieces))
    assert "<b>" not in check_page(tmp_path / "page.html").html


def test_line_breaks_at_missing_values():
    y = np.array([1.0, 2, np.nan, 4, 5])
    chart = charts.lines("t", [charts.Series("", np.arange(5.0), y)])
    assert chart.count('<path class="line') == 2 and chart.count("<circle") == 4
