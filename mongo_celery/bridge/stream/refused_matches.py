"""Expressions of `match` that the server refuses as such, whatever the change."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.stream.cursor import Position, open_cursor
from mongo_celery.bridge.stream.reactions import Reaction, reaction_to
from mongo_celery.mongo.verdicts import brief

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo import MongoClient

    from mongo_celery.bridge.stream.source import Scope

_NOW = Position(None, None)
_SECONDS = 5.0


def find_refused_matches(make_client: Callable[[float], MongoClient[RawBSONDocument]], scope: Scope) -> dict[str, str]:
    """
    Open the stream with each `match` alone, if the server refuses it with all of them.

    Args:
        make_client: makes a client for the stream, with a socket timeout in seconds.

    Returns:
        What the server said, by handler; empty where the stream can be opened, or fails for another reason.
    """
    names, bare = list(scope.flags), replace(scope, selection=(), options={}, given=())
    if not names:
        return {}
    with make_client(_SECONDS) as client, pymongo.timeout(_SECONDS):
        if _refusal(client, bare, names) is None:
            return {}
        return {name: said for name in names if (said := _refusal(client, bare, [name])) is not None}


def _refusal(client: MongoClient[RawBSONDocument], bare: Scope, names: Collection[str]) -> str | None:
    try:
        with closing(open_cursor(client, bare.with_flags(names), _NOW)):
            return None
    except PyMongoError as error:
        return brief(error) if reaction_to(error, opening=True) is Reaction.REFUSED else None
