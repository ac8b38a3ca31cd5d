"""Own telling a sound index file from a lost or broken one, and putting a new one in its place."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import sqlalchemy as sa

from prefixbank import namesfile
from prefixbank.check import broken_chains
from prefixbank.config import Durability
from prefixbank.errors import (
    BankBusyError,
    BankReadOnlyError,
    IndexCorruptError,
    PrefixBankError,
    SchemaError,
    StorageError,
)
from prefixbank.files import make_private_folder, set_aside, sync_folder
from prefixbank.index import Index, chunk_rows, namespace_rows, rates_rows
from prefixbank.namesfile import KeptNames
from prefixbank.schema import HEAD_REVISION, KNOWN_REVISIONS, has_declared_tables, is_system_error

__all__ = ["IndexState", "Salvage", "judge", "replace_index", "salvage"]

IndexState = Literal["sound", "lost", "broken"]
_REVISION = re.compile("[0-9]{4}")
_BESIDE = ("-journal", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Salvage:
    """Hold what could still be read from a broken index: digests of files by name, names, pins.

    A digest proves the file that has it, wherever it was read; a name is only a name.
    """

    digests: dict[str, bytes] = field(default_factory=dict)
    names: KeptNames = namesfile.NO_NAMES


def judge(path: Path, *, read_only: bool, busy_timeout_s: float) -> tuple[IndexState, str]:
    """Return the state of an index file, and why it is not sound; changes nothing, but may undo a killed transaction.

    An index that contradicts itself is broken: SQLite has no checksums, and no row beside a wrong one can be told to be
    right. Raises `SchemaError` for an index of another version, `BankBusyError`, and `StorageError` where the system
    refuses.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return ("broken", "it is a link to nothing") if path.is_symlink() else ("lost", "it is gone")
    except OSError as exc:
        raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
    if not stat.S_ISREG(status.st_mode):
        return "broken", "it is no file"
    if status.st_size == 0:
        return "lost", "it is empty"
    index = Index(path, read_only=read_only, durability="full", busy_timeout_s=busy_timeout_s)
    with closing(index):
        try:
            why = _contradiction(index)
        except (BankBusyError, BankReadOnlyError):
            raise
        except SchemaError as exc:
            if _is_other_version(index):
                raise
            why = str(exc)
        except StorageError as exc:
            if is_system_error(exc):
                raise
            why = str(exc)
        except IndexCorruptError as exc:
            why = str(exc)
        except (ValueError, TypeError, OverflowError, AssertionError) as exc:  # values no column can have
            why = f"a value in it is damaged ({exc})"
    return ("broken", why) if why else ("sound", "")


def _contradiction(index: Index) -> str:
    """Return what is wrong with an index, or ""; raises whatever reading it raises."""
    with index.reading() as tx:
        for text in tx.exec_driver_sql("PRAGMA integrity_check").scalars():
            if text != "ok":
                return str(text)
    index.require_current()
    with index.reading() as tx:
        if not has_declared_tables(tx):
            return "a table lacks a column"
        if tx.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            return "a row names another that is not there"
        chunk_rows.disk_bytes(tx)
        namespaces = namespace_rows.list_all(tx)
        namesfile.of_index(tx)
        rates_rows.list_all(tx)
        for finding in broken_chains(chunk_rows.list_all(tx), namespaces):
            return f"chunk or namespace {finding.subject}: {finding.message}"
    return ""


def _is_other_version(index: Index) -> bool:
    """Tell whether the index is one of ours, of an older or a newer version, rather than a damaged one."""
    try:
        revision = index.revision
    except PrefixBankError:
        return False
    return (
        revision is not None
        and revision != HEAD_REVISION
        and bool(revision in KNOWN_REVISIONS or (_REVISION.fullmatch(revision) and revision > HEAD_REVISION))
    )


def salvage(path: Path, busy_timeout_s: float) -> Salvage:
    """Return what can be read from a broken index, as far as it can. Raises nothing."""
    found = Salvage()
    names = found.names
    with suppress(Exception):  # whatever a damaged file makes of it
        index = Index(path, read_only=True, durability="full", busy_timeout_s=busy_timeout_s)
        with closing(index):
            with suppress(Exception), index.reading() as tx:
                found.digests.update(_digests(tx))
            with suppress(Exception), index.reading() as tx:
                names = namesfile.of_index(tx)
    return Salvage(found.digests, names)


def _digests(tx: sa.Connection) -> Iterator[tuple[str, bytes]]:
    for file_name, digest in tx.exec_driver_sql("SELECT file_name, digest FROM chunks"):
        if isinstance(file_name, str) and isinstance(digest, bytes):
            yield file_name, digest


def replace_index(path: Path, state: IndexState, *, durability: Durability, busy_timeout_s: float) -> None:
    """Put an empty index in the place of a lost or broken one, which goes to the quarantine.

    The path names the old file or the new one at each moment, where the file system has hard links; who holds the old
    one open notices that it was replaced. Killed inside, the old index or an empty one is there. Raises `StorageError`.
    """

    def make(new: Path) -> None:
        with closing(Index(new, read_only=False, durability=durability, busy_timeout_s=busy_timeout_s)) as index:
            index.migrate()

    if state == "lost":
        _move_aside(path, _BESIDE)  # a journal that is left would be played back into the new file
        Index.create_file(path)
        make(path)
        return
    root = path.parent
    make_private_folder(root / "tmp")
    new = root / "tmp" / f"{path.name}-{secrets.token_hex(4)}"
    Index.create_file(new)
    make(new)
    tag = _move_aside(path, _BESIDE)
    try:
        aside = root / "quarantine" / f"{path.name}-{tag}"
        try:
            os.link(path, aside, follow_symlinks=False)
        except OSError:  # a folder, or a file system without hard links
            path.rename(aside)
        new.replace(path)
        if durability == "full":
            sync_folder(aside.parent)
            sync_folder(root)
    except OSError as exc:
        raise StorageError(f"{path} can't be replaced: {exc.strerror or exc}") from exc


def _move_aside(path: Path, suffixes: tuple[str, ...]) -> str:
    """Move what lies beside an index to the quarantine; returns what marks the files there."""
    tag = secrets.token_hex(4)
    for suffix in suffixes:
        set_aside(path.with_name(path.name + suffix), f"{path.name}-{tag}{suffix}")
    return tag
