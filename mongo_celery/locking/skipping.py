"""
Documents that nobody else holds, as far as that can be guessed.

Locks of others are uncommitted writes, which nobody sees: only a write of one's own finds out, and a conflict aborts
the whole transaction. So nothing is skipped within an attempt. An attempt takes some at random of the first that match;
a conflict ends it, the body is repeated, and what was refused is left out: by the other attempts of this transaction,
and for half a second by all of this process. Where several were wanted, the next attempt wants half as many, since
nobody knows which one was refused.

An attempt that finds nothing to try any more, or has been refused often enough, has no document.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pymongo.errors import OperationFailure

from mongo_celery.locking.call import LockCall, judged
from mongo_celery.locking.plans import Plan
from mongo_celery.locking.waits import Waits
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.transaction.scopes import Session
from mongo_celery.mongo.verdicts import Code

_CANDIDATES_MIN = 16
_REFUSALS_MAX = 16
_LEFT_OUT_SECONDS = 0.5

_Key = Hashable
"""A document of a collection."""


@dataclass(slots=True)
class _Refusals:
    """
    What one call has been refused over the attempts of its transaction.

    Attributes:
        waits: of the transaction; those of `transactional` are each call's own.
        at: when it was refused last, on the monotonic clock.
        keys: the documents.
        count: how often.
        wanted: how many the next attempt asks for at most; None where as many as the caller does.
    """

    waits: Waits
    at: float
    keys: set[_Key] = field(default_factory=set)
    count: int = 0
    wanted: int | None = None


_of_session: WeakKeyDictionary[Session, dict[Hashable, _Refusals]] = WeakKeyDictionary()

_left_out: dict[tuple[int, str], dict[_Key, float]] = {}
"""By client and collection, until when a document is left out, on the monotonic clock."""


def free_ids(call: LockCall, limit: int, first: Callable[[int], Plan[list[Any]]]) -> Plan[list[Any]]:
    """
    The ids of documents to try, at most so many, chosen at random among the first; none where all are refused.

    Args:
        call: that wants them.
        limit: how many at most.
        first: reads the ids of the first ones that match, so many.
    """
    refusals = _refusals_of(call)
    if refusals.count >= _REFUSALS_MAX:
        _forget(call)
        return []
    out = refusals.keys | _left_out_now(call)
    look = max(2 * limit, _CANDIDATES_MIN)
    seen = yield from judged(call, first(look + len(out)), locks=False)
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
    refusals.at = time.monotonic()
    _of_session.setdefault(call.session, {})[_place(call)] = refusals
    if len(ids) == 1:
        key = _key(call, ids[0])
        refusals.keys.add(key)
        _left_out.setdefault(_collection(call), {})[key] = refusals.at + _LEFT_OUT_SECONDS
    else:
        refusals.wanted = (len(ids) + 1) // 2


def _refusals_of(call: LockCall) -> _Refusals:
    now, waits = time.monotonic(), call.waits
    known = _of_session.get(call.session, {}).get(_place(call))
    if known is None or known.waits is not waits or now - known.at > waits.forget_after:
        return _Refusals(waits, now)
    return known


def _forget(call: LockCall) -> None:
    _of_session.get(call.session, {}).pop(_place(call), None)


def _place(call: LockCall) -> Hashable:
    """By which a call is known again. In a driver's transaction nobody says which call of an attempt it is."""
    return call.place if math.isinf(call.waits.forget_after) else call.collection.full_name


def _left_out_now(call: LockCall) -> set[_Key]:
    now = time.monotonic()
    for collection, keys in list(_left_out.items()):
        for key, until in list(keys.items()):
            if until < now:
                keys.pop(key, None)
        if not keys:
            _left_out.pop(collection, None)
    return set(_left_out.get(_collection(call), ()))


def _collection(call: LockCall) -> tuple[int, str]:
    return id(call.collection.database.client), call.collection.full_name


def _key(call: LockCall, document_id: Any) -> _Key:
    return id_key(document_id, call.collection.codec_options)
