"""Hold `export` and `import` to what they print, their exit codes and their dry runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from tests.cli.banks import CHUNK_TOKENS, FINGERPRINTS, FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]


@pytest.fixture
def archive(run: Run, filled: FilledBank, tmp_path: Path) -> Path:
    assert run("export", str(tmp_path / "archive.tar")).code == 0
    return tmp_path / "archive.tar"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    root = tmp_path / "other"
    PrefixBank.open(root, chunk_tokens=CHUNK_TOKENS).close()
    return root


def test_export_says_what_the_file_holds_and_reveals(run: Run, filled: FilledBank, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    outcome = run("export", str(path), "short", "long")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["NAME", "MODEL", "FINGERPRINT", "SALTED", "TOKENS", "PINNED", "ACTION"]
    assert lines[1].split() == ["long", "models/first", FINGERPRINTS[0][:12], "no", "28", "no", "exported"]
    assert lines[3].startswith(f"{path} holds 2 prefixes: 32 tokens in 5 shards, ")
    assert "both reveal these prompts word for word" in lines[4]
    document = run("export", str(tmp_path / "y.tar"), "--json").document
    assert document["reveals_prompts"] is True
    assert [prefix["name"] for prefix in document["prefixes"]] == ["long", "other", "short"]
    assert document["n_bytes"] == (tmp_path / "y.tar").stat().st_size


def test_import_says_what_it_did_and_what_it_can_not_prove(run: Run, archive: Path, other: Path) -> None:
    outcome = run("import", str(archive), bank=other)
    assert (outcome.code, outcome.err) == (0, "")
    assert "7 chunks were stored" in outcome.out
    assert "you trust whoever made it" in outcome.out
    assert run("check", "--read-data", bank=other).code == 0
    document = run("import", str(archive), "--json", bank=other).document
    assert document["kv_is_proven"] is False
    assert {prefix["action"] for prefix in document["prefixes"]} == {"there"}


@pytest.mark.parametrize("verb", ["export", "import"])
def test_help_says_what_is_trusted_and_revealed(run: Run, verb: str) -> None:
    text = " ".join(run(verb, "--help").out.split())
    assert {"export": "reveal the prompts", "import": "trusts whoever made it"}[verb] in text


def test_a_dry_run_prints_the_plan_and_changes_no_byte(
    run: Run, filled: FilledBank, archive: Path, other: Path
) -> None:
    before = digest_of(other), digest_of(filled.root)
    path = archive.with_name("x.tar")
    planned = run("export", str(path), "-n", "--json").document
    assert not path.exists()
    todo = run("import", str(archive), "-n", "--json", bank=other).document
    assert "would be stored" in run("import", str(archive), "--dry-run", bank=other).out
    assert (digest_of(other), digest_of(filled.root)) == before
    assert run("export", str(path), "--json").document == planned | {"dry_run": False}
    assert run("import", str(archive), "--json", bank=other).document == todo | {"dry_run": False}


def test_a_name_that_is_kept_is_a_problem_found(run: Run, archive: Path, other: Path) -> None:
    FilledBank(other).store("short", [1, 2, 3])
    outcome = run("import", str(archive), bank=other)
    assert outcome.code == 1
    assert outcome.err == (
        "prefixbank: warning: short was not imported: another prefix has that name, and keeps it (--replace takes it "
        "away)\n"
    )
    assert run("import", str(archive), "--replace", bank=other).code == 0
    assert run("show", "short", "--json", bank=other).document["prefixes"][0]["n_tokens"] == 20


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("export {archive}", 2, "is there already"),
        ("export {folder}/no/x.tar", 2, "is no folder"),
        ("export {folder}/x.tar nobody", 2, "'nobody' can't be exported"),
        ("export {folder}/x.tar --namespace ffff", 2, "no namespaces begin with"),
        ("import {folder}/x.tar", 2, "is not there"),
        ("import {archive} --max-bytes 8192", 3, "do not fit into the budget of 8192 bytes"),
        ("import {archive} -n --max-bytes 8192", 3, "do not fit into the budget of 8192 bytes"),
        ("import {folder}", 13, "is no regular file"),
    ],
)
def test_what_goes_wrong_is_one_line(
    run: Run, filled: FilledBank, archive: Path, other: Path, line: str, code: int, part: str
) -> None:
    given = line.format(archive=archive, folder=archive.parent).split()
    outcome = run(*given, bank=other if given[0] == "import" else filled.root)
    assert (outcome.code, outcome.out) == (code, "")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1


def test_the_banks_own_budget_holds_for_imports(run: Run, archive: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert run("init", "--chunk-tokens", "8", "--max-bytes", "8192", bank=small).code == 0
    assert run("import", str(archive), bank=small).code == 3


def test_without_a_bank_nothing_is_made(run: Run, archive: Path, tmp_path: Path) -> None:
    assert run("import", str(archive), bank=tmp_path / "nowhere").code == 10
    assert run("export", str(tmp_path / "x.tar"), bank=tmp_path / "nowhere").code == 10
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "x.tar").exists()
