"""Hold import to refusing what `export` does not write: a typed error, an exit code, and a bank that did not change."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import chunk_key, pack_token_ids, root_key
from prefixbank.cli import main
from prefixbank.errors import (
    ArchiveError,
    ConfigError,
    FingerprintMismatchError,
    PrefixBankError,
    SchemaError,
    StorageError,
)
from tests.cli.banks import CHUNK_TOKENS, FINGERPRINTS, FilledBank, digest_of
from tests.fault import tally
from tests.fault.tampering import Parts, infos, pack, pack_with_tar, with_value

CHECKOUT = Path(__file__).parents[2]
Attack = Callable[[Parts], bytes]
ATTACKS: dict[str, Attack] = {}
ERRORS: dict[str, type[PrefixBankError]] = {}


def attack(error: type[PrefixBankError] = ArchiveError) -> Callable[[Attack], Attack]:
    def add(make: Attack) -> Attack:
        name = make.__name__.replace("_", " ").strip()
        ATTACKS[name], ERRORS[name] = make, error
        return make

    return add


def changing(name: str, error: type[PrefixBankError] = ArchiveError) -> Callable[[Callable[[Parts], object]], None]:
    """Add an attack that changes parts, all of which are then packed as export would."""

    def add(change: Callable[[Parts], object]) -> None:
        def make(parts: Parts) -> bytes:
            change(parts)
            return parts.pack()

        ATTACKS[name], ERRORS[name] = make, error

    return add


# --- members: what a tar can hold


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


# --- the manifest


def texts(name: str, error: type[PrefixBankError] = ArchiveError) -> Callable[[Callable[[str], str | bytes]], None]:
    """Add an attack that spells the manifest otherwise."""

    def add(change: Callable[[str], str | bytes]) -> None:
        ATTACKS[name] = lambda parts: parts.pack(change(json.dumps(parts.manifest)))
        ERRORS[name] = error

    return add


texts("a manifest that is empty")(lambda text: "")
texts("a manifest that is no JSON")(lambda text: text[:-1])
texts("a manifest that is a list")(lambda text: "[]")
texts("a manifest that is no UTF-8")(lambda text: text.encode().replace(b"models/first", b"models/\xff\xfe"))
texts("a manifest that is nested deeply")(lambda text: "[" * 200_000)
texts("a manifest of very many empty lists")(lambda text: "[" + "[]," * (8 << 20) + "[]]")
texts("a manifest of very many numbers")(lambda text: "[" + "7," * (12 << 20) + "7]")
texts("a manifest that is too long")(lambda text: text + " " * (33 << 20))
texts("a number of very many digits")(lambda text: with_value(text, "n_tokens", "9" * 100_000))
texts("a number that SQLite can't hold")(lambda text: with_value(text, "created_at", "9" * 30))
texts("a number that is NaN")(lambda text: with_value(text, "n_tokens", "NaN"))
texts("a number that is infinite")(lambda text: with_value(text, "n_tokens", "Infinity"))
texts("a number with a fraction")(lambda text: with_value(text, "n_tokens", "8.0"))
texts("a number that is true")(lambda text: with_value(text, "start", "true"))
texts("a negative size")(lambda text: with_value(text, "n_bytes", "-1840"))
texts("a negative number of tokens")(lambda text: with_value(text, "n_tokens", "-8"))
texts("a key twice")(lambda text: text.replace('"chunk_tokens"', '"chunk_tokens": 8, "chunk_tokens"', 1))
texts("a key too many")(lambda text: text.replace('"chunk_tokens"', '"__reduce__": "os.system", "chunk_tokens"', 1))
texts("a key too few")(lambda text: text.replace('"has_state": false, ', "", 1))
texts("a wrong format")(lambda text: text.replace("prefixbank archive", "prefixbank bank", 1))
texts("a newer format", SchemaError)(lambda text: with_value(text, "format_version", "2"))
texts("a format version that is true", SchemaError)(lambda text: with_value(text, "format_version", "true"))
texts("a newer shard format", SchemaError)(lambda text: with_value(text, "shard_format_version", '"2"'))
texts("half a surrogate pair as a name")(lambda text: text.replace('"name": "short"', '"name": "\\ud800"', 1))


@changing("chunks of another length", FingerprintMismatchError)
def _(parts: Parts) -> None:
    parts.manifest["chunk_tokens"] = 16
    keep_short(parts)


def keep_short(parts: Parts) -> None:
    """Leave one prefix of one chunk, so that any `chunk_tokens` above it would do."""
    entry = next(s for s in parts.manifest["shards"] if s["n_tokens"] == CHUNK_TOKENS and not s["parent_key"])
    number = parts.manifest["shards"].index(entry)
    parts.shards = [parts.shards[number]]
    parts.manifest["shards"] = [entry]
    prefix = parts.manifest["prefixes"][0] | {"namespace": 0, "chunk_key": entry["chunk_key"], "n_tokens": 8}
    parts.manifest["namespaces"] = [parts.manifest["namespaces"][entry["namespace"]]]
    parts.manifest["prefixes"] = [prefix]
    entry["namespace"] = 0


for _bad in ["", "../../x", "a/../b", "..", "x\ny", "\x1b[2J", "x" * 201, " x", "\x7f", "x\x00y"]:
    changing(f"the name {_bad[:8]!r}")(
        lambda parts, bad=_bad: parts.manifest["prefixes"][0].update(name=bad)  # type: ignore[misc]
    )
changing("a name that is a number")(lambda parts: parts.manifest["prefixes"][0].update(name=7))
changing("a name twice")(lambda parts: parts.manifest["prefixes"].append(parts.manifest["prefixes"][0]))
changing("a pin that is a text")(lambda parts: parts.manifest["prefixes"][0].update(pinned="yes"))
changing("namespaces in another order")(lambda parts: parts.manifest["namespaces"].reverse())
changing("no prefixes")(lambda parts: parts.manifest.update(prefixes=[]))
changing("a prefix without a shard")(lambda parts: parts.manifest["prefixes"][0].update(chunk_key="0" * 32))
changing("a prefix longer than its shards")(lambda parts: parts.manifest["prefixes"][0].update(n_tokens=1000))
changing("a prefix in a namespace that is not there")(lambda parts: parts.manifest["prefixes"][0].update(namespace=9))
changing("a prefix in another namespace than its shards")(
    lambda parts: parts.manifest["prefixes"][0].update(namespace=1)
)
changing("a shard that no prefix needs")(lambda parts: parts.manifest["prefixes"].pop())
changing("a namespace twice")(lambda parts: parts.manifest["namespaces"].append(parts.manifest["namespaces"][0]))
changing("a fingerprint that is none")(lambda parts: parts.manifest["namespaces"][0].update(fingerprint="../" * 21))
changing("a root key that is not the namespace's own")(
    lambda parts: parts.manifest["namespaces"][0].update(root_key="0" * 32)
)
changing("a salt in place of its digest")(lambda parts: parts.manifest["namespaces"][0].update(salt_digest="secret"))
changing("a label of a megabyte")(lambda parts: parts.manifest["namespaces"][0].update(label="x" * (1 << 20)))
changing("a parent that is missing")(lambda parts: parts.manifest["shards"][1].update(parent_key="0" * 32))
changing("a parent that is the chunk itself")(
    lambda parts: parts.manifest["shards"][1].update(parent_key=parts.manifest["shards"][1]["chunk_key"])
)
changing("a digest of other bytes")(lambda parts: parts.manifest["shards"][0].update(digest="0" * 32))
changing("states where the layout has none")(lambda parts: parts.manifest["shards"][0].update(has_state=True))


@changing("a cycle of parents")
def _(parts: Parts) -> None:
    first, second = parts.manifest["shards"][:2]
    first["parent_key"], second["parent_key"] = second["chunk_key"], first["chunk_key"]


def layouts(parts: Parts, layout: Any) -> None:
    for namespace in parts.manifest["namespaces"]:
        namespace["layout"] = layout if isinstance(layout, str) else json.dumps(layout, separators=(",", ":"))


_ROWS = {"arrays": [["keys", "F16", 2, 8]], "kind": "rows", "n_layers": 2, "settings": {}}
for _name, _layout in {
    "another layout": [_ROWS],
    "a layout of a billion layers": [_ROWS | {"n_layers": 10**9}],
    "a layout of minus one layers": [_ROWS | {"n_layers": -1}],
    "a layout of negative width": [_ROWS | {"arrays": [["keys", "F16", -2, -8]]}],
    "a layout whose sizes overflow": [_ROWS | {"arrays": [["keys", "F16", 2**62, 2**62]]}],
    "a layout of an unknown dtype": [_ROWS | {"arrays": [["keys", "object", 2, 8]]}],
    "a layout nested deeply": '[{"members":' * 5000,
    "a layout that is no JSON": "layout",
    "a layout that is empty": [],
}.items():
    changing(_name)(lambda parts, layout=_layout: layouts(parts, layout))  # type: ignore[misc]


# --- shards


@changing("a shard with a byte changed")
def _(parts: Parts) -> None:
    name, content = parts.shards[-1]
    parts.shards[-1] = (name, content[:-1] + bytes([content[-1] ^ 1]))


@changing("a shard with a byte changed and the digest right")
def _(parts: Parts) -> None:
    content = parts.shards[-1][1]
    parts.replace_shard(-1, content[:-1] + bytes([content[-1] ^ 1]))  # the seal is not


@changing("another chunk key than the token ids have")
def _(parts: Parts) -> None:
    keep_short(parts)
    parts.rename_shard(0, "ab" * 16)
    parts.manifest["prefixes"][0]["chunk_key"] = "ab" * 16
    parts.change_metadata(0, chunk_key="ab" * 16)


changing("other token ids")(lambda parts: parts.change_metadata(0, token_ids="[9,9,9,9,9,9,9,9]"))
changing("token ids that are too large")(lambda parts: parts.change_metadata(0, token_ids="[4294967296]"))
changing("token ids that are no list")(lambda parts: parts.change_metadata(0, token_ids='{"a":1}'))
changing("token ids nested deeply")(lambda parts: parts.change_metadata(0, token_ids="[" * 5000))
changing("a shard of another fingerprint")(lambda parts: parts.change_metadata(0, fingerprint="0f" * 32))
changing("a shard of another parent")(lambda parts: parts.change_metadata(1, parent_key="0f" * 16))
changing("a shard of another root")(lambda parts: parts.change_metadata(0, root_key="0f" * 16))
changing("a shard of another start")(lambda parts: parts.change_metadata(1, start="16"))
changing("a shard of another layout")(lambda parts: parts.change_metadata(0, layout="[]"))
changing("a shard of a newer format", SchemaError)(lambda parts: parts.change_metadata(0, format_version="2"))


@changing("a shard of another namespace of the archive")
def _(parts: Parts) -> None:
    ids = [n["fingerprint"] for n in parts.manifest["namespaces"]]
    parts.change_metadata(0, fingerprint=ids[1], root_key=root_key(ids[1]).hex())


def header_with(name: str, old: str, new: str) -> None:
    def change(parts: Parts) -> None:
        text = parts.header(0)
        assert old in text
        parts.replace_header(0, text.replace(old, new, 1))

    changing(name)(change)


header_with("a tensor that overlaps another", '"data_offsets":[0,', '"data_offsets":[8,')
header_with("a tensor of another shape", '"shape":[1,2,', '"shape":[1,4,')
header_with("a tensor whose shape overflows", '"shape":[1,2,', '"shape":[9223372036854775807,2,')
header_with("a tensor of a negative dimension", '"shape":[1,2,', '"shape":[-1,2,')
header_with("a tensor of another dtype", '"dtype":"F16"', '"dtype":"F32"')
header_with("a tensor twice", '"0.keys":', '"0.keys":{"dtype":"F16","shape":[0],"data_offsets":[0,0]},"0.keys":')
header_with("a header with blanks", '{"__metadata__"', '{ "__metadata__"')


@changing("a header longer than its shard")
def _(parts: Parts) -> None:
    content = parts.shards[0][1]
    parts.replace_shard(0, (2**40).to_bytes(8, "little") + content[8:])


@changing("a shard that is a pickle")
def _(parts: Parts) -> None:
    import pickle

    content = pickle.dumps({"cmd": os.system})
    parts.replace_shard(0, content.ljust(len(parts.shards[0][1]), b"."))


# --- what the bank has


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of four prefixes: two of one model, one of another, one with a salt."""
    root = tmp_path_factory.mktemp("exporting")
    bank = FilledBank(root / "bank")
    bank.store("short", list(range(20)), pinned=True)
    bank.store("long", [*range(16), *range(100, 112)])
    bank.store("other", list(range(50, 60)), fingerprint=FINGERPRINTS[1])
    bank.store("salted", list(range(30)), salt=b"tenant")
    with PrefixBank.open(bank.root) as opened:
        opened.export_prefixes(root / "archive.tar")
    return root / "archive.tar"


