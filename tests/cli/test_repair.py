"""Hold `prefixbank repair` to its plan, its JSON and its exit codes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.banks import FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]


def a_shard(bank: FilledBank) -> Path:
    return sorted((bank.root / "shards").rglob("*.safetensors"))[0]


def test_a_bank_in_order_needs_no_step(filled: FilledBank, run: Run) -> None:
    before = digest_of(filled.root)
    outcome = run("repair", "--json")
    assert outcome.code == 0
    document = outcome.document
    assert (document["ok"], document["index"], document["steps"], document["left"]) == (True, "sound", [], [])
    assert digest_of(filled.root) == before
    assert run("repair").out == "0 steps taken, 0 things left as they are\n"


def test_a_dry_run_prints_the_plan_that_is_then_executed(filled: FilledBank, run: Run) -> None:
    (filled.root / "index.sqlite3").write_bytes(b"garbage" * 999)
    a_shard(filled).write_bytes(b"damaged")
    before = digest_of(filled.root)
    planned = run("repair", "-n", "--json")
    assert digest_of(filled.root) == before
    done = run("repair", "--json")
    assert (planned.code, done.code) == (0, 0)
    assert planned.document["steps"] == done.document["steps"]
    assert planned.document["dry_run"]
    assert {"new-index", "set-aside", "take-up", "name"} <= {step["action"] for step in done.document["steps"]}
    assert "0 steps taken" in run("repair").out


def test_names_and_pins_come_back(filled: FilledBank, run: Run) -> None:
    run("pin", "long")
    before = run("ls", "--json").document["prefixes"]
    (filled.root / "index.sqlite3").unlink()
    assert run("ls").code == 10
    assert run("repair").code == 0
    after = run("ls", "--json").document["prefixes"]
    when = ("last_used_at",)
    assert [{k: v for k, v in p.items() if k not in when} for p in after] == [
        {k: v for k, v in p.items() if k not in when} for p in before
    ]
    assert run("check", "--read-data").code == 0


def test_a_removed_name_does_not_come_back(filled: FilledBank, run: Run) -> None:
    run("rm", "short")
    (filled.root / "index.sqlite3").unlink()
    run("repair")
    assert {p["name"] for p in run("ls", "--json").document["prefixes"]} == {"long", "other"}


def test_what_needs_a_hand_is_exit_code_1(filled: FilledBank, run: Run) -> None:
    for path in (filled.root / "shards").rglob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        del header["__metadata__"]["content_digest"]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    (filled.root / "index.sqlite3").unlink()
    outcome = run("repair", "--json")
    assert outcome.code == 1
    assert not outcome.document["ok"]
    assert "--unproven" in outcome.document["left"][0]["message"]


@pytest.mark.parametrize("fault", ["missing", "damaged", "permissions", "names"])
def test_check_names_repair_and_is_content_after_it(filled: FilledBank, run: Run, fault: str) -> None:
    deeds: dict[str, Callable[[], Any]] = {
        "missing": a_shard(filled).unlink,
        "damaged": lambda: os.truncate(a_shard(filled), 99),
        "permissions": lambda: filled.root.chmod(0o755),
        "names": lambda: (filled.root / "prefixes.json").write_text("{}"),
    }
    deeds[fault]()
    found = run("check")
    assert found.code == 1
    assert "prefixbank repair" in found.out
    assert run("repair").code == 0
    assert run("check", "--read-data").code == 0


def test_no_bank_newer_schema_and_a_busy_index_have_their_exit_codes(filled: FilledBank, run: Run) -> None:
    import sqlite3
    from contextlib import closing

    assert run("repair", bank=filled.root / "nowhere").code == 10
    with closing(sqlite3.connect(filled.root / "index.sqlite3", isolation_level=None)) as index:
        index.execute("BEGIN EXCLUSIVE")
        assert run("--busy-timeout", "0.05", "repair").code == 11
        index.execute("ROLLBACK")
        index.execute("UPDATE alembic_version SET version_num = '9999'")
    before = digest_of(filled.root)
    assert run("repair").code == 12
    assert digest_of(filled.root) == before
