"""The part of a transaction that its caller has given: the same id twice is one request, or a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson

from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase.values import Codec

_GIVEN = ("source", "destination", "value", "accounts", "require", "participants", "takesBack")


def refuse_other_request(stored: Mapping[str, Any], fields: Mapping[str, Any], codec: Codec) -> None:
    """
    Refuse a request whose id belongs to another one.

    Args:
        stored: the transaction of that id, in whatever state.
        fields: of the request.
        codec: of the transactions' collection.

    Raises:
        TransactionStateError: the stored one asks for something else, byte for byte.
    """
    if "changes" in stored:  # with receipts the participants have another name, from pending on
        stored = {**stored, "participants": stored["changes"]}
    other = [name for name in _GIVEN if _bytes_of(name, stored, codec) != _bytes_of(name, fields, codec)]
    if other:
        raise TransactionStateError(
            f"there is a transaction {stored['_id']!r} already, with another {', '.join(other)}. Nothing was changed. "
            "Give each transaction an id of its own.",
            id=stored["_id"],
        )


def _bytes_of(name: str, fields: Mapping[str, Any], codec: Codec) -> bytes | None:
    return bson.encode({name: fields[name]}, codec_options=codec) if name in fields else None