@pytest.fixture
def bank(tmp_path: Path) -> FilledBank:
    """A bank that has some of the same chunks, and a name of its own."""
    filled = FilledBank(tmp_path / "bank")
    filled.store("mine", list(range(12)))
    return filled


def refusal(root: Path, path: Path) -> tuple[int, type[PrefixBankError]]:
    """Import by Python and by command line; return the exit code and the error's class. The bank must not change."""
    before = digest_of(root)
    with PrefixBank.open(root) as opened:
        with pytest.raises(PrefixBankError) as raised:
            opened.import_prefixes(path)
        report = opened.check(read_data=True)
        assert report.findings == ()
    code = main(["--bank", str(root), "import", str(path)])
    assert digest_of(root) == before
    return code, raised.type


def test_what_the_attacks_are_made_of_is_imported_when_nothing_is_changed(
    archive: Path, bank: FilledBank, tmp_path: Path
) -> None:
    """Or every attack would be refused for another reason than its own."""
    (tmp_path / "same.tar").write_bytes(Parts.of(archive).pack())
    assert main(["--bank", str(bank.root), "import", str(tmp_path / "same.tar"), "-n"]) == 0
    parts = Parts.of(archive)
    for number in range(len(parts.shards)):
        parts.change_metadata(number)
        parts.replace_shard(number, parts.shards[number][1])
    assert parts == Parts.of(archive)
    keep_short(parts)
    (tmp_path / "short.tar").write_bytes(parts.pack())
    assert main(["--bank", str(bank.root), "import", str(tmp_path / "short.tar")]) == 0


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_archive_is_refused_and_changes_nothing(
    name: str, archive: Path, bank: FilledBank, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.tar"
    path.write_bytes(ATTACKS[name](Parts.of(archive)))
    outside = {p.name for p in tmp_path.iterdir()}
    tally.count("damaged inputs")
    code, error = refusal(bank.root, path)
    assert error is ERRORS[name]
    assert code == error.exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.isprintable() or err[:-1].isprintable()
    assert len(err) < 2000
    assert {p.name for p in tmp_path.iterdir()} == outside


def test_there_are_attacks_enough() -> None:
    assert len(ATTACKS) >= 100


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "nothing"])
def test_what_is_no_regular_file_is_refused_without_waiting(kind: str, bank: FilledBank, tmp_path: Path) -> None:
    path = tmp_path / "archive.tar"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    code, error = refusal(bank.root, path)
    assert (code, error) == ((2, ConfigError) if kind == "nothing" else (13, ArchiveError))


