"""Hold fingerprints to what they must tell apart, and the memo of digests to never believing a changed file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixbank import fingerprint as fingerprints
from prefixbank.bank import PrefixBank
from prefixbank.errors import ConfigError
from prefixbank.fingerprint import digest_files, fingerprint, list_adapter_files, list_model_files, salt_digest
from prefixbank.values import WeightsFile


class Memo(dict[WeightsFile, str]):
    """Remember digests as the index does."""

    def digest(self, *files: Path) -> dict[str, str]:
        return digest_files(list(files), self.get, self.update)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights 1")
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the files that are read for hashing."""
    recorded: list[str] = []
    real = hashlib.file_digest

    def file_digest(file: Any, name: str) -> Any:
        recorded.append(Path(file.name).name)
        return real(file, name)

    monkeypatch.setattr(fingerprints.hashlib, "file_digest", file_digest)
    return recorded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a clock that stands far behind all changes of files; set `now` to move it."""
    hands = SimpleNamespace(now=4e9)
    monkeypatch.setattr(fingerprints, "time", SimpleNamespace(time=lambda: hands.now))
    return hands


@pytest.mark.usefixtures("clock")
def test_a_second_start_reads_no_weights(weights: Path, reads: list[str]) -> None:
    memo = Memo()
    assert memo.digest(weights) == {"model.safetensors": hashlib.sha256(b"weights 1").hexdigest()}
    assert memo.digest(weights) == {"model.safetensors": hashlib.sha256(b"weights 1").hexdigest()}
    assert reads == ["model.safetensors"]


@pytest.mark.usefixtures("clock")
def test_the_index_is_such_a_memo_beyond_the_process(weights: Path, reads: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        with PrefixBank.open(tmp_path / "bank") as bank:
            found = bank._session.digest_files([weights])
            assert found == {"model.safetensors": hashlib.sha256(b"weights 1").hexdigest()}
    assert reads == ["model.safetensors"]


@pytest.mark.usefixtures("clock")
def test_a_read_only_bank_reads_and_remembers_nothing(weights: Path, reads: list[str], tmp_path: Path) -> None:
    PrefixBank.open(tmp_path / "bank").close()
    for _ in range(2):
        with PrefixBank.open(tmp_path / "bank", read_only=True) as bank:
            bank._session.digest_files([weights])
    assert reads == ["model.safetensors"] * 2


@pytest.mark.usefixtures("clock")
def test_only_changed_files_are_read_again(weights: Path, reads: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    memo = Memo()
    memo.digest(weights, config)
    reads.clear()
    config.write_text("{ }")
    assert memo.digest(weights, config)["config.json"] == hashlib.sha256(b"{ }").hexdigest()
    assert reads == ["config.json"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_weights_overwritten_with_the_same_size_and_time_are_seen(weights: Path, how: str) -> None:
    memo = Memo()
    memo.digest(weights)
    status = weights.stat()
    if how == "in place":
        with weights.open("r+b") as file:
            file.write(b"weights 2")
    else:
        weights.with_name("new").write_bytes(b"weights 2")
        weights.with_name("new").rename(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    assert weights.stat().st_mtime_ns == status.st_mtime_ns
    assert memo.digest(weights) == {"model.safetensors": hashlib.sha256(b"weights 2").hexdigest()}


@pytest.mark.parametrize(("age_s", "remembered"), [(-5.0, False), (0.0, False), (0.05, False), (0.2, True)])
def test_a_file_that_may_change_within_one_timestamp_is_not_remembered(
    weights: Path, clock: Any, age_s: float, remembered: bool
) -> None:
    status = weights.stat()
    clock.now = max(status.st_mtime_ns, status.st_ctime_ns) / 1e9 + age_s
    memo = Memo()
    assert memo.digest(weights) == {"model.safetensors": hashlib.sha256(b"weights 1").hexdigest()}
    assert bool(memo) == remembered


@pytest.mark.usefixtures("clock")
def test_a_file_that_changes_while_it_is_read_is_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashlib.file_digest

    def change_after_reading(file: Any, name: str) -> Any:
        digest = real(file, name)
        weights.write_bytes(b"weights 22")
        return digest

    monkeypatch.setattr(fingerprints.hashlib, "file_digest", change_after_reading)
    memo = Memo()
    with pytest.raises(ConfigError, match="changed while it was read"):
        memo.digest(weights)
    assert not memo


def test_a_file_that_can_not_be_read_is_an_error_of_ours(weights: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            Memo().digest(weights, path)


def test_what_the_index_can_not_hold_is_cut(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have inodes and devices of 64 bits."""
    fields = weights.stat()
    odd = SimpleNamespace(
        st_dev=2**64 - 1,
        st_ino=2**64 - 2,
        st_size=fields.st_size,
        st_mtime_ns=1,
        st_ctime_ns=1,
        st_mode=fields.st_mode,
    )
    monkeypatch.setattr(Path, "stat", lambda _path, **_: odd)
    memo = Memo()
    memo.digest(weights)
    (state,) = memo
    assert max(state.device, state.inode) < 2**63


