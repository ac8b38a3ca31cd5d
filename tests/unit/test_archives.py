"""Hold export and import to their promises: nothing else than asked for, nothing lost, nothing overwritten."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixbank import archives
from prefixbank.bank import PrefixBank
from prefixbank.chunking import unpack_token_ids
from prefixbank.errors import (
    ArchiveError,
    BankReadOnlyError,
    ConfigError,
    ShardCorruptError,
    ShardMissingError,
    StorageError,
    UnknownPrefixError,
)
from tests.fakekv import HYBRID, FakeModel

SHOTS = list(range(1, 11))  # two chunks of 4 and a tail of 2
OTHER = [*SHOTS[:8], 50, 51, 52, 53, 54]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[PrefixBank]:
    """Give a second bank, in which a check must find nothing in the end."""
    with PrefixBank.open(tmp_path / "target", chunk_tokens=4) as opened:
        yield opened
        report = opened.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive.tar"


def rows_of(bank: PrefixBank) -> list[tuple[Any, ...]]:
    return [(r.key, r.file_name, r.digest, r.n_bytes, r.has_state) for r in bank.chunks()]


def manifest_of(path: Path) -> dict[str, Any]:
    with tarfile.open(path) as archive:
        return json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type,no-any-return]


def tokens_in(path: Path) -> set[int]:
    """Return all token ids that the shards of an archive hold, as the safetensors library reads them."""
    from safetensors import safe_open

    found: set[int] = set()
    with tarfile.open(path) as archive:
        for info in archive.getmembers()[1:]:
            extracted = path.with_name(Path(info.name).name)
            extracted.write_bytes(archive.extractfile(info).read())  # type: ignore[union-attr]
            with safe_open(extracted, "numpy") as shard:
                found |= set(json.loads(shard.metadata()["token_ids"]))
    return found


# --- round trips


def test_what_is_exported_is_imported_with_names_pins_and_digests(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    model.name("shots", SHOTS, pin=True)
    model.name("other", OTHER)
    exported = bank.export_prefixes(path)
    imported = target.import_prefixes(path)
    assert [p.name for p in exported.prefixes] == ["other", "shots"]
    assert {(p.name, p.action, p.refused) for p in imported.prefixes} == {("other", "new", ""), ("shots", "new", "")}
    assert imported.n_new_chunks == imported.n_shards == exported.n_shards == 5
    assert exported.n_tokens == 15
    assert exported.n_bytes == path.stat().st_size
    there, back = bank.prefixes(), target.prefixes()
    assert [(p.name, p.n_tokens, p.pinned, p.source_digest) for p in there] == [
        (p.name, p.n_tokens, p.pinned, p.source_digest) for p in back
    ]
    assert {r.key for r in bank.chunks()} == {r.key for r in target.chunks()}
    again = FakeModel(target)
    assert again.held(SHOTS, OTHER) == [len(SHOTS), len(OTHER)]


def test_a_second_import_writes_nothing(bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    target.import_prefixes(path)
    before = rows_of(target)
    again = target.import_prefixes(path)
    assert [p.action for p in again.prefixes] == ["there"]
    assert (again.n_new_chunks, again.n_written_bytes) == (0, 0)
    assert rows_of(target) == before


def test_states_of_recurrent_layers_travel(bank: PrefixBank, target: PrefixBank, path: Path) -> None:
    model = FakeModel(bank, layout=HYBRID)
    model.name("shots", SHOTS, ends=[3, 8, 10])
    bank.export_prefixes(path)
    target.import_prefixes(path)
    again = FakeModel(target, layout=HYBRID)
    assert again.held([*SHOTS, 99], [*SHOTS[:9], 98], [*SHOTS[:3], 97]) == [10, 8, 3]


def test_an_export_of_an_import_is_the_same_file(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    target.import_prefixes(path)
    target.export_prefixes(path.with_name("again.tar"))
    assert path.with_name("again.tar").read_bytes() == path.read_bytes()


def test_a_dry_run_says_the_same_and_changes_nothing(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path, unchanged: Callable[[Path], Any]
) -> None:
    model.name("shots", SHOTS)
    planned = bank.export_prefixes(path, dry_run=True)
    assert not path.exists()
    assert bank.export_prefixes(path) == planned
    with unchanged(target.root):
        todo = target.import_prefixes(path, dry_run=True)
    assert target.import_prefixes(path) == todo


# --- what an archive holds


def test_only_the_names_that_are_asked_for_are_exported(bank: PrefixBank, model: FakeModel, path: Path) -> None:
    model.name("shots", SHOTS)
    model.name("other", OTHER)
    model.store([60, 61, 62, 63])
    assert [p.name for p in bank.export_prefixes(path, ["shots"]).prefixes] == ["shots"]
    assert tokens_in(path) == set(SHOTS)


def test_tokens_behind_a_prefix_are_not_exported(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    """A name moves to the chunk that supersedes its tail; what follows there is somebody else's prompt."""
    model.name("shots", SHOTS)
    model.store([*SHOTS, 77, 78])
    model.store([*SHOTS[:8], 9, 10, 77, 78, 79, 80])
    exported = bank.export_prefixes(path)
    assert tokens_in(path) == set(SHOTS)
    assert exported.n_tokens == len(SHOTS)
    target.import_prefixes(path)
    assert FakeModel(target).held([*SHOTS, 77, 78]) == [len(SHOTS)]


