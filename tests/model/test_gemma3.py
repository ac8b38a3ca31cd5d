"""A real model with real windows of 512 tokens: a cache restored in a second bank object goes on as the live one does.

Opt-in: `pytest -m gemma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixbank import BankedModel, PrefixBank
from tests.model.gemma3 import fetch_gemma3
from tests.model.tiny import FROM_DISK

pytestmark = pytest.mark.gemma

CHUNK = 256  # the default
WINDOWS = [512, 512, 512, 512, 512, 0] * 3  # of the 18 layers; 0 keeps everything
N_PROMPT = 1400
N_FURTHER = 5
N_GREEDY = 10
N_ANSWER = 12
BOUNDARIES = [511, 512, 513, 700, 1024]  # around the window, inside a chunk, twice the window

SENTENCES = """
The ferry left the harbour at seven, and nobody on deck spoke until the lighthouse was out of sight.
Margaret kept her recipes in a tin box, sorted by the season in which the fruit was ripe.
A storm in March had taken the roof off the old mill, but the wheel still turned.
When the train stopped between two stations, the conductor walked through and handed out apples.
The museum owns eleven clocks, and no two of them agree about the time.
He learned to read maps before he could read books, which explains his spelling.
Every autumn the geese cross the valley in long uneven lines and land on the flooded meadow.
The committee voted to plant forty lime trees along the road to the railway bridge.
Our neighbour repairs violins; on warm evenings you can hear him tune them one after another.
Water boils at a lower temperature in the mountains, so the beans took twice as long.
She wrote the letter three times, burned two of them, and posted the shortest.
The baker's dog sleeps under the counter and wakes only when the oven door is opened.
In 1911 the town had two newspapers, five tailors and a theatre with three hundred seats.
Nobody could find the key to the cellar, though everyone remembered having seen it last week.
The astronomer measured the star's brightness for ninety nights and plotted it on squared paper.
Because the bridge was closed, the children rowed to school and arrived before their teacher.
It rained on the day of the fair, and the brass band played in the fire station.
The last tenant had painted the kitchen green, the hall yellow and the front door a deep blue.
After the harvest they counted the sacks, divided them by seven, and gave the rest to the mill.
An honest answer, said the judge, is often shorter than the question that calls for it.
""".strip().splitlines()


def english_text() -> str:
    """Return all sentences in four orders: text that reads on, and repeats itself only out of sequence."""
    n = len(SENTENCES)
    return " ".join(SENTENCES[i * stride % n] for stride in (1, 3, 7, 9) for i in range(n))


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_gemma3()


@pytest.fixture(scope="module")
def first_bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixBank]:
    with PrefixBank.open(tmp_path_factory.mktemp("gemma") / "bank", **FROM_DISK, chunk_tokens=CHUNK) as bank:
        yield bank


@pytest.fixture(scope="module")
def first(first_bank: PrefixBank, folder: Path) -> BankedModel:
    return load(first_bank, folder)


@pytest.fixture(scope="module")
def prompt(first: BankedModel) -> list[int]:
    token_ids = first.encode(english_text())[:N_PROMPT]
    assert len(token_ids) == N_PROMPT
    return token_ids


@pytest.fixture(scope="module")
def cold_text(first: BankedModel, prompt: list[int]) -> str:
    """Return what mlx-lm generates behind the whole prompt without a bank."""
    return generate(first.model, first.tokenizer, prompt, max_tokens=N_ANSWER)


def load(bank: PrefixBank, folder: Path) -> BankedModel:
    return bank.load_model(folder, precision="float32")


def go_on(model: Any, prompt_cache: list[Any], token_ids: list[int]) -> tuple[mx.array, list[int]]:
    """Return the logits behind each given token and each of the greedy steps, and all tokens that were fed."""
    logits = [model(mx.array(token_ids)[None], cache=prompt_cache)[0]]
    fed = list(token_ids)
    for _ in range(N_GREEDY):
        fed.append(mx.argmax(logits[-1][-1]).item())
        logits.append(model(mx.array(fed[-1:])[None], cache=prompt_cache)[0])
        mx.eval(logits[-1])
    return mx.concatenate(logits), fed


def one_pass(model: Any, token_ids: list[int], n_last: int) -> mx.array:
    """Return the last logits of one pass over all tokens, without any cache (all logits would be 1 GB)."""
    hidden = model.model(mx.array(token_ids)[None])[0, -n_last:]
    return model.model.embed_tokens.as_linear(hidden)


def windows(prompt_cache: list[Any]) -> list[int]:
    """Return the window sizes of the layers, 0 for those that keep everything."""
    assert {type(layer_cache) for layer_cache in prompt_cache} == {KVCache, RotatingKVCache}
    return [getattr(layer_cache, "max_size", 0) for layer_cache in prompt_cache]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_second_bank_object_goes_on_bit_for_bit_as_the_live_cache(
    boundary: int, first_bank: PrefixBank, first: BankedModel, prompt: list[int], cold_text: str, folder: Path
) -> None:
    first_bank.prune(max_bytes=0)
    assert first_bank.chunks() == []
    further = prompt[boundary : boundary + N_FURTHER]
    live = first.prefill(prompt[: boundary + 1], prefill_step_size=CHUNK)
    assert (live.cached_tokens, live.computed_tokens) == (0, boundary)
    assert windows(live.prompt_cache) == WINDOWS
    live_logits, fed = go_on(first.model, live.prompt_cache, further)
    assert live_logits.dtype == mx.float32
    cold_logits = one_pass(first.model, prompt[:boundary] + fed, len(fed))

    with PrefixBank.open(first_bank.root, **FROM_DISK) as bank:
        second = load(bank, folder)  # the model is loaded anew, too
        restored = second.resolve(prompt[: boundary + N_FURTHER])
        assert (restored.cached_tokens, restored.rest) == (boundary, further)
        assert windows(restored.prompt_cache) == WINDOWS
        logits, fed_again = go_on(second.model, restored.prompt_cache, further)
        assert fed_again == fed
        assert mx.array_equal(logits, live_logits).item()
        assert mx.abs(logits - cold_logits).max().item() < 1e-3
        assert mx.array_equal(mx.argmax(logits, axis=-1), mx.argmax(cold_logits, axis=-1)).item()

        # Far on from there the windows turn over; then once more, from the full chunks that this leaves behind.
        for n_cached in (boundary, N_PROMPT - N_PROMPT % CHUNK):
            result = second.generate(prompt, max_tokens=N_ANSWER)
            assert (result.cached_tokens, result.text) == (n_cached, cold_text)
        report = bank.check(read_data=True)
        assert report.ok, report.findings


def test_converted_model_knows_a_fact_and_its_tokenizer_keeps_text(first: BankedModel) -> None:
    prompt = first.encode("The capital of France is the city of")
    assert generate(first.model, first.tokenizer, prompt, max_tokens=1).strip() == "Paris"
    text = "Two  spaces,\n\na\ttab, 12.5 %, <b>bold</b>, naïve café, 東京 and 🦆."
    bos, *token_ids = first.encode(text)
    assert first.tokenizer.decode([bos]) == "<bos>"
    assert first.tokenizer.decode(token_ids) == text
