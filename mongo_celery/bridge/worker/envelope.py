"""
The signed BSON envelope in which a run travels through the broker.

One base64 string is the only argument of the handler task and of the commit task: 32 bytes of
HMAC-SHA256 under the bridge's signing key, then one BSON document. The kind of message stands inside
the signed part, so that a commit cannot be replayed as a run. Changes travel as the bytes that the
server sent, so that every BSON type arrives exact, whatever serializer the broker uses.

An undeliverable change travels alone, with its reason and its token. A run of stored changes travels by reference:
the message names them by their tokens, and the worker reads their bytes under its claim. The replay of a dead letter
names that and the number of the attempt. Its change is read there. A run of several changes, or
beside parked keys, carries the hash of each change's key: any of them may fail, and a worker stops before one whose
key is parked.

Who can only write to the broker can neither invent changes nor commits. Who replays a valid message
meets the claim in MongoDB, which drops it. What a worker honours of the message around an envelope, its id
and the link behind it, is signed with it (`Carrier`). `worker/request.py` sees to the rest.

The id of the installation can be read before the signature is checked, so that a message of another
installation is told from a forgery.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson.binary import Binary
from bson.errors import BSONError
from bson.int64 import Int64

from mongo_celery.bridge.change import read_token, token_data
from mongo_celery.bridge.window import Refusal
from mongo_celery.errors import InvalidEnvelopeError

_SIGNATURE_BYTES = 32
_FORMAT = 1
_HASHES = 1 << 64
_HASH_BYTES = 8
_LINKS = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


@dataclass(frozen=True, slots=True)
class Carrier:
    """
    The signed part of the message around an envelope: what that must be.

    Attributes:
        task_id: the message's own.
        links: digest of the tasks that follow. Empty where none do.
    """

    task_id: str
    links: str = ""

    @classmethod
    def of(cls, task_id: str, links: Sequence[Any] | None) -> Carrier:
        """The carrier of a message with this id and chain."""
        if not links:
            return cls(task_id)
        return cls(task_id, hashlib.sha256(_LINKS.encode(links).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Run:
    """
    Consecutive changes of one partition, dispatched under one version of the lease.

    Attributes:
        changes: the raw BSON of each event. Empty in the envelope of a commit, and where they are stored.
        first: sequence number of the first change.
        last: sequence number of the last change.
        carrier: the message in which it travels. None before it is signed.
        refusal: why its one change is not given to the handler. None for all others.
        token: the resume token of a refused change, whose bytes may be unreadable.
        hash: of the first change's partition key, from 0 to 2^64 - 1; 0 where no change travels.
        stored: comparable parts of the tokens of changes that are stored, and do not travel. Empty for all others.
        dead_letter: `_id` of the one that is replayed. None for a run of changes.
        starts: how often that dead letter was started before.
        hashes: of the partition keys of all its changes. Empty for one change of a partition without parked keys.
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
    refusal: Refusal | None = None
    token: Mapping[str, Any] | None = None
    hash: int = 0
    stored: tuple[str, ...] = ()
    dead_letter: str | None = None
    starts: int = 0
    hashes: tuple[int, ...] = ()

    @property
    def partition_id(self) -> str:
        """`_id` of the partition's document."""
        return f"{self.bridge}/{self.subscription}/{self.generation}/{self.index}"

    @property
    def is_inline(self) -> bool:
        """Return True if no commit task follows, which is signed: the execution writes the position itself."""
        return self.dead_letter is None and self.carrier is not None and not self.carrier.links

    @property
    def head(self) -> str:
        """Comparable part of the first change's resume token."""
        return self.stored[0] if self.stored else token_data(self.read_token(self.changes[0]))

    def hash_at(self, offset: int) -> int:
        """Return the hash of the partition key of one of the changes."""
        return self.hashes[offset] if self.hashes else self.hash

    def read_token(self, change: bytes) -> Mapping[str, Any]:
        """The resume token of one of the changes: from its bytes, since a handler could change what it was given."""
        return self.token if self.token is not None else read_token(change)


def sign_run(kind: str, run: Run, key: bytes, installation: str = "", carrier: Carrier | None = None) -> str:
    """
    The argument of a task.

    Args:
        kind: `"run"` or `"commit"`. `verify_run` must ask for the same.
        run: what the message is about.
        key: the bridge's signing key.
        installation: id of the state that the key belongs to.
        carrier: the message in which it travels. By default the run's own.
    """
    carrier = carrier or run.carrier
    assert carrier is not None, "a message is signed with its id"
    document: dict[str, Any] = {
        "f": _FORMAT,
        "k": kind,
        "b": run.bridge,
        "s": run.subscription,
        "g": run.generation,
        "i": run.index,
        "v": Int64(run.version),
        "n": [Int64(run.first), Int64(run.last)],
        "c": b"".join(run.changes),  # `Binary` would be the same, after two copies
        "o": installation,
        "t": carrier.task_id,
        "l": carrier.links,
        "q": Int64(run.hash - _HASHES if run.hash >= _HASHES // 2 else run.hash),
    }
    if run.refusal is not None:
        assert run.token is not None, "a refused change is known by its token"
        document |= {"r": run.refusal.reason, "h": run.refusal.halts, "p": dict(run.token)}
    if run.stored:
        assert not run.changes, "what is stored does not travel"
        document["d"] = run.stored
    if run.dead_letter is not None:
        assert not run.changes, "the change of a dead letter does not travel"
        document |= {"e": run.dead_letter, "m": Int64(run.starts)}
    if run.hashes:
        hashes = b"".join(each.to_bytes(_HASH_BYTES, "big") for each in run.hashes)
        document["w"] = Binary(hashes)
    body = bson.encode(document)
    return base64.b64encode(_sign(key, body) + body).decode("ascii")


def bridge_of(envelope: object) -> str:
    """
    The bridge that an envelope names, before its signature is checked. Only to find the key.

    Raises:
        InvalidEnvelopeError: when it is no envelope at all.
    """
    return str(_decode(_bytes(envelope)[_SIGNATURE_BYTES:])["b"])


def read_installation(envelope: object) -> str:
    """The installation that an envelope names, before its signature is checked. Empty where it names none."""
    try:
        return str(_decode(_bytes(envelope)[_SIGNATURE_BYTES:]).get("o", ""))
    except InvalidEnvelopeError:
        return ""


def verify_run(kind: str, envelope: object, key: bytes) -> Run:
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
    is_refused = "r" in document
    first, last = document["n"]
    return Run(
        document["b"],
        document["s"],
        document["g"],
        document["i"],
        document["v"],
        first,
        last,
        (bytes(document["c"]),) if is_refused and "d" not in document else tuple(_split(document["c"])),
        Carrier(document["t"], document["l"]),
        Refusal(document["r"], document["h"]) if is_refused else None,
        document["p"] if is_refused else None,
        document["q"] % _HASHES,
        tuple(document.get("d", ())),
        document.get("e"),
        document.get("m", 0),
        tuple(_hashes(bytes(document.get("w", b"")))),
    )


def _hashes(data: bytes) -> Iterator[int]:
    return (int.from_bytes(data[at : at + _HASH_BYTES], "big") for at in range(0, len(data), _HASH_BYTES))


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
