"""An evaluation from the bank has the scores and texts of `mlx_lm.evaluate`, and computes fewer tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
pytest.importorskip("lm_eval")

import lm_eval
import mlx.core as mx
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_model

from prefixbank import BankedModel, BankWarning, ConfigError, EvaluationError, PrefixBank, PromptError
from prefixbank.chunking import common_run, pack_token_ids
from prefixbank.evaluating import BankedLM, load_as_it_is
from prefixbank.harness import Tasks, evaluate, find_tasks, parse_arguments, warn_of_drawn_shots
from tests.model import evaltasks
from tests.model.evaltasks import ANSWERS, BROKEN, CHOICES, DRAWN, N_DOCS, ROLLING, counting_tokens, sharp_model
from tests.model.tiny import FROM_DISK, build_model

KINDS = ["llama", "gemma3_text", "qwen3_next", "mamba2"]
Samples = dict[str, list[list[Any]]]


class PlainLM(MLXLM):
    """mlx-lm's own, of a model that is loaded already."""

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        LM.__init__(self)
        given = {"max_tokens": None, "batch_size": 8, "use_chat_template": False, "sampler": None, **options}
        self._model, self.tokenizer = model, tokenizer
        self._max_tokens, self._batch_size, self._sampler = (
            given[name] for name in ("max_tokens", "batch_size", "sampler")
        )
        self.use_chat_template = given["use_chat_template"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaltasks.write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def manager(tasks: Path) -> Tasks:
    return find_tasks([CHOICES, ANSWERS, ROLLING, DRAWN], tasks)


def evaluated(lm: Any, manager: TaskManager, *names: str, **options: Any) -> tuple[Samples, dict[str, Any]]:
    """Return all responses of each task, and its results."""
    done = lm_eval.simple_evaluate(model=lm, tasks=list(names), task_manager=manager, bootstrap_iters=0, **options)
    samples = {
        name: [sample["resps"] for sample in sorted(done["samples"][name], key=lambda sample: sample["doc_id"])]
        for name in names
    }
    return samples, done["results"]


def assert_same(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Assert equal texts and greedy flags, and log-probabilities to 1e-4."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, list | tuple):
            assert_same(one, other)
        elif isinstance(other, float):
            assert one == pytest.approx(other, abs=1e-4)
        else:
            assert one == other


def metrics(result: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, float)}


def request(kind: str, *arguments: Any, task: str = "own") -> Instance:
    return Instance(kind, {}, arguments, 0, metadata=(task, 0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_texts_are_mlx_lms_and_fewer_tokens_are_computed(
    kind: str, bank_root: Path, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    names = (CHOICES, ANSWERS, ROLLING)
    model = sharp_model(kind)
    with counting_tokens(model) as seen:
        wanted, wanted_results = evaluated(PlainLM(model, tokenizer), manager, *names)
        n_plain = sum(seen)
        n_run = []
        for _ in range(2):
            seen.clear()
            with PrefixBank.open(bank_root, chunk_tokens=64) as bank:
                lm = BankedLM(bank.attach(model, tokenizer), use_chat_template=False)
                found, results = evaluated(lm, manager, *names)
                n_run.append(sum(seen))
                bank.flush()
                assert bank.check(read_data=True).ok
            for name in names:
                assert_same(found[name], wanted[name])
                assert metrics(results[name]) == pytest.approx(metrics(wanted_results[name]), rel=1e-4)
    assert sum(len(docs) for docs in wanted.values()) == 3 * N_DOCS
    # The random qwen3_next says the same of all documents.
    assert len({text for doc in wanted[ANSWERS] for (text,) in doc}) > (5 if kind != "qwen3_next" else 0)
    assert n_run[0] < n_plain / 4
    assert n_run[1] < n_run[0] - 500  # the shots of both tasks came from the bank


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 1), *((kind, 8) for kind in KINDS)])
def test_the_bank_holds_only_what_documents_share(
    kind: str, batch_size: int, bank_root: Path, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    model = sharp_model(kind)
    with PrefixBank.open(bank_root, chunk_tokens=64) as bank:
        llm = bank.attach(model, tokenizer)
        lm = BankedLM(llm, use_chat_template=False, batch_size=batch_size)
        evaluated(lm, manager, ROLLING)
        assert bank.stats().n_chunks == 0
        assert lm.counts[ROLLING].asked == lm.counts[ROLLING].computed > 500
        contexts = []
        for name in (CHOICES, ANSWERS):
            evaluated(lm, manager, name)
            contexts += [instance.args[0] for instance in manager.loaded[name].instances]
        bank.flush()
        ids = sorted({tuple(llm.encode(context)) for context in contexts})
        stored = [match.n_tokens for match in map(llm.match, map(list, ids))]
        packed = [pack_token_ids(one) for one in ids]
        n_shared = [
            max(common_run(one, other) for at, other in enumerate(packed) if at != place)
            for place, one in enumerate(packed)
        ]
        assert min(stored) > 300
        assert all(n <= shared for n, shared in zip(stored, n_shared, strict=True))
        # Words that two documents begin with are not worth a shard each.
        assert bank.stats().n_tokens < 2.2 * max(stored)  # of two tasks


def test_tokens_are_counted_as_they_were_computed(
    bank_root: Path, llama: Any, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    with counting_tokens(llama) as seen:
        evaluated(PlainLM(llama, tokenizer), manager, CHOICES)
        n_plain = sum(seen)
        n_computed = []
        for _ in range(2):
            with PrefixBank.open(bank_root, chunk_tokens=64, load="always") as bank:
                lm = BankedLM(bank.attach(llama, tokenizer), use_chat_template=False, batch_size=1)
                seen.clear()
                done = lm_eval.simple_evaluate(model=lm, tasks=[CHOICES], task_manager=manager, bootstrap_iters=0)
                counts = done["config"]["prefixbank"]
                assert counts == lm.token_counts()
                assert counts["tokens"] == lm.counts[CHOICES].asked == n_plain
                assert counts["computed"] == lm.counts[CHOICES].computed
                assert counts["computed"] <= sum(seen) <= counts["computed"] + 4 * N_DOCS  # padding of choices
                assert counts["computed"] + counts["from_bank"] + counts["shared_in_memory"] == n_plain
                assert counts["shared_in_memory"] > n_plain // 2
                n_computed.append(counts["computed"])
    assert n_computed[1] < n_computed[0] - 300
    assert counts["from_bank"] > 300


def test_a_bank_that_breaks_in_the_middle_changes_nothing_but_the_tokens(
    bank_root: Path, llama: Any, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    wanted, _ = evaluated(PlainLM(llama, tokenizer), manager, CHOICES, ANSWERS)
    with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        evaluated(BankedLM(llm, use_chat_template=False), manager, CHOICES)
        bank.flush()
        shards = sorted((bank_root / "shards").rglob("*.safetensors"))
        assert shards
        for n, path in enumerate(shards):
            path.unlink() if n % 2 else path.write_bytes(b"damaged")
        with pytest.warns(BankWarning):
            found, _ = evaluated(BankedLM(llm, use_chat_template=False), manager, CHOICES, ANSWERS)
        assert_same(found[CHOICES], wanted[CHOICES])
        assert_same(found[ANSWERS], wanted[ANSWERS])


def test_a_bank_whose_index_is_lost_is_one_warning(
    bank_root: Path, llama: Any, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    wanted, _ = evaluated(PlainLM(llama, tokenizer), manager, CHOICES, ANSWERS)
    bank = PrefixBank.open(bank_root, **FROM_DISK)
    llm = bank.attach(llama, tokenizer)
    llm.prefill("Review:")
    bank.flush()
    (bank_root / "index.sqlite3").write_bytes(b"no index " * 1000)
    with pytest.warns(BankWarning) as warned:
        found, _ = evaluated(BankedLM(llm, use_chat_template=False), manager, CHOICES, ANSWERS)
        bank.close()
    messages = [str(warning.message) for warning in warned]
    assert len(messages) == len(set(messages))
    assert_same(found[CHOICES], wanted[CHOICES])
    assert_same(found[ANSWERS], wanted[ANSWERS])


def test_a_model_that_can_not_be_stored_is_evaluated_all_the_same(
    small_bank: PrefixBank, tokenizer: TokenizerWrapper, manager: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model()
    from mlx_lm.models.cache import KVCache

    class Unknown(KVCache):
        pass

    monkeypatch.setattr(type(model), "make_cache", lambda self: [Unknown() for _ in self.layers], raising=False)
    wanted, _ = evaluated(PlainLM(model, tokenizer), manager, CHOICES, limit=6)
    with pytest.warns(BankWarning, match="Unknown"):
        llm = small_bank.attach(model, tokenizer)
        found, _ = evaluated(BankedLM(llm, use_chat_template=False), manager, CHOICES, limit=6)
    assert_same(found[CHOICES], wanted[CHOICES])


def test_chat_templates_are_applied_as_mlx_lm_does(llm: BankedModel, manager: Tasks) -> None:
    for options in (
        {"apply_chat_template": True, "fewshot_as_multiturn": True},
        {"apply_chat_template": True, "fewshot_as_multiturn": False},
        {"apply_chat_template": False, "num_fewshot": 3},
    ):
        use = {"use_chat_template": bool(options["apply_chat_template"])}
        wanted, _ = evaluated(PlainLM(llm.model, llm.tokenizer, **use), manager, CHOICES, ANSWERS, limit=6, **options)
        found, _ = evaluated(BankedLM(llm, **use), manager, CHOICES, ANSWERS, limit=6, **options)
        for name in (CHOICES, ANSWERS):
            assert_same(found[name], wanted[name])
    assert BankedLM(llm).use_chat_template  # the tokenizer has one


@pytest.mark.parametrize("options", [{"max_tokens": 40}, {"max_tokens": 90}, {"batch_size": 1}, {"batch_size": 3}])
def test_options_mean_what_they_mean_to_mlx_lm(llm: BankedModel, manager: Tasks, options: dict[str, int]) -> None:
    """`max_tokens` also cuts the prompts of choices."""
    wanted, _ = evaluated(PlainLM(llm.model, llm.tokenizer, **options), manager, CHOICES, ANSWERS, limit=8)
    found, _ = evaluated(BankedLM(llm, use_chat_template=False, **options), manager, CHOICES, ANSWERS, limit=8)
    for name in (CHOICES, ANSWERS):
        assert_same(found[name], wanted[name])


def both(llm: BankedModel, **options: Any) -> tuple[BankedLM, PlainLM]:
    return BankedLM(llm, use_chat_template=False, **options), PlainLM(llm.model, llm.tokenizer, **options)


def test_odd_continuations_are_scored_as_mlx_lm_does(llm: BankedModel) -> None:
    """The same one twice, contexts in any order, a continuation that joins the context, an empty context."""
    pairs = [
        ("review: the lamp", " is lovely"),
        ("the zip", " broke"),
        ("review: the lamp", " is lovely"),
        ("review: the lamp", " is"),
        ("review: the l", "amp is lovely"),
        ("the zip", " is lovely and cold"),
        ("", " is lovely"),
        ("", " broke"),
        ("review: the lamp is", " lovely"),
    ]
    requests = [request("loglikelihood", *pair) for pair in pairs]
    banked, plain = both(llm)
    found = banked.loglikelihood(requests)
    assert_same(found, plain.loglikelihood(requests))
    assert found[0] == found[2]
    assert found[6] == (-float("inf"), False)
    assert banked.loglikelihood([]) == []
    assert banked.loglikelihood(requests[6:8]) == [(-float("inf"), False)] * 2


def test_prompts_that_continuations_leave_no_room_for_are_minus_infinity(llm: BankedModel) -> None:
    requests = [
        request("loglikelihood", "the zip", " broke" * 9),
        request("loglikelihood", "the zip", " is"),
        request("loglikelihood", "review: the lamp is lovely", " is"),
    ]
    banked, plain = both(llm, max_tokens=3)
    found = banked.loglikelihood(requests)
    assert_same(found, plain.loglikelihood(requests))
    assert [score == -float("inf") for score, _ in found] == [True, True, False]


def test_a_continuation_without_tokens_is_named(llm: BankedModel) -> None:
    lm = BankedLM(llm, use_chat_template=False)
    with pytest.raises(PromptError, match="task own: '' adds no token"):
        lm.loglikelihood([request("loglikelihood", "the zip", " broke"), request("loglikelihood", "the zip", "")])


def test_each_answer_has_its_own_length_and_ends(llm: BankedModel) -> None:
    shots = "review: the lamp is lovely\nsentiment: positive\n\n" * 4
    requests = [
        request("generate_until", f"{shots}review: {n}", {"until": until, "max_gen_toks": n_most})
        for n, (until, n_most) in enumerate(
            [(["@@"], 3), (["e"], 9), ([" ", "a"], 3), (["e"], 20), (["@@"], 9), (["@@"], 1)]
        )
    ]
    banked, plain = both(llm)
    found = banked.generate_until(requests)
    assert found == plain.generate_until(requests)
    assert len({len(text) for text in found}) > 2


def test_an_answer_without_ends_is_whole(llm: BankedModel) -> None:
    """Where mlx-lm fails."""
    lm = BankedLM(llm, use_chat_template=False)
    without, with_none, with_one = (
        lm.generate_until([request("generate_until", "review: the", {"max_gen_toks": 9, **until})])
        for until in ({"until": []}, {}, {"until": ["@@"]})
    )
    assert without == with_none == with_one


def test_answers_are_given_where_the_prompt_is_longer_than_the_models_context(
    llm: BankedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.model.args, "max_position_embeddings", 40)
    requests = [
        request("generate_until", "review: the lamp" * n, {"until": ["\n"], "max_gen_toks": 5}) for n in (1, 30, 2)
    ]
    banked, plain = both(llm)
    assert banked.generate_until(requests) == plain.generate_until(requests)
    assert banked.counts["own"].computed > 100


def test_thoughts_are_taken_off_as_mlx_lm_does(llm: BankedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("generate_until", f"review: {n}", {"until": ["@@"], "max_gen_toks": 12}) for n in range(6)]
    banked, plain = both(llm)
    whole = banked.generate_until(requests)
    monkeypatch.setattr(type(llm.tokenizer), "has_thinking", True)
    monkeypatch.setattr(type(llm.tokenizer), "think_end", whole[0][3])
    found = banked.generate_until(requests)
    assert found == plain.generate_until(requests)
    assert found != whole


def test_texts_are_what_the_tokenizer_decodes(llm: BankedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `batch_generate` gives them; a streaming detokenizer may give other blanks."""

    class Detokenizer:
        last_segment = "other"

        def add_token(self, token_id: int) -> None:
            pass

        def finalize(self) -> None:
            pass

    monkeypatch.setattr(type(llm.tokenizer), "detokenizer", property(lambda self: Detokenizer()))
    requests = [request("generate_until", f"review: {n}", {"until": ["@@"], "max_gen_toks": 5}) for n in range(3)]
    banked, plain = both(llm)
    assert banked.generate_until(requests) == plain.generate_until(requests)


def test_a_sampler_is_used(llm: BankedModel) -> None:
    requests = [request("generate_until", "review: the", {"until": ["@@"], "max_gen_toks": 12})] * 4
    banked, _ = both(llm, sampler=make_sampler(temp=1.0))
    assert len(set(banked.generate_until(requests))) > 1
    greedy, plain = both(llm)
    assert greedy.generate_until(requests) == plain.generate_until(requests)


def test_equal_greedy_prompts_are_computed_once(llm: BankedModel) -> None:
    prompt = "review: the lamp is lovely"
    lm = BankedLM(llm, use_chat_template=False)
    lm.generate_until([request("generate_until", prompt, {"until": ["@@"], "max_gen_toks": 2})] * 5)
    n_tokens = len(llm.encode(prompt))
    assert (lm.counts["own"].asked, lm.counts["own"].computed) == (5 * n_tokens, n_tokens)


# --- drawn shots


def test_shots_that_are_drawn_for_each_document_are_told_of_with_numbers(
    bank_root: Path, llama: Any, tokenizer: TokenizerWrapper, manager: Tasks
) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=64) as bank:
        lm = BankedLM(bank.attach(llama, tokenizer), use_chat_template=False)
        evaluated(lm, manager, CHOICES, DRAWN, ROLLING)
    counts = lm.counts[DRAWN]
    assert counts.share_saved < 0.5 < lm.counts[CHOICES].share_saved
    with pytest.warns(BankWarning) as warned:
        warn_of_drawn_shots(manager.loaded, lm.counts)
    (message,) = [str(warning.message) for warning in warned]
    assert message.startswith(f"{DRAWN}: ")
    assert f"{counts.share_saved:.0%} of {counts.asked:,} tokens" in message
    assert "fewshot_config: {sampler: first_n}" in message


def test_nothing_is_said_of_fixed_shots_or_none(llm: BankedModel, manager: Tasks) -> None:
    lm = BankedLM(llm, use_chat_template=False)
    evaluated(lm, manager, CHOICES, ROLLING, limit=3)
    warn_of_drawn_shots(manager.loaded, lm.counts)
    evaluated(lm, manager, CHOICES, limit=3)
    lm.counts.clear()
    evaluated(lm, manager, ROLLING, limit=3)
    warn_of_drawn_shots(manager.loaded, lm.counts)  # warnings are errors


# --- options of the command line


def test_options_of_the_command_line_reach_the_model(
    small_bank: PrefixBank, save_tiny: Callable[..., Path], manager: Tasks, tmp_path: Path
) -> None:
    given = ["--model", str(save_tiny()), "--tasks", CHOICES, "--limit", "1", "--output-dir", str(tmp_path / "out")]
    lm = evaluate(small_bank, parse_arguments(given), manager)
    assert (lm._sampler, lm._max_tokens, lm._batch_size, lm.use_chat_template) == (None, None, 8, True)
    message = [{"role": "user", "content": "hello"}]
    usual = lm.apply_chat_template(message)
    more = ["--temp", "0.7", "--max-tokens", "90", "--batch-size", "3"]
    more += ["--chat-template-args", '{"chat_template": "<{{ messages[0].content }}>"}']
    lm = evaluate(small_bank, parse_arguments([*given, *more, "--no-apply-chat-template"]), manager)
    assert lm._sampler is not None
    assert (lm._max_tokens, lm._batch_size, lm.use_chat_template) == (90, 3, False)
    assert lm.apply_chat_template(message) == "<hello>" != usual
    assert BankedLM(lm._llm).apply_chat_template(message) == usual


def test_a_batch_size_that_makes_no_sense_is_refused(llm: BankedModel) -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        BankedLM(llm, batch_size=0).generate_until([request("generate_until", "a", {"until": ["b"]})])


# --- finding tasks, and the name in lm-eval's registry


def test_unknown_tasks_and_broken_ones_are_errors_of_ours(tasks: Path, tmp_path: Path) -> None:
    broken = find_tasks([BROKEN], tasks)
    with pytest.raises(EvaluationError, match=f"can't be loaded .*{BROKEN}"):
        broken.load([BROKEN])
    with pytest.raises(EvaluationError, match="--include-path"):
        find_tasks([str(tasks / f"{CHOICES}.yaml")])
    with pytest.raises(EvaluationError, match="is no folder"):
        find_tasks([CHOICES], tmp_path / "nowhere")


def test_weights_stay_as_they_are(small_bank: PrefixBank, save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()
    save_model(folder, build_model(dtype=mx.bfloat16))
    assert load_as_it_is(small_bank, str(folder)).model.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16


def test_the_registered_name_makes_bank_and_model(
    tmp_path: Path, save_tiny: Callable[..., Path], manager: Tasks
) -> None:
    model, root = save_tiny(), tmp_path / "own-bank"
    plain = MLXLM(str(model), use_chat_template=False)
    wanted, _ = evaluated(plain, manager, CHOICES, limit=6)
    given = {"model": str(model), "bank": str(root), "use_chat_template": False, "memory_bytes": 0}
    as_text = ",".join(f"{name}={value}" for name, value in given.items())
    for arguments in (given, as_text):
        done = lm_eval.simple_evaluate(
            model="prefixbank",
            model_args=arguments,
            tasks=[CHOICES],
            task_manager=manager,
            bootstrap_iters=0,
            limit=6,
            batch_size=2,
            device="cpu",
        )
        found = [sample["resps"] for sample in done["samples"][CHOICES]]
        assert_same(found, wanted[CHOICES])
    assert (root / "bank.json").is_file()
    for wrong in ({"bank": str(root)}, {**given, "colour": "red"}):
        with pytest.raises(ConfigError, match="model_args"):
            BankedLM.create_from_arg_obj(wrong)
