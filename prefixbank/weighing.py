"""Own running a prompt and choices behind it through the model: each token once, the choices as batches.

What prompt and choices share is taken from the bank, or computed and stored as `generate` does; of the choices nothing
is ever stored.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from prefixbank import computing
from prefixbank.choices import Branch, EncodedChoices, branches
from prefixbank.chunking import unpack_token_ids
from prefixbank.errors import ConfigError, PromptError
from prefixbank.kvcache.capture import held_arrays
from prefixbank.kvcache.probe import quantize
from prefixbank.kvcache.widening import can_widen, widen
from prefixbank.promptcaches import PromptCaches, Resolved

__all__ = ["BATCH_BYTES", "ChoiceWeights", "in_tiles", "padded_rows", "weigh"]

T = TypeVar("T")

LAST_STEP = 64
"""How many of the prompt's last tokens are computed together with the logits that the choices need."""

BATCH_BYTES = 1 << 30
"""How many bytes the caches and logits of a batch of choices take at most; one choice is always run."""

MAX_RESERVE = 1024
"""How many tokens the choices get room for in advance at most."""


class ChoiceWeights:
    """Hold the log-probability of each choice behind one prompt, once it was `run`.

    `log_probs` are sums in nats; `is_greedy` says whether each token is the most probable one where it stands.
    `cached_tokens` of the prompt came from the bank, `computed_tokens` of prompt and choices went through the model.
    """

    def __init__(self, caches: PromptCaches, encoded: EncodedChoices, prefill_step_size: int | None) -> None:
        self.encoded = encoded
        self.log_probs = [0.0] * len(encoded.suffixes)
        self.is_greedy = [True] * len(encoded.suffixes)
        self.cached_tokens = 0
        self.computed_tokens = 0
        self._n_vocabulary = 0
        self._caches = caches
        self._step = prefill_step_size or caches.prefill_step_size
        if self._step < 1:
            raise ConfigError(f"prefill_step_size={self._step} must be at least 1")

    def run(self) -> ChoiceWeights:
        """Compute what the bank lacks of the prompt, then the choices; what is to be stored is stored."""
        caches, prompt = self._caches, self.encoded.prompt
        reserve = min(max(map(len, self.encoded.suffixes)), MAX_RESERVE)
        resolved = caches.resolve(prompt, reserve=reserve, lend=True)
        ahead, recorder = computing.follow(caches, prompt, resolved, 0, self._step, None)
        logits = self._read_prompt(ahead)
        self.cached_tokens, self.computed_tokens = resolved.match.n_tokens, len(resolved.rest)

        def keep() -> None:
            computing.keep_after_generation(caches, prompt, ahead, recorder, (), keep=False, hold_back=0)

        if ahead.lent_by is None:
            keep()  # before windows and states are overwritten
        try:
            self._n_vocabulary = logits.shape[-1]
            self.check_vocabulary(self._n_vocabulary)
            with wired_limit(caches.model, [generation_stream]), mx.stream(generation_stream):
                self._descend(ahead.prompt_cache, logits, branches(dict(enumerate(self.encoded.suffixes))))
        finally:
            if ahead.lent_by is not None:
                keep()  # from now on others may write into the cache
        caches.session.count(cached_tokens=self.cached_tokens, computed_tokens=self.computed_tokens)
        return self

    def _read_prompt(self, ahead: Resolved) -> mx.array:
        """Compute the rest of the prompt and return the logits behind its last token, `[1, vocabulary]`."""
        caches, prompt_cache = self._caches, ahead.prompt_cache
        token_ids = unpack_token_ids(self.encoded.prompt.token_ids)
        start = len(token_ids) - len(ahead.rest)
        last = max(start, len(token_ids) - min(LAST_STEP, self._step))
        computing.compute(caches, prompt_cache, token_ids, start, last, self._step, None)
        started_at = time.perf_counter()
        with wired_limit(caches.model, [generation_stream]), mx.stream(generation_stream):
            logits = caches.model(mx.array(token_ids[last:])[None], cache=prompt_cache)[:, -1]
            quantize(prompt_cache, caches.options)
            mx.eval(logits, [layer_cache.state for layer_cache in prompt_cache if layer_cache is not None])
        caches.note_computed(len(token_ids) - last, time.perf_counter() - started_at)
        return logits

    def check_vocabulary(self, n_known: int) -> None:
        """Raise `PromptError` for a choice with a token id that the model does not know."""
        for index, suffix in enumerate(self.encoded.suffixes):
            if max(suffix) >= n_known:
                raise PromptError(f"choice {index} has the token id {max(suffix)}: the model knows {n_known} ids")

    def _descend(self, prompt_cache: list[Any], logits: mx.array, found: Sequence[Branch]) -> None:
        """Add up the branches that follow on a cache (which is written into) and its last token's logits, `[1, n]`.

        First tokens need no forward pass. Runs that nothing follows on go together as a batch; one that branches again
        is computed once for all that goes through it.
        """
        firsts = mx.array([[branch.token_ids[0] for branch in found]])
        chosen, greedy = weigh(logits, firsts)
        for branch, log_prob, is_greedy in zip(found, chosen[0], greedy[0], strict=True):
            self.add(branch, 0, log_prob, is_greedy)
        forks = [branch for branch in found if branch.children]
        batches = list(self._batches(prompt_cache, [b for b in found if not b.children and len(b.token_ids) > 1]))
        n_left = len(batches) + len(forks)
        for together in [*batches, *([fork] for fork in forks)]:
            n_left -= 1
            if len(together) > 1:
                own = widen(prompt_cache, len(together), max(len(branch.token_ids) for branch in together))
            else:
                own = copy.deepcopy(prompt_cache) if n_left else prompt_cache
            last = self._follow(own, together)
            if children := together[0].children:
                self._descend(own, last, children)

    def _batches(self, prompt_cache: list[Any], chains: Sequence[Branch]) -> Iterator[list[Branch]]:
        """Return branches to run at once, of similar lengths; singly where the cache can't hold a batch."""
        chains = sorted(chains, key=lambda branch: len(branch.token_ids))
        if len(chains) > 1 and can_widen(prompt_cache):
            n_bytes = sum(array.nbytes for array in held_arrays(prompt_cache))
        else:
            n_bytes = BATCH_BYTES

        def bytes_of(branch: Branch) -> int:
            return n_bytes + min(len(branch.token_ids), self._step) * self._n_vocabulary * 8

        return in_tiles(chains, bytes_of, BATCH_BYTES)

    def _follow(self, prompt_cache: list[Any], together: Sequence[Branch]) -> mx.array:
        """Run branches through the model as one batch, add up all tokens but their first ones, return the last logits.

        The last token is run only where something follows on it.
        """
        inputs = [b.token_ids if b.children else b.token_ids[:-1] for b in together]
        targets = [b.token_ids[1:] for b in together]
        self.computed_tokens += sum(map(len, inputs))
        n_tokens = max(map(len, inputs))
        padded, wanted = (padded_rows(rows, n_tokens) for rows in (inputs, targets))
        for start in range(0, n_tokens, self._step):
            stop = min(start + self._step, n_tokens)
            logits = self._caches.model(padded[:, start:stop], cache=prompt_cache)
            quantize(prompt_cache, self._caches.options)
            chosen, greedy = weigh(logits, wanted[:, start:stop, None])
            last = logits[:, -1]
            for row, (branch, target) in enumerate(zip(together, targets, strict=True)):
                for at in range(min(len(target), stop) - start):
                    self.add(branch, start + at + 1, chosen[row][at][0], greedy[row][at][0])
        return last

    def add(self, branch: Branch, at: int, log_prob: float, is_greedy: bool) -> None:
        """Add a branch's token to the choices that it belongs to."""
        for index, n_tokens in branch.n_of_choices.items():
            if at < n_tokens:
                self.log_probs[index] += log_prob
                self.is_greedy[index] &= is_greedy


def in_tiles(runs: Iterable[T], bytes_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield runs of growing length, as many together as fit when padded to the longest; one alone may be larger."""
    tile: list[T] = []
    for run in runs:
        if tile and (len(tile) + 1) * bytes_of(run) > most_bytes:
            yield tile
            tile = []
        tile.append(run)
    if tile:
        yield tile


def weigh(logits: mx.array, targets: mx.array) -> tuple[Any, Any]:
    """Return the log-probabilities of targets, and whether each is the most probable, as lists of the targets' shape.

    `logits` and `targets` have the same axes but the last: the vocabulary, and any number of token ids.
    """
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
    greedy = mx.argmax(logits, axis=-1, keepdims=True) == targets
    mx.eval(chosen, greedy)
    return chosen.tolist(), greedy.tolist()


def padded_rows(rows: Sequence[Sequence[int]], n_tokens: int) -> mx.array:
    """Return token ids as `[batch, n_tokens]`, padded on the right."""
    return mx.array([[*row, *[0] * (n_tokens - len(row))] for row in rows], mx.int32)
