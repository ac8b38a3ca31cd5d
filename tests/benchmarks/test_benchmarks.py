"""Each benchmark runs and gives its fields. What it measures is not looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from benchmarks import __main__ as command
from benchmarks import batches, disk, evaluation, first_token, loading, models, plot, precision, report, storing
from benchmarks.bare_read import BareRead
from benchmarks.measuring import interleave, paired_ratio, random_token_ids


@pytest.fixture(scope="module")
def tiny() -> models.BenchModel:
    return models.tiny()


@pytest.fixture(scope="module")
def first_token_result(tiny: models.BenchModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return first_token.run([tiny], (16, 300), 1, tmp_path_factory.mktemp("first-token"))


def assert_times(row: dict[str, Any]) -> None:
    """Assert that the seconds in a row are ones."""
    for name, value in row.items():
        if name.endswith("_s"):
            assert math.isfinite(value), name
            assert value >= 0, name


def assert_aligned(table: report.Table) -> None:
    """Assert that a table's lines fit its header."""
    lines = str(table).splitlines()
    assert lines[0] == table.title
    assert all(len(line) <= len(lines[3]) for line in lines[2 : 4 + len(table.rows)])


def test_first_token_has_a_row_for_each_contender_and_length(first_token_result: dict[str, Any]) -> None:
    rows = first_token_result["rows"]
    assert [(row["n_tokens"], row["contender"]) for row in rows] == [
        (n_tokens, name) for n_tokens in (16, 300) for name in first_token.CONTENDERS
    ]
    for row in rows:
        assert_times(row)
        assert len(row["seconds"]) == row["n_repeats"]
        if row["contender"] == first_token.COLD:
            assert row["cached_tokens"] == 0
        elif row["contender"] != first_token.BANK_AUTO:  # that one chooses
            assert row["cached_tokens"] == row["n_tokens"], row["contender"]
    (table,) = first_token.tables(first_token_result)
    assert_aligned(table)
    assert len(table.rows) == 2


def test_first_token_leaves_out_prefixes_that_the_model_was_not_made_for(
    tiny: models.BenchModel, tmp_path: Path
) -> None:
    short = models.BenchModel(tiny.label, tiny.model, tiny.tokenizer, max_tokens=64)
    assert {row["n_tokens"] for row in first_token.run([short], (16, 49), 1, tmp_path)["rows"]} == {16}


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_is_made(first_token_result: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    assert plot.can_plot()
    path = tmp_path / f"figure.{suffix}"
    plot.save(first_token_result, path)
    begin = {"svg": b"<?xml", "png": b"\x89PNG"}[suffix]
    assert path.read_bytes().startswith(begin)


def test_loading_gives_hits_checkouts_and_peak_memory(tmp_path: Path) -> None:
    result = loading.run((300,), 1, tmp_path, shape=(2, 2, 32), checkout_tokens=(64,))
    contenders = {loading.BARE_READ, loading.MLX_LM_FILE, *loading.BANKS}
    assert {(row["contender"], row["allocator"]) for row in result["hits"]} == {
        (name, allocator) for name in contenders for allocator in ("cold", "warm")
    }
    for row in result["hits"]:
        assert_times(row)
        assert row["n_bytes"] == 300 * 2 * 2 * 2 * 32 * 2
    (checkout,) = result["checkout"]
    assert_times(checkout)
    assert checkout["same_memory"]
    assert [row["contender"] for row in result["peak_memory"]] == ["mlx-lm file", "bank, disk"]
    assert all(row["peak_rss_bytes"] >= 0 for row in result["peak_memory"])
    for table in loading.tables(result):
        assert_aligned(table)


def test_storing_gives_times_and_bytes(tiny: models.BenchModel, tmp_path: Path) -> None:
    result = storing.run([tiny], (300,), 1, tmp_path)
    (prefill,) = result["prefill"]
    assert_times(prefill)
    new, again, half, more = result["written"]
    assert new["n_new_tokens"] == 299
    assert new["written_bytes"] >= new["new_kv_bytes"] > 0
    assert (again["n_new_tokens"], again["written_bytes"], again["written_ratio"]) == (0, 0, None)
    assert (half["n_new_tokens"], more["n_new_tokens"]) == (149, 119)
    for table in storing.tables(result):
        assert_aligned(table)


def test_disk_gives_bytes_of_each_way_of_keeping(tiny: models.BenchModel, tmp_path: Path) -> None:
    result = disk.run([tiny], tmp_path, n_prompts=3)
    assert [row["contender"] for row in result["rows"]] == [disk.BANK_GENERATE, disk.BANK_PREFILL, disk.MLX_LM_FILES]
    for row in result["rows"]:
        assert row["n_prompts"] == 3
        assert row["disk_bytes"] > 0
        assert row["n_tokens"] > 3 * row["n_shared_tokens"]
    for table in disk.tables(result):
        assert_aligned(table)


def test_command_prints_tables_and_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, drawing = tmp_path / "figures.json", tmp_path / "figure.svg"
    options = ["--model", "tiny", "--tokens", "32", "--repeats", "1", "--folder", str(tmp_path)]
    command.main(["first-token", "storing", *options, "--json", str(figures), "--plot", str(drawing)])
    printed = capsys.readouterr().out
    assert "Time to the first token" in printed
    assert "Bytes written by a prefill" in printed
    document = json.loads(figures.read_text("utf-8"))
    assert document["schema"] == report.SCHEMA
    assert set(document["results"]) == {"first-token", "storing"}
    assert document["repeats"] == 1
    assert document["versions"]["mlx"]
    assert drawing.is_file()


def test_command_says_so_where_matplotlib_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "can_plot", lambda: False)
    options = ["--model", "tiny", "--tokens", "16", "--repeats", "1", "--folder", str(tmp_path)]
    command.main(["first-token", *options, "--plot", str(tmp_path / "figure.svg")])
    assert plot.MATPLOTLIB_MISSING in capsys.readouterr().err
    assert not (tmp_path / "figure.svg").exists()