def test_a_salt_is_exported_as_its_digest_only(bank: PrefixBank, target: PrefixBank, path: Path) -> None:
    FakeModel(bank, salt=b"the tenant's own secret").name("shots", SHOTS)
    bank.export_prefixes(path)
    assert b"secret" not in path.read_bytes()
    target.import_prefixes(path)
    assert FakeModel(target, salt=b"the tenant's own secret").held(SHOTS) == [len(SHOTS)]
    assert FakeModel(target).held(SHOTS) == [0]


def test_one_namespace_can_be_exported(bank: PrefixBank, path: Path) -> None:
    first, second = FakeModel(bank, "first"), FakeModel(bank, "second")
    first.name("shots", SHOTS)
    second.name("shots", OTHER)
    exported = bank.export_prefixes(path, namespace=second.namespace.fingerprint[:8])
    assert [p.label for p in exported.prefixes] == ["second"]
    assert [n["label"] for n in manifest_of(path)["namespaces"]] == ["second"]


def test_names_that_hold_nothing_are_left_out_and_said(bank: PrefixBank, model: FakeModel, path: Path) -> None:
    model.name("shots", SHOTS)
    model.name("gone", [60, 61])
    record = bank.chain(bank.prefixes("gone")[0])[0]
    model.path_of(record).unlink()
    model.resolve([60, 61])  # heals: a hole, since a name stands on it
    exported = bank.export_prefixes(path)
    assert [name for name, _ in exported.left_out] == ["gone"]
    with pytest.raises(UnknownPrefixError, match="a shard of it was lost"):
        bank.export_prefixes(path.with_name("b"), ["gone"])
    with pytest.raises(UnknownPrefixError, match="no prefix has that name"):
        bank.export_prefixes(path.with_name("b"), ["shots", "nothing"])


def test_a_bank_without_names_has_nothing_to_export(bank: PrefixBank, model: FakeModel, path: Path) -> None:
    model.store(SHOTS)
    with pytest.raises(UnknownPrefixError, match="no named prefix"):
        bank.export_prefixes(path)


# --- the file


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_an_archive_is_private_whatever_the_umask(
    bank: PrefixBank, model: FakeModel, path: Path, umask: Callable[[int], int], mask: int
) -> None:
    model.name("shots", SHOTS)
    umask(mask)
    bank.export_prefixes(path)
    umask(0o022)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_an_export_overwrites_nothing(bank: PrefixBank, model: FakeModel, path: Path, kind: str) -> None:
    model.name("shots", SHOTS)
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="is there already"):
        bank.export_prefixes(path)
    assert not path.with_name("elsewhere").exists()
    assert kind != "file" or path.read_text() == "precious"


def test_a_file_that_appears_during_an_export_stays(
    bank: PrefixBank, model: FakeModel, path: Path, tmp_path: Path
) -> None:
    model.name("shots", SHOTS)
    with pytest.raises(ConfigError, match="was made meanwhile"):
        bank.export_prefixes(path, progress=lambda done, total: path.write_text("precious") and None)
    assert path.read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {"bank", "archive.tar"}


