"""Fixtures for the command line: running it, banks with content, and a tiny model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.cli import main
from tests.cli.banks import CHUNK_TOKENS, FINGERPRINTS, SHOTS, TEXT, FilledBank, Outcome

Run = Callable[..., Outcome]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FilledBank]:
    """The banks that tests get copies of: making one takes longer than most tests."""
    empty = FilledBank(tmp_path_factory.mktemp("banks") / "empty")
    PrefixBank.open(empty.root, chunk_tokens=CHUNK_TOKENS, durability="fast").close()
    filled = empty.copy(empty.root.with_name("filled"))
    filled.store("short", list(range(20)))
    filled.store("long", [*range(16), *range(100, 112)])
    filled.store("other", list(range(50, 60)), fingerprint=FINGERPRINTS[1])
    return {"empty": empty, "filled": filled}


@pytest.fixture
def empty(templates: dict[str, FilledBank], root: Path) -> FilledBank:
    """A bank without content."""
    return templates["empty"].copy(root)


@pytest.fixture
def filled(templates: dict[str, FilledBank], root: Path) -> FilledBank:
    """A bank with the prefixes `short` (20 tokens), `long` (28, the same first 16) and `other` (10, another model)."""
    return templates["filled"].copy(root)


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Give a function that runs a command line on the bank, in this process."""

    def run_verb(*args: str, bank: Path | None = root) -> Outcome:
        given = [*(["--bank", str(bank)] if bank is not None else []), *args]
        capsys.readouterr()
        code = main(given)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run_verb


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of two layers and a byte-level tokenizer with a chat template."""
    from prefixbank.blas import load_blas

    load_blas()
    import mlx.core as mx
    from mlx_lm.utils import _get_classes, save_config, save_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "vocab_size": 512,
    }
    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    save_model(folder, model_class(args_class.from_dict(config)))
    save_config(config, folder / "config.json")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the lamp is lovely", "the zip broke"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def shots(tmp_path: Path) -> str:
    path = tmp_path / "shots.toml"
    path.write_text(SHOTS)
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def warm(run: Run, tiny_model: Path) -> Run:
    def warm_with(*args: str) -> Outcome:
        return run("warm", *args, "--model", str(tiny_model))

    return warm_with


@pytest.fixture
def explain(run: Run, tiny_model: Path) -> Run:
    def explain_with(*args: str) -> Outcome:
        return run("explain", *args, "--model", str(tiny_model))

    return explain_with


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """Give a function that writes a .jsonl file."""

    def write(*prompts: Any) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((p if isinstance(p, str) else json.dumps(p)) + "\n" for p in prompts))
        return str(path)

    return write


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return give