def test_command_measures_the_growth_of_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    command.main(["index", "--chunks", "256", "--json", str(figures)])
    assert "Index growth" in capsys.readouterr().out
    (row,) = json.loads(figures.read_text("utf-8"))["results"]["index"]["rows"]
    assert row["n_chunks"] == 256


def test_command_refuses_unknown_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["speed"])
    assert "choose from first-token" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--plot", "figure.txt"]])
def test_command_refuses_options_that_make_no_sense(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(options)


def test_all_sections_are_the_default() -> None:
    assert command.parse([]).sections == command.parse(["all"]).sections == list(command.SECTIONS)


def test_contenders_take_turns_and_those_of_fewer_repeats_stop_earlier() -> None:
    ran: list[str] = []
    seconds = interleave({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, {"a": 1, "b": 3})
    assert ran == ["a", "b", "b", "b"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 1, "b": 3}


def test_paired_ratio_is_the_median_over_rounds_that_both_ran() -> None:
    assert paired_ratio([2.0, 9.0, 8.0], [1.0, 3.0]) == 2.5


def test_each_seed_has_token_ids_of_its_own() -> None:
    prompts = {tuple(random_token_ids(32, seed)) for seed in (*range(-3, 4), "new", "half")}
    assert len(prompts) == 9
    assert all(0 <= token_id < models.VOCAB for prompt in prompts for token_id in prompt)


def test_bare_read_reads_whole_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 5000)
    with BareRead(sorted(tmp_path.iterdir())) as bare_read:
        bare_read()
        assert bare_read.n_bytes == 15000
        (tmp_path / "2").write_bytes(b"shorter")
        with pytest.raises(RuntimeError, match="changed"):
            bare_read()


def test_evaluation_gives_times_tokens_and_says_whether_results_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    result = evaluation.run([models.tiny()], 2, tmp_path, n_docs=6, n_shots=3)
    assert [row["contender"] for row in result["rows"]] == list(evaluation.CONTENDERS)
    for row in result["rows"]:
        assert_times(row)
        assert len(row["seconds"]) == row["n_repeats"] == 2
        assert row["same"]
    plain, first, again = (row["computed_tokens"] for row in result["rows"])
    assert plain == result["rows"][1]["n_tokens"]
    assert again <= first < plain
    (table,) = evaluation.tables(result)
    assert_aligned(table)


def test_command_says_so_where_lm_eval_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "can_evaluate", lambda: False)
    command.main(["evaluation"])
    assert evaluation.LM_EVAL_MISSING in capsys.readouterr().err


def test_batches_have_a_row_for_each_contender_and_a_plot(tiny: models.BenchModel, tmp_path: Path) -> None:
    result = batches.run([tiny], (1, 3), (20, 70), 1, tmp_path, n_scored=4)
    assert [(row["n_tokens"], row["n_queries"], row["contender"]) for row in result["rows"]] == [
        (n_tokens, n_queries, name) for n_tokens in (20, 70) for n_queries in (1, 3) for name in ("merged", "shared")
    ]
    for row in result["rows"]:
        assert_times(row)
        assert row["peak_bytes"] > 0
    assert {row["contender"] for row in result["scores"]} >= {"one by one", "merged", "shared", "auto"}
    for row in result["scores"]:
        assert_times(row)
    tables = batches.tables(result)
    assert [len(table.rows) for table in tables] == [4, len(result["scores"])]
    for table in tables:
        assert_aligned(table)
    plot.save_batches(result, tmp_path / "batches.svg")
    assert (tmp_path / "batches.svg").stat().st_size > 1000


def test_precision_compares_both_kinds_of_caches(tiny: models.BenchModel) -> None:
    before = [array.dtype for _, array in tree_flatten(tiny.model.parameters())]
    result = precision.run([tiny], n_answer=3)
    assert [(row["dtype"], row["contender"]) for row in result["rows"]] == [
        (dtype, name) for dtype in ("bfloat16", "float16") for name in ("merged", "shared")
    ]
    for row in result["rows"]:
        assert 0 < row["mean_error"] <= row["max_error"] < 0.1
        assert row["n_positions"] == 24
    (table,) = precision.tables(result)
    assert_aligned(table)
    assert [array.dtype for _, array in tree_flatten(tiny.model.parameters())] == before
