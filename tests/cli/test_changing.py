"""Hold the verbs that change a bank to their rules: init, pin, unpin, rm, prune, migrate; and their dry runs."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.schema import HEAD_REVISION
from tests.cli.banks import FINGERPRINTS, FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]

DRY_RUNS = [
    "pin short",
    "unpin short",
    "rm short",
    "prune --max-bytes 0",
    "prune --unused-for 0",
    f"prune --namespace {FINGERPRINTS[0]}",
    "migrate",
    "init",
]


@pytest.mark.parametrize("verb", DRY_RUNS)
@pytest.mark.parametrize("flag", ["-n", "--dry-run"])
def test_a_dry_run_prints_and_changes_no_byte(run: Run, filled: FilledBank, verb: str, flag: str) -> None:
    before = digest_of(filled.root)
    outcome = run(*verb.split(), flag)
    assert outcome.code == 0
    assert outcome.out
    assert run(*verb.split(), flag, "--json").document["dry_run"] is True
    assert digest_of(filled.root) == before


@pytest.mark.parametrize("verb", DRY_RUNS)
def test_a_dry_run_prints_the_very_plan_that_is_executed(run: Run, filled: FilledBank, verb: str) -> None:
    planned = run(*verb.split(), "-n", "--json").document
    done = run(*verb.split(), "--json").document
    assert done == planned | {"dry_run": False}


# --- init


def test_init_makes_a_bank_and_says_where(run: Run, root: Path) -> None:
    outcome = run("init", "--chunk-tokens", "64", "--max-bytes", "20GB")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{root} is a bank now: 64 tokens a chunk, a budget of 20.0 GB\n"
    assert run("check").code == 0
    assert run("stats", "--json").document["max_bytes"] == 20_000_000_000


def test_init_dry_run_makes_nothing(run: Run, root: Path) -> None:
    planned = run("init", "-n", "--json").document
    assert planned["created"] is True
    assert not root.exists()
    assert run("init", "--json").document == planned | {"dry_run": False}


def test_init_of_a_bank_says_so_and_changes_nothing(run: Run, filled: FilledBank) -> None:
    before = digest_of(filled.root)
    outcome = run("init")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{filled.root} is a bank already: 8 tokens a chunk, no budget\n"
    outcome = run("init", "--max-bytes", "1GB", "--json")
    assert outcome.code == 0
    assert (outcome.document["created"], outcome.document["max_bytes"]) == (False, None)
    assert outcome.err == "prefixbank: warning: the bank is there already and keeps what it was made with\n"
    assert digest_of(filled.root) == before


@pytest.mark.parametrize("flags", [[], ["-n"]])
def test_init_refuses_a_folder_in_use(run: Run, root: Path, flags: list[str]) -> None:
    root.mkdir()
    (root / "thesis.doc").write_text("")
    outcome = run("init", *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert "holds other files (thesis.doc)" in outcome.err


@pytest.mark.parametrize("flags", [[], ["-n"]])
def test_init_refuses_a_file(run: Run, root: Path, flags: list[str]) -> None:
    root.write_text("")
    outcome = run("init", *flags)
    assert (outcome.code, outcome.out) == (10, "")
    assert "is a file, not a bank" in outcome.err


# --- pin, unpin, rm


def test_a_pinned_prefix_outlives_any_prune_until_it_is_unpinned(run: Run, filled: FilledBank) -> None:
    assert run("pin", "short").out == "short is pinned\n"
    assert run("pin", "short").out == "short was pinned already\n"
    run("prune", "--max-bytes", "0")
    assert [p["stored"] for p in run("ls", "--json").document["prefixes"]] == [False, False, True]
    assert run("unpin", "short").out == "short is unpinned\n"
    run("prune", "--max-bytes", "0")
    assert run("stats", "--json").document["n_chunks"] == 0


def test_pinning_an_evicted_prefix_warns_that_it_holds_nothing(run: Run, filled: FilledBank) -> None:
    run("prune", "--max-bytes", "0")
    outcome = run("pin", "short")
    assert outcome.code == 0
    assert outcome.err == ("prefixbank: warning: short was evicted, so the pin holds nothing yet: warm it again\n")


def test_pinning_evicts_nothing_from_a_bank_above_its_budget(run: Run, root: Path) -> None:
    run("init", "--chunk-tokens", "8", "--max-bytes", "8KiB")
    FilledBank(root).store("short", list(range(20)), max_bytes="1GB")
    assert run("pin", "short").code == 0
    assert run("ls", "--json").document["prefixes"][0]["stored"]


@pytest.mark.parametrize("verb", ["pin", "unpin", "rm"])
@pytest.mark.parametrize("flags", [[], ["-n"]])
def test_an_unknown_name_is_a_usage_error(run: Run, filled: FilledBank, verb: str, flags: list[str]) -> None:
    outcome = run(verb, "nothing", *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "prefixbank: no prefix is named 'nothing': `prefixbank ls` lists the names\n"


def test_rm_removes_the_chunks_that_no_other_prefix_stands_on(run: Run, filled: FilledBank) -> None:
    document = run("rm", "short", "--json").document
    assert document["name"] == "short"
    assert [(c["start"], c["n_tokens"], c["reason"]) for c in document["chunks"]] == [(16, 4, "removed")]
    assert document["freed_bytes"] == document["chunks"][0]["disk_bytes"]
    assert [p["name"] for p in run("ls", "--json").document["prefixes"]] == ["long", "other"]
    outcome = run("rm", "long")
    assert outcome.out.splitlines()[0] == "long is removed"
    assert outcome.out.splitlines()[-1].startswith("4 chunks and 0 other files removed: ")
    assert run("check").code == 0


# --- prune


def test_prune_holds_the_budget_that_the_bank_was_made_with(run: Run, root: Path) -> None:
    run("init", "--chunk-tokens", "8", "--max-bytes", "8KiB")
    FilledBank(root).store("short", list(range(20)), max_bytes="1GB")
    document = run("prune", "--json").document
    assert [(c["start"], c["reason"]) for c in document["chunks"]] == [(16, "budget")]
    assert (document["max_bytes"], document["kept_bytes"]) == (8192, 8192)
    assert run("prune").out == "0 chunks and 0 other files removed: 0 B freed, 8.2 kB kept\n"


def test_prune_removes_what_was_not_used_for_so_long(
    run: Run, filled: FilledBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("prune", "--unused-for", "1h", "--json").document["chunks"] == []
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    document = run("prune", "--unused-for", "1h", "--json").document
    assert document["unused_for_s"] == 3600
    assert {c["reason"] for c in document["chunks"]} == {"unused"}
    assert len(document["chunks"]) == 7


def test_prune_of_a_namespace_leaves_the_others(run: Run, filled: FilledBank) -> None:
    document = run("prune", "--namespace", FINGERPRINTS[0][:6], "--json").document
    assert {(c["fingerprint"], c["reason"]) for c in document["chunks"]} == {(FINGERPRINTS[0], "namespace")}
    assert [n["label"] for n in run("ls", "namespaces", "--json").document["namespaces"]] == ["models/second"]


def test_prune_sweeps_old_files_that_no_row_names(run: Run, filled: FilledBank) -> None:
    left_over = filled.root / "shards" / "ab" / "dead.safetensors"
    left_over.parent.mkdir(exist_ok=True)
    left_over.write_bytes(b"x" * 5)
    os.utime(left_over, (0, 0))
    outcome = run("prune", "-n")
    assert outcome.out.splitlines()[0] == "shards/ab/dead.safetensors (5 B)"
    assert "1 other files would be removed" in outcome.out
    assert run("prune", "--json").document["files"] == [{"path": "shards/ab/dead.safetensors", "n_bytes": 5}]
    assert not left_over.exists()


# --- migrate


def test_migrate_says_that_a_current_index_is_current(run: Run, filled: FilledBank) -> None:
    before = digest_of(filled.root)
    assert run("migrate").out == f"{filled.root} has the newest schema, {HEAD_REVISION}\n"
    document = run("migrate", "--json").document
    assert (document["from_revision"], document["to_revision"], document["changed"]) == (
        HEAD_REVISION,
        HEAD_REVISION,
        False,
    )
    assert digest_of(filled.root) == before


def test_migrate_brings_an_older_index_to_the_newest_schema(run: Run, filled: FilledBank) -> None:
    index = filled.root / "index.sqlite3"
    index.write_bytes(b"")  # the oldest there is: made, and not yet filled
    assert run("ls").code == 12
    planned = run("migrate", "-n", "--json").document
    assert (planned["from_revision"], planned["to_revision"], planned["changed"]) == (None, HEAD_REVISION, True)
    assert index.read_bytes() == b""
    assert run("migrate").out == f"{filled.root} went from schema (empty) to {HEAD_REVISION}\n"
    assert run("ls").code == 0
    with PrefixBank.open(filled.root) as bank:
        assert bank.chunks() == []


UNDO = {"0003": ["DROP TABLE rates"], "0002": ["ALTER TABLE chunks DROP COLUMN has_state"]}
"""What takes an index back by one revision."""


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_migrate_keeps_what_an_index_of_an_older_schema_holds(run: Run, filled: FilledBank, revision: str) -> None:
    with closing(sqlite3.connect(filled.root / "index.sqlite3")) as index:
        for of_revision in sorted(UNDO, reverse=True):
            for statement in UNDO[of_revision] if of_revision > revision else ():
                index.execute(statement)
        index.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        index.commit()
    refused = run("ls")
    assert (refused.code, "run `prefixbank migrate`" in refused.err) == (12, True)
    document = run("migrate", "--json").document
    assert (document["from_revision"], document["to_revision"]) == (revision, HEAD_REVISION)
    with PrefixBank.open(filled.root) as bank:
        assert len(bank.chunks()) == 7
        assert bank.check(read_data=True).ok
