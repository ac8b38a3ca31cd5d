"""Fixtures around the tiny random models of `tiny`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_config, save_model

from prefixbank import PrefixBank
from tests.model.tiny import CHAT_TEMPLATE, CONFIGS, FROM_DISK, build_model, build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(build_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="session")
def llama() -> Any:
    return build_model()


@pytest.fixture
def save_tiny(tmp_path: Path) -> Callable[..., Path]:
    """Give a function that saves a tiny model as an mlx-lm folder, over one that is there."""

    def save(name: str = "llama", *, seed: int = 0, folder: str = "model") -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        save_model(path, build_model(name, seed=seed))
        save_config(dict(CONFIGS[name]), path / "config.json")
        build_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(path)
        return path

    return save


@pytest.fixture
def small_bank(bank_root: Path) -> Any:
    """A bank with chunks of 16 tokens that reads what it gives out from its files, checked when the test is over."""
    with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        yield bank
        report = bank.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def bank_root(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture
def llm(small_bank: PrefixBank, llama: Any, tokenizer: TokenizerWrapper) -> Any:
    return small_bank.attach(llama, tokenizer)
