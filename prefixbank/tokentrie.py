"""Own the trie of many prompts' token ids: which runs they share, and how many tokens are unique; no MLX, no model.

There is no node for each token: sorted, the prompts that share a run are neighbours, so the trie follows from the
common runs of neighbours, in memory that grows with the number of prompts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prefixbank.chunking import TOKEN_BYTES, common_run

__all__ = ["SharedRun", "fold_small_runs", "n_unique_tokens", "shared_runs"]


@dataclass(slots=True, eq=False)
class SharedRun:
    """Hold the tokens `[start, end)` that several prompts share behind the run above.

    `holder` is one of these prompts. `members` are the prompts that share no longer run; `children` the longer runs.
    Only the root, which is empty, may have fewer than two of both.
    """

    start: int
    end: int
    holder: int
    members: list[int] = field(default_factory=list)
    children: list[SharedRun] = field(default_factory=list)

    @property
    def n_repeats(self) -> int:
        """Return how many more tokens are computed where each branch computes the run by itself."""
        return (self.end - self.start) * (len(self.members) + len(self.children) - 1)

    def walk(self) -> Iterator[SharedRun]:
        """Yield this run and those below, depth first, each before its children."""
        left = [self]
        while left:
            run = left.pop()
            yield run
            left += reversed(run.children)


def shared_runs(prompts: Sequence[bytes]) -> SharedRun:
    """Return the root of the trie of packed prompts; members and holders are their indexes, equal prompts included."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    root = SharedRun(0, 0, order[0] if order else 0)
    open_runs = [root]  # each inside the one before
    for place, member in enumerate(order):
        following = order[place + 1] if place + 1 < len(order) else None
        n_common = 0 if following is None else common_run(prompts[member], prompts[following])
        if n_common > open_runs[-1].end:
            open_runs.append(SharedRun(open_runs[-1].end, n_common, member))
        open_runs[-1].members.append(member)
        while open_runs[-1].end > n_common:
            done = open_runs.pop()
            if open_runs[-1].end < n_common:
                open_runs.append(SharedRun(open_runs[-1].end, n_common, member))
            done.start = open_runs[-1].end
            open_runs[-1].children.append(done)
    return root


def n_unique_tokens(prompts: Sequence[bytes]) -> int:
    """Return how many tokens the trie of packed prompts has: those that no two of them share, and shared ones once."""
    order = sorted(prompts)
    n_shared = sum(common_run(one, other) for one, other in pairwise(order))
    return sum(len(prompt) // TOKEN_BYTES for prompt in order) - n_shared


def fold_small_runs(root: SharedRun, least_repeats: int, max_repeats: int) -> int:
    """Take out runs that are hardly worth a step of their own: their branches compute them, each by itself.

    Those are folded that cost fewer than `least_repeats` tokens more so, as long as all of them together cost at most
    `max_repeats`. Returns how many tokens more are computed.
    """
    n_folded = 0
    for run in reversed(list(root.walk())):  # each after those below
        kept: list[SharedRun] = []
        for child in run.children:
            if child.n_repeats < least_repeats and n_folded + child.n_repeats <= max_repeats:
                n_folded += child.n_repeats
                run.members += child.members
                kept += child.children
            else:
                kept.append(child)
        run.children = kept
        for child in kept:
            child.start = run.end
    return n_folded
