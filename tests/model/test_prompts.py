"""Prompts of every form, the seam between shots and query, and explanations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm import generate

from prefixbank import Example, FewShotPrompt, PrefixBank, PromptError
from prefixbank.chunking import unpack_token_ids
from tests.model.tiny import FROM_DISK, VOCAB, build_model, build_tokenizer, random_ids

EXAMPLES = (Example("the lamp is lovely", "positive"), Example("the zip broke", "negative"))
SHOTS = FewShotPrompt("Judge the review.", EXAMPLES, input_label="review: ", output_label="sentiment: ")
CHAT = FewShotPrompt("Judge the review.", EXAMPLES, chat=True)


def test_texts_ids_and_arrays_are_prompts_alike(llm: Any) -> None:
    import mlx.core as mx
    import numpy as np

    text = "review: the lamp is lovely\nsentiment:"
    token_ids = llm.tokenizer.encode(text)
    assert llm.encode(text) == token_ids
    assert (
        llm.encode(mx.array(token_ids)) == llm.encode(np.array(token_ids)) == llm.encode(tuple(token_ids)) == token_ids
    )


@pytest.mark.parametrize("quantised", [False, True])
def test_a_token_id_that_the_model_does_not_know_is_refused_whatever_is_asked(
    small_bank: PrefixBank, tokenizer: Any, quantised: bool
) -> None:
    """MLX would read what lies behind the embedding, and the bank keep what came of it."""
    model = build_model()
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    llm = small_bank.attach(model, tokenizer)
    assert llm.generate([1, VOCAB - 1], max_tokens=1).text is not None
    bad = [1, VOCAB, 2]
    for ask in (
        lambda: llm.generate(bad, max_tokens=1),
        lambda: next(iter(llm.stream_generate(bad, max_tokens=1))),
        lambda: llm.match(bad),
        lambda: llm.warm(bad),
        lambda: llm.score(bad, [" a"]),
        lambda: llm.checkout(bad).__enter__(),
    ):
        with pytest.raises(PromptError, match="token id 320: the model knows 320 ids"):
            ask()
    assert all(VOCAB not in unpack_token_ids(record.token_ids) for record in small_bank.chunks())


def test_chat_messages_use_the_chat_template(llm: Any) -> None:
    messages = [{"role": "user", "content": "the lamp"}]
    assert llm.encode(messages) == llm.encode("<user>the lamp</user>\n<assistant>")
    assert llm.encode(CHAT.render("the lamp"))[: len(llm.shared_token_ids(CHAT))] == llm.shared_token_ids(CHAT)


def test_chat_without_template_is_refused(small_bank: PrefixBank, llama: Any) -> None:
    llm = small_bank.attach(llama, build_tokenizer())
    with pytest.raises(PromptError, match="no chat template"):
        llm.generate([{"role": "user", "content": "hello"}])
    with pytest.raises(PromptError, match="no chat template"):
        llm.warm(CHAT)


@pytest.mark.parametrize("shots", [SHOTS, CHAT], ids=["plain", "chat"])
def test_warmed_shots_serve_every_query(shots: FewShotPrompt, llm: Any) -> None:
    n_shared = llm.warm(shots, name="shots").n_tokens
    assert n_shared > 20
    for query in ("a great soup", "The film", "12 nights", "", "\n", "é"):
        rendered = shots.render(query)
        hit = llm.generate(rendered, max_tokens=4)
        assert hit.text == generate(llm.model, llm.tokenizer, llm.encode(rendered), max_tokens=4)
        if query[:1].isalnum():
            assert hit.cached_tokens == n_shared


def test_seam_where_the_prefix_ends_in_other_ids_than_inside_the_prompt(llm: Any) -> None:
    """The prefix "... review: " alone ends in a blank; inside a prompt that blank belongs to the query's first word."""
    prefix = "review: the lamp is lovely\nsentiment: positive\n\nreview: "
    whole = prefix + "the zip broke"
    alone, inside = llm.encode(prefix), llm.encode(whole)
    assert inside[: len(alone)] != alone, "the tokenizer has no seam here: the test needs another text"
    llm.warm(prefix)
    n_common = next(n for n, (a, b) in enumerate(zip(alone, inside, strict=False)) if a != b)
    hit = llm.generate(whole, max_tokens=6)
    assert hit.cached_tokens == n_common
    assert hit.text == generate(llm.model, llm.tokenizer, inside, max_tokens=6)


def test_explain_names_the_first_token_that_differs(llm: Any) -> None:
    llm.warm("Today is Monday. review: the lamp", name="monday")
    explanation = llm.explain("Today is Tuesday. review: the lamp")
    assert (
        explanation.differs_at
        == explanation.n_matched_tokens
        == llm.match("Today is Tuesday. review: the lamp").n_tokens
    )
    assert explanation.prompt_text is not None
    assert explanation.stored_text is not None
    assert explanation.prompt_text.startswith("T")
    assert explanation.stored_text.startswith("M")
    assert "differs" in explanation.reason
    assert "Monday"[:4] in str(explanation)


def test_explain_knows_hit_end_and_nothing(llm: Any) -> None:
    prompt = random_ids(40)
    assert "nothing that begins like this" in llm.explain(prompt).reason
    llm.warm(prompt)
    assert llm.explain(prompt).differs_at is None
    longer = llm.explain(prompt + random_ids(5, seed=2))
    assert (longer.differs_at, longer.stored_token) == (40, None)
    assert "ends before token 40" in longer.reason


def test_explain_names_another_model_that_has_the_prefix(llm: Any, small_bank: PrefixBank) -> None:
    from tests.model.tiny import build_model

    prompt = random_ids(40)
    small_bank.attach(build_model(seed=9), llm.tokenizer).warm(prompt)
    assert "another model" in llm.explain(prompt).reason


def test_names_pins_and_eviction(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, max_bytes="60kB") as bank:
        llm = bank.attach(llama, tokenizer)
        kept = random_ids(32, seed=50)
        llm.warm(kept, name="kept", pin=True)
        for seed in range(8):
            llm.warm(random_ids(32, seed=seed), name=f"prefix {seed}")
        assert bank.stats().disk_bytes <= 60_000
        assert llm.match([*kept, 1]).n_tokens == 32
        assert llm.match([*random_ids(32, seed=0), 1]).n_tokens == 0
        assert llm.match([*random_ids(32, seed=7), 1]).n_tokens == 32
        assert {prefix.name for prefix in bank.prefixes() if prefix.chunk_key is None} >= {"prefix 0"}
        bank.unpin("kept")
        for seed in range(8):
            llm.warm(random_ids(32, seed=seed), name=f"prefix {seed}")
        assert llm.match([*kept, 1]).n_tokens == 0
        assert bank.check(read_data=True).ok


def test_longer_prompt_takes_over_the_name_of_a_tail_that_it_covers(llm: Any, small_bank: PrefixBank) -> None:
    prompt = random_ids(60)
    llm.warm(prompt[:20], name="short", pin=True)
    llm.warm(prompt, name="long")
    assert sorted(c.n_tokens for c in small_bank.chunks()) == [12, 16, 16, 16]
    short = small_bank.prefixes("short")[0]
    assert short.n_tokens == 20
    assert [c.end for c in small_bank.chain(short)] == [16, 32]
