"""KV is served only to the model, adapter, settings and salt that it was computed with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.optimizers import SGD
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm import generate
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from prefixbank import FingerprintMismatchError, PrefixBank
from tests.model.tiny import FROM_DISK, build_model, random_ids

SaveTiny = Callable[..., Path]


def save_adapter(folder: Path, *, seed: int, scale: float = 20.0) -> Path:
    """Save a random LoRA adapter for the tiny llama."""
    folder.mkdir(exist_ok=True)
    model = build_model()
    parameters = {"rank": 4, "scale": scale, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(array.shape) * 0.3 for name, array in tree_flatten(model.parameters()) if "lora_" in name
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_model_overwritten_in_place_misses(small_bank: PrefixBank, save_tiny: SaveTiny) -> None:
    folder = save_tiny(seed=0)
    prompt = random_ids(60)
    first = small_bank.load_model(folder)
    first.warm(prompt)
    assert small_bank.load_model(folder).match(prompt).n_tokens == 59

    weights = folder / "model.safetensors"
    before = weights.stat()
    other = save_tiny(seed=1, folder="other") / "model.safetensors"
    with weights.open("r+b") as file:  # the same inode, the same size
        file.write(other.read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    second = small_bank.load_model(folder)
    assert second.match(prompt).n_tokens == 0
    hit = second.generate(prompt, max_tokens=6)
    assert hit.cached_tokens == 0
    assert hit.text == generate(build_model(seed=1), second.tokenizer, prompt, max_tokens=6)


def test_changed_config_misses(small_bank: PrefixBank, save_tiny: SaveTiny) -> None:
    folder = save_tiny()
    prompt = random_ids(60)
    small_bank.load_model(folder).warm(prompt)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert small_bank.load_model(folder).match(prompt).n_tokens == 0


def test_two_models_in_one_bank_keep_apart(small_bank: PrefixBank, save_tiny: SaveTiny) -> None:
    prompt = random_ids(60)
    models = [small_bank.load_model(save_tiny(seed=seed, folder=f"model{seed}")) for seed in (0, 1)]
    cold = [generate(llm.model, llm.tokenizer, prompt, max_tokens=6) for llm in models]
    models[0].warm(prompt)
    assert [llm.match(prompt).n_tokens for llm in models] == [59, 0]
    for _ in range(5):
        for llm, text in zip(models, cold, strict=True):
            assert llm.generate(prompt, max_tokens=6).text == text
    assert models[1].match(prompt).n_tokens == 48


def test_adapters_keep_apart_and_a_retrained_one_misses(
    small_bank: PrefixBank, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    folder, prompt = save_tiny(), random_ids(60)
    adapters = [save_adapter(tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]
    llms = [small_bank.load_model(folder, adapter_path=path) for path in (None, *adapters)]
    for llm in llms:
        assert llm.match(prompt).n_tokens == 0
        llm.warm(prompt)
        assert llm.match(prompt).n_tokens == 59
    save_adapter(adapters[0], seed=3)
    assert small_bank.load_model(folder, adapter_path=adapters[0]).match(prompt).n_tokens == 0
    save_adapter(adapters[1], seed=2, scale=1.0)
    assert small_bank.load_model(folder, adapter_path=adapters[1]).match(prompt).n_tokens == 0


def test_adapters_loaded_swapped_trained_and_fused_in_a_live_model_miss(
    small_bank: PrefixBank, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    prompt = random_ids(60)
    llm = small_bank.load_model(save_tiny())
    adapters = [save_adapter(tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]

    def misses_and_is_right() -> bool:
        cold = generate(llm.model, llm.tokenizer, prompt, max_tokens=6)
        missed = llm.match(prompt).n_tokens == 0
        llm.warm(prompt)
        return missed and llm.generate(prompt, max_tokens=6).text == cold and llm.match(prompt).n_tokens == 59

    assert misses_and_is_right()
    load_adapters(llm.model, str(adapters[0]))
    llm.model.eval()
    assert misses_and_is_right()
    llm.model.load_weights(str(adapters[1] / "adapters.safetensors"), strict=False)
    assert misses_and_is_right()

    optimizer = SGD(0.1)
    state = [llm.model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def train(token_ids: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(llm.model, lambda m, ids: m(ids).square().mean())(llm.model, token_ids)
        optimizer.update(llm.model, gradients)
        return loss

    train(mx.array(prompt)[None])
    mx.eval(state)
    assert misses_and_is_right()
    fused = [(name, module.fuse()) for name, module in llm.model.named_modules() if hasattr(module, "fuse")]
    llm.model.update_modules(tree_unflatten(fused))
    assert misses_and_is_right()


def test_weights_swapped_in_a_live_model_miss(small_bank: PrefixBank, tokenizer: Any, save_tiny: SaveTiny) -> None:
    prompt = random_ids(60)
    llm = small_bank.load_model(save_tiny())
    llm.warm(prompt)
    llm.model.update(tree_map(lambda array: array * 1.5, llm.model.parameters()))
    assert llm.match(prompt).n_tokens == 0
    assert llm.generate(prompt, max_tokens=6).text == generate(llm.model, tokenizer, prompt, max_tokens=6)
    llm.model.set_dtype(mx.bfloat16)
    assert llm.match(prompt).n_tokens == 0


def test_attached_models_are_told_apart_by_their_parameters_and_settings(
    small_bank: PrefixBank, tokenizer: Any
) -> None:
    prompt = random_ids(60)
    small_bank.attach(build_model(seed=0), tokenizer).warm(prompt)
    assert small_bank.attach(build_model(seed=0), tokenizer).match(prompt).n_tokens == 59
    assert small_bank.attach(build_model(seed=1), tokenizer).match(prompt).n_tokens == 0
    other_setting = build_model(seed=0)
    other_setting.layers[0].self_attn.rope.base = 5e5  # no parameter, and yet it decides the KV
    assert small_bank.attach(other_setting, tokenizer).match(prompt).n_tokens == 0


def test_dtypes_and_quantisation_keep_apart(small_bank: PrefixBank, save_tiny: SaveTiny) -> None:
    folder, prompt = save_tiny(), random_ids(60)
    small_bank.load_model(folder).warm(prompt)
    half = build_model(dtype=mx.bfloat16)
    assert small_bank.attach(half, small_bank.load_model(folder).tokenizer).match(prompt).n_tokens == 0
    first = small_bank.load_model(folder).layout
    assert {array.dtype for _, array in first.row_arrays()} == {"F32"}


def test_cache_classes_keep_apart(small_bank: PrefixBank, tokenizer: Any) -> None:
    """The same weights, but another class of cache: what is restored must be of the class that the model uses."""
    prompt = random_ids(60)
    small_bank.attach(build_model(), tokenizer).warm(prompt)
    other = build_model()
    object.__setattr__(other, "make_cache", lambda: [ConcatenateKVCache() for _ in other.layers])
    llm = small_bank.attach(other, tokenizer)
    assert llm.match(prompt).n_tokens == 0
    llm.warm(prompt)
    assert type(llm.resolve(prompt).prompt_cache[0]) is ConcatenateKVCache


def test_salts_keep_apart(small_bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    prompt = random_ids(60)
    small_bank.attach(llama, tokenizer, salt="tenant a").warm(prompt)
    assert small_bank.attach(llama, tokenizer, salt=b"tenant a").match(prompt).n_tokens == 59
    assert small_bank.attach(llama, tokenizer, salt="tenant b").match(prompt).n_tokens == 0
    assert small_bank.attach(llama, tokenizer).match(prompt).n_tokens == 0
    assert b"tenant a" not in b"".join(p.read_bytes() for p in small_bank.root.rglob("*") if p.is_file())


def test_second_start_reads_no_weights_for_hashing(
    bank_root: Path, save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny()
    long_ago = 1_600_000_000
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    read: list[str] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: (read.append(file.name), real(file, name))[1])
    # A digest taken within the grain of the file's last change is not kept: let the clock say that it is over.
    monkeypatch.setattr("prefixbank.fingerprint.time.time", lambda: (folder / "config.json").stat().st_ctime + 10)
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        fingerprint = bank.load_model(folder).namespace.fingerprint
    assert any(name.endswith("model.safetensors") for name in read)
    read.clear()
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        assert bank.load_model(folder).namespace.fingerprint == fingerprint
    assert read == []


@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "gemma3_text", "llama4", "falcon_h1", "mamba2"])
def test_second_process_hits_what_the_first_stored(name: str, bank_root: Path, save_tiny: SaveTiny) -> None:
    folder, prompt = save_tiny(name), random_ids(60)
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        llm = bank.load_model(folder)
        llm.prefill(prompt)
        text = generate(llm.model, llm.tokenizer, prompt, max_tokens=6)
    script = (
        "import sys, json; from prefixbank import PrefixBank\n"
        "bank = PrefixBank.open(sys.argv[1], load='always', memory_bytes=0)\n"
        "llm = bank.load_model(sys.argv[2])\n"
        "r = llm.generate(json.loads(sys.argv[3]), max_tokens=6)\n"
        "print(json.dumps([r.text, r.cached_tokens, r.computed_tokens]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(bank_root), str(folder), json.dumps(prompt)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [text, 59, 1]


def test_put_refuses_a_cache_of_another_layout(llm: Any, small_bank: PrefixBank) -> None:
    other = build_model(dtype=mx.float16)
    prompt_cache = make_prompt_cache(other)
    other(mx.array(random_ids(20))[None], cache=prompt_cache)
    with pytest.raises(FingerprintMismatchError):
        llm.put(random_ids(20), prompt_cache)
    assert small_bank.chunks() == []


@pytest.mark.parametrize(("first", "n_warnings"), [("import prefixbank", 0), ("import mlx.core", 1)])
def test_mlx_imported_before_prefixbank_is_said_to_be_slow(
    first: str, n_warnings: int, bank_root: Path, save_tiny: SaveTiny
) -> None:
    script = (
        f"{first}\nimport sys, warnings; from prefixbank import PrefixBank\n"
        "from prefixbank.blas import _candidates; from pathlib import Path\n"
        "installed = any(Path(name).is_file() for name in _candidates())\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); PrefixBank.open(sys.argv[1]).load_model(sys.argv[2])\n"
        "n = sum('import prefixbank first' in str(w.message) for w in caught)\n"
        f"sys.exit(n != ({n_warnings} if installed else 0))"
    )
    subprocess.run([sys.executable, "-c", script, str(bank_root), str(save_tiny())], check=True)
