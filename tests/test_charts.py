"""Charts: labels inside the picture, one value is one tick, pictures that are to be compared have the same scales."""

import re

import numpy as np
import pytest

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