HEAVY = [
    "a gzip bomb",
    "a million tiny members",
    "a huge pax header",
    "a manifest that is nested deeply",
    "a manifest of very many empty lists",
    "a manifest of very many numbers",
    "a manifest that is too long",
    "a layout of a billion layers",
    "a layout nested deeply",
]

LIMITED = """
import resource, sys
from prefixbank.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
sys.exit(main(sys.argv[1:]))
"""


def import_limited(root: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Import in a process that may take 1 GiB of memory and 30 s of a processor."""
    command = [sys.executable, "-c", LIMITED, "--bank", str(root), "import", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=CHECKOUT)


@pytest.mark.parametrize("name", HEAVY)
def test_memory_and_time_are_bounded_whatever_an_archive_claims(
    name: str, archive: Path, bank: FilledBank, tmp_path: Path
) -> None:
    path = tmp_path / "hostile.tar"
    path.write_bytes(ATTACKS[name](Parts.of(archive)))
    done = import_limited(bank.root, path)
    assert (done.returncode, done.stdout) == (13, ""), done.stderr


def test_a_sparse_file_of_a_terabyte_is_not_read_through(archive: Path, bank: FilledBank, tmp_path: Path) -> None:
    path = tmp_path / "sparse.tar"
    path.write_bytes(Parts.of(archive).pack())
    os.truncate(path, 1 << 40)
    done = import_limited(bank.root, path)
    assert (done.returncode, done.stdout) == (13, ""), done.stderr


def test_an_archive_that_the_disk_has_no_room_for_is_refused(
    archive: Path, bank: FilledBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a sparse file cost its maker nothing, and the bank their number."""
    from prefixbank import archives

    monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4096})())
    assert refusal(bank.root, archive) == (3, StorageError)


