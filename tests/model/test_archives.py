"""Hold archives to the models that they travel between: the same tokens, hits in the other bank, nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import Example, FewShotPrompt, PrefixBank
from tests.model.tiny import FROM_DISK, build_model

SHOTS = FewShotPrompt(
    instructions="Say positive or negative.\n\n",
    examples=[Example("the lamp is lovely", "positive"), Example("the zip broke", "negative")],
)


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "mamba2"])
def test_an_imported_prefix_gives_the_same_tokens_as_no_bank(
    kind: str, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    model = build_model(kind)
    prompt = SHOTS.render("the lamp broke")
    with PrefixBank.open(tmp_path / "cold", chunk_tokens=16, **FROM_DISK) as bank:
        cold = bank.attach(model, tokenizer).generate(prompt, max_tokens=12)
    with PrefixBank.open(tmp_path / "from", chunk_tokens=16, **FROM_DISK) as bank:
        warmed = bank.attach(model, tokenizer).warm(SHOTS, name="lamps/v1", pin=True)
        bank.export_prefixes(tmp_path / "archive.tar")
    with PrefixBank.open(tmp_path / "to", chunk_tokens=16, **FROM_DISK) as bank:
        (imported,) = bank.import_prefixes(tmp_path / "archive.tar").prefixes
        hit = bank.attach(build_model(kind), tokenizer).generate(prompt, max_tokens=12)
        assert bank.check(read_data=True).ok
    assert (imported.name, imported.n_tokens, imported.pinned) == ("lamps/v1", warmed.n_tokens, True)
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == warmed.n_tokens
    assert hit.token_ids == cold.token_ids


def test_imported_kv_is_of_no_other_model_and_no_other_salt(
    tmp_path: Path, llama: Any, tokenizer: TokenizerWrapper
) -> None:
    with PrefixBank.open(tmp_path / "from", chunk_tokens=16, **FROM_DISK) as bank:
        bank.attach(llama, tokenizer, salt="tenant").warm(SHOTS, name="lamps/v1")
        bank.export_prefixes(tmp_path / "archive.tar")
    prompt = SHOTS.render("the lamp broke")
    with PrefixBank.open(tmp_path / "to", chunk_tokens=16, **FROM_DISK) as bank:
        bank.import_prefixes(tmp_path / "archive.tar")
        others = [
            bank.attach(llama, tokenizer),
            bank.attach(llama, tokenizer, salt="other"),
            bank.attach(build_model(seed=7), tokenizer, salt="tenant"),
        ]
        assert [llm.match(prompt).n_tokens for llm in others] == [0, 0, 0]
        assert bank.attach(llama, tokenizer, salt="tenant").match(prompt).n_tokens > 0