@pytest.mark.parametrize(("fault", "error"), [("damage", ShardCorruptError), ("deletion", ShardMissingError)])
def test_a_shard_that_fails_leaves_no_archive(tmp_path: Path, fault: str, error: type[Exception]) -> None:
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.name("shots", SHOTS)
        shard = model.path_of(bank.chunks()[-1])
        if fault == "damage":
            shard.write_bytes(shard.read_bytes()[:-1] + b"!")
        else:
            shard.unlink()
        with pytest.raises(error):
            bank.export_prefixes(tmp_path / "x.tar")
    assert {p.name for p in tmp_path.iterdir()} == {"bank"}


def test_an_archive_is_synced_before_it_has_its_name(
    bank: PrefixBank, model: FakeModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefixbank import archivefile

    model.name("shots", SHOTS)
    steps: list[str] = []
    sync, link, sync_folder = archivefile.sync, os.link, archivefile.sync_folder
    monkeypatch.setattr(archivefile, "sync", lambda fd: (steps.append("sync"), sync(fd)))
    monkeypatch.setattr(os, "link", lambda a, b: (steps.append("name"), link(a, b)))
    monkeypatch.setattr(archivefile, "sync_folder", lambda p: (steps.append("sync folder"), sync_folder(p)))
    bank.export_prefixes(path)
    assert steps == ["sync", "name", "sync folder"]


def test_a_file_system_without_hard_links_will_do(
    bank: PrefixBank, model: FakeModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    model.name("shots", SHOTS)
    monkeypatch.setattr(os, "link", refuse)
    bank.export_prefixes(path)
    assert manifest_of(path)["prefixes"][0]["name"] == "shots"


def test_a_read_only_bank_exports_and_plans_and_imports_nothing(
    bank: PrefixBank, model: FakeModel, path: Path, target: PrefixBank
) -> None:
    model.name("shots", SHOTS)
    bank.flush()
    with PrefixBank.open(bank.root, read_only=True) as reading:
        reading.export_prefixes(path)
    with PrefixBank.open(target.root, read_only=True) as reading:
        assert reading.import_prefixes(path, dry_run=True).n_new_chunks == 3
        with pytest.raises(BankReadOnlyError):
            reading.import_prefixes(path)


# --- what an import leaves alone


def test_chunks_that_are_there_keep_their_files(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    """The archive's KV is another: only computing would tell whose is right, so the bank's own stays."""
    ours = FakeModel(target)
    ours.store(SHOTS[:9], b"ours")  # two chunks, and a tail that the archive's covers
    before = rows_of(target)
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    imported = target.import_prefixes(path)
    assert imported.n_new_chunks == 1
    assert set(before) < set(rows_of(target))
    ours.resolve(SHOTS[:9], [b"ours", b"A"])


def test_a_chunk_without_states_is_not_replaced_by_an_imported_one(
    bank: PrefixBank, target: PrefixBank, path: Path
) -> None:
    ours = FakeModel(target, layout=HYBRID)
    ours.store(SHOTS[:8], b"ours")
    before = rows_of(target)
    FakeModel(bank, layout=HYBRID).name("shots", SHOTS[:8], ends=[4, 8])
    bank.export_prefixes(path)
    assert target.import_prefixes(path, dry_run=True).n_new_chunks == 0
    assert target.import_prefixes(path).n_new_chunks == 0
    assert rows_of(target) == before


def test_a_name_stays_with_the_prefix_that_has_it(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    FakeModel(target).name("shots", OTHER, pin=True)
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    before = rows_of(target), target.prefixes()
    assert [p.action for p in target.import_prefixes(path).prefixes] == ["kept"]
    assert (rows_of(target), target.prefixes()) == before
    assert [p.action for p in target.import_prefixes(path, replace=True).prefixes] == ["replaces"]
    (prefix,) = target.prefixes("shots")
    assert prefix.n_tokens == len(SHOTS)
    assert prefix.pinned, "the pin stays with the name"


def test_a_name_that_was_evicted_is_filled_again(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    target.import_prefixes(path)
    target.prune(max_bytes=0)
    assert target.prefixes("shots")[0].chunk_key is None
    target.import_prefixes(path)
    assert target.prefixes("shots")[0].chunk_key is not None
    assert FakeModel(target).held(SHOTS) == [len(SHOTS)]


def test_a_name_that_is_given_during_an_import_stays(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path
) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    ours = FakeModel(target)

    def name(done: int, total: int) -> None:
        if done == total:
            ours.name("shots", OTHER)

    (prefix,) = target.import_prefixes(path, progress=name).prefixes
    assert prefix.refused == "its name was given to another prefix meanwhile"
    assert target.prefixes("shots")[0].n_tokens == len(OTHER)


# --- the budget, and ends in the middle


def test_an_archive_above_the_budget_is_refused_and_evicts_nothing(
    bank: PrefixBank, model: FakeModel, path: Path, tmp_path: Path
) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    with PrefixBank.open(tmp_path / "small", chunk_tokens=4, max_bytes=2 * 4096) as small:
        FakeModel(small).store([60, 61])
        before = rows_of(small)
        for dry_run in (True, False):
            with pytest.raises(StorageError, match="do not fit into the budget of 8192 bytes"):
                small.import_prefixes(path, dry_run=dry_run)
        assert rows_of(small) == before
        assert small.namespaces(empty=True) == small.namespaces()


def test_an_import_evicts_what_the_budget_needs(bank: PrefixBank, model: FakeModel, path: Path, tmp_path: Path) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    with PrefixBank.open(tmp_path / "small", chunk_tokens=4, max_bytes=3 * 4096) as small:
        ours = FakeModel(small)
        ours.store([60, 61])
        assert small.import_prefixes(path, dry_run=True).n_evicted_chunks == 1
        assert small.import_prefixes(path).n_evicted_chunks == 1
        assert ours.held([60, 61, 62], SHOTS) == [0, len(SHOTS)]
        assert small.stats().disk_bytes <= 3 * 4096


def test_an_import_that_dies_leaves_whole_prefixes_and_another_finishes_it(
    bank: PrefixBank, model: FakeModel, target: PrefixBank, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.name("shots", SHOTS)
    model.name("other", OTHER)
    bank.export_prefixes(path)
    read = archives._Archive.read
    n_reads = 0

    def dying(archive: Any, record: Any) -> memoryview:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 5:  # `other` has four chunks
            raise KeyboardInterrupt
        return read(archive, record)

    monkeypatch.setattr(archives._Archive, "read", dying)
    with pytest.raises(KeyboardInterrupt):
        target.import_prefixes(path)
    assert [p.name for p in target.prefixes()] == ["other"]
    assert {r.file_name for r in target.chunks()} == {p.name for p in (target.root / "shards").rglob("*.safetensors")}
    monkeypatch.undo()
    assert target.import_prefixes(path).n_new_chunks == 1
    assert FakeModel(target).held(SHOTS, OTHER) == [len(SHOTS), len(OTHER)]


# --- namespaces that an archive lied about


def test_a_model_sets_a_namespace_right_that_an_archive_lied_about(
    tmp_path: Path,
) -> None:
    """A layout can't be proven by the fingerprint alone: the model itself does, once nothing hangs on the lie."""
    from prefixbank.errors import FingerprintMismatchError

    with PrefixBank.open(tmp_path / "lying", chunk_tokens=4) as lying:
        FakeModel(lying, "the model", layout=HYBRID).name("shots", SHOTS, ends=[10])
        lying.export_prefixes(tmp_path / "x.tar")
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        bank.import_prefixes(tmp_path / "x.tar")
        with pytest.raises(FingerprintMismatchError, match="prefixbank prune --namespace"):
            FakeModel(bank, "the model")
        bank.prune(namespace=bank.namespaces()[0].namespace.fingerprint + "/")
        model = FakeModel(bank, "the model")
        model.store(SHOTS)
        assert model.held(SHOTS) == [len(SHOTS)]
        assert unpack_token_ids(bank.chunks()[0].token_ids) == SHOTS[:4]


@pytest.mark.parametrize("name", ["\udcff", "a\ud800b", "../x", "a/../b", ".."])
def test_half_characters_and_dots_are_no_names(bank: PrefixBank, model: FakeModel, name: str) -> None:
    with pytest.raises(ConfigError, match="prefix name"):
        model.name(name, SHOTS)
    model.name("a..b/c...", SHOTS)


def test_an_archive_says_what_it_is_itself(bank: PrefixBank, model: FakeModel, path: Path) -> None:
    model.name("shots", SHOTS)
    bank.export_prefixes(path)
    manifest = manifest_of(path)
    assert "reveal the prompts" in manifest["notice"]
    assert (manifest["format"], manifest["format_version"], manifest["chunk_tokens"]) == ("prefixbank archive", 1, 4)
    with pytest.raises(ArchiveError, match="no regular file"):
        bank.import_prefixes(path.parent)