def test_a_models_files_are_weights_configuration_and_its_own_code(tmp_path: Path) -> None:
    counted = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "modeling.py"]
    for name in [*counted, "adapters.safetensors", "tokenizer.json", "README.md", "consolidated.safetensors"]:
        (tmp_path / name).touch()
    assert [path.name for path in list_model_files(tmp_path)] == counted


def test_an_adapters_files_are_its_weights_and_configuration(tmp_path: Path) -> None:
    for name in ("adapters.safetensors", "adapter_config.json", "0000100_adapters.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in list_adapter_files(tmp_path)] == ["adapter_config.json", "adapters.safetensors"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="no model weights"):
        list_model_files(tmp_path)
    with pytest.raises(ConfigError, match="no adapter weights"):
        list_adapter_files(tmp_path)
    with pytest.raises(ConfigError, match="no model weights"):
        list_model_files(tmp_path / "nowhere")


PARTS = {"files": {"model.safetensors": "ab"}, "adapter": None, "kv": {"bits": 4}, "layout": "[]"}


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"model.safetensors": "ac"}},
        {"files": {"model.safetensors": "ab", "config.json": "cd"}},
        {"adapter": {"adapters.safetensors": "ab"}},
        {"kv": {"bits": 8}},
        {"layout": "[1]"},
        {"precision": "float32"},
    ],
    ids=str,
)
def test_every_part_changes_the_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint(PARTS | changed) != fingerprint(PARTS)


def test_a_fingerprint_is_64_hex_digits_whatever_the_order_of_parts() -> None:
    again = fingerprint(dict(reversed(PARTS.items())))
    assert fingerprint(PARTS) == again
    assert len(bytes.fromhex(again)) == 32


@pytest.mark.parametrize(
    ("version", "same"), [("0.32.2", True), ("0.32.9", True), ("0.33.0", False), ("1.32.2", False)]
)
def test_the_minor_version_of_mlx_lm_counts(monkeypatch: pytest.MonkeyPatch, version: str, same: bool) -> None:
    monkeypatch.setattr(fingerprints, "version", lambda _: "0.32.2")
    before = fingerprint(PARTS)
    monkeypatch.setattr(fingerprints, "version", lambda _: version)
    assert (fingerprint(PARTS) == before) == same


def test_the_shard_format_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(PARTS)
    monkeypatch.setattr(fingerprints, "SHARD_FORMAT_VERSION", "2")
    assert fingerprint(PARTS) != before


def test_a_salt_is_kept_as_a_digest_that_does_not_tell_it() -> None:
    assert salt_digest(b"") == ""
    digests = {salt_digest(salt) for salt in (b"a", b"b", b"\0", b"a\0")}
    assert len(digests) == 4
    assert hashlib.sha256(b"a").hexdigest() not in digests
