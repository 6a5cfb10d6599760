"""
Many documents locked by a fixed number of commands, however many they are.

Which comes first, the write or the read, depends on what the lock itself would change of the answer:

| asked for | commands |
|---|---|
| all that match | `update`, `find` |
| no more than one or two `_id`s, in a replica set | `findAndModify` for each |
| a `limit`; a filter or an order that looks at the lock; a filter that may find others later | `find`, `update` |
| the same with a projection that shows the lock, or that is more than names of fields | `find`, `update`, `find` |
| the same with a projection of parts of `_id` | `find`, `update`, and a `find` for each document |

One or two by `_id` take no more commands than many do, and these less of server and client; a router would want the
shard key beside an `_id`. After a write, the read asks for the value that was written beside the filter. After a read,
the write names the `_id`s. The transaction has one snapshot, so a document that has changed in between is a
conflict, whatever the read concern; fewer than were read are treated as one. Where documents are read again, the filter
is asked once more if the projection or the order takes something from it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any
from uuid import UUID

import bson
from bson import ObjectId
from pymongo.errors import OperationFailure

from mongo_celery.errors import ConfigurationError
from mongo_celery.locking.call import Document, LockCall, judged
from mongo_celery.locking.plans import Plan
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.verdicts import Code

_BY_ID = [("_id", 1)]
_UNSTEADY = {"$expr", "$where", "$jsonSchema", "$sampleRate", "$text"}
"""Conditions that may see the lock without naming its field, the time, or chance."""

_FEW = 2
_ORDERED = {int, ObjectId}
"""Ids that are one each, whatever the collection's collation, and are put in order here as by the server."""

_SINGLE = {*_ORDERED, str, UUID}

_TRANSIENT = "TransientTransactionError"


def lock_all(call: LockCall, sort: Any, limit: int, projection: Any) -> Plan[list[Any]]:
    """Lock what matches; the documents as they are afterwards, in the order asked for."""
    order = _BY_ID if sort is None else sort
    few = [] if sort or _takes_from_filter(projection) else _few_ids(call)
    if few and not 0 < limit < len(few):
        return judged(call, _one_by_one(call, few, projection or None))
    if limit or _looks_at_lock(call, call.filter, sort) or _is_unsteady(call.filter):
        return judged(call, _read_then_written(call, order, limit, projection or None))
    return judged(call, _written_then_read(call, order, projection or None))


def lock_these(call: LockCall, ids: Sequence[Any], sort: Any, projection: Any) -> Plan[list[Any]]:
    """Lock documents by their ids, which were read in this transaction; as they are afterwards."""

    def asked() -> Plan[list[Any]]:
        yield from _write(call, ids)
        return (yield from _again(call, ids, projection, _BY_ID if sort is None else sort))

    return judged(call, asked())


def lock_read(call: LockCall, ids: Sequence[Any]) -> Plan[None]:
    """Lock documents that this transaction has read already, by their ids, each of which stands there once."""
    return judged(call, _write(call, ids))


def _few_ids(call: LockCall) -> list[Any]:
    """The one or two ids that a filter asks for, and for nothing else, in their order; none where it asks otherwise."""
    topology = call.session.client.topology_description.topology_type_name
    if topology != "ReplicaSetWithPrimary" or list(call.filter) != ["_id"]:
        return []
    asked = call.filter["_id"]
    ids = asked["$in"] if isinstance(asked, Mapping) and list(asked) == ["$in"] else [asked]
    if not isinstance(ids, list | tuple) or len(ids) > _FEW:
        return []
    kinds = {type(each) for each in ids}
    if len(ids) == 1:
        return list(ids) if kinds <= _SINGLE else []
    return sorted(set(ids)) if len(kinds) == 1 and kinds <= _ORDERED else []


def _one_by_one(call: LockCall, ids: Sequence[Any], projection: Any) -> Plan[list[Any]]:
    found = []
    for each in ids:
        document = yield from call.lock_one({"_id": each}, None, projection)
        if document is not None:
            found.append(document)
    return found


def _written_then_read(call: LockCall, order: Any, projection: Any) -> Plan[list[Any]]:
    done = yield call.collection.update_many(call.filter, call.update, session=call.session)
    if not done.matched_count:
        return []
    found = yield from call.find({**call.filter, **call.own}, projection, order)
    # Fewer, where the filter no longer matches what has just been locked; there is none known that comes here.
    return found if len(found) == done.matched_count else (yield from call.find(call.own, projection, order))


