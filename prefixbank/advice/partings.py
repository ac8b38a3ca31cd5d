"""Own where prompts part: the points of the trie behind which most tokens are computed more than once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from prefixbank.advice.results import PartingPoint, Way
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.tokentrie import SharedRun

__all__ = ["n_shared_behind", "partings"]

SHOWN_PARTINGS = 5
SHOWN_WAYS = 4
_SHOWN_TOKENS = 8
_TOKENS_BEFORE = 16


def partings(root: SharedRun, prompts: Sequence[bytes], decode: Callable[[Sequence[int]], str]) -> list[PartingPoint]:
    """Return the most costly parting points of the trie of packed prompts, the most costly first."""
    n_prompts: dict[int, int] = {}
    n_below: dict[int, int] = {}  # unique tokens behind the run's end
    costs = []
    for number, run in enumerate(reversed(list(root.walk()))):  # each after those below
        ways = [len(prompts[member]) // TOKEN_BYTES - run.end for member in run.members]
        ways += [child.end - child.start + n_below.pop(id(child)) for child in run.children]
        n_prompts[id(run)] = len(run.members) + sum(n_prompts[id(child)] for child in run.children)
        n_below[id(run)] = sum(ways)
        cost = sum(ways) - max(ways, default=0)
        if cost:
            costs.append((cost, -run.end, number, run))
    return [
        _parting(run, cost, n_prompts, prompts, decode) for cost, _, _, run in heapq.nlargest(SHOWN_PARTINGS, costs)
    ]


def _parting(
    run: SharedRun,
    cost: int,
    n_prompts: dict[int, int],
    prompts: Sequence[bytes],
    decode: Callable[[Sequence[int]], str],
) -> PartingPoint:
    def ids(prompt: int, start: int, end: int) -> tuple[int, ...]:
        return tuple(unpack_token_ids(prompts[prompt][start * TOKEN_BYTES : end * TOKEN_BYTES]))

    going = [(n_prompts[id(child)], child.holder) for child in run.children]
    ended = [member for member in run.members if len(prompts[member]) // TOKEN_BYTES == run.end]
    going += [(1, member) for member in run.members if len(prompts[member]) // TOKEN_BYTES > run.end]
    if ended:
        going.append((len(ended), min(ended)))
    ways = []
    for n, prompt in sorted(going, key=lambda way: (-way[0], way[1]))[:SHOWN_WAYS]:
        shown = ids(prompt, run.end, run.end + _SHOWN_TOKENS)
        ways.append(Way(n, prompt, shown, decode(shown) if shown else ""))
    before = ids(run.holder, max(run.end - _TOKENS_BEFORE, 0), run.end)
    text_before = decode(before) if before else ""
    return PartingPoint(run.end, n_prompts[id(run)], len(going), cost, text_before, tuple(ways))


def n_shared_behind(root: SharedRun, offset: int) -> int:
    """Return how many tokens of the shared runs stand behind a token offset, each run once."""
    return sum(max(run.end - max(run.start, offset), 0) for run in root.walk())
