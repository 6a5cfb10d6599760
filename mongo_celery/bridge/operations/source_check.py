"""Preflight of the sources: whether what handlers listen to is there, and can be listened to at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import OperationFailure

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.reasons import NAMED, listed
from mongo_celery.bridge.stream.source import Source
from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, error, ok, warning
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_STREAMED = "collection"
_KINDS = {"view": "a view", "timeseries": "a time series"}


def check_sources(wiring: Wiring) -> Iterator[Finding]:
    """Look for the collections that handlers name, as far as the user may see them: a right on them is enough."""
    try:
        selectors, _ = wiring.stream()
    except ConfigurationError:
        return  # a finding of its own says so
    wanted = {selector.name: selector.sources for selector in selectors}
    databases = {source.database for sources in wanted.values() for source in sources if source.database}
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            there = {
                name: {
                    str(each["name"]): str(each["type"])
                    for each in wiring.client[name].list_collections(nameOnly=True, authorizedCollections=True)
                }
                for name in sorted(databases)
            }
    except OperationFailure as failure:
        yield warning("sources", f"Cannot see which collections exist; grant listCollections. {short(failure)}.")
        return
    yield from judge_sources(wanted, there)


def judge_sources(wanted: Mapping[str, Iterable[Source]], there: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """
    Findings from what handlers listen to.

    Args:
        wanted: sources by handler.
        there: the kinds of collections, by their names, by database.
    """
    named: dict[Source, list[str]] = {}
    for handler, sources in sorted(wanted.items()):
        for source in sources:
            named.setdefault(source, []).append(handler)
    absent, foreign = [], False
    for source, handlers in named.items():
        found = there.get(source.database or "", {})
        kind = found.get(source.collection or "", "")
        if kind and kind != _STREAMED:
            foreign = True
            yield error(
                "sources",
                f"{listed(handlers)} {_listens(handlers)} to {source}, which is {_KINDS.get(kind, kind)}: MongoDB has "
                "no changes of it. Listen to the collection that is written to.",
            )
        elif source.database is not None and not (kind or (found and source.collection is None)):
            absent.append((source, handlers))
    for source, handlers in absent[:NAMED]:
        meant = nearest(source.collection or "", sorted(there.get(source.database or "", {})))
        yield warning(
            "sources",
            f"{listed(handlers)} {_listens(handlers)} to {source}, which does not exist{meant}: nothing comes until "
            "somebody writes there. Look for a slip of the pen, or leave it if its first document creates it.",
        )
    if len(absent) > NAMED:
        yield warning("sources", f"{len(absent) - NAMED} more that handlers listen to do not exist.")
    if named and not absent and not foreign:
        yield ok("sources", "Whatever handlers listen to exists.")


def _listens(handlers: Sequence[str]) -> str:
    return "listens" if len(handlers) == 1 else "listen"
