"""The file that results are streamed to: whole lines, torn ends, broken lines, one run at a time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbank.errors import ConfigError, StorageError
from prefixbank.resultsfile import ResultLine, ResultsFile, prompt_digest

LINE = ResultLine(0, "prompt", "settings", "text", [1, 2], 3, 4, "stop")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def write(path: Path, *lines: ResultLine) -> bytes:
    file = ResultsFile(path, "settings")
    for line in lines:
        file.append(line)
    file.close()
    return path.read_bytes()


def read(path: Path, digest: str = "prompt", index: int = 0) -> ResultLine | None:
    file = ResultsFile(path, "settings")
    try:
        return file.take(digest, index, once=False)
    finally:
        file.close()


@pytest.mark.parametrize("text", ["", "plain", "line\nbreak", "Grüße 🎉", "\u2028", "\x00", '"\\', "\ud800"])
def test_what_is_appended_is_found_again(text: str, path: Path) -> None:
    line = replace(LINE, text=text, finish_reason=None)
    content = write(path, line)
    assert content.count(b"\n") == 1
    assert read(path) == line


def test_results_of_other_settings_and_prompts_are_not_found(path: Path) -> None:
    write(path, replace(LINE, settings_digest="others"))
    assert read(path) is None
    write(path, LINE)
    assert read(path, "another prompt") is None
    assert read(path) == LINE


def test_of_several_results_that_of_the_same_index_is_taken(path: Path) -> None:
    write(path, replace(LINE, index=5), replace(LINE, index=6), replace(LINE, index=7))
    assert (found := read(path, index=6)) is not None
    assert found.index == 6
    file = ResultsFile(path, "settings")
    taken = [file.take("prompt", index, once=True) for index in (7, 1, 2, 3)]
    file.close()
    assert [line and line.index for line in taken] == [7, 5, 6, None]


@given(st.integers(0, 400))
def test_a_file_that_is_cut_anywhere_loses_the_torn_line_alone(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        content = write(path, LINE, replace(LINE, prompt_digest="second"))
        cut = min(cut, len(content))
        path.write_bytes(content[:cut])
        n_whole = [len(part) for part in content.splitlines()]
        first, second = cut >= n_whole[0], cut >= len(content) - 1
        assert (read(path) is not None, read(path, "second") is not None) == (first, second)
        assert path.read_bytes() in (b"", content[: n_whole[0] + 1], content)
        assert write(path, replace(LINE, prompt_digest="third")).count(b"\n") == first + second + 1
        assert read(path, "third") is not None


def without(name: str) -> str:
    return json.dumps({key: value for key, value in asdict(LINE).items() if key != name})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "no JSON"),
        ("\x00\x00\x00", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "no JSON object"),
        (without("token_ids"), "there is no 'token_ids'"),
        (json.dumps({**asdict(LINE), "text": 5}), "'text' is of type int"),
        (json.dumps({**asdict(LINE), "index": True}), "'index' is of type bool"),
        (json.dumps({**asdict(LINE), "token_ids": ["a"]}), "no list of integers"),
        (json.dumps({**asdict(LINE), "token_ids": [True]}), "no list of integers"),
    ],
)
def test_a_broken_line_is_named_and_the_file_left_as_it_is(broken: str, message: str, path: Path) -> None:
    whole = json.dumps(asdict(LINE))
    path.write_text(f"{whole}\n{broken}\n{whole}\n")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"results.jsonl, line 2: .*{message}"):
        ResultsFile(path, "settings")
    assert path.read_bytes() == before
    path.write_text(f"{whole}\n\n{whole}\n")  # an empty line is none
    assert read(path) == LINE


def test_bytes_that_are_no_text_are_a_broken_line(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 1: this is no JSON"):
        ResultsFile(path, "settings")


def test_two_runs_can_not_write_to_one_file(path: Path) -> None:
    first = ResultsFile(path, "settings")
    with pytest.raises(ConfigError, match="another run writes to"):
        ResultsFile(path, "settings")
    first.close()
    first.close()
    write(path, LINE)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    import os

    with pytest.raises(ConfigError, match="can't be written"):
        ResultsFile(tmp_path, "settings")
    with pytest.raises(ConfigError, match="can't be written"):
        ResultsFile(tmp_path / "nowhere" / "results.jsonl", "settings")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        ResultsFile(tmp_path / "pipe", "settings")


def test_a_write_that_fails_is_a_storage_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prefixbank.resultsfile._write", fail)
    with pytest.raises(StorageError, match="No space left on device; call again with the same file"):
        write(path, LINE)


def test_results_can_hold_answers_so_they_are_the_users_alone(path: Path) -> None:
    write(path, LINE)
    assert path.stat().st_mode & 0o077 == 0


def test_prompts_are_told_apart_by_all_their_token_ids() -> None:
    assert prompt_digest(b"\1\0\0\0") != prompt_digest(b"\1\0\0\0\1\0\0\0")
    assert len(prompt_digest(b"")) == 64
