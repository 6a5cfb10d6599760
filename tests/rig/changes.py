"""Changes, tokens and runs of the partition that a rig makes: `shop/record`, of documents in `shop.orders`."""

from __future__ import annotations

from typing import Any

import bson

from mongo_celery import Change
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.dead_letters import FAILED, Place, dead_letter, keep_change
from mongo_celery.bridge.worker.envelope import Run

Document = dict[str, Any]

BRIDGE = "shop"
HANDLER = "record"
TERM = 100


def token(number: int) -> Document:
    return {"_data": f"82{number:06d}"}


def event_of_key(number: int, key: object, *, exists: bool = False) -> Document:
    """Return the insert at this place in the stream; or the row that a snapshot gives there."""
    data = token(number)["_data"]
    return {
        "_id": {"_data": f"{data:0<18}~1"} if exists else token(number),
        "operationType": "snapshot" if exists else "insert",
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": key},
        "fullDocument": {"_id": key, "n": number},
    }


def hash_of(key: object) -> int:
    return document_hash(event_of_key(0, key))


def number_of(change: Change) -> int:
    return int((change.full_document or {}).get("n", 0))


def letter_of(
    number: int,
    fence: int,
    *,
    key: object = None,
    hash_: int = 7,
    partition: int = 0,
    name: str | None = None,
    raw: bytes = b"",
    error: str = "ValueError: no",
) -> Document:
    document = number if key is None else key
    return dead_letter(
        bridge=BRIDGE,
        subscription=HANDLER,
        token=token(number),
        key=f"shop.orders insert {document}",
        kept=keep_change(raw or bson.encode(event_of_key(number, document))),
        error=error,
        traceback="Traceback",
        attempts=1,
        place=Place(0, partition, number, fence, hash_),
        cause=FAILED,
        name=name,
    )


def make_run(first: int, count: int, *changes: bytes, **fields: Any) -> Run:
    return Run(BRIDGE, HANDLER, 0, 0, TERM, first, first + count - 1, **{"changes": changes, **fields})


def make_run_of_keys(first: int, *keys: str, existing: set[int] = frozenset(), **fields: Any) -> Run:  # type: ignore[assignment]
    """Build a run of changes of these keys, numbered from the first on; of which some are rows of a snapshot."""
    raws = [bson.encode(event_of_key(n, key, exists=n in existing)) for n, key in enumerate(keys, first)]
    given = {"hash": hash_of(keys[0]), "hashes": tuple(map(hash_of, keys)), "changes": tuple(raws), **fields}
    return make_run(first, len(keys), **given)
