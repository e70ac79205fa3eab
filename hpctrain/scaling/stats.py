"""Medians, 95 % intervals and tests of significance, in plain Python.

Times of a step are positive and their errors multiply, so that intervals and tests work on their
logarithms; the point that is stated is the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured time and how sure it is.

    Attributes:
        value: the median.
        low, high: 95 % interval; None where one run says nothing about the next.
        count: independent runs.
        log_variance: of the mean of the runs' logarithms; None from a single run.
    """

    value: float
    low: float | None
    high: float | None
    count: int
    log_variance: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one number a run, for example each run's median step.

        The interval is Student's: median · exp(± t · s / √n), s the standard deviation of the
        logarithms and t the quantile for n - 1 degrees of freedom.

        Raises:
            ValueError: none, or one that is not positive.
        """
        if not values or min(values) <= 0:
            raise ValueError(f"positive numbers belong here, found {list(values)}")
        middle = statistics.median(values)
        n = len(values)
        if n == 1:
            return cls(middle, None, None, 1, None)
        variance = statistics.variance([math.log(value) for value in values]) / n
        width = math.exp(t_quantile(0.5 + CONFIDENCE / 2, n - 1) * math.sqrt(variance))
        return cls(middle, middle / width, middle * width, n, variance)

    def per(self, other: Estimate, factor: float = 1.0) -> Estimate:
        """``factor · self / other``, with the interval of the quotient (Welch's degrees)."""
        value = factor * self.value / other.value
        if self.log_variance is None or other.log_variance is None:
            return Estimate(value, None, None, min(self.count, other.count), None)
        variance = self.log_variance + other.log_variance
        degrees = _welch(self.log_variance, self.count, other.log_variance, other.count)
        width = math.exp(t_quantile(0.5 + CONFIDENCE / 2, degrees) * math.sqrt(variance))
        return Estimate(value, value / width, value * width, min(self.count, other.count), variance)

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Estimate(self.value * factor, low, high, self.count, self.log_variance)

    def inverse(self, factor: float = 1.0) -> Estimate:
        """``factor / self``: a rate from a time."""
        low = None if self.high is None else factor / self.high
        high = None if self.low is None else factor / self.low
        return Estimate(factor / self.value, low, high, self.count, self.log_variance)


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of equal means of the logarithms (Welch 1947); None with a single run in a side.

    Equal runs without any spread are equal (1) or differ for sure (0).
    """
    if len(a) < 2 or len(b) < 2:
        return None
    x, y = [math.log(value) for value in a], [math.log(value) for value in b]
    va, vb = statistics.variance(x) / len(x), statistics.variance(y) / len(y)
    difference = statistics.fmean(x) - statistics.fmean(y)
    if va + vb == 0:
        return 1.0 if abs(difference) < 1e-12 else 0.0
    t = difference / math.sqrt(va + vb)
    return 2.0 * (1.0 - t_cdf(abs(t), _welch(va, len(x), vb, len(y))))


def rank_sum(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p that neither of two samples tends to be larger (Mann and Whitney 1947).

    Normal approximation with the correction for ties; None with fewer than 4 values in a side,
    where it says nothing.
    """
    n, m = len(a), len(b)
    if min(n, m) < 4:
        return None
    ordered = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks = 0.0
    ties = 0.0
    at = 0
    while at < n + m:
        end = at
        while end < n + m and ordered[end][0] == ordered[at][0]:
            end += 1
        shared = (at + 1 + end) / 2
        ranks += shared * sum(1 for _, side in ordered[at:end] if side == 0)
        ties += (end - at) ** 3 - (end - at)
        at = end
    total = n + m
    variance = n * m / 12 * ((total + 1) - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    difference = abs(ranks - n * (n + 1) / 2 - n * m / 2)
    z = max(0.0, difference - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _welch(va: float, na: int, vb: float, nb: int) -> float:
    """Degrees of freedom of a difference of means (Welch-Satterthwaite)."""
    below = va**2 / (na - 1) + vb**2 / (nb - 1)
    return (va + vb) ** 2 / below if below > 0 else float(na + nb - 2)


def t_quantile(share: float, degrees: float) -> float:
    """Quantile above the median of Student's distribution, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if t_cdf(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(t: float, degrees: float) -> float:
    """P(T <= t) of Student's distribution, for t >= 0."""
    x = degrees / (degrees + t * t)
    return 1.0 - 0.5 * _incomplete_beta(degrees / 2, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(tiny, 1.0 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            found *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * found / a
