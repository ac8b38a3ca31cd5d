"""Own the bank root: making it, recognising it, and `bank.json`; must not know the index or shards."""

from __future__ import annotations

import errno
import json
import os
import shlex
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from prefixbank.config import BANK_FILE
from prefixbank.errors import BankNotFoundError, ConfigError, SchemaError, StorageError
from prefixbank.files import make_private_folder, set_aside, sync_folder

__all__ = [
    "INDEX_FILE",
    "NAMES_FILE",
    "BankFile",
    "BankFileState",
    "bank_file_state",
    "create_root",
    "finish_root",
    "is_bank",
    "read_bank_file",
    "refusals",
    "require_usable_root",
    "restore_bank_file",
]

INDEX_FILE = "index.sqlite3"
NAMES_FILE = "prefixes.json"
CACHEDIR_TAG_FILE = "CACHEDIR.TAG"
FORMAT_VERSION = 1
DEFAULT_CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 65_536

_MAY_LIE_IN_A_NEW_ROOT = {".gitignore", ".gitkeep", ".DS_Store", "README.md", "prefixes"}
_DAMAGES = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_FOLDERS = ("shards", "tmp", "quarantine")
_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This folder is a prefixbank: a cache that can be made again. See https://bford.info/cachedir/\n"
)


BankFileState = Literal["sound", "lost", "damaged"]


@dataclass(frozen=True, slots=True)
class BankFile:
    """Hold what `bank.json` says; written once, when the bank is made.

    `max_bytes` is the budget of whoever opens the bank without giving one; None is no limit.
    """

    bank_id: str
    chunk_tokens: int
    max_bytes: int | None
    created_at: int
    format_version: int = FORMAT_VERSION


@contextmanager
def refusals(root: Path) -> Iterator[None]:
    """Turn what the system refuses inside, and no one below has named better, into a `StorageError`."""
    try:
        yield
    except OSError as exc:
        raise StorageError(f"{exc.filename or root} can't be used: {exc.strerror or exc}") from exc


def read_bank_file(root: Path) -> BankFile:
    """Return what `bank.json` says.

    Raises `BankNotFoundError` without one, `SchemaError` for a damaged one or an unknown format.
    """
    content = _read(root)
    try:
        return _parse(root, content)
    except _DAMAGES as exc:
        raise SchemaError(f"{root / BANK_FILE} is damaged ({exc}): run `prefixbank repair`") from exc


def bank_file_state(root: Path) -> BankFileState:
    """Tell whether `bank.json` is sound, or can be made anew. Raises as `read_bank_file` does where it can't."""
    try:
        content = _read(root)
    except BankNotFoundError:
        if holds_chunks(root):
            return "lost"
        raise
    try:
        _parse(root, content)
    except _DAMAGES:
        return "damaged"
    return "sound"


