"""Hold the few-shot files of a bank to their rules on the command line: warming, planning, versions, listing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from tests.cli.banks import FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]
Write = Callable[..., Path]

MOOD = """
instructions = "Say {{what}}."
variables = {what = "positive or negative"}
queries = ["the wick broke"]
[[examples]]
input = "the lamp is lovely"
output = "positive"
[[examples]]
input = "the zip broke"
output = "negative"
"""


@pytest.fixture
def write(root: Path) -> Write:
    """Give a function that writes a file into the bank's folder of few-shot files."""

    def write_file(path: str, content: str = MOOD) -> Path:
        whole = root / "prefixes" / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(content)
        return whole

    return write_file


def names(outcome: Outcome) -> list[str]:
    return [prefix["name"] for prefix in outcome.document["prefixes"]]


def states(run: Run) -> dict[str, Any]:
    return {prefix["name"]: prefix["file_state"] for prefix in run("ls", "--json").document["prefixes"]}


# --- by name


def test_explain_takes_a_files_name_too(explain: Run, warm: Run, write: Write) -> None:
    path = write("mood/v1.toml")
    n_shared = warm("mood/v1", "--json").document["prefixes"][0]["n_tokens"]
    (explained,) = explain("mood/v1", "--query", "7 lamps broke", "--json").document["explanations"]
    assert (explained["source"], explained["n_matched_tokens"]) == (str(path), n_shared)


def test_a_file_is_warmed_by_its_name_or_its_path_under_the_same_name(run: Run, warm: Run, write: Write) -> None:
    path = write("mood/v1.toml")
    by_name = warm("mood/v1", "--json").document["prefixes"][0]
    assert (by_name["name"], by_name["source"]) == ("mood/v1", str(path))
    by_path = warm(str(path), "--json").document["prefixes"][0]
    assert (by_path["name"], by_path["computed_tokens"]) == ("mood/v1", 0)
    assert states(run) == {"mood/v1": "warm"}
    assert names(warm("mood/v1", "--name", "other", "--json")) == ["other"]


def test_a_path_that_is_there_goes_before_a_name(
    warm: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mood.toml")
    write("folder.toml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mood").write_text("the lamp is lovely")
    (tmp_path / "folder").mkdir()
    assert names(warm("mood", "--json")) == [None]
    assert names(warm("folder", "--json")) == ["folder"]


def test_a_name_that_is_none_is_told_with_those_there_are(warm: Run, write: Write, root: Path) -> None:
    write("mood/v1.toml")
    outcome = warm("mood/v2")
    assert (outcome.code, outcome.out) == (2, "")
    assert "mood/v2 can't be read: No such file" in outcome.err
    assert f"no prefix file in {root / 'prefixes'} is called 'mood/v2': there are mood/v1" in outcome.err
    assert outcome.err.count("\n") == 1


# --- k and variables


def test_first_examples_and_variables_make_prefixes_of_their_own(run: Run, warm: Run, write: Write) -> None:
    write("mood.toml")
    whole = warm("mood", "--json").document["prefixes"][0]
    first = warm("mood", "-k", "1", "--json").document["prefixes"][0]
    assert first["name"] == "mood@k=1"
    assert (first["computed_tokens"], first["written_bytes"]) == (0, 0)
    assert 0 < first["n_tokens"] < whole["n_tokens"]
    assert names(warm("mood", "--var", "what=yes", "--json")) == ["mood@what=yes"]
    assert names(warm("mood", "-k", "2", "--var", "what=positive or negative", "--json")) == ["mood"]
    assert states(run) == {"mood": "warm", "mood@k=1": "warm", "mood@what=yes": "warm"}


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["mood", "-k", "3"], "mood.toml: k=3 is out of range: mood has 2 examples"),
        (["PATH", "-k", "-1"], "mood.toml: k=-1 is out of range"),
        (["SHOTS", "-k", "9"], "shots.toml: k=9 is out of range: lamps/v1 has 1 examples"),
        (["mood", "--var", "tone=x"], "mood.toml: unknown variable 'tone' (known: what)"),
        (["SHOTS", "--var", "what=x"], "shots.toml has no table [variables]"),
        (["mood", "--var", "what"], "--var what: give each variable once, as name=value"),
        (["mood", "--var", "what=x", "--var", "what=y"], "--var what=y: give each variable once"),
        (["TEXT", "-k", "1"], "prompt.txt is no few-shot file: -k and --var are for these"),
        (["-", "--var", "a=b"], "stdin is no few-shot file"),
        (["TEXT", "--jsonl", "-k", "1"], "is no few-shot file"),
        (["mood", "--old", "lose"], "lose"),
        (["mood", "--boundaries", "all"], "all"),
        (["mood", "--all"], "--all takes all few-shot files as they are"),
        (["--all", "-k", "1"], "--all takes all few-shot files as they are"),
        (["--all", "--var", "a=b"], "--all takes all few-shot files as they are"),
        (["--all", "--name", "x"], "--all takes all few-shot files as they are"),
        (["--all", "--jsonl"], "--all takes all few-shot files as they are"),
    ],
    ids=str,
)
def test_wrong_options_are_said_in_one_line(
    warm: Run, write: Write, text: str, shots: str, root: Path, args: list[str], part: str
) -> None:
    paths = {"TEXT": text, "SHOTS": shots, "PATH": str(write("mood.toml"))}
    outcome = warm(*(paths.get(arg, arg) for arg in args))
    assert (outcome.code, outcome.out) == (2, "")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (root / "bank.json").exists()