# --- clashes with what the bank has


def test_another_layout_for_a_namespace_of_the_bank_is_refused(bank: FilledBank, archive: Path, tmp_path: Path) -> None:
    """An archive in itself in order that says another layout of a model that the bank knows."""
    parts = Parts.of(archive)
    keep_short(parts)
    layout = json.loads(parts.manifest["namespaces"][0]["layout"])
    layout[0]["kind"] = "other"
    layouts(parts, layout)
    parts.change_metadata(0, layout=parts.manifest["namespaces"][0]["layout"])
    (tmp_path / "x.tar").write_bytes(parts.pack())
    assert refusal(bank.root, tmp_path / "x.tar") == (3, FingerprintMismatchError)


def salted_parts(archive: Path, root: bytes) -> Parts:
    """Return an archive of one chunk whose namespace has a salt digest of its own, and this root key."""
    parts = Parts.of(archive)
    keep_short(parts)
    salt = hashlib.sha256(b"nobody's").hexdigest()
    ids = json.loads(json.loads(parts.header(0))["__metadata__"]["token_ids"])
    key = chunk_key(root, pack_token_ids(ids)).hex()  # type: ignore[arg-type]
    parts.manifest["namespaces"][0] |= {"salt_digest": salt, "root_key": root.hex()}
    parts.rename_shard(0, key)
    parts.manifest["prefixes"][0]["chunk_key"] = key
    parts.change_metadata(0, salt_digest=salt, root_key=root.hex(), chunk_key=key)
    return parts


