"""
Whose handlers a lease serves, and whose are newer.

A listener's definitions are what it does with the stream: the digest of each handler, and of the options that concern
all. While it stands by or leads it says three times in a lease's ttl that they are there (`candidates`, by digest).
`definedAt` is the server's time at which a set was first seen. From this follow the rules of a rolling deploy, in
either order:

1. A leader steps down when a live candidate has other definitions with a later `definedAt`.
2. A lease is not acquired for definitions while a live candidate has later ones.
3. A candidate is live for the lease's ttl: a killed one delays nobody for longer than a killed leader.
4. A set whose listener has failed for good, or has let its lease expire, is not newer than anything for
   `_DISTRUST_SECONDS`, and leaves a free lease to a live candidate that has not: what is killed each time it leads must
   not stop the others each time. A frozen machine looks the same. Where there is no such candidate it leads at once.
5. A set that nobody has named for `_MEMORY_SECONDS` is forgotten: deployed again, it is new.

So old and new processes may run side by side for as long as they like, and old ones may restart as often as they like:
the newer definitions lead. A deploy of old code soon after the new one leads when the last listener of the new one has
ended, and at once when the new one has been in place for longer.

`app` and `tasks` tell another app, which may not lead at all: see `is_other_app`. Whose handlers the present term
serves is known only where `is_of_this_term` holds: a listener of an earlier version leaves what it finds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.mongo.expressions import literal, millis

_MEMORY_SECONDS = 600.0
_DISTRUST_SECONDS = 300.0
_TTL_AGO = {"$subtract": ["$$NOW", "$ttl"]}


@dataclass(frozen=True, slots=True)
class Definitions:
    """
    What a listener would do with the stream.

    Attributes:
        app: name of its app; None for one without a name.
        tasks: names of the handlers' tasks, by handler.
        handlers: digests of the handlers' definitions, by handler.
        digest: of all, the bridge's options included.
    """

    app: str | None
    tasks: Mapping[str, str]
    handlers: Mapping[str, str]
    digest: str


def is_other_app(lease: Mapping[str, Any], mine: Definitions) -> bool:
    """
    Whether a lease serves another app than these definitions are of.

    Apps with different names are different. Where the name is the same, or one has none, they are the same if they
    share a handler's name or a module with handlers: code is renamed and moved, but rarely all of it at once.
    """
    theirs: Mapping[str, str] = lease.get("tasks") or {}
    if not theirs:
        return False  # of an earlier version, or never led
    app = lease.get("app")
    if app and mine.app and app != mine.app:
        return True
    return not (theirs.keys() & mine.tasks.keys() or _modules(theirs) & _modules(mine.tasks))


def _modules(tasks: Mapping[str, str]) -> set[str]:
    return {task.rpartition(".")[0] for task in tasks.values()}


def named(digest: str) -> list[dict[str, Any]]:
    """Stages of an update: this set of definitions is there now; what was not named for long is forgotten."""
    mine = f"candidates.{digest}"
    remembered = {"$gt": [f"${mine}.seenAt", _ago(_MEMORY_SECONDS)]}
    entry = {
        "definedAt": {"$cond": [remembered, f"${mine}.definedAt", "$$NOW"]},
        "seenAt": "$$NOW",
        "failedAt": {"$ifNull": [f"${mine}.failedAt", None]},
        "host": literal(socket.gethostname()),
        "pid": literal(os.getpid()),
    }
    kept = {"$filter": {"input": _entries(), "as": "each", "cond": {"$gt": ["$$each.v.seenAt", _ago(_MEMORY_SECONDS)]}}}
    return [{"$set": {mine: entry}}, {"$set": {"candidates": {"$arrayToObject": kept}}}]


def is_overtaken(digest: str) -> dict[str, Any]:
    """Expression: whether somebody is there with newer definitions."""
    return _has_other(digest, {"$gt": ["$$each.v.definedAt", f"$candidates.{digest}.definedAt"]})


def stands_back(digest: str) -> dict[str, Any]:
    """Expression: whether this set leaves a free lease to others that are there."""
    distrusted = _is_distrusted(literal(digest), f"$candidates.{digest}.failedAt")
    return {"$or": [is_overtaken(digest), {"$and": [distrusted, _has_other(digest)]}]}


def _has_other(digest: str, *conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Whether another set is there, is trusted, and fulfils these conditions."""
    fits = {
        "$and": [
            {"$ne": ["$$each.k", digest]},
            {"$gt": ["$$each.v.seenAt", _TTL_AGO]},
            {"$not": [_is_distrusted("$$each.k", "$$each.v.failedAt")]},
            *conditions,
        ],
    }
    return {"$anyElementTrue": [{"$map": {"input": _entries(), "as": "each", "in": fits}}]}


def _is_distrusted(digest: Any, failed_at: str) -> dict[str, Any]:
    """Whether a set has failed, also where only the next acquisition will say so: or two would wait for each other."""
    return {"$or": [{"$gt": [failed_at, _ago(_DISTRUST_SECONDS)]}, _let_it_expire(digest)]}


def died() -> dict[str, Any]:
    """Stage of an acquisition, before it names the new holder: the set of one that let its lease expire has failed."""
    entry = {"k": "$$each.k", "v": {"$mergeObjects": ["$$each.v", {"failedAt": "$$NOW"}]}}
    charged = {
        "$map": {"input": _entries(), "as": "each", "in": {"$cond": [_let_it_expire("$$each.k"), entry, "$$each"]}}
    }
    return {"$set": {"candidates": {"$arrayToObject": charged}}}


def has_failed(entry: Mapping[str, Any]) -> bool:
    """Whether a listener of these definitions has failed lately, from the entry that `named` has just written."""
    failed = entry.get("failedAt")
    return bool(failed and (entry["seenAt"] - failed).total_seconds() < _DISTRUST_SECONDS)


def is_of_this_term(lease: Mapping[str, Any]) -> bool:
    """Whether the term that has the lease has said itself what it serves."""
    return lease.get("listenerId") is not None and lease.get("servedBy") == lease["listenerId"]


def served(mine: Definitions) -> dict[str, Any]:
    """Stage: the lease serves these definitions now."""
    return {
        "$set": {
            "app": literal(mine.app),
            "tasks": literal(dict(mine.tasks)),
            "definitions": literal(dict(mine.handlers)),
            "served": literal(mine.digest),
            "servedBy": "$listenerId",
            "definedAt": f"$candidates.{mine.digest}.definedAt",
        },
    }


def ended(digest: str, *, failed: bool) -> dict[str, Any]:
    """Stage: a listener of this set leads no more, and need not be waited for."""
    mine = f"candidates.{digest}"
    failure = {f"{mine}.failedAt": "$$NOW"} if failed else {}
    return {"$set": {f"{mine}.seenAt": _TTL_AGO, **failure}}


def _let_it_expire(digest: Any) -> dict[str, Any]:
    """Of a lease that can be acquired: whether a term that serves this set has not given it back. (Else: has it.)"""
    held = {"$ne": [{"$ifNull": ["$listenerId", None]}, None]}
    return {"$and": [held, {"$eq": ["$servedBy", "$listenerId"]}, {"$eq": ["$served", digest]}]}


def _entries() -> dict[str, Any]:
    return {"$objectToArray": {"$ifNull": ["$candidates", {}]}}


def _ago(seconds: float) -> dict[str, Any]:
    return {"$subtract": ["$$NOW", millis(seconds)]}
