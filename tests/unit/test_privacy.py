"""Hold the bank to letting nobody in: file modes, salts, what messages say, and no pickle."""

from __future__ import annotations

import ast
import os
import re
import stat
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import prefixbank
from prefixbank import restoring, shards
from prefixbank.bank import PrefixBank
from prefixbank.errors import PrefixBankError, PromptError, ShardCorruptError
from prefixbank.index import chunk_rows
from tests.fakekv import FakeModel

PACKAGE = Path(prefixbank.__file__).parent
SECRET = [987654321 + n for n in range(10)]
"""Token ids that nothing else looks like."""


def modes(root: Path) -> dict[str, str]:
    """Return the modes of all below a folder that are not 0700 or 0600."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    return {str(p): oct(mode) for p, mode in found.items() if mode != (0o700 if p.is_dir() else 0o600)}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Note the mode of every file the moment that it is made, before anything can be written to it."""
    made: dict[str, str] = {}
    real = os.open

    def opening(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        descriptor = real(path, flags, mode, **options)
        if flags & os.O_CREAT and (granted := stat.S_IMODE(os.fstat(descriptor).st_mode)) & 0o077:
            made[str(path)] = oct(granted)
        return descriptor

    monkeypatch.setattr(os, "open", opening)
    yield made
    assert made == {}, "files that others can read for a moment"


def test_all_that_is_written_is_private_under_umask_0(
    tmp_path: Path, umask: Callable[[int], int], watched: dict[str, str]
) -> None:
    """Index, journal, shards, temporary files, notes, quarantine, archives: also in a root in everybody's folder."""
    tmp_path.chmod(0o777)
    umask(0)
    root = tmp_path / "bank"
    seen: set[str] = set()
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.name("secret", SECRET, pin=True)
        with bank._session.index.writing() as tx:
            chunk_rows.next_tick(tx)
            assert modes(root) == {}
            seen |= {path.name.rpartition("-")[2] for path in root.glob("index.sqlite3-*")}
        with bank._session.shards.writer() as writer:
            writer.write(bank.chunks()[0].key, b"header--", [memoryview(b"rows")])
            assert modes(root) == {}
            seen |= {path.parent.name for path in (root / "tmp").iterdir()}
        bank.export_prefixes(root / "archive.tar")
        with PrefixBank.open(tmp_path / "to", chunk_tokens=4) as target:
            target.import_prefixes(root / "archive.tar")
        record = bank.chunks()[-1]
        model.path_of(record).write_bytes(b"x" * record.n_bytes)
        model.resolve(SECRET)
        seen |= {path.parent.name for path in (root / "quarantine").iterdir()}
    assert modes(root) == {}
    assert modes(tmp_path / "to") == {}
    assert {"journal", "tmp", "quarantine"} <= seen


# --- salts


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str] | int]]:
    """Count what a match does to the index: the statements, and the rows that come back."""
    work: dict[str, Any] = {"statements": [], "rows": 0}
    connect, from_row = chunk_rows._sqlite, chunk_rows._from_sqlite

    def connecting(tx: Any) -> Any:
        connection = connect(tx)
        connection.set_trace_callback(note)
        return connection

    def note(text: str) -> None:
        if text.startswith("SELECT"):
            work["statements"].append(re.sub(r"[xX]'[0-9A-Fa-f]*'|\b\d+\b", "?", text))

    def reading(row: Any) -> Any:
        work["rows"] += 1
        return from_row(row)

    with monkeypatch.context() as patched:
        patched.setattr(chunk_rows, "_sqlite", connecting)
        patched.setattr(chunk_rows, "_from_sqlite", reading)
        yield work


@pytest.mark.parametrize("n_tokens", [3, 8, 10])
def test_a_match_under_another_salt_sees_nothing_and_does_what_it_does_for_a_prompt_that_nobody_stored(
    bank: PrefixBank, monkeypatch: pytest.MonkeyPatch, n_tokens: int
) -> None:
    """Who could tell the two apart by time could ask what others' prompts are."""
    owner, other = FakeModel(bank, salt=b"owner"), FakeModel(bank, salt=b"other")
    owner.store(SECRET)
    other.store([5, 6, 7, 8, 9])
    done = []
    for prompt in (SECRET[:n_tokens], [1234567 + n for n in range(n_tokens)]):
        with counting(monkeypatch) as work:
            found = other.match(prompt)
        assert (found.n_tokens, found.chunks, found.n_known_tokens, found.parted) == (0, (), 0, found.parted)
        done.append((work, found.reason, found.parted))
    assert done[0] == done[1]
    assert done[0][0]["statements"]
    with counting(monkeypatch) as work:
        assert owner.match(SECRET[:n_tokens]).n_tokens == n_tokens
    assert work["rows"] or n_tokens < 4


def test_storing_under_another_salt_does_not_show_what_is_there(bank: PrefixBank) -> None:
    """A store that writes nothing would say that somebody has stored the same."""
    first = FakeModel(bank, salt=b"owner").store(SECRET)
    second = FakeModel(bank, salt=b"other").store(SECRET)
    assert first.n_written_bytes == second.n_written_bytes
    assert second.known_keys == ()


