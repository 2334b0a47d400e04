"""The arithmetic behind the tables: areas, verdicts, exponents."""

import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import evidence


def test_area_of_a_broken_line():
    points = [(0, 0.2), (100, 0.6), (300, 1.0)]
    assert evidence.area(points, 100) == pytest.approx(0.4)
    assert evidence.area(points, 200) == pytest.approx((40 + 70) / 200)  # it ends between two points
    assert evidence.reaches(points, 0.6) == 100 and evidence.reaches(points, 1.1) is None


def test_verdict_is_the_interval_of_paired_differences():
    low, high = [0.1, 0.5, 0.9, 0.3, 0.7], [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 apart, give or take 0.01
    mean, half = evidence.difference(high, low)
    assert mean == pytest.approx(0.1) and half == pytest.approx(2.78 * 0.01 / 5**0.5, rel=1e-6)
    assert evidence.verdict(high, low).startswith("shown")
    assert evidence.verdict(low, high).startswith("the opposite")
    assert evidence.verdict([0.1, 0.3, 0.2], [0.2, 0.1, 0.25]).startswith("not shown")


def test_exponent_of_a_power():
    assert evidence.exponent([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
