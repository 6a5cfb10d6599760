"""
The signed BSON envelope in which a run travels through the broker.

One base64 string is the only argument of the handler task and of the commit task: 32 bytes of
HMAC-SHA256 under the bridge's signing key, then one BSON document. The kind of message stands inside
the signed part, so that a commit cannot be replayed as a run. Changes travel as the bytes that the
server sent, so that every BSON type arrives exact, whatever serializer the broker uses.

A refused change travels alone, in a format of its own, with its reason and its token. A worker of an older version
drops that format as one that it cannot read; it would take the reason away and call the handler. The listener sends
the run again, and a newer worker applies the failure policy.

Who can only write to the broker can neither invent changes nor commits; who replays a valid message
meets the claim in MongoDB, which drops it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson.binary import Binary
from bson.errors import BSONError
from bson.int64 import Int64

from mongo_celery.bridge.refusal import Refusal
from mongo_celery.errors import InvalidEnvelopeError

_SIGNATURE_BYTES = 32
_FORMAT = 1
_REFUSED_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Run:
    """
    Consecutive changes of one partition, dispatched under one version of the lease.

    Attributes:
        changes: the raw BSON of each event; empty in the envelope of a commit.
        first: sequence number of the first change.
        last: sequence number of the last change.
        refusal: why its one change is not given to the handler; None for all others.
        token: the resume token of a refused change, whose bytes may be unreadable.
    """

    bridge: str
    subscription: str
    generation: int
    index: int
    version: int
    first: int
    last: int
    changes: Sequence[bytes] = ()
    refusal: Refusal | None = None
    token: Mapping[str, Any] | None = None

    @property
    def partition_id(self) -> str:
        """`_id` of the partition's document."""
        return f"{self.bridge}/{self.subscription}/{self.generation}/{self.index}"


def seal(kind: str, run: Run, key: bytes) -> str:
    """
    The argument of a task.

    Args:
        kind: `"run"` or `"commit"`; `unseal` must ask for the same.
        run: what the message is about.
        key: the bridge's signing key.
    """
    document: dict[str, Any] = {
        "f": _FORMAT,
        "k": kind,
        "b": run.bridge,
        "s": run.subscription,
        "g": run.generation,
        "i": run.index,
        "v": Int64(run.version),
        "n": [Int64(run.first), Int64(run.last)],
        "c": Binary(b"".join(run.changes)),
    }
    if run.refusal is not None:
        assert run.token is not None, "a refused change is known by its token"
        document |= {"f": _REFUSED_FORMAT, "r": run.refusal.reason, "h": run.refusal.halts, "t": dict(run.token)}
    body = bson.encode(document)
    return base64.b64encode(_sign(key, body) + body).decode("ascii")


def bridge_of(envelope: object) -> str:
    """
    The bridge that an envelope names, before its signature is checked; only to find the key.

    Raises:
        InvalidEnvelopeError: when it is no envelope at all.
    """
    return str(_decode(_bytes(envelope)[_SIGNATURE_BYTES:])["b"])


def unseal(kind: str, envelope: object, key: bytes) -> Run:
    """
    The run in an envelope, after its signature was checked in constant time.

    Raises:
        InvalidEnvelopeError: forged, damaged, of another kind or of another installation.
    """
    data = _bytes(envelope)
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(key, body)):
        raise InvalidEnvelopeError
    document = _decode(body)
    is_refused = document.get("f") == _REFUSED_FORMAT
    if not (is_refused or document.get("f") == _FORMAT) or document["k"] != kind:
        raise InvalidEnvelopeError
    first, last = document["n"]
    return Run(
        document["b"],
        document["s"],
        document["g"],
        document["i"],
        document["v"],
        first,
        last,
        (bytes(document["c"]),) if is_refused else tuple(_split(document["c"])),
        Refusal(document["r"], document["h"]) if is_refused else None,
        document["t"] if is_refused else None,
    )


def _sign(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)


def _bytes(envelope: object) -> bytes:
    if not isinstance(envelope, str):
        raise InvalidEnvelopeError
    try:
        return base64.b64decode(envelope, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidEnvelopeError from error


def _decode(body: bytes) -> dict[str, Any]:
    try:
        document = bson.decode(body)
    except BSONError as error:
        raise InvalidEnvelopeError from error
    if not isinstance(document.get("b"), str):
        raise InvalidEnvelopeError
    return document


def _split(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "little")
        yield data[position : position + size]
        position += size
