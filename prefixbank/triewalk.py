"""Own the walk over the trie of many prompts: each shared run is computed once, and stored; one-off rests never.

The walk goes depth first. What the branches of a run go on from are copies of its cache, which share the arrays until
they are written to, and live no longer than the run's part of the trie.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefixbank import computing
from prefixbank.batching import SharedFrom
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.kvcache.sharing import SharedPrefix, Sharing
from prefixbank.promptcaches import REASON_UNAVAILABLE, REASON_UNSUPPORTED, PromptCaches, Resolved
from prefixbank.prompts import EncodedPrompt
from prefixbank.resolver import REASON_NONE
from prefixbank.tokentrie import SharedRun, fold_small_runs, n_unique_tokens, shared_runs
from prefixbank.values import Match

__all__ = ["Job", "TrieWalk", "declared_prefixes"]

_LEAST_REPEATS = 16
"""A shared run that saves fewer tokens than this is not worth a step of its own."""
_LEAST_STORED = 16
"""A shared run that goes on for fewer tokens behind what is stored is not worth a shard."""
_LEAST_LOOKED_UP = 16
"""A one-off rest that is shorter is computed without a look at the bank."""


@dataclass(frozen=True, slots=True)
class _Base:
    """Hold a cache to go on from: what the bank gave, gone on with to `n_tokens`.

    `n_kept` of these are in the bank, or on their way there.
    """

    resolved: Resolved
    n_tokens: int
    n_kept: int

    def copied(self) -> _Base:
        """Return one that may be written into. The arrays are shared until then."""
        prompt_cache = copy.deepcopy(self.resolved.prompt_cache)
        return replace(self, resolved=replace(self.resolved, prompt_cache=prompt_cache))


@dataclass(slots=True, eq=False)
class Job:
    """Hold a prompt that is ready to be answered, and its answer as it grows.

    `prompt_cache` holds the token ids `before` and is the job's own; `rest` is never empty. `n_computed` counts the
    rest and the shared runs that were computed for this prompt and others. The rows of the first `shared_tokens` tokens
    are held once for all jobs that have them in common.
    """

    index: int
    prompt_cache: list[Any]
    found: Match
    before: list[int]
    rest: list[int]
    n_computed: int
    started_at: float
    ttft_s: float = 0.0
    answer: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    batched: bool = False
    shared_tokens: int = 0


class TrieWalk:
    """Give out the prompts in depth-first order, each with the cache of all that it shares with another one."""

    def __init__(
        self,
        caches: PromptCaches,
        token_ids: Sequence[bytes],
        *,
        hold_back: int = 0,
        prefill_step_size: int | None = None,
        sharing: Sharing | None = None,
        n_together: int = 1,
        shared_from: SharedFrom = lambda _: None,
        declared: Sequence[bytes] = (),
    ) -> None:
        """Take packed prompts; the last `hold_back` tokens of each, and at least one, are computed with the prompt.

        `declared` are packed prefixes that are computed apart and stored even if one prompt alone has them. With
        `sharing`, caches of jobs share the rows of runs that are as long as `shared_from` says for as many jobs as are
        run at a time, `n_together` at most.
        """
        self._caches = caches
        self._n_prompts = len(token_ids)
        self._prefill_step_size = prefill_step_size
        n_held = max(hold_back, 1) * TOKEN_BYTES
        bodies = [ids[: max(len(ids) - n_held, 0)] for ids in token_ids]
        # As if each declared prefix were another prompt, which shares all of it with those that begin so.
        self._token_ids = [*token_ids, *declared]
        self._bodies = [*bodies, *declared]
        self._root = shared_runs(self._bodies)
        # Computed are at most 1 % more than the unique tokens, and one a prompt: most prompts' last token is unique.
        n_unique = n_unique_tokens(token_ids)
        n_unique_last = min(n_unique - n_unique_tokens(bodies), len(token_ids))
        fold_small_runs(self._root, _LEAST_REPEATS, n_unique // 100 + n_unique_last)
        self._sharing = sharing
        self._sharing_runs = self._runs_to_share(n_together, shared_from)
        self._stored: dict[SharedRun | int, int] = {}
        self._bank_fails = False
        self._n_computed = 0  # for the next prompt that is given out, and others

    @property
    def shares(self) -> bool:
        """Tell whether the jobs' caches share rows; then they all are made for it."""
        return bool(self._sharing_runs)

    def __iter__(self) -> Iterator[Job]:
        if not self._n_prompts:
            return
        self._look_up()
        empty = _Base(self._caches.load(b"", Match(0, 0, 0, REASON_NONE), 0), 0, 0)
        nothing = self._sharing.empty if self._sharing is not None and self.shares else None
        left: list[tuple[SharedRun, _Base, SharedPrefix | None, bool]] = [(self._root, empty, nothing, False)]
        while left:
            run, base, prefix, is_last = left.pop()
            if run is not self._root:
                base = self._compute(run, base, is_last)
                if run in self._sharing_runs and self._sharing is not None and prefix is not None:
                    prefix = self._sharing.extended(prefix, base.resolved.prompt_cache, run.end)
            for member in self._prompts(run):
                yield self._job(member, base, prefix)
            # The last one popped may write into the cache: nobody needs it any more.
            left += [(child, base, prefix, place == 0) for place, child in enumerate(run.children)]

    def _prompts(self, run: SharedRun) -> list[int]:
        """Return the prompts that go on behind a run alone: its members, without declared prefixes."""
        return [member for member in run.members if member < self._n_prompts]

    def _runs_to_share(self, n_together: int, shared_from: SharedFrom) -> set[SharedRun]:
        """Return the runs whose rows are to be shared, each for what it adds to those above it."""
        if self._sharing is None or n_together < 2:
            return set()
        runs = list(self._root.walk())
        n_below: dict[SharedRun, int] = {}
        for run in reversed(runs):  # each after those below
            n_below[run] = len(self._prompts(run)) + sum(n_below[child] for child in run.children)
        found = set()
        n_above = {self._root: 0}
        for run in runs:
            least = shared_from(min(n_below[run], n_together))
            if least is not None and run.end - n_above[run] >= least:
                found.add(run)
                n_above[run] = run.end
            n_above |= dict.fromkeys(run.children, n_above[run])
        return found

    def _look_up(self) -> None:
        """Note how much of each run and prompt is stored, before anything new is on its way to disk.

        A look at what lies behind a run that is not stored whole is spared. Where the bank fails, all are.
        """
        left = [self._root]
        while left:
            run = left.pop()
            asked: list[tuple[SharedRun | int, int, int]] = [(child, child.holder, child.end) for child in run.children]
            for member in self._prompts(run):
                n_tokens = len(self._bodies[member]) // TOKEN_BYTES
                if n_tokens - run.end >= _LEAST_LOOKED_UP:
                    asked.append((member, member, n_tokens))
            for whose, holder, end in asked:
                found = self._caches.match(self._up_to(holder, end), 0)
                if found.reason in (REASON_UNAVAILABLE, REASON_UNSUPPORTED):
                    self._bank_fails = True
                    return
                self._stored[whose] = found.n_tokens
                if isinstance(whose, SharedRun) and max(found.n_known_tokens, found.n_tokens) >= end:
                    left.append(whose)

    def _up_to(self, holder: int, end: int) -> EncodedPrompt:
        """Return a prompt's first `end` tokens and the next one, which a match leaves out."""
        return EncodedPrompt(self._token_ids[holder][: (end + 1) * TOKEN_BYTES])

    def _load(self, whose: SharedRun | int, holder: int, end: int, base: _Base) -> _Base | None:
        """Return what the bank has of a prompt's first `end` tokens, if that is worth more than what is there."""
        if self._stored.get(whose, 0) <= base.n_tokens:
            return None
        prompt = self._up_to(holder, end)
        found = self._caches.match(prompt, 0)
        if not self._pays(found, found.n_tokens - base.n_tokens):
            return None
        resolved = self._caches.load(prompt.token_ids, found, 0)
        if resolved.match.n_tokens <= base.n_tokens:
            return None
        return _Base(resolved, resolved.match.n_tokens, resolved.match.n_tokens)

    def _pays(self, found: Match, n_more: int) -> bool:
        """Tell whether to load a match for its last `n_more` tokens: unless computing those is known to be faster."""
        if n_more <= 0 or found.in_memory or self._caches.session.options.load == "always":
            return n_more > 0
        if found.load_s is None or found.compute_s is None:
            return True
        return found.load_s <= found.compute_s * n_more / found.n_tokens

    def _compute(self, run: SharedRun, base: _Base, may_take: bool) -> _Base:
        """Return a cache that ends with a run, and store it."""
        caches = self._caches
        packed = self._token_ids[run.holder][: run.end * TOKEN_BYTES]
        base = self._load(run, run.holder, run.end, base) or (base if may_take else base.copied())
        resolved = base.resolved
        recorder = computing.recorder_for(caches, resolved)
        computing.compute(
            caches,
            resolved.prompt_cache,
            unpack_token_ids(packed),
            base.n_tokens,
            run.end,
            self._prefill_step_size,
            None,
            recorder,
        )
        self._n_computed += run.end - base.n_tokens
        n_kept = base.n_kept
        if self._is_worth_storing(run, n_kept, has_all_rows=recorder is None or not recorder.must_follow):
            computing.store_behind(caches, packed, resolved, run.end, recorder)
            n_kept = run.end
        if recorder is not None:  # the branches' stores begin in the chunk behind what the bank had
            n_there = resolved.match.n_stored_tokens
            resolved = replace(resolved, seed=recorder.seed(n_there - n_there % caches.session.chunk_tokens))
        return _Base(resolved, run.end, n_kept)

    def _is_worth_storing(self, run: SharedRun, n_kept: int, *, has_all_rows: bool) -> bool:
        if self._bank_fails or run.end - n_kept < (_LEAST_STORED if n_kept else 1):
            return False
        # What comes next stores this run's rows, too, but not its states nor what windows hold at its end.
        follows = not run.members and all(child.end - run.end >= _LEAST_STORED for child in run.children)
        return not (has_all_rows and run.children and follows)

    def _job(self, member: int, base: _Base, prefix: SharedPrefix | None) -> Job:
        token_ids = self._token_ids[member]
        started_at = time.perf_counter()
        end = len(self._bodies[member]) // TOKEN_BYTES
        base = self._load(member, member, end, base) or base
        prompt_cache = base.resolved.prompt_cache
        if self._sharing is not None and prefix is not None:
            prompt_cache = self._sharing.behind(prefix, prompt_cache, base.n_tokens)
        else:
            prompt_cache = copy.deepcopy(prompt_cache)
        ids = unpack_token_ids(token_ids)
        before, rest = ids[: base.n_tokens], ids[base.n_tokens :]
        n_computed, self._n_computed = self._n_computed + len(rest), 0
        n_prompt = len(token_ids) // TOKEN_BYTES
        self._caches.session.count(cached_tokens=n_prompt - n_computed, computed_tokens=n_computed)
        found = replace(base.resolved.match, n_prompt_tokens=n_prompt)
        n_shared = prefix.n_tokens if prefix is not None else 0
        return Job(member, prompt_cache, found, before, rest, n_computed, started_at, shared_tokens=n_shared)


def declared_prefixes(prompts: Sequence[EncodedPrompt]) -> list[bytes]:
    """Return the different declared shared parts of prompts, packed."""
    ends = ((prompt.token_ids, (prompt.n_shared_tokens or 0) * TOKEN_BYTES) for prompt in prompts)
    return sorted({token_ids[:end] for token_ids, end in ends if end})