def _read_then_written(call: LockCall, order: Any, limit: int, projection: Any) -> Plan[list[Any]]:
    if projection is None and "." not in call.field and _can_be_amended(call):
        return (yield from _whole(call, order, limit))
    if _hides(projection, call.field):
        names = {**dict.fromkeys(_names(projection), 1), "_id": 1}
        found = yield from call.find(call.filter, names, order, limit)
        yield from _write(call, [each["_id"] for each in found])
        return [_without_id(each, projection) for each in found]
    seen = yield from call.find(call.filter, {"_id": 1}, order, limit)
    if not seen:
        return []
    ids = [each["_id"] for each in seen]
    yield from _write(call, ids)
    if _parts_of_id(projection):
        found = []
        for one in ids:
            found += yield from _again(call, [one], projection)
        return found
    shown: Any = projection
    if isinstance(projection, Mapping):
        shown = {name: value for name, value in projection.items() if name != "_id"} or None
    found = yield from _again(call, ids, shown)
    by_id = {_key(call, each["_id"]): each for each in found}
    return [_without_id(by_id[_key(call, each)], projection) for each in ids]


def _again(call: LockCall, ids: Sequence[Any], projection: Any, sort: Any = None) -> Plan[list[Any]]:
    """Documents that this transaction has locked, read by their ids."""
    by_id: Mapping[str, Any] = {"_id": {"$in": ids}}
    if _takes_from_filter(projection) or _takes_from_filter(sort):
        if _looks_at_lock(call, call.filter):
            raise ConfigurationError(
                f"The projection or the order takes something from the filter, and the filter looks at {call.field!r}, "
                "the lock's field, which is another one by then: name another one with field=.",
            )
        by_id = among(call.filter, by_id["_id"])
    found = yield from call.find(by_id, projection, sort)
    if len(found) != len(ids):
        raise _changed(len(ids), len(found))
    return found


def among(filter_: Mapping[str, Any], ids: Any) -> Mapping[str, Any]:
    """A filter, of some documents only; it keeps a shard key, and what projections take from it."""
    return {"$and": [filter_, {"_id": ids}]} if "_id" in filter_ else {**filter_, "_id": ids}


def _whole(call: LockCall, order: Any, limit: int) -> Plan[list[Any]]:
    """Read the server's time beside the documents, and write it: what was read is then known as it will be."""
    found = yield from call.find(call.filter, {"document": "$$ROOT", "at": "$$NOW"}, order, limit)
    if not found:
        return []
    written = {**call.value, "at": found[0]["at"]}
    yield from _write(call, [each["_id"] for each in found], [{"$set": {call.field: {"$literal": written}}}])
    codec = call.collection.codec_options
    encoded = bson.encode(written, codec_options=codec)
    documents: list[Any] = []
    for each in found:
        each["document"][call.field] = bson.decode(encoded, codec_options=codec)
        documents.append(each["document"])
    return documents


def _write(call: LockCall, ids: Sequence[Any], update: list[Document] | None = None) -> Plan[None]:
    if not ids:
        return
    done = yield call.collection.update_many({"_id": {"$in": ids}}, update or call.update, session=call.session)
    if done.matched_count > len(ids):
        raise ConfigurationError(
            f"{done.matched_count} documents of {call.collection.full_name} have the {len(ids)} _ids that were to be "
            "locked, so an _id does not say which: in a collection that is sharded by another key, make them unique.",
        )
    if done.matched_count != len(ids):
        raise _changed(len(ids), done.matched_count)


def _changed(read: int, found: int) -> OperationFailure:
    """As the server would have it: what was read is not there any more."""
    message = f"{read} documents were read, and {found} of them are there to be locked"
    return OperationFailure(message, Code.WriteConflict, {"errmsg": message, "errorLabels": [_TRANSIENT]})


# -- what the lock's field has to do with it -------------------------------------------------------


def _looks_at_lock(call: LockCall, *asked: object) -> bool:
    return any(_mentions(each, call.field) for each in asked)


def _is_unsteady(value: object) -> bool:
    """Whether a filter may find others once its documents are locked, or the next time that it is asked."""
    if isinstance(value, Mapping):
        return any(name in _UNSTEADY or _is_unsteady(item) for name, item in value.items())
    return isinstance(value, list | tuple) and any(map(_is_unsteady, value))


def _takes_from_filter(asked: object) -> bool:
    """Whether a projection or an order has `$` at a place of an array, or a `$meta`."""
    if isinstance(asked, str):
        return asked == "$meta" or asked.endswith(".$")
    if isinstance(asked, Mapping):
        return any(_takes_from_filter(name) or _takes_from_filter(item) for name, item in asked.items())
    return isinstance(asked, list | tuple) and any(map(_takes_from_filter, asked))


def _parts_of_id(projection: Any) -> bool:
    return not isinstance(projection, str) and any(name.startswith("_id.") for name in projection or ())


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
    if _parts_of_id(projection):
        return False
    if isinstance(projection, Mapping):
        values = [value for name, value in projection.items() if name != "_id"]
        if not values:
            return bool(projection.get("_id"))
        if not all(value is True or (type(value) is int and value) for value in values):
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
