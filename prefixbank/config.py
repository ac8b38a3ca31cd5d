"""Own the options of a bank, the units that people write, and where the bank root is; must not touch a bank."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from prefixbank.errors import ConfigError

__all__ = [
    "BANK_FILE",
    "PREFIXES_FOLDER",
    "BankOptions",
    "Durability",
    "LoadRule",
    "Verify",
    "default_root",
    "format_size",
    "parse_duration_s",
    "parse_size",
]

BANK_FILE = "bank.json"
PREFIXES_FOLDER = "prefixes"
ENV_HOME = "PREFIXBANK_HOME"

Durability = Literal["full", "fast"]
LoadRule = Literal["auto", "always"]
Verify = Literal["once", "always", "never"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(size: int | str) -> int:
    """Return a number of bytes from an int or a text such as `20GB`, `512 MiB`, `1.5T` or `4096`.

    `kB MB GB TB PB` are powers of 1000 and `KiB MiB GiB TiB PiB` powers of 1024. Raises `ConfigError`.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        n_bytes = size
    else:
        found = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if found is None:
            raise ConfigError(f"{size!r} is no size: write for example 20GB, 512MiB or 4096")
        number, prefix, binary = found.groups()
        if binary and not prefix:
            raise ConfigError(f"{size!r} is no size: write for example 20GB, 512MiB or 4096")
        power = "kmgtp".index(prefix.lower()) + 1 if prefix else 0
        amount = float(number) * (1024 if binary else 1000) ** power
        n_bytes = int(amount) if amount < 2**63 else -1  # int(inf) raises
    if n_bytes < 0 or n_bytes >= 2**63:
        raise ConfigError(f"{size!r} is no size: it must be between 0 and 8 EiB")
    return n_bytes


def format_size(n_bytes: int) -> str:
    """Return a number of bytes as people read it, in powers of 1000: `17.3 MB`."""
    amount = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} PB"


def parse_duration_s(duration: str) -> float:
    """Return seconds from a text such as `30d`, `12h`, `90m`, `2w` or `45` (seconds). Raises `ConfigError`."""
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise ConfigError(f"{duration!r} is no duration: write for example 30d, 12h or 90m")
    return float(found[1]) * _SECONDS[found[2].lower()]


def default_root() -> Path:
    """Return the bank root when none is given: `PREFIXBANK_HOME`, `./bank` if it is a bank, else the user cache."""
    if home := os.environ.get(ENV_HOME):
        return Path(home)
    here = Path("bank")
    if (here / BANK_FILE).is_file():
        return here
    import platformdirs  # late: 35 ms that a given root does not need

    return platformdirs.user_cache_path("prefixbank") / "bank"


@dataclass(frozen=True, slots=True, kw_only=True)
class BankOptions:
    """Hold how a bank is opened. `PrefixBank.open` documents each option.

    Raises `ConfigError` for a value outside its range.
    """

    max_bytes: int | None = None
    memory_bytes: int = 1_000_000_000
    write_queue_bytes: int = 1_000_000_000
    load: LoadRule = "auto"
    durability: Durability = "full"
    verify: Verify = "once"
    read_only: bool = False
    chunk_tokens: int | None = None
    busy_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("load", self.load, get_args(LoadRule)),
            ("durability", self.durability, get_args(Durability)),
            ("verify", self.verify, get_args(Verify)),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= 65536:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens} must be between 1 and 65536")
        if not 0 <= self.busy_timeout_s <= 3600:
            raise ConfigError(f"busy_timeout_s={self.busy_timeout_s} must be between 0 and 3600")
