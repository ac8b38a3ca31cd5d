"""Own saying why a prompt matches as far as it does, and no further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixbank import resolver
from prefixbank.advice.hints import hint
from prefixbank.chunking import TOKEN_BYTES, common_run, pack_token_ids, unpack_token_ids
from prefixbank.values import ChunkRecord, Match, Namespace

if TYPE_CHECKING:
    from prefixbank.session import BankSession

__all__ = ["Explanation", "explain"]

_SHOWN_TOKENS = 8
_LOOKED_AT_TOKENS = 24
"""How many tokens before and behind the point are looked at for a cause."""
_LEAST_MOVED_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Explanation:
    """Say how far a prompt matches and why no further.

    `differs_at` is the offset of the first token that is not stored like this (None where all that may be taken is
    stored); `prompt_token` and `stored_token` are the ids there and `prompt_text` and `stored_text` what follows, as
    text; the stored ones are None where nothing is stored behind the match. `prefix_names` are names of prefixes that
    the match ends in. `reason` is one sentence. `load_s`, `compute_s` and `loading_pays` are the match's: whether it
    will be loaded, and what that rests on. `hint` names the cause where it is recognised: a date, time or id that
    differs, white space, another order of examples, a seam between tokens.
    """

    n_prompt_tokens: int
    n_matched_tokens: int
    differs_at: int | None
    prompt_token: int | None
    prompt_text: str | None
    stored_token: int | None
    stored_text: str | None
    prefix_names: tuple[str, ...]
    reason: str
    load_s: float | None = None
    compute_s: float | None = None
    loading_pays: bool = True
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.n_matched_tokens} of {self.n_prompt_tokens} tokens are stored: {self.reason}"
        if self.load_s is not None and self.compute_s is not None:
            choice = "they are loaded" if self.loading_pays else "they are computed, which is faster"
            text += f"\n  loading takes {self.load_s:.3g} s, computing {self.compute_s:.3g} s (estimated): {choice}"
        if self.stored_token is not None:
            text += f"\n  here   {self.prompt_token} {self.prompt_text!r}"
            text += f"\n  stored {self.stored_token} {self.stored_text!r}"
        if self.hint is not None:
            text += f"\n  looks like {self.hint}"
        return text


def explain(
    session: BankSession,
    namespace: Namespace,
    token_ids: bytes,
    found: Match,
    decode: Callable[[Sequence[int]], str],
) -> Explanation:
    """Explain the match of packed token ids. Reads no shard."""
    at = found.n_tokens
    n_prompt = found.n_prompt_tokens
    names = _names(session, found)
    if found.reason == resolver.REASON_ALL:
        reason = "all but the last one, which is always computed" if at == n_prompt - 1 else "all that may be taken"
        costs = found.load_s, found.compute_s, found.loading_pays
        return Explanation(n_prompt, at, None, None, None, None, None, names, reason, *costs)
    here = unpack_token_ids(token_ids[at * TOKEN_BYTES :][: _SHOWN_TOKENS * TOKEN_BYTES])
    no_state = found.reason == resolver.REASON_NO_STATE
    record = None if no_state else _stored_behind(session, namespace, found, token_ids)
    stored = [] if record is None else _from_offset(record, at, _SHOWN_TOKENS)
    if stored:
        reason = f"token {at} differs from what is stored there"
    elif found.reason == resolver.REASON_NO_STATE:
        reason = (
            f"{found.n_known_tokens} tokens are stored, but this model's recurrent layers can go on only where their "
            "state was kept; prompts that part here make it be kept"
        )
    elif found.reason == resolver.REASON_LOST:
        reason = f"the shard that holds token {at} was lost; it is computed and stored again"
    elif at:
        reason = f"nothing longer is stored: the stored prefix ends before token {at}"
    else:
        reason = _reason_of_nothing(session, namespace, token_ids)
    return Explanation(
        n_prompt_tokens=n_prompt,
        n_matched_tokens=at,
        differs_at=at,
        prompt_token=here[0],
        prompt_text=decode(here),
        stored_token=stored[0] if stored else None,
        stored_text=decode(stored) if stored else None,
        prefix_names=names,
        reason=reason,
        load_s=found.load_s,
        compute_s=found.compute_s,
        loading_pays=found.loading_pays,
        hint=_hint(session, namespace, token_ids, at, record, decode) if record is not None and stored else None,
    )


def _hint(
    session: BankSession,
    namespace: Namespace,
    token_ids: bytes,
    at: int,
    record: ChunkRecord,
    decode: Callable[[Sequence[int]], str],
) -> str | None:
    """Return the recognised cause of the difference between a prompt and the stored chunk at token `at`."""
    before = unpack_token_ids(token_ids[: at * TOKEN_BYTES][-_LOOKED_AT_TOKENS * TOKEN_BYTES :])
    here = unpack_token_ids(token_ids[at * TOKEN_BYTES :][: _LOOKED_AT_TOKENS * TOKEN_BYTES])
    stored = _from_offset(record, at, _LOOKED_AT_TOKENS)
    is_whole = record.end == at + len(stored)
    return hint(
        decode(before) if before else "",
        decode(here),
        decode(stored),
        stored_ends=is_whole and not session.next_chunks(namespace, record.key),
        later_at=_find_behind(token_ids, at, pack_token_ids(stored)),
    )


def _find_behind(token_ids: bytes, at: int, wanted: bytes) -> int | None:
    """Return the offset behind token `at` where the wanted packed ids come, whole; None for few ids or no place."""
    if len(wanted) < _LEAST_MOVED_TOKENS * TOKEN_BYTES:
        return None
    place = token_ids.find(wanted, (at + 1) * TOKEN_BYTES)
    while place % TOKEN_BYTES and place > 0:
        place = token_ids.find(wanted, place + 1)
    return place // TOKEN_BYTES if place > 0 else None


def _names(session: BankSession, found: Match) -> tuple[str, ...]:
    if not found.chunks:
        return ()
    last = found.chunks[-1].key
    return tuple(prefix.name for prefix in session.prefixes() if prefix.chunk_key == last)


def _stored_behind(session: BankSession, namespace: Namespace, found: Match, token_ids: bytes) -> ChunkRecord | None:
    """Return the chunk that holds what is stored where the match ends, None where nothing is."""
    at = found.n_tokens
    chain = list(found.chunks)
    if chain and chain[-1].end > at:  # the match ends inside this chunk
        return chain[-1]
    siblings = session.next_chunks(namespace, chain[-1].key if chain else None)
    rest = token_ids[at * TOKEN_BYTES :]
    return max(siblings, key=lambda s: common_run(s.token_ids, rest), default=None)


def _from_offset(record: ChunkRecord, at: int, n_tokens: int) -> list[int]:
    low = (at - record.start) * TOKEN_BYTES
    return unpack_token_ids(record.token_ids[low : low + n_tokens * TOKEN_BYTES])


def _reason_of_nothing(session: BankSession, namespace: Namespace, token_ids: bytes) -> str:
    others = [
        other.label
        for other, record in session.first_chunks(token_ids)
        if other.id != namespace.id and token_ids.startswith(record.token_ids)
    ]
    if others:
        return (
            f"these tokens are stored for another model, adapter, salt or version of the weights ({others[0]}), "
            "not for this one"
        )
    return "nothing that begins like this is stored for this model"
