"""Hold import to refusing what `export` does not write: a typed error, an exit code, and a bank that did not change."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import chunk_key, pack_token_ids, root_key
from prefixbank.cli import main
from prefixbank.errors import (
    ArchiveError,
    ConfigError,
    FingerprintMismatchError,
    PrefixBankError,
    StorageError,
)
from tests.cli.banks import FINGERPRINTS, FilledBank, digest_of
from tests.fault import tally
from tests.fault.attacks import ATTACKS, ERRORS, keep_short, layouts
from tests.fault.tampering import Parts

CHECKOUT = Path(__file__).parents[2]


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
