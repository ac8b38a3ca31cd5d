"""Hold errors and warnings to their rules: one line on stderr that says what to do, an exit code, nothing on stdout."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import prefixbank
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning, PrefixBankError
from tests.cli.banks import FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]

BANK_VERBS = [
    "ls",
    "ls chunks --json",
    "show x",
    "stats",
    "check",
    "pin x",
    "pin x -n",
    "unpin x",
    "rm x",
    "rm x --dry-run",
    "prune",
    "prune -n --max-bytes 1",
    "migrate",
    "migrate -n",
]


def assert_one_line(outcome: Outcome, code: int, *parts: str) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("prefixbank: ")
    assert outcome.err.count("\n") == 1
    assert all(part in outcome.err for part in parts), outcome.err


@pytest.mark.parametrize("verb", BANK_VERBS)
def test_no_bank_ends_with_10_and_names_init(run: Run, root: Path, verb: str) -> None:
    assert_one_line(run(*verb.split()), 10, f"{root} is no bank", f"prefixbank --bank {root} init")
    assert not root.exists()


@pytest.mark.parametrize("verb", BANK_VERBS)
def test_a_file_or_another_folder_is_no_bank(run: Run, tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("x")
    assert_one_line(run(*verb.split(), bank=tmp_path / "file"), 10, "is no bank")
    assert_one_line(run(*verb.split(), bank=tmp_path), 10, "is no bank")


@pytest.mark.parametrize("verb", BANK_VERBS)
def test_a_newer_schema_ends_with_12_and_changes_nothing(run: Run, filled: FilledBank, verb: str) -> None:
    with closing(sqlite3.connect(filled.root / "index.sqlite3", isolation_level=None)) as index:
        index.execute("UPDATE alembic_version SET version_num = '9999'")
    before = digest_of(filled.root)
    assert_one_line(run(*verb.split()), 12, "newer prefixbank (schema 9999", "upgrade prefixbank")
    assert digest_of(filled.root) == before


def test_an_unknown_format_of_the_bank_ends_with_12(run: Run, filled: FilledBank) -> None:
    bank_file = filled.root / "bank.json"
    bank_file.write_text(bank_file.read_text().replace('"format_version": 1', '"format_version": 9'))
    assert_one_line(run("ls"), 12, "bank.json has format 9")
    assert_one_line(run("init"), 12, "bank.json has format 9")


@pytest.mark.parametrize("verb", BANK_VERBS)
def test_a_corrupt_index_ends_with_13(run: Run, filled: FilledBank, verb: str) -> None:
    (filled.root / "index.sqlite3").write_bytes(b"garbage " * 1000)
    assert_one_line(run(*verb.split()), 13, "is damaged")


@pytest.fixture
def held(filled: FilledBank) -> Iterator[FilledBank]:
    """A bank whose index another connection holds for itself."""
    with closing(sqlite3.connect(filled.root / "index.sqlite3", isolation_level=None)) as index:
        index.execute("BEGIN EXCLUSIVE")
        yield filled


@pytest.mark.parametrize("verb", BANK_VERBS)
def test_a_busy_index_ends_with_11(run: Run, held: FilledBank, verb: str) -> None:
    assert_one_line(run("--busy-timeout", "0", *verb.split()), 11, "another process holds")


def test_a_writer_in_another_process_does_not_keep_readers_out(run: Run, filled: FilledBank) -> None:
    with closing(sqlite3.connect(filled.root / "index.sqlite3", isolation_level=None)) as index:
        index.execute("BEGIN IMMEDIATE")
        assert run("--busy-timeout", "0", "ls").code == 0
        assert_one_line(run("--busy-timeout", "0", "pin", "short"), 11, "another process holds")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("prune --max-bytes 20X", "'20X' is no size: write for example 20GB"),
        ("init --max-bytes 20X", "'20X' is no size"),
        ("init -n --max-bytes=-1", "'-1' is no size"),
        ("warm x --model x --max-bytes 20X", "'20X' is no size"),
        ("prune --unused-for soon", "'soon' is no duration: write for example 30d"),
        ("prune --namespace ffff", "no namespaces begin with 'ffff'"),
        ("init --chunk-tokens 0", "chunk_tokens=0 must be between"),
        ("--busy-timeout 1e9 ls", "busy_timeout_s=1000000000.0 must be between"),
        ("ls everything", "'everything' is not one of"),
        ("init --chunk-tokens many", "'--chunk-tokens'"),
        ("ls --frobnicate", "see `prefixbank ls --help`"),
        ("ls --bank elsewhere", "--bank goes before the verb"),
        ("show", "missing argument 'NAME': see `prefixbank show --help`"),
        ("warm", "missing option '--model': see `prefixbank warm --help`"),
        ("frobnicate", "no such command 'frobnicate': see `prefixbank --help`"),
        ("", "see `prefixbank --help`"),
    ],
)
def test_a_usage_error_ends_with_2_and_says_what_to_do(run: Run, filled: FilledBank, line: str, part: str) -> None:
    assert_one_line(run(*line.split()), 2, part)


def _error_classes(root: type[PrefixBankError]) -> list[type[PrefixBankError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _error_classes(child))]


@pytest.mark.parametrize("error", _error_classes(PrefixBankError))
def test_each_error_of_the_bank_is_one_line_with_its_exit_code(
    run: Run, empty: FilledBank, error: type[PrefixBankError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_bank: PrefixBank) -> None:
        raise error("it is so,\nand so")

    monkeypatch.setattr(PrefixBank, "stats", fail)
    outcome = run("stats", "--json")
    assert outcome.err == "prefixbank: it is so, and so\n"
    assert_one_line(outcome, error.exit_code)


def test_an_unexpected_error_ends_with_3_and_a_traceback_only_where_it_is_asked_for(
    run: Run, empty: FilledBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_bank: PrefixBank) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(PrefixBank, "stats", fail)
    monkeypatch.delenv("PREFIXBANK_DEBUG", raising=False)
    assert_one_line(run("stats"), 3, "failed: RuntimeError: boom", "PREFIXBANK_DEBUG=1")
    monkeypatch.setenv("PREFIXBANK_DEBUG", "1")
    outcome = run("stats")
    assert outcome.code == 3
    assert outcome.err.startswith("Traceback")


def test_an_interrupt_ends_with_130(run: Run, empty: FilledBank, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_bank: PrefixBank) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PrefixBank, "stats", interrupt)
    assert_one_line(run("stats"), 130, "interrupted")


def test_a_bank_warning_is_one_line_on_stderr(run: Run, empty: FilledBank, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = PrefixBank.stats

    def warn(bank: PrefixBank) -> object:
        warnings.warn("something\nis odd", BankWarning, stacklevel=2)
        return stats(bank)

    monkeypatch.setattr(PrefixBank, "stats", warn)
    outcome = run("stats", "--json")
    assert outcome.code == 0
    assert outcome.err == "prefixbank: warning: something is odd\n"
    assert outcome.document["n_chunks"] == 0


def test_a_lost_index_is_made_anew_by_verbs_that_change_and_missed_by_those_that_read(
    run: Run, filled: FilledBank
) -> None:
    (filled.root / "index.sqlite3").unlink()
    assert_one_line(run("ls"), 10, "is gone")
    outcome = run("prune")
    assert outcome.code == 0
    assert outcome.err.startswith("prefixbank: warning: ")
    assert run("ls").code == 0


def test_without_bank_the_root_is_the_default_one(
    run: Run, filled: FilledBank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFIXBANK_HOME", str(filled.root))
    assert run("stats", "--json", bank=None).document["root"] == str(filled.root)
    monkeypatch.delenv("PREFIXBANK_HOME")
    monkeypatch.chdir(tmp_path)
    assert run("stats", "--json", bank=None).document["n_chunks"] == 7


def test_version_and_help_are_data(run: Run) -> None:
    assert run("--version", bank=None) == Outcome(0, f"prefixbank {prefixbank.__version__}\n", "")
    for line in ("", "--help", "-h"):
        outcome = run(*line.split(), bank=None)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("Usage: prefixbank ")


def test_each_verb_and_option_has_one_sentence_of_help(run: Run) -> None:
    from typer.main import get_command

    from prefixbank.cli import app

    group = get_command(app)
    commands = [group, *group.commands.values()]  # type: ignore[attr-defined]
    for command in commands:
        assert command.help
        assert command.help.split("\n\n")[0].endswith(".")
        for parameter in command.params:
            if parameter.name != "help":
                assert getattr(parameter, "help", "").endswith((".", ")")), (command.name, parameter.name)