# --- all


def test_all_warms_what_is_not_warm(run: Run, warm: Run, write: Write) -> None:
    write("b.toml")
    write("a/v1.toml", MOOD.replace("lovely", "great"))
    done = warm("--all", "--pin", "--json")
    assert (done.code, names(done), done.document["errors"]) == (0, ["a/v1", "b"], [])
    write("c.toml", MOOD.replace("lovely", "awful"))
    done = warm("--all", "--json").document["prefixes"]
    assert [p["name"] for p in done if p["computed_tokens"]] == ["c"]
    assert states(run) == {"a/v1": "warm", "b": "warm", "c": "warm"}
    assert [p["pinned"] for p in run("ls", "--json").document["prefixes"]] == [True, True, False]


def test_a_broken_file_stops_no_other_and_is_told_at_the_end(run: Run, warm: Run, write: Write, root: Path) -> None:
    write("a.toml")
    broken = write("b.toml", "instructions = 'x'\nexamples = 5")
    chat = write("c.toml", MOOD + "output2 = 'x'")
    write("d.toml", MOOD.replace("lovely", "great"))
    for args in (["-n"], []):
        outcome = warm("--all", "--json", *args)
        assert outcome.code == 1
        assert names(outcome) == ["a", "d"]
        assert [(e["name"], e["source"]) for e in outcome.document["errors"]] == [("b", str(broken)), ("c", str(chat))]
        assert outcome.err.splitlines() == [f"prefixbank: {e['error']}" for e in outcome.document["errors"]]
        assert f"{broken}: examples has the wrong type int" in outcome.err
    assert states(run) == {"a": "warm", "d": "warm"}


def test_a_prompt_that_the_model_refuses_stops_no_other(
    run: Run, write: Write, tiny_model: Path, tmp_path: Path
) -> None:
    write("a.toml", "chat = true\nroles = {input = 'nobody'}\n" + MOOD)
    write("b.toml")
    template = (
        "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}"
    )
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    folder = tmp_path / "refusing"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    outcome = run("warm", "--all", "--json", "--model", str(folder))
    assert outcome.code == 1
    assert names(outcome) == ["b"]
    assert "a.toml: the chat template refuses these messages: who?" in outcome.document["errors"][0]["error"]


def test_all_broken_files_load_no_model_and_make_no_bank(run: Run, write: Write, root: Path) -> None:
    write("a.toml", "x")
    outcome = run("warm", "--all", "--model", "no/such-model")
    assert (outcome.code, outcome.out) == (1, "")
    assert "a.toml is no valid TOML" in outcome.err
    assert "line 1" in outcome.err
    assert not (root / "bank.json").exists()


