"""
The signed BSON envelope in which a run travels through the broker.

The only argument of the handler task and of the commit task is one base64 string: 32 bytes of HMAC-SHA256 under the
bridge's signing key, then one BSON document. The signed part contains the kind of message, so a commit cannot be
replayed as a run. Changes travel as the bytes that the server sent, so every BSON type arrives unchanged, whatever
serializer the broker uses. Many similar changes are compressed: Redis and a worker's parent process handle each byte
several times.

An undeliverable change travels alone, with its reason and its token. A run of stored changes travels by reference: the
message contains their tokens, and the worker reads their bytes under its claim. A replay contains the id of its dead
letter and the number of the attempt, and the worker reads the change. A run of several changes, or beside parked keys,
contains the hash of each change's key: any of them may fail, and a worker stops before a change whose key is parked.
Under a limit of the handler, a message contains the fencing token of its partition, which its claim needs.

A writer to the broker can forge neither changes nor commits. If it replays a valid message, the claim in MongoDB drops
it. The envelope also signs the parts of the surrounding message that a worker uses: its id and the link that follows
(`Carrier`). `worker/request.py` handles all other parts.

The id of the installation is readable before the signature is checked. So a worker can distinguish another
installation's message from a forgery.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson.binary import Binary
from bson.errors import BSONError
from bson.int64 import Int64

from mongo_celery.bridge.window import Refusal
from mongo_celery.errors import InvalidEnvelopeError

_SIGNATURE_BYTES = 32
_PLAIN, _PACKED = 1, 2
_PACKED_MIN = 16 << 10
_SAMPLE_BYTES = 4 << 10
_RATIO = 4
"""
A run is compressed if a sample shrinks to one of so many parts. If it shrinks less, listener and pool pay more than all
others save.
"""
_HASHES = 1 << 64
_HASH_BYTES = 8
_LINKS = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


@dataclass(frozen=True, slots=True)
class Carrier:
    """
    The signed part of the message around an envelope.

    Attributes:
        task_id: id of the message.
        links: digest of the tasks that follow. Empty if none do.
    """

    task_id: str
    links: str = ""

    @classmethod
    def of(cls, task_id: str, links: Sequence[Any] | None) -> Carrier:
        """Return the carrier of a message with this id and chain."""
        if not links:
            return cls(task_id)
        return cls(task_id, hashlib.sha256(_LINKS.encode(links).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Run:
    """
    Consecutive changes of one partition, dispatched in one term.

    Attributes:
        changes: the raw BSON of each event. Empty in the envelope of a commit, and of stored runs.
        first: sequence number of the first change.
        last: sequence number of the last change.
        carrier: the message that contains it. None before signing.
        refusal: reason why its only change is not given to the handler. None for all others.
        token: the resume token of a refused change, whose bytes may be unreadable.
        hash: the hash of the first change's partition key, from 0 to 2^64 - 1; 0 if no change travels.
        stored: comparable parts of the tokens of stored changes, which do not travel. Empty for all others.
        dead_letter: `_id` of the dead letter to replay. None for a run of changes.
        starts: number of earlier starts of that dead letter.
        hashes: partition key hashes of all its changes. Empty for one change of a partition without parked keys.
        fencing_token: the partition's fencing token at the time of sending, which its claim needs. None for a handler
            without a limit.
    """

    bridge: str
    subscription: str
    partitioning: int
    index: int
    term: int
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
    fencing_token: int | None = None

    @property
    def partition_id(self) -> str:
        """`_id` of the partition's document."""
        return f"{self.bridge}/{self.subscription}/{self.partitioning}/{self.index}"

    @property
    def is_inline(self) -> bool:
        """Return True if no commit task follows, which the envelope signs. The execution then writes the position."""
        return self.dead_letter is None and self.carrier is not None and not self.carrier.links

    def find_hash(self, offset: int) -> int:
        """Return the partition key hash of one of the changes."""
        return self.hashes[offset] if self.hashes else self.hash


