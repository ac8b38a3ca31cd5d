"""Own the measured speed of computing and loading, and the choice between them. No clock here, and no files.

Both costs are lines: a fixed time, and a time for each token or byte. What loading saves is the slope: computing a
whole prompt and computing only its rest have the fixed time in common. Of computing the shortest times count, since
what makes it slow (kernels that are compiled, a busy machine) passes; of loading the typical ones, since files that are
not in the page cache are as typical as those that are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from math import log
from statistics import median

from prefixbank.values import Namespace, Rates

__all__ = ["Estimate", "Line", "RateBook"]

_SAMPLES = 8
"""How many of the last measurements of a size count."""

_APART = 1.5
"""Sizes less than this factor apart count as one."""

_LEAST_LOADS = 3
"""How many loads must have been measured before the choice relies on them."""

_FARTHEST = 2.0
"""How many times larger than the largest measured size one may be for its time to be told from the line."""

_LOOK_AGAIN = 16
"""Every how many times the other way is taken where both take about as long: else neither would be measured again."""


class Line:
    """Fit `seconds = fixed + slope * size` to the last measurements.

    Measurements of about one size count as one, of their typical (`median`) or shortest time (`min`); the slope is the
    median of the slopes between sizes (Theil-Sen estimator), so that single slow ones don't count.
    """

    def __init__(self, of_a_size: Callable[[Iterable[float]], float], known: tuple[float, float] | None = None) -> None:
        """Start from what is known: fixed seconds and slope."""
        self._of_a_size = of_a_size
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._known = self._line = known
        self._largest = 0.0
        self._is_due = False

    def add(self, size: float, seconds: float) -> None:
        """Take a measurement."""
        if size > 0 and seconds > 0:
            alike = self._samples.setdefault(round(log(size, _APART)), deque(maxlen=_SAMPLES))
            alike.append((size, seconds))
            self._largest = max(self._largest, size)
            self._is_due = True

    def line(self) -> tuple[float, float] | None:
        """Return fixed seconds and slope, neither negative; None where nothing is known."""
        if self._is_due:
            self._is_due = False
            self._line = self._fit()
        return self._line

    def seconds(self, size: float) -> float | None:
        """Return the time that something of this size takes, the fixed part included; None far beyond what is known."""
        line = self.line()
        if line is None or (self._largest and size > _FARTHEST * self._largest):
            return None
        return line[0] + line[1] * size

    def _fit(self) -> tuple[float, float]:
        points = sorted(
            (median(size for size, _ in alike), self._of_a_size(seconds for _, seconds in alike))
            for alike in self._samples.values()
        )
        slopes = [(y - x) / (n - m) for (m, x), (n, y) in combinations(points, 2) if n > m]
        slope = median(slopes) if slopes else 0.0
        if slope <= 0.0:
            # Sizes too much alike: what was known says how the time divides, or it is all taken to grow with the size.
            return self._known or (0.0, min(seconds / size for size, seconds in points))
        return max(median(seconds - slope * size for size, seconds in points), 0.0), slope


@dataclass(frozen=True, slots=True)
class Estimate:
    """Say how long loading a match would take, and computing its tokens; None where that is not known yet."""

    load_s: float | None
    compute_s: float | None

    @property
    def loading_pays(self) -> bool:
        """Tell whether to load: unless computing is known to be faster."""
        return self.load_s is None or self.compute_s is None or self.load_s <= self.compute_s


@dataclass(slots=True)
class _Lines:
    compute: Line
    load: Line
    n_loads: int = 0
    n_close_choices: int = 0
    is_new: bool = False


class RateBook:
    """Know the rates of each namespace on this device. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lines: dict[int, _Lines] = {}
        self._recalled: set[int] = set()
        self._lock = threading.Lock()

    def recall(self, namespace: Namespace, rates: Rates | None) -> None:
        """Begin with what an earlier process measured."""
        with self._lock:
            if namespace.id in self._recalled:
                return
            self._recalled.add(namespace.id)
            if namespace.id in self._lines and self._lines[namespace.id].is_new:
                return  # what was measured meanwhile is newer
            compute = load = None
            if rates is not None and rates.compute_s is not None and rates.compute_s_per_token is not None:
                compute = rates.compute_s, rates.compute_s_per_token
            if rates is not None and rates.load_s is not None and rates.load_s_per_byte is not None:
                load = rates.load_s, rates.load_s_per_byte
            self._lines[namespace.id] = _Lines(Line(min, compute), Line(median, load), _LEAST_LOADS if load else 0)

    def computed(self, namespace: Namespace, n_tokens: int, seconds: float) -> None:
        """Take the time that a prefill of so many tokens took."""
        with self._lock:
            lines = self._of(namespace)
            lines.compute.add(n_tokens, seconds)
            lines.is_new = True

    def loaded(self, namespace: Namespace, n_bytes: int, seconds: float) -> None:
        """Take the time that a load of so many bytes took."""
        with self._lock:
            lines = self._of(namespace)
            lines.n_loads += 1
            if lines.n_loads > 1:  # the first one starts threads
                lines.load.add(n_bytes, seconds)
                lines.is_new = True

    def estimate(self, namespace: Namespace, n_tokens: int, n_bytes: int) -> Estimate:
        """Return what loading so many bytes, for so many tokens, costs and saves."""
        with self._lock:
            lines = self._of(namespace)
            computing = lines.compute.line()
            return Estimate(
                lines.load.seconds(n_bytes) if lines.n_loads >= _LEAST_LOADS else None,
                None if computing is None else computing[1] * n_tokens,
            )

    def whole_time(self, namespace: Namespace, n_tokens: int, n_bytes: int) -> Estimate:
        """Return what computing so many tokens, and loading so many bytes, take in all, fixed parts included."""
        with self._lock:
            lines = self._of(namespace)
            return Estimate(
                (lines.load.seconds(n_bytes) if lines.n_loads >= _LEAST_LOADS else None) if n_bytes else 0.0,
                lines.compute.seconds(n_tokens) if n_tokens else 0.0,
            )

    def should_load(self, namespace: Namespace, estimate: Estimate) -> bool:
        """Tell whether to load now: as the estimate says, but where it is close not each time.

        Computing instead is never slower than having no bank; loading instead is tried where it takes twice as long at
        most.
        """
        pays = estimate.loading_pays
        if estimate.load_s is None or estimate.compute_s is None:
            return pays
        is_close = estimate.compute_s < 4 * estimate.load_s if pays else estimate.load_s < 2 * estimate.compute_s
        if not is_close:
            return pays
        with self._lock:
            lines = self._of(namespace)
            lines.n_close_choices += 1
            return pays if lines.n_close_choices % _LOOK_AGAIN else not pays

    def take_new(self, device: str, now_s: int) -> list[Rates]:
        """Return the rates of the namespaces that something was measured of since the last call."""
        with self._lock:
            fresh = [(number, lines) for number, lines in self._lines.items() if number and lines.is_new]
            for _, lines in fresh:
                lines.is_new = False
            return [Rates(number, device, *_pair(lines.compute), *_pair(lines.load), now_s) for number, lines in fresh]

    def _of(self, namespace: Namespace) -> _Lines:
        return self._lines.setdefault(namespace.id, _Lines(Line(min), Line(median)))


def _pair(line: Line) -> tuple[float | None, float | None]:
    return line.line() or (None, None)