def test_all_of_nothing_is_a_usage_error(run: Run, root: Path) -> None:
    outcome = run("warm", "--all", "--model", "no/such-model")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{root / 'prefixes'} holds no few-shot files" in outcome.err


# --- plans


def test_a_plan_of_all_says_what_is_then_written_and_writes_nothing(warm: Run, write: Write, empty: FilledBank) -> None:
    for name, word in (("a", "lovely"), ("b", "great"), ("c", "awful")):
        write(f"{name}.toml", MOOD.replace("lovely", word))
    write("d.toml")  # the same as the first
    before = digest_of(empty.root)
    planned = warm("--all", "-n", "--json")
    text = warm("--all", "-n").out
    assert digest_of(empty.root) == before
    done = warm("--all", "--json")
    for key in ("written_bytes", "computed_tokens", "cached_tokens", "n_tokens", "name"):
        assert [p[key] for p in planned.document["prefixes"]] == [p[key] for p in done.document["prefixes"]]
    assert planned.document["prefixes"][3]["written_bytes"] == 0 < planned.document["prefixes"][2]["written_bytes"]
    assert [p["seconds"] for p in planned.document["prefixes"][:3]] == [None] * 3
    header = " ".join(text.splitlines()[0].split())
    assert header == "PREFIX TOKENS STORED FROM THE BANK TO COMPUTE TO WRITE TIME PINNED"
    assert text.splitlines()[-1].startswith("in all: ")
    assert text.splitlines()[-1].endswith("to write, time unknown")


def test_a_plan_knows_the_time_once_the_model_was_measured(warm: Run, write: Write, text: str) -> None:
    warm(text)
    write("mood.toml")
    (planned,) = warm("mood", "-n", "--json").document["prefixes"]
    assert planned["seconds"] == planned["compute_s"] > 0
    assert planned["load_s"] == 0.0
    assert warm("mood", "-n").out.splitlines()[1].split()[-2:] in (["ms", "no"], ["s", "no"])
    (done,) = warm("mood", "--json").document["prefixes"]
    assert done["seconds"] > 0


# --- versions


@pytest.mark.parametrize("old", ["drop", "keep", "leave", None])
def test_a_changed_file_is_seen_and_its_old_version_dropped_or_kept(
    run: Run, warm: Run, write: Write, root: Path, old: str | None
) -> None:
    args = [] if old is None else ["--old", old]
    old = old or "drop"
    write("mood.toml")
    warm("mood", "--pin")
    digest = run("ls", "--json").document["prefixes"][0]["source_digest"]
    n_chunks = len(run("ls", "chunks", "--json").document["chunks"])
    write("mood.toml", MOOD.replace("lovely", "great"))
    assert states(run) == {"mood": "changed"}
    before = digest_of(root)
    (planned,) = warm("mood", "-n", "--json", *args).document["prefixes"]
    assert "would be" in warm("mood", "-n", *args).out
    assert digest_of(root) == before
    outcome = warm("mood", *args)
    kept = f"mood@{digest[:8]}"
    fate = {"drop": "is dropped (", "keep": f"is kept as {kept}", "leave": "is left to eviction"}[old]
    assert f"mood has changed: its old version {digest[:8]} {fate}" in outcome.out
    assert planned["replaced"]["source_digest"] == digest
    assert planned["replaced"]["kept_as"] == (kept if old == "keep" else None)
    assert (planned["replaced"]["freed_bytes"] > 0) == (old == "drop")
    assert states(run) == ({"mood": "warm", kept: "old version"} if old == "keep" else {"mood": "warm"})
    assert all(p["pinned"] for p in run("ls", "--json").document["prefixes"])
    assert (len(run("ls", "chunks", "--json").document["chunks"]) > n_chunks) == (old != "drop")
    assert warm("mood", "--json").document["prefixes"][0]["replaced"] is None
    assert run("check", "--read-data").code == 0


