"""Hold the verbs that only look to their rules: ls, show, stats, check."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.index import rates_rows
from prefixbank.values import Rates
from tests.cli.banks import FINGERPRINTS, LABELS, FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def test_ls_lists_named_prefixes_by_default(run: Run, filled: FilledBank) -> None:
    lines = run("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "MODEL", "TOKENS", "BYTES", "PINNED", "STORED", "LAST", "USED"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["long", "models/first", "28"],
        ["other", "models/second", "10"],
        ["short", "models/first", "20"],
    ]
    assert run("ls", "prefixes").out.splitlines() == lines


def test_ls_says_all_of_a_prefix_in_json(run: Run, filled: FilledBank) -> None:
    document = run("ls", "--json").document
    assert document["root"] == str(filled.root)
    prefix = document["prefixes"][0]
    assert TIME.fullmatch(prefix.pop("last_used_at"))
    n_bytes, disk_bytes = prefix.pop("n_bytes"), prefix.pop("disk_bytes")
    assert 0 < n_bytes <= disk_bytes
    assert prefix == {
        "name": "long",
        "fingerprint": FINGERPRINTS[0],
        "salt_digest": None,
        "label": "models/first",
        "n_tokens": 28,
        "n_stored_tokens": 28,
        "pinned": False,
        "stored": True,
        "source_digest": "5e" * 32,
        "prefix_file": None,
        "file_state": "no file",
        "chunk_key": filled.last_keys["long"],
        "created_at": "2023-11-14T22:13:20Z",
    }


def test_ls_lists_chunks(run: Run, filled: FilledBank) -> None:
    document = run("ls", "chunks", "--json").document
    # 20 tokens are 8 + 8 + 4, 28 share the first 16 and add 8 + 4, 10 are 8 + 2
    assert sorted(c["n_tokens"] for c in document["chunks"]) == [2, 4, 4, 8, 8, 8, 8]
    assert all((filled.root / c["file"]).stat().st_size == c["n_bytes"] for c in document["chunks"])
    lines = run("ls", "chunks").out.splitlines()
    assert lines[0].split() == ["KEY", "NAMESPACE", "START", "TOKENS", "BYTES", "HITS", "LAST", "USED"]
    assert [line.split()[0] for line in lines[1:]] == [c["key"] for c in document["chunks"]]


def test_ls_lists_namespaces_and_tells_salts_apart(run: Run, filled: FilledBank) -> None:
    filled.store("salted", [1, 2, 3], salt=b"tenant")
    found = run("ls", "namespaces", "--json").document["namespaces"]
    assert [(n["fingerprint"], n["label"], n["n_chunks"], n["n_tokens"]) for n in found] == [
        (FINGERPRINTS[0], "models/first", 5, 32),
        (FINGERPRINTS[1], "models/second", 2, 10),
        (FINGERPRINTS[0], "models/first", 1, 3),
    ]
    assert [n["salt_digest"] is None for n in found] == [True, True, False]
    lines = run("ls", "namespaces").out.splitlines()
    assert lines[1].split()[:3] == ["ab" * 6, "-", "models/first"]
    assert lines[3].split()[1] == found[2]["salt_digest"][:8]


def test_ls_of_an_empty_bank_prints_nothing_on_stdout(run: Run, empty: FilledBank) -> None:
    outcome = run("ls")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"prefixbank: no prefixes in {empty.root}\n"
    assert run("ls", "--json").document["prefixes"] == []


def test_ls_shows_evicted_prefixes_with_their_model(run: Run, filled: FilledBank) -> None:
    assert run("prune", "--max-bytes", "0").code == 0
    found = run("ls", "--json").document["prefixes"]
    assert [(p["name"], p["label"], p["stored"], p["disk_bytes"]) for p in found] == [
        ("long", "models/first", False, 0),
        ("other", "models/second", False, 0),
        ("short", "models/first", False, 0),
    ]
    assert "no (evicted)" in run("ls").out


def test_ls_says_how_much_is_stored_where_a_shard_was_lost(run: Run, filled: FilledBank) -> None:
    from prefixbank.index import chunk_rows

    with PrefixBank.open(filled.root) as bank, bank._session.index.writing() as tx:
        first = next(c for c in chunk_rows.list_all(tx) if c.start == 8)
        assert chunk_rows.heal(tx, first)
    found = {p["name"]: p for p in run("ls", "--json").document["prefixes"]}
    assert (found["short"]["stored"], found["short"]["n_stored_tokens"]) == (False, 8)
    assert found["other"]["stored"]
    assert "8 tokens" in run("ls").out
    assert "(lost)" in run("show", "short").out


def test_names_and_labels_cannot_drive_a_terminal(
    run: Run, filled: FilledBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LABELS, FINGERPRINTS[1], "evil\x1b[2J\nmodel 模型")
    filled.store("中文", [7, 8, 9], fingerprint=FINGERPRINTS[1], salt=b"new")
    lines = run("ls").out.splitlines()
    assert len(lines) == 5
    assert "evil\\x1b[2J\\nmodel 模型" in lines[-1]
    column = lines[1].index("models/first")
    assert lines[-1].index("evil") == column - 2  # two characters that take two columns each


def test_show_tells_all_of_a_prefix(run: Run, filled: FilledBank) -> None:
    prefix = run("show", "short", "--json").document["prefixes"][0]
    assert (prefix["name"], prefix["n_tokens"], prefix["stored"]) == ("short", 20, True)
    assert [(c["start"], c["n_tokens"], c["hits"]) for c in prefix["chunks"]] == [(0, 8, 0), (8, 8, 0), (16, 4, 0)]
    assert prefix["chunks"][1]["parent_key"] == prefix["chunks"][0]["key"]
    text = run("show", "short").out
    assert text.startswith("short\n  model      models/first\n")
    assert all(c["key"] in text and c["file"] in text for c in prefix["chunks"])


def test_show_tells_a_name_of_each_model_that_has_it(run: Run, filled: FilledBank) -> None:
    filled.store("short", list(range(5)), fingerprint=FINGERPRINTS[1])
    document = run("show", "short", "--json").document
    assert [p["label"] for p in document["prefixes"]] == ["models/first", "models/second"]
    assert run("show", "short").out.count("  model ") == 2


def test_show_finds_a_chunk_by_the_start_of_its_key(run: Run, filled: FilledBank) -> None:
    chunks = run("show", "short", "--json").document["prefixes"][0]["chunks"]
    run("pin", "long")
    chunk = run("show", chunks[0]["key"][:6].upper(), "--json").document["chunk"]
    assert chunk == chunks[0] | {"prefix_names": ["long", "short"], "pinned": True}
    text = run("show", chunks[2]["key"]).out
    assert "tokens     4, from 16" in text
    assert "prefixes   short" in text


@pytest.mark.parametrize("name", ["nothing", "abcdef", "abc", "ABCDEF0123456789ABCDEF0123456789"])
def test_show_of_an_unknown_name_is_a_usage_error(run: Run, filled: FilledBank, name: str) -> None:
    outcome = run("show", name)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"prefixbank: no prefix is named '{name}'")


def test_stats_sums_up_what_the_bank_holds(run: Run, filled: FilledBank) -> None:
    run("pin", "short")
    document = run("stats", "--json").document
    on_disk = sum(c["disk_bytes"] for c in run("ls", "chunks", "--json").document["chunks"])
    assert document == {
        "root": str(filled.root),
        "n_prefixes": 3,
        "n_pinned": 1,
        "n_namespaces": 2,
        "n_chunks": 7,
        "n_holes": 0,
        "n_tokens": 42,
        "disk_bytes": on_disk,
        "quarantined_bytes": 0,
        "max_bytes": None,
        "rates": [],
    }
    text = run("stats").out
    assert "prefixes     3 (1 pinned)" in text
    assert "no budget" in text
    assert "speed" not in text


def test_stats_says_how_fast_models_compute_and_load(run: Run, filled: FilledBank) -> None:
    with PrefixBank.open(filled.root) as bank, bank._session.index.writing() as tx:
        first, second = sorted(usage.namespace.id for usage in bank.namespaces())
        rates_rows.remember(tx, Rates(first, "gpu Toaster", 0.125, 0.004, 0.5, 1e-9, 1_700_000_000))
        rates_rows.remember(tx, Rates(second, "cpu Abacus", None, None, None, None, 1_700_000_000))
    rates = run("stats", "--json").document["rates"]
    assert rates[0] == {
        "fingerprint": FINGERPRINTS[0],
        "salt_digest": None,
        "label": "models/first",
        "device": "gpu Toaster",
        "compute_s": 0.125,
        "compute_s_per_token": 0.004,
        "load_s": 0.5,
        "load_s_per_byte": 1e-9,
        "updated_at": "2023-11-14T22:13:20Z",
    }
    assert (rates[1]["fingerprint"], rates[1]["load_s"]) == (FINGERPRINTS[1], None)
    text = run("stats").out
    assert "speed        computing 250 tokens/s, loading 1.0 GB/s (models/first, gpu Toaster)" in text
    assert "speed        unknown (models/second, cpu Abacus)" in text


def test_check_of_a_sound_bank_finds_no_problem(run: Run, filled: FilledBank) -> None:
    outcome = run("check", "--read-data", "--json")
    assert outcome.code == 0
    document = outcome.document
    assert (document["ok"], document["read_data"], document["n_chunks"], document["findings"]) == (True, True, 7, [])
    assert run("check").out.startswith("0 problems and 0 notes in 7 chunks (")


def test_check_ends_with_1_for_problems_and_names_them(run: Run, filled: FilledBank) -> None:
    shards = sorted(filled.root.glob("shards/*/*"))
    shards[0].unlink()
    _flip_last_byte(shards[1])
    outcome = run("check", "--json")
    assert outcome.code == 1
    assert [f["kind"] for f in outcome.document["findings"]] == ["missing"]
    outcome = run("check", "--read-data", "--json")
    assert outcome.code == 1
    assert sorted(f["kind"] for f in outcome.document["findings"]) == ["corrupt", "missing"]
    text = run("check", "--read-data")
    assert text.code == 1
    assert shards[0].name in text.out
    assert text.out.splitlines()[-1].startswith("2 problems and 0 notes in 7 chunks")


def test_check_notes_what_is_harmless_and_ends_with_0(run: Run, filled: FilledBank) -> None:
    run("prune", "--max-bytes", "0")
    outcome = run("check")
    assert outcome.code == 0
    assert "note  evicted  long" in outcome.out


def test_reading_verbs_change_no_byte(run: Run, filled: FilledBank) -> None:
    (filled.root / "prefixes").mkdir()
    (filled.root / "prefixes" / "short.toml").write_text("instructions = 'x'")
    before = digest_of(filled.root)
    key = filled.last_keys["short"]
    verbs = [
        "ls",
        "ls files",
        "ls chunks",
        "ls namespaces",
        "show short",
        f"show {key}",
        "stats",
        "check",
        "check --read-data",
    ]
    for verb in verbs:
        assert run(*verb.split()).code == 0
        assert run(*verb.split(), "--json").code == 0
    assert digest_of(filled.root) == before


def test_bars_are_shown_on_a_terminal_only_and_never_on_stdout(
    run: Run, filled: FilledBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("check", "--read-data", "--json").err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = run("check", "--read-data", "--json")
    assert outcome.document["ok"]
    assert "checking" in outcome.err


def _flip_last_byte(path: Path) -> None:
    shard = bytearray(path.read_bytes())
    shard[-1] ^= 1
    path.write_bytes(shard)


def test_tables_on_a_terminal_are_folded_not_cut(run: Run, filled: FilledBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = re.sub(r"\x1b\[[0-9;]*m", "", run("ls").out)  # without the styles
    assert max(len(line) for line in out.splitlines()) <= 60
    cells = " ".join(out.split())
    for name in ("long", "other", "short"):
        assert name in cells
    # Every letter of every cell is there, whatever line it is folded to.
    assert all(out.count(letter) >= "models/firstmodels/firstmodels/second".count(letter) for letter in "mdfisc")
