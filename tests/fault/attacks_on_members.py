"""Make archives whose members are what `export` does not write, and hold the tables that attacks are added to."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable

from prefixbank.errors import ArchiveError, PrefixBankError
from tests.fault.tampering import Parts, infos, pack, pack_with_tar

Attack = Callable[[Parts], bytes]
ATTACKS: dict[str, Attack] = {}
ERRORS: dict[str, type[PrefixBankError]] = {}
"""By name; `attacks` adds its own: who wants all imports them from there."""


def attack(error: type[PrefixBankError] = ArchiveError) -> Callable[[Attack], Attack]:
    def add(make: Attack) -> Attack:
        name = make.__name__.replace("_", " ").strip()
        ATTACKS[name], ERRORS[name] = make, error
        return make

    return add


def member_in_front(info: tarfile.TarInfo, content: bytes = b"") -> Attack:
    return lambda parts: pack_with_tar([(info, content), *infos(parts)])


def member_instead(change: Callable[[tarfile.TarInfo], object], content: bytes | None = None) -> Attack:
    """Put another kind of member in the place of the last shard."""

    def make(parts: Parts) -> bytes:
        *others, (name, whole) = parts.shards
        info = tarfile.TarInfo(name)
        info.mode, info.mtime = 0o600, 0
        change(info)
        tail = pack_with_tar([(info, content if content is not None else whole)])
        front = pack([("manifest.json", json.dumps(parts.manifest).encode()), *others])
        return front[:-1024] + tail

    return make


def _typed(kind: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, target

    return change


def _named(name: str) -> Callable[[tarfile.TarInfo], None]:
    return lambda info: setattr(info, "name", name)


for _name, _attack in {
    "a path that climbs out": member_instead(_named("../../evil.safetensors")),
    "an absolute path": member_instead(_named("/tmp/evil.safetensors")),
    "a path that climbs out further down": member_instead(_named("shards/../../evil.safetensors")),
    "a backslash path": member_instead(_named("shards\\..\\evil.safetensors")),
    "a symbolic link": member_instead(_typed(tarfile.SYMTYPE, "/etc/passwd"), b""),
    "a symbolic link in front": member_in_front(
        next(i for i in [tarfile.TarInfo("shards")] if not _typed(tarfile.SYMTYPE, "/tmp")(i))
    ),
    "a hard link": member_instead(_typed(tarfile.LNKTYPE, "manifest.json"), b""),
    "a character device": member_instead(_typed(tarfile.CHRTYPE), b""),
    "a block device": member_instead(_typed(tarfile.BLKTYPE), b""),
    "a FIFO": member_instead(_typed(tarfile.FIFOTYPE), b""),
    "a folder": member_instead(_typed(tarfile.DIRTYPE), b""),
    "an unknown member type": member_instead(_typed(b"Z"), b""),
    "a setuid mode": member_instead(lambda info: setattr(info, "mode", 0o4755)),
    "an owner": member_instead(lambda info: setattr(info, "uid", 1000)),
    "an upper-case twin of a name": member_instead(lambda info: setattr(info, "name", info.name.upper())),
    "a full-width twin of a name": member_instead(
        lambda info: setattr(info, "name", info.name.translate({ord(c): ord(c) + 0xFEE0 for c in "abcdef0123456789"}))
    ),
    "a decomposed twin of a name": member_instead(lambda info: setattr(info, "name", info.name + "\u0301")),
    "a long name of GNU tar": member_instead(_named("shards/" + "a" * 300)),
    "a file in front": member_in_front(tarfile.TarInfo("README"), b"hello"),
}.items():
    ATTACKS[_name], ERRORS[_name] = _attack, ArchiveError


@attack()
def a_member_twice(parts: Parts) -> bytes:
    return pack([("manifest.json", json.dumps(parts.manifest).encode()), *parts.shards, parts.shards[-1]])


@attack()
def a_member_twice_in_manifest_and_file(parts: Parts) -> bytes:
    parts.manifest["shards"].append(parts.manifest["shards"][-1])
    parts.shards.append(parts.shards[-1])
    return parts.pack()


@attack()
def a_second_manifest(parts: Parts) -> bytes:
    manifest = ("manifest.json", json.dumps(parts.manifest).encode())
    return pack([manifest, *parts.shards, manifest])


@attack()
def members_in_another_order(parts: Parts) -> bytes:
    parts.shards.reverse()
    return parts.pack()


@attack()
def a_member_missing(parts: Parts) -> bytes:
    del parts.shards[3]
    return parts.pack()


@attack()
def a_member_longer_than_said(parts: Parts) -> bytes:
    name, content = parts.shards[-1]
    parts.shards[-1] = (name, content + bytes(1000))
    return parts.pack()


@attack()
def a_member_said_to_be_longer_than_the_file(parts: Parts) -> bytes:
    content = parts.pack()
    name = parts.shards[-1][0].encode()
    at = content.rindex(name)
    header = bytearray(content[at : at + 512])
    header[124:136] = b"77777777777\0"
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:]))
    return content[:at] + bytes(header) + content[at + 512 :]


@attack()
def a_file_cut_off_inside_a_shard(parts: Parts) -> bytes:
    return parts.pack()[:-3000]


@attack()
def a_file_cut_off_at_its_end(parts: Parts) -> bytes:
    return parts.pack()[:-1]


@attack()
def a_file_cut_off_inside_its_first_header(parts: Parts) -> bytes:
    return parts.pack()[:100]


@attack()
def an_empty_file(parts: Parts) -> bytes:
    return b""


@attack()
def bytes_behind_the_end(parts: Parts) -> bytes:
    return parts.pack() + b"PK\x03\x04 another archive"


@attack()
def bytes_in_the_padding(parts: Parts) -> bytes:
    content = bytearray(parts.pack())
    content[-1025] = 1
    return bytes(content)


@attack()
def an_old_gnu_sparse_member(parts: Parts) -> bytes:
    return member_instead(_typed(tarfile.GNUTYPE_SPARSE), bytes(512))(parts)


@attack()
def a_pax_sparse_member(parts: Parts) -> bytes:
    info = tarfile.TarInfo(parts.shards[-1][0])
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}
    front = pack([("manifest.json", json.dumps(parts.manifest).encode()), *parts.shards[:-1]])
    return front[:-1024] + pack_with_tar([(info, b"1\n0\n0\n".ljust(512, b"\0"))], tarfile.PAX_FORMAT)


@attack()
def a_pax_header_that_renames(parts: Parts) -> bytes:
    info = tarfile.TarInfo("manifest.json")
    info.pax_headers = {"path": "../../evil"}
    return pack_with_tar([(info, json.dumps(parts.manifest).encode())], tarfile.PAX_FORMAT)


@attack()
def a_huge_pax_header(parts: Parts) -> bytes:
    info = tarfile.TarInfo("manifest.json")
    info.pax_headers = {"comment": "x" * (8 << 20)}
    return pack_with_tar([(info, json.dumps(parts.manifest).encode())], tarfile.PAX_FORMAT)


@attack()
def a_million_tiny_members(parts: Parts) -> bytes:
    front = parts.pack()[:-1024]
    return front + pack([("shards/" + "0" * 32 + ".safetensors", b"")])[:512] * 1_000_000 + bytes(1024)


@attack()
def an_archive_that_was_packed_again(parts: Parts) -> bytes:
    return pack_with_tar(infos(parts), tarfile.PAX_FORMAT)


BOMB = bytes(64 << 20)

for _name, _packed in {
    "a gzip bomb": gzip.compress(BOMB),
    "a bzip2 bomb": bz2.compress(BOMB),
    "an xz bomb": lzma.compress(BOMB),
    "a zip": b"PK\x03\x04" + zlib.compress(BOMB),
    "a zstd file": b"\x28\xb5\x2f\xfd" + bytes(1000),
}.items():
    ATTACKS[_name], ERRORS[_name] = (lambda packed: lambda parts: packed)(_packed), ArchiveError
