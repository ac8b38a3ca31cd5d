"""Hold the few-shot files of a bank to their names, and to their states against what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import PromptError, UnknownPrefixError
from prefixbank.fewshot import FewShotPrompt
from prefixbank.index import chunk_rows
from prefixbank.prefixfiles import FileState, PrefixFile, PrefixFiles
from prefixbank.values import PrefixRecord
from prefixbank.variables import old_version_name
from tests.fakekv import FakeModel

MOOD = """
instructions = "Name the mood, {{tone}}."
variables = {tone = "dry"}
[[examples]]
input = "great"
output = "positive"
[[examples]]
input = "awful"
output = "negative"
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Give a function that writes a file into the bank's folder."""

    def write_file(path: str, content: str = MOOD) -> Path:
        whole = tmp_path / "bank" / "prefixes" / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(content)
        return whole

    return write_file


def files_of(bank: PrefixBank) -> dict[str, PrefixFile]:
    return {file.name: file for file in bank.prefix_files()}


# --- names


def test_a_file_is_called_by_its_path_unless_it_says_a_name(bank: PrefixBank, write: Write) -> None:
    write("mood.toml")
    write("sentiment/v3.toml")
    write("a/b/c/d.toml", "name = 'deep/one'\n" + MOOD)
    write("dots/v1.2.toml")
    assert set(files_of(bank)) == {"mood", "sentiment/v3", "deep/one", "dots/v1.2"}
    assert bank.few_shot("deep/one").name == "deep/one"
    assert bank.few_shot("sentiment/v3").name == "sentiment/v3"
    with pytest.raises(UnknownPrefixError, match=r"no prefix file .* is called 'a/b/c/d': there are deep/one, dots/"):
        bank.few_shot("a/b/c/d")


def test_a_bank_without_the_folder_has_no_files(bank: PrefixBank) -> None:
    assert bank.prefix_files() == []
    with pytest.raises(UnknownPrefixError, match="is called 'mood'"):
        bank.few_shot("mood")


def test_other_files_and_hidden_ones_are_passed_over(bank: PrefixBank, write: Write) -> None:
    for path in ("README.md", ".hidden.toml", ".git/x.toml", "x.toml.orig"):
        write(path)
    (write("mood.toml").parent / "folder.toml").mkdir()
    assert set(files_of(bank)) == {"mood"}


@pytest.mark.parametrize(
    "name", ["../out", "/etc/x", "a//b", "a/./b", "a/../b", "a\\\\b", "a@b", "-x", " x", "a/ ", "a\\u0007", "x" * 151]
)
def test_a_name_that_is_not_safe_is_refused(bank: PrefixBank, write: Write, name: str) -> None:
    path = write("mood.toml", f'name = "{name}"\n' + MOOD)
    (file,) = bank.prefix_files()
    assert file.shots is None
    assert str(path) in file.error
    assert "can't be a prefix file's name" in file.error
    with pytest.raises(PromptError, match="can't be a prefix file's name"):
        bank.few_shot(file.name)


def test_a_name_leads_to_no_file_outside_the_folder(bank: PrefixBank, write: Write, tmp_path: Path) -> None:
    write("mood.toml")
    (tmp_path / "bank" / "out.toml").write_text(MOOD)
    for name in ("../out", "out", str(tmp_path / "bank" / "out"), "./mood", "mood.toml", ""):
        with pytest.raises(UnknownPrefixError):
            bank.few_shot(name)


def test_links_out_of_the_folder_are_refused_and_others_read(bank: PrefixBank, write: Write, tmp_path: Path) -> None:
    inside = write("mood.toml")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.toml").write_text(MOOD)
    (inside.parent / "inner.toml").symlink_to(inside)
    (inside.parent / "outer.toml").symlink_to(outside / "x.toml")
    (inside.parent / "nowhere.toml").symlink_to(inside.parent / "gone.toml")
    (inside.parent / "circle.toml").symlink_to(inside.parent / "circle.toml")
    (inside.parent / "folder").symlink_to(outside)
    files = files_of(bank)
    assert set(files) == {"mood", "inner", "outer", "nowhere", "circle"}
    assert [name for name, file in files.items() if file.shots is not None] == ["inner", "mood"]
    assert "leads out of" in files["outer"].error
    assert "can't be read" in files["nowhere"].error
    assert "can't be read" in files["circle"].error


def test_the_folder_itself_may_be_a_link(bank: PrefixBank, tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "mood.toml").write_text(MOOD)
    (bank.root / "prefixes").symlink_to(tmp_path / "prompts")
    assert bank.few_shot("mood").name == "mood"


def test_files_of_one_name_are_both_broken_and_named(bank: PrefixBank, write: Write) -> None:
    first, second = write("a.toml", "name = 'mood'\n" + MOOD), write("b.toml", "name = 'mood'\n" + MOOD)
    write("c.toml")
    with pytest.raises(PromptError) as caught:
        bank.few_shot("mood")
    assert all(str(path) in str(caught.value) for path in (first, second))
    assert bank.few_shot("c").examples


def test_a_broken_file_stops_no_other(bank: PrefixBank, write: Write) -> None:
    write("good.toml")
    broken = write("broken.toml", "instructions = 'x'\nexamples = [")
    write("also.toml", "name = 'broken'\n" + MOOD)
    files = {file.path and file.path.name: file for file in bank.prefix_files()}
    assert files["good.toml"].shots is not None
    assert str(broken) in files["broken.toml"].error
    assert "line 2" in files["broken.toml"].error
    assert bank.few_shot("good").examples
    assert bank.few_shot("broken").examples  # the one that can be read and says so


