"""Hold `warm` to its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.banks import TEXT, FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]

N_TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head_dim, float32


def test_warm_makes_the_bank_and_stores_what_few_shot_prompts_share(run: Run, warm: Run, shots: str) -> None:
    outcome = warm(shots, "--pin", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    (warmed,) = outcome.document["prefixes"]
    assert (warmed["source"], warmed["name"], warmed["pinned"]) == (shots, "lamps/v1", True)
    assert warmed["stored_tokens"] == warmed["computed_tokens"] == warmed["n_tokens"] > 0
    assert warmed["written_bytes"] > warmed["n_tokens"] * N_TOKEN_BYTES
    (prefix,) = run("ls", "--json").document["prefixes"]
    assert (prefix["name"], prefix["n_tokens"], prefix["pinned"]) == ("lamps/v1", warmed["n_tokens"], True)


def test_warming_again_writes_nothing(warm: Run, shots: str) -> None:
    first = warm(shots, "--json").document["prefixes"][0]
    again = warm(shots, "--json").document["prefixes"][0]
    assert (again["cached_tokens"], again["computed_tokens"], again["written_bytes"]) == (first["n_tokens"], 0, 0)


def test_warm_stores_a_whole_text_from_a_file_or_stdin(
    run: Run, warm: Run, text: str, stdin: Callable[[str], None]
) -> None:
    warmed = warm(text, "--name", "text", "--json").document["prefixes"][0]
    assert (warmed["name"], warmed["cached_tokens"]) == ("text", 0)
    for source in (["-"], []):
        stdin(TEXT)
        again = warm(*source, "--json").document["prefixes"][0]
        assert (again["source"], again["cached_tokens"]) == ("stdin", warmed["n_tokens"])


def test_warm_prints_a_table(warm: Run, text: str) -> None:
    header, row = warm(text, "--name", "text").out.splitlines()
    assert header.split("  ")[0] == "PREFIX"
    assert "COMPUTED" in header
    assert row.split()[0] == "text"
    header, row = warm(text, "--name", "text", "-n").out.splitlines()
    assert "TO COMPUTE" in header


def test_warm_takes_each_kind_of_json_line(run: Run, warm: Run, lines: Callable[..., str]) -> None:
    source = lines(
        {"text": "the zip broke", "name": "text", "pin": True},
        "",
        {"messages": [{"role": "user", "content": "hello"}], "name": "chat"},
        {"token_ids": [1, 2, 3, 4]},
        {"instructions": "Judge.", "examples": [{"input": "a", "output": "b"}], "name": "shots", "pin": False},
    )
    warmed = warm(source, "--json").document["prefixes"]
    assert [w["name"] for w in warmed] == ["text", "chat", None, "shots"]
    assert [w["source"] for w in warmed] == [f"{source}, line {n}" for n in (1, 3, 4, 5)]
    assert warmed[2]["n_tokens"] == 4
    assert {p["name"]: p["pinned"] for p in run("ls", "--json").document["prefixes"]} == {
        "text": True,
        "chat": False,
        "shots": False,
    }


def test_json_lines_come_from_stdin_too(warm: Run, stdin: Callable[[str], None]) -> None:
    stdin('{"token_ids": [5, 6, 7]}\n')
    assert warm("--jsonl", "--json").document["prefixes"][0]["source"] == "stdin, line 1"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "is no JSON"),
        ('["text"]', "is no JSON object"),
        ('{"txt": "a"}', "needs one of text, messages, token_ids, or instructions"),
        ('{"text": "a", "token_ids": [1]}', "needs one of"),
        ('{"text": "a", "instructions": "b"}', "needs one of"),
        ('{"text": 7}', "text has the wrong type int"),
        ('{"text": "a", "pin": 1}', "pin must be true or false"),
        ('{"text": "a", "pin": true}', "a pin needs a name"),
        ('{"token_ids": ["a"]}', "token ids must be integers"),
        ('{"text": ""}', "the prompt is empty"),
        ('{"instructions": "a", "shots": []}', "unknown key 'shots'"),
    ],
)
def test_a_bad_line_is_named_and_earlier_lines_stay_stored(
    run: Run, warm: Run, lines: Callable[..., str], line: str, part: str
) -> None:
    source = lines({"text": "the lamp", "name": "first"}, line, {"text": "never"})
    outcome = warm(source, "--json")
    assert outcome.code == 2
    assert outcome.err.startswith(f"prefixbank: {source}, line 2")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1
    assert [w["name"] for w in outcome.document["prefixes"]] == ["first"]
    assert [p["name"] for p in run("ls", "--json").document["prefixes"]] == ["first"]


@pytest.mark.parametrize("args", [["--json"], []])
def test_warm_dry_run_plans_what_is_then_done_and_changes_nothing(
    run: Run, warm: Run, empty: FilledBank, text: str, tmp_path: Path, args: list[str]
) -> None:
    warm(text, "--name", "text")
    longer = tmp_path / "longer.txt"
    longer.write_text(TEXT[:-8] + " of the lovely lamp")
    before = digest_of(empty.root)
    planned = warm(str(longer), "-n", *args)
    assert planned.code == 0
    assert digest_of(empty.root) == before
    done = warm(str(longer), *args)
    if args:
        (plan,), (result,) = planned.document["prefixes"], done.document["prefixes"]
        assert result.pop("seconds") > 0
        assert plan.pop("seconds") == plan.pop("compute_s") > 0  # measured by the first run
        assert plan.pop("load_s") is None
        assert plan == result
        assert 0 < result["cached_tokens"] < result["n_tokens"]
        n_stored_anew = result["n_tokens"] - result["cached_tokens"] // 8 * 8
        assert result["written_bytes"] > n_stored_anew * N_TOKEN_BYTES  # the heads of the shards come on top
        again = warm(str(longer), "-n", "--json").document["prefixes"][0]
        assert (again["computed_tokens"], again["written_bytes"]) == (0, 0)


def test_warm_dry_run_without_a_bank_makes_none(warm: Run, root: Path, shots: str) -> None:
    (planned,) = warm(shots, "-n", "--json").document["prefixes"]
    assert (planned["cached_tokens"], planned["computed_tokens"]) == (0, planned["n_tokens"])
    assert planned["seconds"] is planned["compute_s"] is None  # nothing was measured yet
    assert not root.exists()
    assert "unknown" in warm(shots, "-n").out
    assert warm(shots, "--json").document["prefixes"][0]["written_bytes"] == planned["written_bytes"] > 0


def test_a_budget_that_refuses_a_prefix_ends_with_1_and_warns(warm: Run, text: str) -> None:
    outcome = warm(text, "--name", "text", "--max-bytes", "100", "--json")
    assert outcome.code == 1
    assert outcome.err.startswith("prefixbank: warning: a prefix was not stored whole: ")
    assert outcome.document["prefixes"][0]["stored_tokens"] == 0


def test_options_of_the_cache_keep_namespaces_apart(run: Run, warm: Run, text: str) -> None:
    for options in ([], ["--salt", "tenant"], ["--kv-bits", "8", "--kv-group-size", "32"]):
        assert warm(text, *options, "--json").document["prefixes"][0]["cached_tokens"] == 0
    assert len(run("ls", "namespaces", "--json").document["namespaces"]) == 3


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["nowhere.txt"], 2, "nowhere.txt can't be read: No such file"),
        (["nowhere.toml"], 2, "nowhere.toml can't be read"),
        (["nowhere.jsonl"], 2, "nowhere.jsonl can't be read"),
        (["TEXT", "--pin"], 2, "a pin needs a name: give --name"),
        (["TEXT", "--precision", "half"], 2, "use auto, model or float32"),
        (["TEXT", "--prefill-step-size", "0"], 2, "prefill_step_size=0 must be at least 1"),
        (["TEXT", "--name", ""], 2, "can't be a prefix name"),
        (["LINES", "--name", "x"], 2, "--name is for one prompt"),
        (["EMPTY", "--jsonl"], 2, "holds no prompt"),
        (["EMPTY"], 2, "the prompt is empty"),
        (["BINARY"], 2, "is no UTF-8 text"),
    ],
)
def test_what_cannot_be_warmed_is_said_in_one_line(
    warm: Run, tmp_path: Path, args: list[str], code: int, part: str
) -> None:
    for name, content in (("TEXT", b"text"), ("EMPTY", b""), ("BINARY", b"\xff\xfe"), ("x.jsonl", b"{}")):
        (tmp_path / name).write_bytes(content)
    names = {"LINES": "x.jsonl"}
    given = [str(tmp_path / names.get(a, a)) if a.isupper() else a for a in args]
    outcome = warm(*given)
    assert (outcome.code, outcome.out) == (code, "")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_model_that_is_none_is_said_in_one_line(run: Run, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "no-model"
    folder.mkdir()
    outcome = run("warm", text, "--model", str(folder))
    assert (outcome.code, outcome.out) == (2, "")
    assert str(folder) in outcome.err
    assert outcome.err.count("\n") == 1