def test_a_salt_is_nowhere_in_a_bank(bank: PrefixBank) -> None:
    FakeModel(bank, salt=b"correct horse battery").name("secret", SECRET)
    bank.flush()
    files = [path for path in bank.root.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if b"correct horse" in path.read_bytes()]


# --- what messages say


def must_not_tell(texts: list[str]) -> None:
    assert texts
    told = [text for text in texts if re.search("98765432|battery|b1def80a|\\\\xde:", text)]
    assert told == []


def test_errors_of_the_index_quote_no_rows_even_as_causes(bank: PrefixBank, model: FakeModel) -> None:
    """SQLAlchemy's own errors end with the parameters of the statement: whoever logs a traceback logs those."""
    model.store(SECRET)
    first = bank.chunks()[0]
    twice = sa.text("INSERT INTO chunks (key, token_ids) VALUES (:key, :token_ids)")
    with pytest.raises(PrefixBankError) as raised, bank._session.index.writing() as tx:
        tx.execute(twice, {"key": first.key, "token_ids": first.token_ids})
    traceback_text = "".join(traceback.format_exception(raised.value))
    assert "IntegrityError" in traceback_text
    assert repr(first.token_ids)[2:-1] not in traceback_text


@pytest.mark.parametrize("choices", [["the battery died"] * 2, [[5, 987654321]] * 2], ids=["texts", "token ids"])
def test_errors_of_choices_do_not_quote_them(choices: list[Any]) -> None:
    from prefixbank.choices import checked_choices

    with pytest.raises(PromptError, match="choice 1 is the same as choice 0") as raised:
        checked_choices(choices)
    must_not_tell([str(raised.value)])


def test_messages_of_failures_hold_no_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings and errors end up in logs that others read: names and chunk keys are in them, prompts are not."""
    texts: list[str] = []

    @contextmanager
    def collecting() -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except PrefixBankError as exc:
                error: BaseException | None = exc
                while error is not None:
                    texts.append(f"{error!r} {error}")
                    error = error.__cause__
            else:
                assert caught, "nothing failed"
        texts.extend(str(warning.message) for warning in caught)

    def damaged(record: Any, model: FakeModel) -> None:
        path = model.path_of(record)
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")

    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4, max_bytes="1MB") as bank:
        model = FakeModel(bank, salt=b"correct horse battery")
        model.name("secret", SECRET)
        bank.export_prefixes(tmp_path / "x.tar")
        with collecting(), monkeypatch.context() as full:
            full.setattr(shards, "write_runs", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            model.store([*SECRET, 987654399])
        with collecting():
            bank._session.options = type(bank._session.options)(max_bytes=1, chunk_tokens=4)
            model.store([*SECRET, 987654399])
        with collecting():
            bank.export_prefixes(tmp_path / "y.tar", ["nobody"])
        first, *_, last = bank.chunks()
        damaged(last, model)
        with collecting():
            bank.export_prefixes(tmp_path / "y.tar")
        texts += [f"{finding}" for finding in bank.check(read_data=True).findings]
        with collecting():
            model.read(last)
        restoring.heal(bank._session.index, bank._session.shards, last, ShardCorruptError("x"))
        model.path_of(first).unlink()
        with collecting():
            model.read(first)
        texts += [f"{finding}" for finding in bank.check(read_data=True).findings]
        content = (tmp_path / "x.tar").read_bytes()
        for number, changed in enumerate(
            [
                content.replace(b"[987654321,", b"[987654321.", 1),
                content.replace(b"[987654321,", b"[98765432x,", 1),
                content.replace(b"[987654321,", b"[999999999,", 1),
                content[:-2000],
                content.replace(b'"n_tokens": 4', b'"n_tokens": 5', 1),
            ]
        ):
            assert changed != content
            (tmp_path / f"{number}.tar").write_bytes(changed)
            with collecting():
                bank.import_prefixes(tmp_path / f"{number}.tar")
        for token_ids in ([*SECRET, -1], [*SECRET, 2**32], [*SECRET, "battery"], [*SECRET, 1.5], b"battery"):
            with collecting():
                model.match(token_ids)  # type: ignore[arg-type]
    with collecting():
        model.store(SECRET)
    assert len(texts) > 25
    must_not_tell([*texts, caplog.text])


# --- code that reads code


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch"}


def test_nothing_that_runs_what_it_reads_is_imported() -> None:
    found = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = ast.unparse(node.func)
                names += [str(node.args[0].value)] if called.endswith(("import_module", "__import__")) else []
            found |= {(path.name, name) for name in names if name.split(".")[0] in RUNS_WHAT_IT_READS}
    assert found == set()


def test_no_call_can_unpickle_or_run_text() -> None:
    """`numpy.load` with `allow_pickle`, `eval`, `exec`, and tar's own ways to write files."""
    found = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.add((path.name, "allow_pickle"))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"eval", "exec", "np.load", "numpy.load"}:
                found.add((path.name, ast.unparse(node.func)))
            if isinstance(node, ast.Attribute) and node.attr in {"extractall", "unpack_archive"}:
                found.add((path.name, node.attr))
    assert found == set()
