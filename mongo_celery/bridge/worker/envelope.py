"""
The signed BSON envelope in which a run travels through the broker.

One base64 string is the only argument of the handler task and of the commit task: 32 bytes of
HMAC-SHA256 under the bridge's signing key, then one BSON document. The kind of message stands inside
the signed part, so that a commit cannot be replayed as a run. Changes travel as the bytes that the
server sent, so that every BSON type arrives exact, whatever serializer the broker uses.

Who can only write to the broker can neither invent changes nor commits; who replays a valid message
meets the claim in MongoDB, which drops it. What a worker honours of the message around an envelope, its id
and the link behind it, is signed with it (`Carrier`); `worker/request.py` sees to the rest.

The id of the installation can be read before the signature is checked, so that a message of another
installation is told from a forgery.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson.binary import Binary
from bson.errors import BSONError
from bson.int64 import Int64

from mongo_celery.errors import InvalidEnvelopeError

_SIGNATURE_BYTES = 32
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Carrier:
    """
    What the message around an envelope must be.

    Attributes:
        task_id: the message's own.
        links: digest of the tasks that follow; empty where none do.
    """

    task_id: str
    links: str = ""

    @classmethod
    def of(cls, task_id: str, links: Sequence[Any] | None) -> Carrier:
        """The carrier of a message with this id and chain."""
        if not links:
            return cls(task_id)
        text = json.dumps(links, sort_keys=True, separators=(",", ":"), default=str)
        return cls(task_id, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Run:
    """
    Consecutive changes of one partition, dispatched under one version of the lease.

    Attributes:
        changes: the raw BSON of each event; empty in the envelope of a commit.
        first: sequence number of the first change.
        last: sequence number of the last change.
        carrier: the message in which it travels; None from a listener of an earlier version, which did not sign it.
    """

    bridge: str
    subscription: str
    generation: int
    index: int
    version: int
    first: int
    last: int
    changes: Sequence[bytes] = ()
    carrier: Carrier | None = None

    @property
    def partition_id(self) -> str:
        """`_id` of the partition's document."""
        return f"{self.bridge}/{self.subscription}/{self.generation}/{self.index}"


def seal(kind: str, run: Run, key: bytes, installation: str = "") -> str:
    """
    The argument of a task.

    Args:
        kind: `"run"` or `"commit"`; `unseal` must ask for the same.
        run: what the message is about.
        key: the bridge's signing key.
        installation: id of the state that the key belongs to.
    """
    carrier = {"t": run.carrier.task_id, "l": run.carrier.links} if run.carrier is not None else {}
    body = bson.encode(
        {
            "f": _FORMAT,
            "k": kind,
            "b": run.bridge,
            "s": run.subscription,
            "g": run.generation,
            "i": run.index,
            "v": Int64(run.version),
            "n": [Int64(run.first), Int64(run.last)],
            "c": Binary(b"".join(run.changes)),
            "o": installation,
            **carrier,
        },
    )
    return base64.b64encode(_sign(key, body) + body).decode("ascii")


def bridge_of(envelope: object) -> str:
    """
    The bridge that an envelope names, before its signature is checked; only to find the key.

    Raises:
        InvalidEnvelopeError: when it is no envelope at all.
    """
    return str(_decode(_bytes(envelope)[_SIGNATURE_BYTES:])["b"])


def installation_of(envelope: object) -> str:
    """The installation that an envelope names, before its signature is checked; empty where it names none."""
    try:
        return str(_decode(_bytes(envelope)[_SIGNATURE_BYTES:]).get("o", ""))
    except InvalidEnvelopeError:
        return ""


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
    if document.get("f") != _FORMAT or document["k"] != kind:
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
        tuple(_split(document["c"])),
        Carrier(document["t"], document["l"]) if "t" in document else None,
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
    except (BSONError, RecursionError) as error:
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
