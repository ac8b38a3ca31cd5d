"""The fixture of all tests of states: a model with recurrent layers beside rows."""

from __future__ import annotations

import pytest

from prefixbank.bank import PrefixBank
from tests.fakekv import HYBRID, FakeModel


@pytest.fixture
def hybrid(bank: PrefixBank) -> FakeModel:
    """Give a model with recurrent layers beside rows."""
    return FakeModel(bank, "hybrid", layout=HYBRID)