# --- listing


def test_ls_and_show_say_how_prefixes_and_files_compare(
    run: Run, warm: Run, write: Write, filled: FilledBank, text: str
) -> None:
    write("mood/v1.toml")
    warm("mood/v1")
    warm(text, "--name", "text")
    assert states(run) == {
        "long": "no file",
        "mood/v1": "warm",
        "other": "no file",
        "short": "no file",
        "text": None,
    }
    lines = run("ls").out.splitlines()
    assert lines[0].split()[-1] == "FILE"
    assert [line.split()[-1] for line in lines[1:]] == ["file", "warm", "file", "file", "-"]
    write("mood/v1.toml", MOOD.replace("lovely", "great"))
    shown = run("show", "mood/v1", "--json").document["prefixes"][0]
    assert (shown["prefix_file"], shown["file_state"]) == ("prefixes/mood/v1.toml", "changed")
    assert "  file       prefixes/mood/v1.toml (changed)\n" in run("show", "mood/v1").out
    assert "  file       -\n" in run("show", "text").out


def test_ls_files_lists_files_and_few_shot_prompts_without_one(
    run: Run, warm: Run, write: Write, empty: FilledBank, shots: str
) -> None:
    write("a.toml")
    write("b.toml", "name = 'mood/v1'\n" + MOOD.replace("lovely", "great"))
    broken = write("c.toml", "instructions = ")
    warm("mood/v1")
    warm(shots)
    files = {file["name"]: file for file in run("ls", "files", "--json").document["files"]}
    assert list(files) == ["a", "c", "mood/v1", "lamps/v1"]
    assert (files["a"]["prefix_file"], files["a"]["n_examples"], files["a"]["stored"]) == ("prefixes/a.toml", 2, [])
    (stored,) = files["mood/v1"]["stored"]
    assert (stored["file_state"], stored["n_tokens"]) == ("warm", stored["n_stored_tokens"])
    assert str(broken) in files["c"]["error"]
    assert files["lamps/v1"]["prefix_file"] is None
    outcome = run("ls", "files")
    assert [" ".join(line.split()[:2] + line.split()[-2:]) for line in outcome.out.splitlines()] == [
        "NAME FILE TOKENS STATE",
        "a prefixes/a.toml not warmed",
        "c prefixes/c.toml - broken",
        f"mood/v1 prefixes/b.toml {stored['n_tokens']} warm",
        "lamps/v1 - no file",
    ]
    assert outcome.code == 0
    assert str(broken) in outcome.err


def test_ls_files_of_a_bank_without_any_says_so(run: Run, empty: FilledBank) -> None:
    outcome = run("ls", "files")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"prefixbank: no files in {empty.root}\n")


def test_names_of_files_cannot_drive_a_terminal(run: Run, write: Write, empty: FilledBank) -> None:
    write("evil\x1b[2J.toml")
    outcome = run("ls", "files")
    assert "\x1b" not in outcome.out + outcome.err


# --- boundaries


def test_boundaries_of_the_command_line_go_before_those_of_the_file(
    warm: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefixbank.model import BankedModel

    seen: list[Any] = []
    real = BankedModel.warm

    def noting(self: BankedModel, prompt: Any, **options: Any) -> Any:
        seen.append((prompt.boundaries, options["boundaries"]))
        return real(self, prompt, **options)

    monkeypatch.setattr(BankedModel, "warm", noting)
    write("mood.toml", "boundaries = 'examples'\n" + MOOD)
    assert warm("mood").code == warm("mood", "--boundaries", "end").code == 0
    assert seen == [("examples", None), ("examples", "end")]


# --- banks


def test_a_bank_with_files_and_nothing_else_is_made_around_them(warm: Run, write: Write, root: Path) -> None:
    path = write("mood.toml")
    assert warm("--all").code == 0
    assert path.read_text() == MOOD
    with PrefixBank.open(root) as bank:
        assert [str(file.stored[0].state) for file in bank.prefix_files()] == ["warm"]
        bank.prune(max_bytes=0)
    assert path.exists()
