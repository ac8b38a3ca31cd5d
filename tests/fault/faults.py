"""Hold the table of ways in which a file operation fails."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from tests.fault.trap import KINDS


@dataclass(frozen=True)
class Fault:
    """Say what fails: which kinds of operations, in which way; `stays`: from then on all of them do."""

    mode: str
    kinds: frozenset[str]
    errno: int = 0
    stays: bool = False


_MAKING = frozenset({"create", "write", "sync", "mkdir", "rename", "link"})
FAULTS = {
    "EIO": Fault("fail", frozenset(KINDS), errno.EIO),
    "EIO from then on": Fault("fail", frozenset(KINDS), errno.EIO, stays=True),
    "ENOSPC": Fault("fail", _MAKING, errno.ENOSPC),
    "ENOSPC from then on": Fault("fail", _MAKING, errno.ENOSPC, stays=True),
    "EDQUOT": Fault("fail", _MAKING | {"close"}, errno.EDQUOT),
    "EACCES": Fault("fail", frozenset(KINDS) - {"read", "write", "sync", "close", "truncate"}, errno.EACCES),
    "EMFILE": Fault("fail", frozenset({"open", "create", "list"}), errno.EMFILE),
    "EMFILE from then on": Fault("fail", frozenset({"open", "create", "list"}), errno.EMFILE, stays=True),
    "short write": Fault("short", frozenset({"write"})),
    "fsync": Fault("fail", frozenset({"sync"}), errno.EIO),
}
