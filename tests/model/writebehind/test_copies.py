"""What is stored is what was copied, whatever is written into the live cache meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import PrefixBank, session
from prefixbank.kvcache.capture import held_arrays, leaf_caches
from tests.model.test_kinds import ALL, ROWS_ONLY
from tests.model.tiny import FROM_DISK, build_model, random_ids
from tests.model.writebehind.gate import PROMPT, Gate, cold_text


def digests(root: Path) -> set[tuple[int, int, bool, bytes]]:
    """Return place and digest of each shard."""
    with PrefixBank.open(root, read_only=True) as bank:
        return {(c.start, c.end, c.has_state, c.digest) for c in bank.chunks()}


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("deepseek_v3", "gpt_oss", "mamba2")])
def test_store_is_right_though_the_live_cache_was_written_in_meanwhile(
    name: str, bank_root: Path, tmp_path: Path, tokenizer: Any, gate: Gate
) -> None:
    model = build_model(name)
    prompt = random_ids(70)
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always") as bank:
        live = bank.attach(model, tokenizer, prefill_step_size=16).prefill(prompt)
        assert gate.entered.wait(60)
        for token_id in random_ids(30, seed=3):  # in place, over the ends of windows
            mx.eval(model(mx.array([[token_id]]), cache=live.prompt_cache))
        for leaf in leaf_caches(live.prompt_cache):
            for owner, name_of_array in ((leaf, "keys"), (leaf, "values")):
                rows = getattr(owner, name_of_array, None)
                if isinstance(rows, mx.array):
                    rows[..., :, :] = mx.zeros_like(rows) + 7
            if hasattr(leaf, "cache"):
                for slot, state in enumerate(leaf.cache):
                    if state is not None:
                        state[...] = mx.zeros_like(state) + 7
                        leaf.cache[slot] = state
        mx.eval(held_arrays(live.prompt_cache))
        gate.opened.set()
        bank.flush()
        assert bank.check(read_data=True).ok
    with PrefixBank.open(tmp_path / "undisturbed", chunk_tokens=16, load="always") as bank:
        bank.attach(model, tokenizer, prefill_step_size=16).prefill(prompt)
    assert len(stored := digests(bank_root)) >= 5
    assert stored == digests(tmp_path / "undisturbed")
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        resolved = bank.attach(model, tokenizer).resolve(prompt)
        cold = make_prompt_cache(model)
        wanted = model(mx.array(prompt)[None], cache=cold)[:, -1]
        assert resolved.cached_tokens == 69
        given = model(mx.array(resolved.rest)[None], cache=resolved.prompt_cache)[:, -1]
        assert mx.abs(given - wanted).max().item() < 1e-4


@pytest.mark.parametrize("name", ROWS_ONLY)
def test_next_generation_writes_into_the_cache_that_is_being_stored(
    name: str, bank_root: Path, tmp_path: Path, tokenizer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the very cache from memory whose rows wait to be written."""
    monkeypatch.setattr(session, "_WRITTEN_BYTES_PER_S", 1e-9)  # nothing is worth waiting for
    model = build_model(name)
    with PrefixBank.open(bank_root, chunk_tokens=16) as bank:
        llm = bank.attach(model, tokenizer, prefill_step_size=16)
        llm.generate(PROMPT, max_tokens=2)
        assert gate.entered.wait(60)
        for prompt in ([*PROMPT, 1, 2], PROMPT[:30] + random_ids(20, seed=3), [*PROMPT, 7]):
            assert llm.generate(prompt, max_tokens=6).text == cold_text(llm, prompt, 6)
        gate.opened.set()
    with PrefixBank.open(tmp_path / "undisturbed", chunk_tokens=16, load="always") as bank:
        bank.attach(model, tokenizer, prefill_step_size=16).generate(PROMPT, max_tokens=2)
    undisturbed = digests(tmp_path / "undisturbed")
    assert len(undisturbed) == 4
    assert undisturbed <= digests(bank_root)
