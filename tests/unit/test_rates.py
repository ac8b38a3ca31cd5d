"""Hold the measured rates to what was measured, and the choice that rests on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.rates import Estimate, Line, RateBook
from prefixbank.values import ChunkKey, Namespace, Rates
from tests.fakekv import FakeModel

A = Namespace(1, ChunkKey(b"a"), "aa" * 32, "", "a", "", 1)
B = replace(A, id=2)
UNKNOWN = replace(A, id=0)


def fitted(*samples: tuple[float, float], known: tuple[float, float] | None = None, of_a_size: Any = median) -> Line:
    line = Line(of_a_size, known)
    for size, seconds in samples:
        line.add(size, seconds)
    return line


# --- lines


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert Line(min).line() is None
    assert Line(min).seconds(5) is None


@pytest.mark.parametrize("of_a_size", [min, median])
def test_an_exact_line_is_found_exactly(of_a_size: Any) -> None:
    line = fitted(*((n, 0.5 + 0.25 * n) for n in (16, 2, 8, 4)), of_a_size=of_a_size)
    assert line.line() == (0.5, 0.25)
    assert line.seconds(20) == 5.5


@pytest.mark.parametrize("of_a_size", [min, median])
def test_single_slow_measurements_do_not_count(of_a_size: Any) -> None:
    choose = random.Random(1)
    line = Line(of_a_size)
    for number in range(60):
        size = choose.randrange(100, 5000)
        seconds = (0.1 + 0.002 * size) * choose.uniform(0.97, 1.03)
        line.add(size, seconds * (30 if number % 6 == 0 else 1))
    fixed, slope = line.line() or (-1.0, -1.0)
    assert slope == pytest.approx(0.002, rel=0.3)
    assert fixed < 1.0


def test_of_one_size_the_shortest_or_the_typical_time_counts() -> None:
    samples = [(10, 3.0), (10, 2.0), (10, 40.0), (40, 9.0), (40, 8.0), (40, 50.0)]
    assert fitted(*samples, of_a_size=min).line() == (0.0, 0.2)
    assert fitted(*samples, of_a_size=median).line() == (1.0, 0.2)


def test_one_slow_start_is_forgotten_once_the_size_comes_again() -> None:
    line = fitted((16, 3.0), (256, 0.5), of_a_size=min)
    assert line.line() == (0.0, 0.5 / 256)  # no line rises from there: all of the time counts as the slope
    line.add(17, 0.02)
    fixed, slope = line.line() or (-1.0, -1.0)
    assert (fixed, slope) == (pytest.approx(0.0, abs=0.02), pytest.approx(0.002, rel=0.01))


def test_measurements_of_one_size_say_nothing_about_the_fixed_part() -> None:
    """So all of the time counts as the slope: the estimate is right at that size."""
    line = fitted((10, 3.0), (10, 2.0), (10, 40.0))
    assert line.line() == (0.0, 0.3)
    assert line.seconds(10) == 3.0
    assert fitted((10, 2.0)).line() == (0.0, 0.2)


def test_measurements_of_one_size_leave_what_was_known() -> None:
    assert fitted((10, 2.0), (10, 2.0), known=(1.0, 0.1)).line() == (1.0, 0.1)
    assert fitted(known=(1.0, 0.1)).seconds(20_000) == 2001.0


def test_what_is_measured_takes_the_place_of_what_was_known() -> None:
    line = fitted((10, 2.0), known=(7.0, 7.0))
    assert line.line() == (7.0, 7.0)
    line.add(40, 5.0)
    assert line.line() == (1.0, 0.1)


def test_neither_part_is_negative() -> None:
    assert fitted((10, 5.0), (20, 4.0), (40, 3.0)).line() == (0.0, 3.0 / 40)
    fixed, slope = fitted((10, 0.1), (20, 2.0), (40, 8.0)).line() or (-1.0, -1.0)
    assert fixed == 0.0
    assert slope > 0


def test_nothing_is_said_of_sizes_far_beyond_the_measured_ones() -> None:
    line = fitted((10, 2.0), (40, 5.0))
    assert line.seconds(80) == 9.0
    assert line.seconds(81) is None


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0)])
def test_what_can_not_be_is_not_taken(size: float, seconds: float) -> None:
    assert fitted((size, seconds)).line() is None


def test_only_the_last_measurements_count() -> None:
    line = fitted(*((n, 100.0 * n) for n in (4, 16, 64) for _ in range(8)))
    for n in (4, 16, 64):
        for _ in range(8):
            line.add(n, 2.0 + n)
    assert line.line() == (2.0, 1.0)


def test_a_line_follows_what_is_added() -> None:
    line = fitted((10, 2.0))
    assert line.line() == (0.0, 0.2)
    line.add(10, 4.0)
    line.add(10, 4.0)
    assert line.line() == (0.0, 0.4)


# --- the choice


@pytest.mark.parametrize(
    ("load_s", "compute_s", "pays"),
    [
        (None, None, True),
        (9.0, None, True),
        (None, 0.001, True),
        (1.0, 2.0, True),
        (1.0, 1.0, True),
        (2.0, 1.0, False),
        (0.1, 0.0, False),
    ],
)
def test_loading_pays_unless_computing_is_known_to_be_faster(
    load_s: float | None, compute_s: float | None, pays: bool
) -> None:
    assert Estimate(load_s, compute_s).loading_pays is pays


@pytest.mark.parametrize(
    ("load_s", "compute_s", "n_flips"),
    [
        (None, None, 0),
        (1.0, None, 0),
        (1.0, 3.9, 4),  # close: computing is tried
        (1.0, 4.1, 0),
        (1.9, 1.0, 4),  # close: loading is tried
        (2.1, 1.0, 0),
    ],
)
def test_close_choices_are_tried_the_other_way_now_and_then(
    load_s: float | None, compute_s: float | None, n_flips: int
) -> None:
    book = RateBook()
    estimate = Estimate(load_s, compute_s)
    chosen = [book.should_load(A, estimate) for _ in range(64)]
    assert chosen.count(not estimate.loading_pays) == n_flips
    assert chosen[0] == estimate.loading_pays


# --- the book


def measure(book: RateBook, namespace: Namespace = A) -> None:
    """Compute at 10 s and 1 s a token, load at 5 s and 0.5 s a byte; the first load does not count."""
    book.loaded(namespace, 1, 999.0)
    for n in (10, 20, 40, 80):
        book.computed(namespace, n, 10.0 + n)
        book.loaded(namespace, n, 5.0 + 0.5 * n)


def test_loading_has_its_fixed_time_and_computing_has_none() -> None:
    """The fixed time of computing is spent on the rest of the prompt all the same."""
    book = RateBook()
    measure(book)
    assert book.estimate(A, 30, 100) == Estimate(55.0, 30.0)
    assert book.estimate(A, 0, 0) == Estimate(5.0, 0.0)


def test_each_half_is_unknown_until_it_was_measured() -> None:
    book = RateBook()
    assert book.estimate(A, 10, 10) == Estimate(None, None)
    book.computed(A, 10, 1.0)
    assert book.estimate(A, 20, 10) == Estimate(None, 2.0)
    for _ in range(3):
        assert book.estimate(A, 20, 20) == Estimate(None, 2.0)
        book.loaded(A, 10, 1.0)
    assert book.estimate(A, 20, 20) == Estimate(2.0, 2.0)


def test_namespaces_have_rates_of_their_own() -> None:
    book = RateBook()
    measure(book)
    assert book.estimate(B, 10, 10) == Estimate(None, None)
    book.recall(B, Rates(2, "cpu", 0.0, 3.0, 0.0, 4.0, 1))
    assert book.estimate(B, 10, 10) == Estimate(40.0, 30.0)
    assert book.estimate(A, 10, 10) == Estimate(10.0, 10.0)


def test_what_an_earlier_process_measured_is_where_a_book_begins() -> None:
    book = RateBook()
    book.recall(A, Rates(1, "cpu", 10.0, 1.0, None, None, 1))
    assert book.estimate(A, 7, 100) == Estimate(None, 7.0)
    book.recall(B, Rates(2, "cpu", None, None, 5.0, 0.5, 1))
    assert book.estimate(B, 7, 100) == Estimate(55.0, None)
    assert book.take_new("cpu", 1) == []  # what was only recalled is known already


def test_recalling_does_not_undo_what_was_measured() -> None:
    book = RateBook()
    measure(book)
    book.recall(A, Rates(1, "cpu", 0.0, 99.0, 0.0, 99.0, 1))
    assert book.estimate(A, 30, 100) == Estimate(55.0, 30.0)
    book.recall(B, None)
    book.recall(B, Rates(2, "cpu", 0.0, 99.0, 0.0, 99.0, 1))  # asked of the index once only
    assert book.estimate(B, 1, 1) == Estimate(None, None)


def test_half_a_pair_is_no_rate() -> None:
    book = RateBook()
    book.recall(A, Rates(1, "cpu", 1.0, None, None, 1.0, 1))
    assert book.estimate(A, 1, 1) == Estimate(None, None)


def test_what_is_new_is_given_out_once() -> None:
    book = RateBook()
    measure(book)
    book.computed(B, 10, 2.0)
    book.computed(UNKNOWN, 10, 2.0)  # a namespace that the index does not know
    assert book.take_new("cpu x", 99) == [
        Rates(1, "cpu x", 10.0, 1.0, 5.0, 0.5, 99),
        Rates(2, "cpu x", 0.0, 0.2, None, None, 99),
    ]
    assert book.take_new("cpu x", 100) == []
    book.loaded(B, 10, 1.0)
    assert book.take_new("cpu x", 101) == []  # the first load does not count
    book.loaded(B, 10, 1.0)
    assert book.take_new("cpu x", 102) == [Rates(2, "cpu x", 0.0, 0.2, 0.0, 0.1, 102)]


# --- through the index


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bank"


def opened(root: Path, device: str = "cpu x", **options: Any) -> FakeModel:
    """Return a model in the bank, whose rates were recalled as when a model is identified."""
    model = FakeModel(PrefixBank.open(root, chunk_tokens=4, **options))
    model.session.recall_rates(model.namespace, device)
    return model


def estimate(model: FakeModel) -> Estimate:
    answer: Estimate = model.session.rates.estimate(model.namespace, 30, 100)
    return answer


@pytest.mark.parametrize("note", [PrefixBank.flush, PrefixBank.close, PrefixBank.stats])
def test_the_next_process_knows_what_this_one_measured(root: Path, note: Callable[[PrefixBank], object]) -> None:
    model = opened(root)
    measure(model.session.rates, model.namespace)
    note(model.bank)
    again = opened(root, read_only=True)
    assert estimate(again) == estimate(model) == Estimate(55.0, 30.0)
    (rates,) = again.bank.stats().rates
    assert (rates.device, rates.compute_s, rates.compute_s_per_token) == ("cpu x", 10.0, 1.0)
    assert (rates.load_s, rates.load_s_per_byte) == (5.0, 0.5)
    again.bank.close()
    model.bank.close()


def test_what_was_measured_later_takes_the_place_of_what_was_before(root: Path) -> None:
    for slope in (2.0, 3.0):
        model = opened(root)
        for n in (10, 20, 40):
            model.session.rates.computed(model.namespace, n, slope * n)
        model.bank.flush()
        (rates,) = model.bank.stats().rates
        assert rates.compute_s_per_token == slope
        model.bank.close()


def test_another_device_has_rates_of_its_own(root: Path) -> None:
    model = opened(root)
    measure(model.session.rates, model.namespace)
    model.bank.close()
    other = opened(root, "gpu y")
    assert estimate(other) == Estimate(None, None)
    other.session.rates.computed(other.namespace, 10, 1.0)
    other.bank.flush()
    assert [rates.device for rates in other.bank.stats().rates] == ["cpu x", "gpu y"]
    other.bank.close()
    again = opened(root)
    assert estimate(again) == Estimate(55.0, 30.0)
    again.bank.close()


def test_another_model_has_rates_of_its_own(root: Path) -> None:
    model = opened(root)
    measure(model.session.rates, model.namespace)
    model.bank.flush()
    other = FakeModel(model.bank, "other")
    other.session.recall_rates(other.namespace, "cpu x")
    assert estimate(other) == Estimate(None, None)
    model.bank.close()


def test_a_read_only_bank_keeps_no_rates(root: Path, unchanged: Callable[[Path], Any]) -> None:
    opened(root).bank.close()
    with unchanged(root):
        model = opened(root, read_only=True)
        measure(model.session.rates, model.namespace)
        assert estimate(model) == Estimate(55.0, 30.0)  # but it goes by them
        model.bank.flush()
        assert model.bank.stats().rates == ()
        model.bank.close()


def test_a_match_says_what_it_costs(root: Path) -> None:
    model = opened(root)
    model.store(range(10))
    found = model.match(range(10))
    assert (found.load_s, found.compute_s, found.loading_pays) == (None, None, True)
    for n_bytes in (1, found.n_bytes // 4, found.n_bytes // 2, found.n_bytes):
        model.session.rates.loaded(model.namespace, n_bytes, n_bytes * 1.0)
        model.session.rates.computed(model.namespace, n_bytes, 0.5 * n_bytes)
    found = model.match(range(10))
    assert found.load_s == pytest.approx(found.n_bytes)
    assert found.compute_s == pytest.approx(5.0)
    assert not found.loading_pays
    nothing = model.match([9, 9])
    assert (nothing.load_s, nothing.compute_s, nothing.loading_pays) == (None, None, True)
    model.bank.close()
    always = opened(root, load="always")
    found = always.match(range(10))
    assert found.load_s == pytest.approx(found.n_bytes)
    assert found.loading_pays
    always.bank.close()
