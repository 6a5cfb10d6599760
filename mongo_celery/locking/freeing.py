"""
The end of open transactions whose client is gone, and what is promised of it.

A client that was killed leaves its transaction open until the server ends it after `transactionLifetimeLimitSeconds`.
Who waits for a document looks before that: from two seconds of conflicts on, every five seconds. A transaction that was
silent between looks for ten seconds, and is *dead* (`holders`) at the last, right before the end, is ended with its
session.

**Promised**: nothing that a transaction has written is kept in part; and none is ended that was heard of within ten
seconds, or whose client has a connection that can be seen.

**Not promised**: that what is ended would not have gone on. A client is known by its address and appName, and seen
only as far as the server shows it. One that lives while a body computes for longer than ten seconds is taken for a dead
one, if it has lost all its connections at the last look; or its pool has closed its own (`maxIdleTimeMS`, a failed
heartbeat), and its heartbeats are not shown, since they are nobody's and the waiter's user lacks `inprog`. It is told
NoSuchTransaction then, labelled as transient: `transactional` repeats its body, as a function; a `with` block, Django's
`atomic` and other programs of the same user fail. A body that computes for so long at each attempt is ended at each as
long as somebody waits, until its time is used up. And one that begins its next operation in the moment of the end is
told Interrupted, which has no label, and fails. Whoever cannot have that turns it off: `set_automatic_freeing(False)`.

Nor is it promised that all that is dead is ended: another process at the same address with the same appName keeps it.
So give each process an appName of its own.

Ending a session of the same user needs no right; `killAnySession` on the cluster ends those of others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import pymongo
from bson.binary import Binary
from pymongo import MongoClient

from mongo_celery.locking import holders
from mongo_celery.locking.holders import AnyClient, OpenTransaction, admin_of, look, note_unanswered, standing_of
from mongo_celery.locking.plans import Plan, carried_out
from mongo_celery.locking.watches import watch_of

logger = logging.getLogger("mongo_celery.locking")

FIRST_LOOK_SECONDS = 2.0
"""Who waits looks for dead holders after so long: most locks are free sooner."""

_LOOK_SECONDS = 5.0
"""A process asks a server at most so often because of waiters."""

_ended: list[float] = []
"""When this process has ended transactions of dead clients; a list, since threads may add to one without a lock."""

_switched_off: set[bool] = set()


def set_automatic_freeing(enabled: bool) -> None:
    """
    Say whether those who wait for a lock in this process end the transactions of dead clients.

    By default they do. Without it, a dead client's documents are free when the server ends its transaction, 60 to 90
    seconds after it began by default, or when somebody does so by `celery -A app locks free`.

    Args:
        enabled: False turns it off, for all clients of this process and those that it forks.
    """
    if enabled:
        _switched_off.clear()
    else:
        _switched_off.add(True)


def end(client: MongoClient[Any], chosen: Sequence[OpenTransaction]) -> list[OpenTransaction]:
    """
    End the sessions of transactions; what these hold is free afterwards.

    Args:
        client: of a user whose own they are, or that may end those of others.
        chosen: as they were read a moment ago; a transaction that a session has begun since is ended with it.

    Returns:
        Those of a user whose sessions this one may not end: they are as they were.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    return carried_out(_end(client, chosen))


def _end(client: AnyClient, chosen: Sequence[OpenTransaction]) -> Plan[list[OpenTransaction]]:
    own = [each for each in chosen if each.own]
    foreign = [each for each in chosen if not each.own]
    admin = admin_of(client)
    if own:
        yield admin.command("killSessions", [{"id": Binary.from_uuid(each.id)} for each in own])
    if foreign:
        standing = yield from standing_of(client)
        if not standing.ends_all:
            return foreign
        patterns = [{"lsid": {"id": Binary.from_uuid(each.id), "uid": each.user}} for each in foreign]
        yield admin.command("killAllSessionsByPattern", patterns)
    return []


def free_dead(client: AnyClient) -> Plan[None]:
    """
    End the transactions of dead clients, as somebody who has waited in vain; it looks at most once in a few seconds.

    It never fails: whoever waits goes on waiting.
    """
    now, watch = time.monotonic(), watch_of(client)
    if _switched_off or now - watch.looked < _LOOK_SECONDS:
        return
    watch.looked = now
    try:
        with pymongo.timeout(holders.ANSWER_SECONDS):
            dead = yield from _dead(client)
            left = (yield from _end(client, dead)) if dead else []
    except holders.UNANSWERED as error:
        note_unanswered(error)
        return
    for each in dead:
        if each in left:
            logger.warning(
                "a transaction of a client that is gone keeps locks; to end it needs the right killAnySession: %s",
                each,
                extra={"event": "dead_holder_kept"},
            )
        else:
            _ended.append(now)
            logger.warning(
                "ended a transaction that kept locks, since its client is gone: %s",
                each,
                extra={"event": "dead_holder_ended"},
            )


def _dead(client: AnyClient) -> Plan[list[OpenTransaction]]:
    """Which clients have a connection is asked only where a transaction has been silent for long enough."""
    found = yield from look(client, connections=False)
    if not any(not each.running and each.silent_seconds >= holders.DEAD_SECONDS for each in found):
        return []
    found = yield from look(client)
    return [each for each in found if each.is_dead]


def ended_count() -> int:
    """How many transactions of dead clients waiters of this process have ended."""
    return len(_ended)