def test_a_folder_that_can_not_be_read_is_told(bank: PrefixBank, tmp_path: Path) -> None:
    (bank.root / "prefixes").write_text("a file")
    (file,) = bank.prefix_files()
    assert str(bank.root / "prefixes") in file.error


# --- variations


def test_few_shot_takes_the_first_k_examples_and_other_values(bank: PrefixBank, write: Write) -> None:
    path = write("mood.toml")
    shots = bank.few_shot("mood", k=1, variables={"tone": "kind"})
    assert (shots.instructions, len(shots.examples)) == ("Name the mood, kind.", 1)
    assert shots.name == "mood@tone=kind,k=1"
    assert bank.few_shot("mood", k=2, variables={"tone": "dry"}) == bank.few_shot("mood")
    for wrong, part in (({"k": 3}, "k=3 is out of range"), ({"variables": {"tune": "x"}}, "unknown variable 'tune'")):
        with pytest.raises(PromptError) as caught:
            bank.few_shot("mood", **wrong)  # type: ignore[arg-type]
        assert str(path) in str(caught.value)
        assert part in str(caught.value)


def test_few_shot_reads_the_file_as_it_is_now(bank: PrefixBank, write: Write) -> None:
    write("mood.toml")
    before = bank.few_shot("mood")
    write("mood.toml", MOOD.replace("great", "lovely"))
    assert bank.few_shot("mood").source_digest != before.source_digest


# --- states


def store(model: FakeModel, name: str, shots: FewShotPrompt | None, token_ids: Any = range(10)) -> PrefixRecord:
    stored = model.store(list(token_ids))
    digest = "" if shots is None else shots.source_digest
    prefix = PrefixRecord(name, model.namespace.id, stored.last_key, stored.n_tokens, False, digest, 1)
    model.session.name_prefix(prefix)
    return prefix


def states(bank: PrefixBank) -> dict[str, list[FileState | None]]:
    return {file.name: [version.state for version in file.stored] for file in bank.prefix_files()}


def test_a_file_is_not_warmed_then_warm_then_changed(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    assert states(bank) == {"mood": []}
    store(model, "mood", bank.few_shot("mood"))
    assert states(bank) == {"mood": [FileState.WARM]}
    write("mood.toml", "# a remark changes nothing\n" + MOOD)
    assert states(bank) == {"mood": [FileState.WARM]}
    write("mood.toml", MOOD.replace("dry", "wry"))
    assert states(bank) == {"mood": [FileState.CHANGED]}


def test_what_was_evicted_or_partly_lost_is_told(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    store(model, "mood", bank.few_shot("mood"))
    with bank._session.index.writing() as tx:
        assert chunk_rows.heal(tx, next(c for c in chunk_rows.list_all(tx) if c.start == 4))
    assert states(bank) == {"mood": [FileState.PARTLY_LOST]}
    assert files_of(bank)["mood"].stored[0].n_stored_tokens == 4
    bank.prune(max_bytes=0)
    assert states(bank) == {"mood": [FileState.EVICTED]}


def test_each_model_has_a_state_of_its_own(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    store(model, "mood", bank.few_shot("mood"))
    store(FakeModel(bank, "other"), "mood", bank.few_shot("mood", k=1))
    assert states(bank) == {"mood": [FileState.WARM, FileState.CHANGED]}


def test_stored_few_shot_prompts_without_a_file_follow(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    store(model, "elsewhere", bank.few_shot("mood"))
    store(model, "a text", None)
    store(model, "mood", None)  # a text that has a file's name was not made of it
    found = bank.prefix_files()
    assert [(file.name, file.path is None) for file in found] == [("mood", False), ("elsewhere", True)]
    assert states(bank) == {"mood": [], "elsewhere": [FileState.NO_FILE]}
    with pytest.raises(PromptError, match="elsewhere has no file"):
        found[1].read()


def test_a_broken_file_can_not_be_compared(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    store(model, "mood", bank.few_shot("mood"))
    write("mood.toml", "instructions =")
    assert states(bank) == {"mood": [FileState.BROKEN]}


def test_old_versions_and_variations_belong_to_their_file(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    shots = bank.few_shot("mood")
    store(model, old_version_name("mood", shots.source_digest), shots)
    store(model, old_version_name("mood", "0" * 8), shots)  # such a name, and not its digest
    variations = [bank.few_shot("mood", k=1), bank.few_shot("mood", variables={"tone": "kind"})]
    variations.append(bank.few_shot("mood", variables={"tone": "more than one word"}))
    for variation in variations:
        store(model, variation.name, variation)
    by_name = {version.prefix.name: version.state for version in files_of(bank)["mood"].stored}
    assert by_name == {
        f"mood@{shots.source_digest[:8]}": FileState.OLD_VERSION,
        "mood@00000000": FileState.CHANGED,
        "mood@k=1": FileState.WARM,
        "mood@tone=kind": FileState.WARM,
        variations[2].name: None,  # what the value is the name does not tell
    }
    write("mood.toml", MOOD.replace("great", "lovely").replace("tone", "tune"))
    by_name = {version.prefix.name: version.state for version in files_of(bank)["mood"].stored}
    assert by_name["mood@k=1"] == by_name["mood@tone=kind"] == FileState.CHANGED


def test_names_of_variations_that_no_program_made_do_no_harm(bank: PrefixBank, model: FakeModel, write: Write) -> None:
    write("mood.toml")
    prefix = store(model, "mood", bank.few_shot("mood"))
    files = PrefixFiles(bank.root)
    for name in ("mood@", "mood@k=x", "mood@k=", "mood@=", "mood@a@b", "mood@k=99", "@mood"):
        state = files.state_of(replace(prefix, name=name), 10)
        assert state in (None, FileState.CHANGED, FileState.NO_FILE), name