def test_a_root_key_of_another_tenant_is_refused(bank: FilledBank, archive: Path, tmp_path: Path) -> None:
    """Only who knows a salt can prove its root key; but nobody can take the place of a namespace that is there."""
    (tmp_path / "x.tar").write_bytes(salted_parts(archive, root_key(FINGERPRINTS[0])).pack())
    assert refusal(bank.root, tmp_path / "x.tar") == (13, ArchiveError)
    (tmp_path / "y.tar").write_bytes(salted_parts(archive, bytes(16)).pack())
    assert main(["--bank", str(bank.root), "import", str(tmp_path / "y.tar")]) == 0


def test_a_chunk_key_that_collides_with_the_banks_is_refused(
    bank: FilledBank, archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As second preimages of xxh3 can be built: here by a hash that knows one other text."""
    from prefixbank import chunking

    parts = Parts.of(archive)
    keep_short(parts)
    taken = parts.manifest["shards"][0]["chunk_key"]  # of the token ids 0 to 7, which the bank has
    root = root_key(FINGERPRINTS[0])
    if parts.manifest["namespaces"][0]["fingerprint"] != FINGERPRINTS[0]:
        pytest.fail("the first chunk is of another model")
    evil = list(range(90, 98))
    real = chunking._hash128
    monkeypatch.setattr(
        chunking,
        "_hash128",
        lambda content: bytes.fromhex(taken) if content == root + pack_token_ids(evil) else real(content),
    )
    parts.change_metadata(0, token_ids=json.dumps(evil, separators=(",", ":")))
    (tmp_path / "x.tar").write_bytes(parts.pack())
    before = digest_of(bank.root)
    with PrefixBank.open(bank.root) as opened, pytest.raises(FingerprintMismatchError, match="another prefix's"):
        opened.import_prefixes(tmp_path / "x.tar")
    assert digest_of(bank.root) == before


def test_an_archive_that_changes_while_it_is_imported_stores_nothing_unproven(
    bank: FilledBank, archive: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.tar"
    content = Parts.of(archive).pack()
    path.write_bytes(content)

    def swap(done: int, total: int) -> None:
        if done == total:  # all is proven
            changed = bytearray(content)
            for at in range(0, len(changed) - 1024, 512):
                if changed[at : at + 7] == b"shards/":
                    size = int(changed[at + 124 : at + 135], 8)
                    changed[at + 512 + size - 1] ^= 1
            path.write_bytes(changed)

    with PrefixBank.open(bank.root) as opened:
        rows = opened.chunks()
        with pytest.raises(ArchiveError, match="other bytes than its manifest says"):
            opened.import_prefixes(path, progress=swap)
        assert opened.chunks() == rows
        assert [prefix.name for prefix in opened.prefixes()] == ["mine"]
        assert opened.check(read_data=True).ok
