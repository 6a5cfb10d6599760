"""
Many documents locked by a fixed number of commands, however many they are.

Which comes first, the write or the read, depends on what the lock itself would change of the answer:

| asked for | commands |
|---|---|
| all that match | `update`, `find` |
| a `limit`, or a filter or an order that looks at the lock's field | `find`, `update` |
| the same with a projection that shows the lock, or that is more than names of fields | `find`, `update`, `find` |

After a write, the read asks for the value that was written beside the filter: a document that matches only by now (a
filter by `$$NOW`) is not locked, and not returned. After a read, the write names the `_id`s. The transaction has one
snapshot, so a document that has changed in between is a conflict, whatever the read concern; a count that differs all
the same is treated as one.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import bson
from pymongo.errors import OperationFailure

from mongo_celery.locking.call import Document, LockCall
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.verdicts import Code

_BY_ID = [("_id", 1)]
_TRANSIENT = "TransientTransactionError"


def lock_all(call: LockCall, filter_: Mapping[str, Any], sort: Any, limit: int, projection: Any) -> list[Any]:
    """Lock what matches; the documents as they are afterwards, in the order asked for."""
    order = _BY_ID if sort is None else sort
    with call.judged():
        if limit or _mentions(filter_, call.field) or _mentions(sort, call.field):
            return _read_then_written(call, filter_, order, limit, projection)
        return _written_then_read(call, filter_, order, projection)


def lock_these(call: LockCall, ids: Sequence[Any], sort: Any, projection: Any) -> list[Any]:
    """Lock documents by their ids, which were read in this transaction; as they are afterwards."""
    if not ids:
        return []
    with call.judged():
        _write(call, ids)
        return list(_find(call, {"_id": {"$in": ids}}, projection, _BY_ID if sort is None else sort))


def lock_read(call: LockCall, ids: Sequence[Any]) -> None:
    """Lock documents that this transaction has read already, by their ids, each of which stands there once."""
    with call.judged():
        _write(call, ids)


def _written_then_read(call: LockCall, filter_: Mapping[str, Any], order: Any, projection: Any) -> list[Any]:
    count = call.collection.update_many(filter_, call.update, session=call.session).matched_count
    if not count:
        return []
    found = list(_find(call, {**filter_, **call.own}, projection, order))
    # Fewer, where the filter no longer matches what has just been locked.
    return found if len(found) == count else list(_find(call, call.own, projection, order))


def _read_then_written(
    call: LockCall, filter_: Mapping[str, Any], order: Any, limit: int, projection: Any
) -> list[Any]:
    if projection is None and "." not in call.field and _can_be_amended(call):
        return _whole(call, filter_, order, limit)
    if _hides(projection, call.field):
        found = list(_find(call, filter_, {**dict.fromkeys(_names(projection), 1), "_id": 1}, order, limit))
        _write(call, [each["_id"] for each in found])
        return [_without_id(each, projection) for each in found]
    ids = [each["_id"] for each in _find(call, filter_, {"_id": 1}, order, limit)]
    _write(call, ids)
    shown = projection
    if isinstance(projection, Mapping):
        shown = {name: value for name, value in projection.items() if name != "_id"} or None
    by_id = {_key(call, each["_id"]): each for each in _find(call, {"_id": {"$in": ids}}, shown)}
    return [_without_id(by_id[_key(call, each)], projection) for each in ids]


def _whole(call: LockCall, filter_: Mapping[str, Any], order: Any, limit: int) -> list[Any]:
    """Read the server's time beside the documents, and write it: what was read is then known as it will be."""
    found = list(_find(call, filter_, {"document": "$$ROOT", "at": "$$NOW"}, order, limit))
    if not found:
        return []
    written = {**call.value, "at": found[0]["at"]}
    _write(call, [each["_id"] for each in found], [{"$set": {call.field: {"$literal": written}}}])
    codec = call.collection.codec_options
    encoded = bson.encode(written, codec_options=codec)
    documents: list[Any] = []
    for each in found:
        each["document"][call.field] = bson.decode(encoded, codec_options=codec)
        documents.append(each["document"])
    return documents


def _write(call: LockCall, ids: Sequence[Any], update: list[Document] | None = None) -> None:
    if not ids:
        return
    done = call.collection.update_many({"_id": {"$in": ids}}, update or call.update, session=call.session)
    if done.matched_count != len(ids):
        message = f"{len(ids)} documents were read, and {done.matched_count} of them are there to be locked"
        raise OperationFailure(message, Code.WriteConflict, {"errmsg": message, "errorLabels": [_TRANSIENT]})


def _find(call: LockCall, filter_: Mapping[str, Any], projection: Any, sort: Any = None, limit: int = 0) -> Any:
    return call.collection.find(filter_, projection, sort=sort, limit=limit, session=call.session)


# -- what the lock's field has to do with it -------------------------------------------------------


def _mentions(value: object, field: str) -> bool:
    """Whether a filter or an order looks at the field, at what it is part of, or at a part of it."""
    if isinstance(value, str):
        return _overlap(value.lstrip("$").removeprefix("ROOT.").removeprefix("CURRENT."), field)
    if isinstance(value, Mapping):
        return any(_mentions(name, field) or _mentions(item, field) for name, item in value.items())
    if isinstance(value, list | tuple):
        return any(_mentions(item, field) for item in value)
    return False


def _overlap(name: str, field: str) -> bool:
    return f"{name}.".startswith(f"{field}.") or f"{field}.".startswith(f"{name}.")


def _hides(projection: Any, field: str) -> bool:
    """Whether a projection is no more than names of fields, and the lock's is not among them."""
    if projection is None or isinstance(projection, str):
        return False
    if isinstance(projection, Mapping):
        values = [value for name, value in projection.items() if name != "_id"]
        if not values or not all(value is True or (type(value) is int and value) for value in values):
            return False
    return not any(_overlap(name, field) for name in _names(projection))


def _names(projection: Any) -> list[str]:
    return [name for name in projection if name != "_id"]


def _can_be_amended(call: LockCall) -> bool:
    return issubclass(call.collection.codec_options.document_class, MutableMapping)


def _without_id(document: Any, projection: Any) -> Any:
    """A document that was read with its `_id`, for somebody who wants none."""
    unwanted = isinstance(projection, Mapping) and "_id" in projection and not projection["_id"]
    if unwanted and isinstance(document, MutableMapping):
        document.pop("_id", None)
    return document


def _key(call: LockCall, document_id: Any) -> Any:
    return id_key(document_id, call.collection.codec_options)
