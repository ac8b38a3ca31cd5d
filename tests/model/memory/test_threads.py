"""Several threads use one kept prefix at once."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_lm import generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import PrefixBank
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    WAYS,
    Open,
    Walk,
    answers_as_cold,
    cold_text,
    goes_on_right,
)
from tests.model.test_kinds import WINDOWED
from tests.model.tiny import build_model, build_tokenizer, random_ids


def test_prefix_resolved_in_one_thread_is_generated_from_in_another(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    handed: queue.Queue[Any] = queue.Queue(2)
    texts: list[str] = []
    rounds = PROMPTS * 10

    def resolve() -> None:
        for prompt in rounds:
            handed.put(llm.resolve(prompt))

    def go_on() -> None:
        for _ in rounds:
            resolved = handed.get(timeout=60)
            texts.append(
                generate(llm.model, llm.tokenizer, resolved.rest, prompt_cache=resolved.prompt_cache, max_tokens=4)
            )

    threads = [threading.Thread(target=target) for target in (resolve, go_on)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert texts == [cold_text(llm, prompt, 4) for prompt in PROMPTS] * 10


def use_one_prefix_at_once(name: str, root: Path, n_threads: int, n_rounds: int) -> None:
    """Resolve, generate and check out in several threads, in too small a memory for all; raises what is wrong."""
    tokenizer = TokenizerWrapper(build_tokenizer())
    with PrefixBank.open(root, chunk_tokens=16, load="always", durability="fast", memory_bytes=400_000) as bank:
        llm = bank.attach(build_model(name), tokenizer)
        llm.warm(SHARED)
        prompts = [*PROMPTS, SHARED[:33] + random_ids(5, seed=5), random_ids(40, seed=6)]
        start = threading.Barrier(n_threads)
        wrong: list[object] = []

        def work(seed: int) -> None:
            choose = random.Random(seed)
            start.wait()
            try:
                for _ in range(n_rounds):
                    prompt = choose.choice(prompts)
                    deed = choose.choice(["generate", *WAYS])
                    if deed == "generate":
                        answers_as_cold(llm, prompt, 3)
                    else:
                        with ExitStack() as stack:
                            Walk(llm.model, prompt, *WAYS[deed](llm, prompt, stack)).finish()
                    assert bank._session.memory.n_bytes <= 400_000
            except BaseException as error:  # seen by the main thread
                traceback.print_exc()
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert bank.stats().session["memory_hits"] > n_rounds // 3
        assert bank.check(read_data=True).ok


def test_threads_use_one_prefix_at_once(tmp_path: Path) -> None:
    """In a process of its own, since a lock that is never opened would stop all tests."""
    script = (
        "from prefixbank.blas import load_blas; load_blas()\n"
        "import pathlib, sys\n"
        "from tests.model.memory.test_threads import use_one_prefix_at_once\n"
        "for name in ('llama', 'gemma3_text', 'qwen3_next'):\n"
        "    use_one_prefix_at_once(name, pathlib.Path(sys.argv[1]) / name, 3, 25)\n"
        "print('right')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    # Not the exit code: MLX (0.32.4) aborts at times when a process ends soon after a thread that generated.
    assert done.stdout == "right\n", done.stderr


def test_windows_are_kept_in_memory_with_what_storing_more_needs(
    models: dict[str, Any], tokenizer: Any, open_bank: Open
) -> None:
    """The rows that a window has dropped since the last full chunk are needed to store the chunk that grew."""
    for name in WINDOWED:
        bank = open_bank()
        files = open_bank(memory_bytes=0).attach(models[name], tokenizer)
        llm = bank.attach(models[name], tokenizer)
        prompt = random_ids(40, seed=len(name))
        llm.warm(prompt[:25])
        llm.resolve(prompt)
        assert llm.match(prompt).in_memory
        live = llm.prefill(prompt)
        assert (live.match.in_memory, live.cached_tokens) == (True, 25)
        bank.flush()
        resolved = files.resolve([*prompt[:39], 1])
        assert resolved.cached_tokens == 39
        goes_on_right(llm, [*prompt[:39], 1], resolved)