def _read(root: Path) -> bytes:
    try:
        return (root / BANK_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        require_no_lost_bank(root)
        raise BankNotFoundError(f"{root} is no bank: run `prefixbank --bank {shlex.quote(str(root))} init`") from exc
    except OSError as exc:
        raise StorageError(f"{root / BANK_FILE} can't be read: {exc.strerror or exc}") from exc
    except ValueError as exc:  # a null character
        raise ConfigError(f"{str(root)!r} can't be a folder: {exc}") from exc


def _parse(root: Path, content: bytes) -> BankFile:
    """Return what a `bank.json` says. Raises one of `_DAMAGES` for a damaged one, `SchemaError` for a newer one."""
    stored: dict[str, Any] = json.loads(content.decode())
    version = stored["format_version"]
    if stored.pop("format") != "prefixbank" or not isinstance(version, int):
        raise ValueError("it is another program's")
    if version != FORMAT_VERSION:
        raise SchemaError(
            f"{root / BANK_FILE} has format {version}, this version knows {FORMAT_VERSION}: upgrade prefixbank"
        )
    found = BankFile(**stored)
    if not isinstance(found.chunk_tokens, int) or not 1 <= found.chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError("chunk_tokens is out of range")
    if found.max_bytes is not None and (not isinstance(found.max_bytes, int) or found.max_bytes < 0):
        raise ValueError("max_bytes is no number of bytes")
    return found


def holds_chunks(root: Path) -> bool:
    """Tell whether a folder holds what only a finished bank gets: names, or shards. Raises `StorageError`."""
    try:
        return (root / NAMES_FILE).exists() or any(path.is_dir() for path in (root / "shards").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise StorageError(f"{root} can't be looked into: {exc.strerror or exc}") from exc


def require_no_lost_bank(root: Path) -> None:
    """Raise `BankNotFoundError` for a bank that has lost its `bank.json`: a new one may be of other chunks."""
    if holds_chunks(root) and not is_bank(root):  # it may just have been made, and filled
        raise BankNotFoundError(f"{root} has lost its {BANK_FILE}: run `prefixbank repair`")


def restore_bank_file(root: Path, chunk_tokens: int) -> None:
    """Make a `bank.json` anew; a damaged one goes to the quarantine. Raises `StorageError`."""
    set_aside(root / BANK_FILE)
    finish_root(root, chunk_tokens=chunk_tokens, max_bytes=None)


def is_bank(root: Path) -> bool:
    """Tell whether `bank.json` is there. Raises `StorageError` or `ConfigError` where that can't be known."""
    try:
        (root / BANK_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise StorageError(f"{root} can't be looked into: {exc.strerror or exc}") from exc
    except ValueError as exc:  # a null character
        raise ConfigError(f"{str(root)!r} can't be a folder: {exc}") from exc
    return True


def require_usable_root(root: Path) -> None:
    """Raise `ConfigError` for a folder in use, `BankNotFoundError` for a file, unless a bank can be made there."""
    try:
        there = {entry.name for entry in root.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError as exc:
        raise BankNotFoundError(f"{root} is a file, not a bank: give a folder") from exc
    except OSError as exc:
        raise StorageError(f"{root} can't be looked into: {exc.strerror or exc}") from exc
    require_no_lost_bank(root)
    # What an interrupted creation, or one by another process, leaves may lie there too.
    foreign = there - _MAY_LIE_IN_A_NEW_ROOT - set(_FOLDERS)
    foreign = {name for name in foreign if not name.startswith((BANK_FILE, CACHEDIR_TAG_FILE, INDEX_FILE))}
    if foreign:
        raise ConfigError(f"{root} is no bank and holds other files ({min(foreign)}): give an empty or a new folder")


def create_root(root: Path) -> None:
    """Make the bank root's folders; `finish_root` then makes it a bank. Raises as `require_usable_root` does."""
    require_usable_root(root)
    made_in = [root.parent]  # whose new names a power cut must not take away, and with them the whole bank
    while not _is_there(made_in[-1]):
        made_in.append(made_in[-1].parent)
    for folder in (root, *(root / name for name in _FOLDERS)):
        make_private_folder(folder)
    for folder in made_in:
        _sync_names(folder)
    _write_once(root / CACHEDIR_TAG_FILE, _CACHEDIR_TAG)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # whoever makes something in it is told why not


def _sync_names(folder: Path) -> None:
    try:
        sync_folder(folder)
    except PermissionError:
        return  # a folder that one may go through, and not look into
    except OSError as exc:
        raise StorageError(f"{folder} can't be synced: {exc.strerror or exc}") from exc


def finish_root(root: Path, *, chunk_tokens: int | None, max_bytes: int | None) -> BankFile:
    """Write `bank.json`, the mark of a bank, unless another process was first; returns what it says."""
    wanted = BankFile(
        bank_id=uuid.uuid4().hex,
        chunk_tokens=chunk_tokens or DEFAULT_CHUNK_TOKENS,
        max_bytes=max_bytes,
        created_at=int(time.time()),
    )
    text = json.dumps({"format": "prefixbank", **asdict(wanted)}, indent=2) + "\n"
    _write_once(root / BANK_FILE, text)
    return read_bank_file(root)


def _name_once(temporary: Path, path: Path) -> None:
    """Give a finished file its name, unless another file has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as exc:
        # A file system without hard links: there two that make one bank at once may both write it.
        if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if not path.exists():
            temporary.rename(path)


def _write_once(path: Path, text: str) -> None:
    """Create a file of mode 0600 with the text, all of it or nothing; leave one that is there as it is."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o600)
                os.fsync(file.fileno())
            _name_once(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as exc:
        raise StorageError(f"{path} can't be written: {exc.strerror or exc}") from exc