def sign_run(kind: str, run: Run, key: bytes, installation: str = "", carrier: Carrier | None = None) -> str:
    """
    Return the argument of a task.

    Args:
        kind: `"run"` or `"commit"`. `verify` must use the same.
        run: the run of the message.
        key: the bridge's signing key.
        installation: id of the state that owns the key.
        carrier: the message that contains it. By default the run's own.
    """
    carrier = carrier or run.carrier
    assert carrier is not None, "a message is signed with its id"
    form, changes = _pack(run.changes)
    document: dict[str, Any] = {
        "f": form,
        "k": kind,
        "b": run.bridge,
        "s": run.subscription,
        "g": run.partitioning,
        "i": run.index,
        "v": Int64(run.term),
        "n": [Int64(run.first), Int64(run.last)],
        "c": changes,  # `Binary` would give the same after two copies
        "o": installation,
        "t": carrier.task_id,
        "l": carrier.links,
        "q": Int64(run.hash - _HASHES if run.hash >= _HASHES // 2 else run.hash),
    }
    if run.refusal is not None:
        assert run.token is not None, "an undeliverable change has a token"
        document |= {"r": run.refusal.reason, "h": run.refusal.halts, "p": dict(run.token)}
    if run.stored:
        assert not run.changes, "the message of stored changes has no bytes"
        document["d"] = run.stored
    if run.dead_letter is not None:
        assert not run.changes, "the message of a replay has no bytes"
        document |= {"e": run.dead_letter, "m": Int64(run.starts)}
    if run.hashes:
        document["w"] = Binary(struct.pack(f">{len(run.hashes)}Q", *run.hashes))
    if run.fencing_token is not None:
        document["x"] = Int64(run.fencing_token)
    body = bson.encode(document)
    return base64.b64encode(hmac.digest(key, body, hashlib.sha256) + body).decode("ascii")


class Envelope:
    """
    An envelope as it arrived. Trust nothing in it before `verify`.

    Args:
        text: the argument of a task.

    Raises:
        InvalidEnvelopeError: it is not an envelope. Raised now or when it is read.
    """

    def __init__(self, text: object) -> None:
        if not isinstance(text, str):
            raise InvalidEnvelopeError
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidEnvelopeError from error
        self._signature, self._body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        self._document: dict[str, Any] | None = None

    @property
    def bridge(self) -> str:
        """The bridge that the envelope names, for finding the key only."""
        return str(self._read()["b"])

    @property
    def installation(self) -> str:
        """The installation that the envelope names. Empty if none."""
        return str(self._read().get("o", ""))

    def verify(self, kind: str, keys: Iterable[bytes]) -> Run:
        """
        Check the signature in constant time against each accepted key, and return the run.

        Raises:
            InvalidEnvelopeError: it is forged, damaged, of another kind or of another installation.
        """
        signature, body = self._signature, self._body
        for key in keys:
            if hmac.compare_digest(signature, hmac.digest(key, body, hashlib.sha256)):
                return _read_run(kind, self._read())
        raise InvalidEnvelopeError

    def _read(self) -> dict[str, Any]:
        if self._document is None:
            try:
                document = bson.decode(self._body)
            except (BSONError, RecursionError) as error:
                raise InvalidEnvelopeError from error
            if not isinstance(document.get("b"), str):
                raise InvalidEnvelopeError
            self._document = document
        return self._document


def _read_run(kind: str, document: Mapping[str, Any]) -> Run:
    form = document.get("f")
    if form not in (_PLAIN, _PACKED) or document["k"] != kind:
        raise InvalidEnvelopeError
    is_refused, changes, hashes = "r" in document, bytes(document["c"]), bytes(document.get("w", b""))
    if form == _PACKED:
        changes = zlib.decompress(changes)
    first, last = document["n"]
    return Run(
        document["b"],
        document["s"],
        document["g"],
        document["i"],
        document["v"],
        first,
        last,
        (changes,) if is_refused and "d" not in document else _split(changes),
        Carrier(document["t"], document["l"]),
        Refusal(document["r"], document["h"]) if is_refused else None,
        document["p"] if is_refused else None,
        document["q"] % _HASHES,
        tuple(document.get("d", ())),
        document.get("e"),
        document.get("m", 0),
        struct.unpack(f">{len(hashes) // _HASH_BYTES}Q", hashes),
        document.get("x"),
    )


def _pack(changes: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the changes of a run as one string of bytes, and its form: compressed if they are much alike."""
    joined = b"".join(changes)
    is_long = len(changes) > 1 and len(joined) >= _PACKED_MIN
    if is_long and len(zlib.compress(joined[:_SAMPLE_BYTES], 1)) <= _SAMPLE_BYTES // _RATIO:
        return _PACKED, zlib.compress(joined, 1)
    return _PLAIN, joined


def _split(data: bytes) -> tuple[bytes, ...]:
    position, found = 0, []
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "little")
        found.append(data[position : position + size])
        position += size
    return tuple(found)
