"""
Documents that nobody else holds, as far as that can be guessed.

Locks of others are uncommitted writes, which nobody sees: only a write of one's own finds out, and a conflict aborts
the whole transaction. So nothing is skipped within an attempt. An attempt takes some at random of the first that match;
a conflict ends it, the body is repeated, and what was refused is left out: for the rest of this transaction, and for
half a second by all of this process. Where several were wanted, the next attempt wants half as many, since nobody knows
which one was refused.

An attempt that finds nothing to try any more, or has been refused often enough, has no document.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from mongo_celery.locking.call import LockCall
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.verdicts import Code, standalone_refused

_CANDIDATES_MIN = 16
_REFUSALS_MAX = 16
_LEFT_OUT_SECONDS = 0.5
_SAME_CALL_SECONDS = 10.0
"""A driver's attempt that comes later than this after a refusal is taken for another transaction's."""

Key = tuple[str, Hashable]


@dataclass(slots=True)
class _Refusals:
    """
    What one call has been refused over the attempts of its transaction.

    Attributes:
        keys: the documents.
        count: how often.
        wanted: how many the next attempt asks for at most; None where as many as the caller does.
        until: when another transaction would begin, on the monotonic clock.
    """

    keys: set[Key] = field(default_factory=set)
    count: int = 0
    wanted: int | None = None
    until: float = 0.0


_of_session: WeakKeyDictionary[ClientSession, dict[Hashable, _Refusals]] = WeakKeyDictionary()
_left_out: dict[Key, float] = {}


def free_ids(call: LockCall, filter_: Mapping[str, Any], sort: Any, limit: int) -> list[Any]:
    """The ids of documents to try, at most so many, chosen at random among the first; none where all are refused."""
    refusals = _refusals_of(call)
    if refusals.count >= _REFUSALS_MAX:
        _forget(call)
        return []
    out = refusals.keys | _left_out_now()
    look = max(2 * limit, _CANDIDATES_MIN)
    with standalone_refused():
        found = call.collection.find(filter_, {"_id": 1}, sort=sort, limit=look + len(out), session=call.session)
        seen = [each["_id"] for each in found]
    free = [each for each in seen if _key(call, each) not in out][:look]
    if not free:
        _forget(call)
    return random.sample(free, min(len(free), refusals.wanted or limit))


@contextmanager
def tried(call: LockCall, ids: Sequence[Any]) -> Iterator[None]:
    """Inside, these are locked; a refusal is remembered for the next attempt."""
    try:
        yield
    except OperationFailure as error:
        if error.code == Code.WriteConflict:
            _note(call, ids)
        raise
    _forget(call)


def _note(call: LockCall, ids: Sequence[Any]) -> None:
    refusals = _refusals_of(call)
    refusals.count += 1
    refusals.until = time.monotonic() + _SAME_CALL_SECONDS
    if len(ids) == 1:
        key = _key(call, ids[0])
        refusals.keys.add(key)
        _left_out[key] = time.monotonic() + _LEFT_OUT_SECONDS
    else:
        refusals.wanted = (len(ids) + 1) // 2


def _refusals_of(call: LockCall) -> _Refusals:
    calls = _of_session.setdefault(call.session, {})
    known = calls.get(call.place)
    if known is None or known.until < time.monotonic():
        known = calls[call.place] = _Refusals()
    return known


def _forget(call: LockCall) -> None:
    _of_session.get(call.session, {}).pop(call.place, None)


def _left_out_now() -> set[Key]:
    now = time.monotonic()
    for key, until in list(_left_out.items()):
        if until < now:
            _left_out.pop(key, None)
    return set(_left_out)


def _key(call: LockCall, document_id: Any) -> Key:
    return call.collection.full_name, id_key(document_id, call.collection.codec_options)
