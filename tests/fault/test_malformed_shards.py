"""Meet malformed safetensors structures: nobody uses one, whether a row names it, or none, or an archive brings it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import ArchiveError, ShardCorruptError
from prefixbank.proving import prove
from prefixbank.repair import repair
from prefixbank.sealing import seal, unsealed
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.limits import blaming, within_limits
from tests.fault.malformed import malformed
from tests.fault.tampering import Parts
from tests.fault.test_damage import TOKENS, must_be_refused
from tests.fault.test_index_lost import make_old


@pytest.fixture(scope="module")
def corpus_bank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ChunkRecord, bytes]:
    root = tmp_path_factory.mktemp("corpus") / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.store(TOKENS)
        (record,) = bank.chunks()
        return root, record, model.path_of(record).read_bytes()


def test_the_corpus_is_large_and_its_names_are_unique(corpus_bank: tuple[Path, ChunkRecord, bytes]) -> None:
    names = [name for name, _ in malformed(corpus_bank[2])]
    assert len(names) == len(set(names)) >= 120
    assert corpus_bank[2] not in [content for _, content in malformed(corpus_bank[2])]


def test_no_malformed_structure_is_used_whoever_meets_it(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path
) -> None:
    """Read and checked through its row, proven without one: refused, each within a second and 200 MB."""
    source, record, shard = corpus_bank
    root = tmp_path / "bank"
    shutil.copytree(source, root)
    path = root / "shards" / str(record.file_name)[:2] / str(record.file_name)
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        for name, content in malformed(shard):
            path.write_bytes(content)
            with blaming(name), within_limits(traced=name.split(":")[0] in ("nesting", "length")):
                tally.count("damaged inputs")
                must_be_refused(model, record)
                assert [f.kind for f in bank.check(read_data=True).findings if f.problem] == ["corrupt"]
                with pytest.raises(ShardCorruptError):
                    sealed = prove(model.session.shards, str(record.file_name), 4).sealed
                    if sealed == "broken":  # all but the bytes of the tensors, or the seal, is right
                        raise ShardCorruptError("its seal is broken")


def resealed(content: bytes) -> bytes:
    """Return a shard with the seal that it would have if it had been written so, where it has a header at all."""
    length = int.from_bytes(content[:8], "little")
    head, data = content[: 8 + length], content[8 + length :]
    return seal(unsealed(head), [memoryview(data)]) + data


def test_no_malformed_structure_passes_with_a_right_seal(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path
) -> None:
    """The seal proves that nothing changed since; that a shard is one, its header must prove."""
    source, record, shard = corpus_bank
    shutil.copytree(source, tmp_path / "bank")
    with PrefixBank.open(tmp_path / "bank") as bank:
        path = FakeModel(bank).path_of(record)
        n_refused = 0
        for name, content in malformed(shard):
            if len(content) > 10_000_000 or name == "bytes: tensors one up":  # other tensors are none the worse
                continue
            path.write_bytes(resealed(content))
            if path.read_bytes() == shard:  # nothing but the seal was wrong
                continue
            with blaming(name), pytest.raises(ShardCorruptError):
                prove(bank._session.shards, str(record.file_name), 4)
            n_refused += 1
            tally.count("damaged inputs")
        assert n_refused >= 120
        path.write_bytes(shard)


def repair_malformed(source: Path, record: ChunkRecord, shard: bytes, root: Path, every: int) -> None:
    """Repair, of every so many structures, a bank where it lies in a shard's place, and one where no row names it."""
    for name, content in list(malformed(shard))[::every]:
        shutil.copytree(source, root)
        path = root / "shards" / str(record.file_name)[:2] / str(record.file_name)
        for index in ("sound", "knows nothing", "lost"):
            path.write_bytes(content)
            make_old(root)
            if index == "lost":
                (root / "index.sqlite3").unlink()
            with blaming(name):
                plan = repair(root, read_data=True, unproven=True, durability="fast")
                assert {step.action for step in plan.steps} - {"new-index"} == {"set-aside"}
                assert not path.exists()
            tally.count("damaged inputs")
        assert len(list((root / "quarantine").iterdir())) == 3
        with PrefixBank.open(root) as bank:
            assert FakeModel(bank).match(TOKENS).n_tokens == 0
        shutil.rmtree(root)


def test_a_repair_sets_malformed_structures_aside(corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path) -> None:
    repair_malformed(*corpus_bank, tmp_path / "bank", every=20)


@pytest.mark.long
def test_a_repair_sets_every_malformed_structure_aside(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path
) -> None:
    repair_malformed(*corpus_bank, tmp_path / "bank", every=1)


def test_a_repair_of_a_lost_index_meets_all_malformed_structures_at_once(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path
) -> None:
    root = tmp_path / "bank"
    shutil.copytree(corpus_bank[0], root)
    key = corpus_bank[1].key.hex()
    structures = list(malformed(corpus_bank[2]))
    for number, (_, content) in enumerate(structures):
        (root / "shards" / key[:2] / f"{key}-{number:08x}.safetensors").write_bytes(content)
    (root / "index.sqlite3").unlink()
    plan = repair(root, durability="fast")
    assert [step.action for step in plan.steps].count("set-aside") == len(structures)
    assert [step.action for step in plan.steps].count("take-up") == 1
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held(TOKENS) == [4]


def test_a_structure_of_a_newer_format_is_left_for_its_version(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path
) -> None:
    root = tmp_path / "bank"
    shutil.copytree(corpus_bank[0], root)
    (path,) = (root / "shards").rglob("*.safetensors")
    path.write_bytes(corpus_bank[2].replace(b'"format_version":"1"', b'"format_version":"2"'))
    (root / "index.sqlite3").unlink()
    plan = repair(root)
    assert "upgrade prefixbank" in plan.left[0].message
    assert path.exists()


@pytest.mark.parametrize("seals", ["as they come", "made right"])
def test_no_archive_brings_a_malformed_structure(
    corpus_bank: tuple[Path, ChunkRecord, bytes], tmp_path: Path, seals: str
) -> None:
    """Its length and digest are what the manifest says; each is refused within a second and 200 MB."""
    source, _, shard = corpus_bank
    shutil.copytree(source, tmp_path / "source")
    with PrefixBank.open(tmp_path / "source") as bank:
        FakeModel(bank).name("named", TOKENS)
        bank.export_prefixes(tmp_path / "whole.tar")
    archive = tmp_path / "malformed.tar"
    n_refused = 0
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        for name, content in malformed(shard):
            if seals == "made right":
                if len(content) > 10_000_000 or name == "bytes: tensors one up":  # other tensors are none the worse
                    continue
                content = resealed(content)
                if content == shard:  # nothing but the seal was wrong
                    continue
            parts = Parts.of(tmp_path / "whole.tar")
            parts.replace_shard(0, content)
            archive.write_bytes(parts.pack())
            with blaming(name), within_limits(), pytest.raises(ArchiveError):
                bank.import_prefixes(archive)
            n_refused += 1
            tally.count("damaged inputs")
        assert bank.chunks() == []
        assert n_refused >= 120
        bank.import_prefixes(tmp_path / "whole.tar")
        assert FakeModel(bank).held(TOKENS) == [4]
