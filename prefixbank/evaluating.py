"""Own the model that lm-evaluation-harness talks to: `mlx_lm.evaluate`'s, with its prompts answered from a bank.

It gives what `MLXLM` gives: prompts are tokenised, cut and scored as there. Scores go through `score_many` and answers
through `generate_many`, so each shared run is computed once, and what one document alone has is not stored.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import prefixbank.kvcache  # noqa: F401  (loads a real BLAS before mlx)

# isort: split
import mlx.core as mx
from tqdm import tqdm

from prefixbank.bank import PrefixBank
from prefixbank.errors import ConfigError, EvaluationError, PromptError
from prefixbank.generation import Sampler
from prefixbank.model import BankedModel
from prefixbank.promptcaches import Progress
from prefixbank.scoring import score_many

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from mlx_lm.evaluate import DEFAULT_MAX_TOKENS, MLXLM, _lstrip, _rstrip_until
except ImportError as exc:
    raise EvaluationError(
        f"lm-evaluation-harness can't be used ({exc}): install it with `pip install 'prefixbank[eval]'`"
    ) from exc

__all__ = ["BankedLM", "TokenCounts", "load_as_it_is"]

Score = tuple[float, bool]
"""The log-probability of a continuation, and whether greedy decoding would write it."""


@dataclass(slots=True)
class TokenCounts:
    """Count tokens of prompts and scored continuations: those that `MLXLM` computes, and those that were computed.

    Tokens of answers are not counted: both compute them.
    """

    asked: int = 0
    computed: int = 0

    @property
    def share_saved(self) -> float:
        """Return which part of them needed no computing."""
        return 1 - self.computed / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class _Question:
    """Hold a prompt and its different continuations, and for each request its index and which continuation it has."""

    prompt: list[int]
    continuations: list[tuple[int, ...]]
    places: list[tuple[int, int]]

    def n_tokens(self) -> int:
        """Return how many tokens `MLXLM` runs through the model: of a continuation all but the last one."""
        return len(self.prompt) + sum(len(self.continuations[place]) - 1 for _, place in self.places)


@register_model("prefixbank")
class BankedLM(MLXLM):  # type: ignore[misc]  # mlx-lm is untyped
    """Be `mlx_lm.evaluate.MLXLM` for a model that works from a bank; give it to `lm_eval.simple_evaluate`.

    `counts` says by task how many tokens there were, and how many were computed. Nothing that is wrong with the bank
    raises.
    """

    def __init__(
        self,
        llm: BankedModel,
        *,
        max_tokens: int | None = None,
        batch_size: int = 8,
        use_chat_template: bool | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Take a model and the options of `MLXLM`.

        Args:
            llm: the model. `mlx_lm.evaluate` takes its weights as they are: load it with `precision="model"`.
            max_tokens: how many tokens an answer has at most, whatever the task says. As in mlx-lm, prompts with
                continuations to score are cut to about as many too, from the left; to 8,192 without it.
            batch_size: how many sequences are processed together.
            use_chat_template: whether prompts come from the chat template, which writes the special tokens itself;
                None: if the tokenizer has one. Give `simple_evaluate` the same as `apply_chat_template`.
            sampler: as in mlx-lm; None is greedy.

        Raises `ConfigError` where the evaluation is spread over several processes.
        """
        if mx.distributed.init().size() > 1:
            raise ConfigError("an evaluation that is spread over several processes has no bank: use mlx_lm.evaluate")
        LM.__init__(self)  # MLXLM's would load the model
        self._llm = llm
        self._model, self.tokenizer = llm.model, llm.tokenizer
        self._max_tokens = max_tokens
        self._batch_size = batch_size
        has_template = self.tokenizer.chat_template is not None
        self.use_chat_template = has_template if use_chat_template is None else use_chat_template
        self._sampler = sampler
        self.counts: dict[str, TokenCounts] = defaultdict(TokenCounts)
        self._n_loaded_before = llm._session.counts["loaded_tokens"]

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> BankedLM:
        """Open a bank and load a model into it, for `simple_evaluate(model="prefixbank", model_args={...})`.

        `model` is a folder or hub id, `bank` the bank root; `max_bytes` and `memory_bytes` go to the bank,
        `trust_remote_code` to the model, the rest is as above. The bank is closed when the interpreter ends. Raises the
        bank's errors and `ConfigError`.
        """
        given = dict(arg_dict)
        try:
            model = given.pop("model")
        except KeyError:
            raise ConfigError("model_args have no model: give model=PATH_OR_ID and bank=DIR") from None
        budgets = {name: given.pop(name) for name in ("max_bytes", "memory_bytes") if name in given}
        bank = PrefixBank.open(given.pop("bank", None), **budgets)
        llm = load_as_it_is(bank, model, trust_remote_code=bool(given.pop("trust_remote_code", False)))
        if (additional_config or {}).get("batch_size") is not None:  # the harness has devices, too, which MLX has not
            given["batch_size"] = int(additional_config["batch_size"])  # type: ignore[index]
        try:
            return cls(llm, **given)
        except TypeError as exc:
            raise ConfigError(f"model_args: {str(exc).split('()')[-1].strip()}") from exc

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> BankedLM:
        """Do the same for `model_args="model=...,bank=..."`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """Return what goes into the `config` of the harness's results: how many tokens were computed."""
        return {"prefixbank": self.token_counts()}

    def token_counts(self) -> dict[str, int]:
        """Return how many tokens there were in all, and where they came from; see `TokenCounts`."""
        n_asked = sum(counts.asked for counts in self.counts.values())
        n_computed = sum(counts.computed for counts in self.counts.values())
        n_loaded = min(self._n_loaded(), n_asked - n_computed)
        n_shared = n_asked - n_computed - n_loaded
        return {"tokens": n_asked, "computed": n_computed, "from_bank": n_loaded, "shared_in_memory": n_shared}

    def _n_loaded(self) -> int:
        return self._llm._session.counts["loaded_tokens"] - self._n_loaded_before

    def _count(self, request: Any, n_asked: int, n_computed: int) -> None:
        counts = self.counts[request.task_name or ""]
        counts.asked += n_asked
        counts.computed += n_computed

    # --- what the harness asks for

    def loglikelihood(self, requests: Sequence[Any]) -> list[Score]:
        """Return each continuation's log-probability in nats behind its context, and whether it is the greedy one.

        Raises `PromptError` for a continuation that adds no token.
        """
        logging.info("Estimating loglikelihood for %d pairs.", len(requests))
        scores: list[Score] = [(-float("inf"), False)] * len(requests)
        questions = list(self._questions(requests))
        if not questions:
            return scores
        with _bar(len(questions)) as progress:
            results = score_many(  # of prompts of any length, as MLXLM does
                self._llm._caches,
                self._llm._encoder,
                self.tokenizer,
                [question.prompt for question in questions],
                [question.continuations for question in questions],
                batch_size=self._batch_size,
                progress=progress,
            )
        for question, result in zip(questions, results, strict=True):
            for index, place in question.places:
                scores[index] = (result.log_probs[place], result.is_greedy[place])
            self._count(requests[question.places[0][0]], question.n_tokens(), result.computed_tokens)
        return scores

    def _questions(self, requests: Sequence[Any]) -> Iterator[_Question]:
        """Yield the contexts with their continuations as `MLXLM` splits and cuts them, but those cut away whole."""
        by_context: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_context[request.args[0]].append(index)
        n_most = self._max_tokens or DEFAULT_MAX_TOKENS
        n_cut_away = 0
        for context, indices in by_context.items():
            (prompt,) = self._tokenize([context])
            wholes = self._tokenize([context + requests[index].args[1] for index in indices])
            cut = list(prompt[max(0, max(map(len, wholes)) - n_most - 1) :])
            if not cut:
                n_cut_away += 1
                continue
            numbers: dict[tuple[int, ...], int] = {}  # the same continuation may come twice
            places = []
            for index, whole in zip(indices, wholes, strict=True):
                continuation = whole[len(prompt) :]
                if not continuation:
                    raise PromptError(
                        f"task {requests[index].task_name}: {requests[index].args[1]!r} adds no token to its context"
                    )
                places.append((index, numbers.setdefault(continuation, len(numbers))))
            yield _Question(cut, list(numbers), places)
        if n_cut_away:
            logging.info("%d contexts are empty, or were cut away by their continuations.", n_cut_away)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text in nats, as `MLXLM` does: whole texts share next to nothing."""
        for request in requests:
            n_tokens = max(len(self._tokenize([request.args[0]])[0]) - 1, 0)
            self._count(request, n_tokens, n_tokens)
        return list(super().loglikelihood_rolling(requests))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return an answer to each context, cut at the first of its `until`.

        As in mlx-lm `max_gen_toks` counts for each request, and `temperature` and `do_sample` don't: the sampler does.
        """
        logging.info("Generating continuation for %d sequences.", len(requests))
        texts = [""] * len(requests)
        by_length: dict[int, list[int]] = defaultdict(list)
        refused = []
        prompts = [list(ids) for ids in self._tokenize([request.args[0] for request in requests])]
        for index, request in enumerate(requests):
            n_most = self._max_tokens or request.args[1].get("max_gen_toks", DEFAULT_MAX_TOKENS)
            if self._is_refused(prompts[index], n_most):
                refused.append(index)
            else:
                by_length[n_most].append(index)
        with tqdm(total=len(requests) - len(refused)) as bar:
            for n_most, indices in by_length.items():
                together = [prompts[index] for index in indices]
                for place, result in self._answer(together, n_most):
                    index = indices[place]
                    texts[index] = self._finished(self.tokenizer.decode(result.token_ids), requests[index].args[1])
                    self._count(requests[index], len(prompts[index]), result.computed_tokens)
                    bar.update()
        if refused:
            for index, text in zip(refused, super().generate_until([requests[i] for i in refused]), strict=True):
                texts[index] = text
                self._count(requests[index], len(prompts[index]), len(prompts[index]))
        return texts

    def _answer(self, prompts: list[list[int]], n_most: int) -> Iterator[tuple[int, Any]]:
        answers: Any = self._llm.generate_many(
            prompts, max_tokens=n_most, sampler=self._sampler, batch_size=self._batch_size, as_completed=True
        )
        return iter(answers)

    def _is_refused(self, prompt: list[int], n_most: int) -> bool:
        """Tell whether `generate_many` would not take a prompt, as one beyond the model's context: MLXLM takes all."""
        try:
            self._answer([prompt], n_most)  # computes nothing before it is iterated over
        except PromptError:
            return True
        return False

    def _finished(self, text: str, options: Mapping[str, Any]) -> str:
        if until := options.get("until"):  # mlx-lm fails without
            text = _rstrip_until(text, until)
        return str(_lstrip(text, self.tokenizer.think_end) if self.tokenizer.has_thinking else text)


def load_as_it_is(bank: PrefixBank, model: str, *, trust_remote_code: bool = False) -> BankedModel:
    """Load a model as `mlx_lm.evaluate` does, its weights as they are. Raises `ConfigError`."""
    return bank.load_model(
        model,
        precision="model",
        tokenizer_config={"trust_remote_code": trust_remote_code},
        trust_remote_code=trust_remote_code,
    )


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    with tqdm(total=total) as bar:
        yield lambda done, _: bar.update(done - bar.n)
