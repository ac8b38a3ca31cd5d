"""Hold the way in which a command line names one namespace to its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, root_key
from prefixbank.fingerprint import salt_digest
from prefixbank.values import Namespace
from tests.cli.banks import FINGERPRINTS, LAYOUT, FilledBank, Outcome, Rows

Run = Callable[..., Outcome]
SALT = b"tenant"


@pytest.fixture
def salted(empty: FilledBank) -> FilledBank:
    """A bank with one model's chunks without salt (12 tokens) and with one (20 tokens)."""
    plain = Namespace(0, root_key(FINGERPRINTS[0]), FINGERPRINTS[0], "", "model", LAYOUT.to_json(), 1)
    other = replace(plain, root_key=root_key(FINGERPRINTS[0], SALT), salt_digest=salt_digest(SALT))
    with PrefixBank.open(empty.root) as bank:
        for wanted, n_tokens in ((plain, 12), (other, 20)):
            bank._session.store(bank._session.namespace(wanted), pack_token_ids(range(n_tokens)), Rows())
    return empty


@pytest.mark.parametrize(
    ("selector", "n_chunks"), [("abab/", 2), (f"abab/{salt_digest(SALT)[:6]}", 3), (f"ABAB/{salt_digest(SALT)}", 3)]
)
def test_salt_tells_namespaces_of_one_model_apart(selector: str, n_chunks: int, run: Run, salted: FilledBank) -> None:
    plan = run("prune", "--namespace", selector, "--json", "-n").document
    assert len(plan["chunks"]) == n_chunks


def test_fingerprint_alone_is_refused_where_salts_share_it(run: Run, salted: FilledBank) -> None:
    outcome = run("prune", "--namespace", "abab")
    assert outcome.code == 2
    assert "2 namespaces begin with 'abab': give FINGERPRINT or FINGERPRINT/SALT" in outcome.err
