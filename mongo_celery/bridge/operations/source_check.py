"""Preflight of the sources: whether what handlers listen to is there, and can be listened to at all."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import OperationFailure

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.reasons import NAMED, listed
from mongo_celery.bridge.stream.source import Selector, Source
from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

_STREAMED = "collection"
_KINDS = {"view": "a view", "timeseries": "a time series"}


def check_sources(wiring: Wiring) -> Iterator[Finding]:
    """Look for the collections that handlers name, as far as the user may see them: a right on them is enough."""
    try:
        selectors, _ = wiring.stream()
    except ConfigurationError:
        return  # a finding of its own says so
    for handler, selector in zip(wiring.handlers, selectors, strict=True):
        yield from judge_feedback(handler, selector, wiring.default_database)
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
        yield degraded("sources", f"Cannot see which collections exist; grant listCollections. {short(failure)}.")
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
            yield failing(
                "sources",
                f"{listed(handlers)} {_listens(handlers)} to {source}, which is {_KINDS.get(kind, kind)}: MongoDB has "
                "no changes of it. Listen to the collection that is written to.",
            )
        elif source.database is not None and not (kind or (found and source.collection is None)):
            absent.append((source, handlers))
    for source, handlers in absent[:NAMED]:
        meant = nearest(source.collection or "", sorted(there.get(source.database or "", {})))
        yield degraded(
            "sources",
            f"{listed(handlers)} {_listens(handlers)} to {source}, which does not exist{meant}: nothing comes until "
            "somebody writes there. Look for a slip of the pen, or leave it if its first document creates it.",
        )
    if len(absent) > NAMED:
        yield degraded("sources", f"{len(absent) - NAMED} more that handlers listen to do not exist.")
    if named and not absent and not foreign:
        yield ok("sources", "Whatever handlers listen to exists.")


def judge_feedback(handler: Handler, selector: Selector, default_database: str | None) -> Iterator[Finding]:
    """Warn of a handler whose code fences its own source by name; what it writes otherwise is not known."""
    if selector.filter.fields is not None or not selector.filter.wants_operation("update"):
        return
    names, texts = _words_of(inspect.unwrap(handler.function).__code__)
    for source in selector.sources:
        written = {str(source), source.collection if source.database == default_database else str(source)}
        if source.collection is not None and "fenced" in names and written & texts:
            yield degraded(
                "feedback",
                f"{handler.name} listens to {source}, and its code has fenced() beside that name: what it writes there "
                "is a change that it is given next. Watch only other fields, with fields=.",
            )


def _words_of(code: CodeType) -> tuple[set[str], set[str | None]]:
    """Return the attributes and the texts that code uses, with the functions in it."""
    names, texts = set(code.co_names), {each for each in code.co_consts if isinstance(each, str)}
    below = [_words_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return names.union(*(each[0] for each in below)), set[str | None]().union(texts, *(each[1] for each in below))


def _listens(handlers: Sequence[str]) -> str:
    return "listens" if len(handlers) == 1 else "listen"
