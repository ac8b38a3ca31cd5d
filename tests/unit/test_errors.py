"""Walk the error tree: each class documented, exported, and given an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages

import pytest

import prefixbank
from prefixbank import errors
from prefixbank.errors import PrefixBankError

PUBLISHED_EXIT_CODES = {2, 3, 10, 11, 12, 13}
"""What is left of the CLI's codes once 0 (done), 1 (found problems) and 130 (interrupted) are taken."""


def import_everything() -> None:
    for module in walk_packages(prefixbank.__path__, "prefixbank."):
        if not module.name.endswith("__main__"):
            with suppress(errors.EvaluationError):  # what needs an extra that is not installed
                import_module(module.name)


def subclasses(root: type[PrefixBankError]) -> Iterator[type[PrefixBankError]]:
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


import_everything()
TREE = sorted(set(subclasses(PrefixBankError)), key=lambda error: error.__name__)


def documented() -> dict[str, tuple[int, int]]:
    """Return, for each class drawn in the docstring, its depth and exit code; without a code its parent's holds."""
    found: dict[str, tuple[int, int]] = {}
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"^ {4}([│├└─ ]*)([A-Z]\w+Error)\s+(?:exit code )?(\d+)", line)
        if drawn:
            found[drawn[2]] = (len(drawn[1]) // 4, int(drawn[3]))
    return found


def test_no_module_defines_errors_of_its_own() -> None:
    assert {error.__module__ for error in TREE} == {"prefixbank.errors"}


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_each_error_is_documented_exported_and_has_an_exit_code(error: type[PrefixBankError]) -> None:
    assert error.__doc__
    assert error.__name__ in prefixbank.__all__
    assert error.__name__ in errors.__all__
    assert getattr(prefixbank, error.__name__) is error
    assert error.exit_code in PUBLISHED_EXIT_CODES
    depth, exit_code = documented()[error.__name__]
    assert exit_code == error.exit_code
    assert depth == error.mro().index(PrefixBankError)


def test_the_drawn_tree_has_no_class_that_is_not_there() -> None:
    assert documented().keys() == {error.__name__ for error in TREE}


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_errors_keep_their_message_across_processes(error: type[PrefixBankError]) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(error("what to do")))
    assert type(again) is error
    assert str(again) == "what to do"


def test_errors_are_also_what_python_code_expects() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.UnknownPrefixError, LookupError)
    assert issubclass(errors.BankWarning, UserWarning)
    assert not issubclass(errors.BankWarning, PrefixBankError)
