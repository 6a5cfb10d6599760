"""
A change event as bytes. Only the requested fields are decoded.

A listener reads five fields of each event: token, time, operation, namespace and document key. The documents are most
of an event. A server always sends the change of one document with the same fields in the same order. The event of an
existing document has this order too. This module recognises such an event from its first byte to its last, and reads
the five fields directly. PyMongo decodes all other events and fields.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bson import Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument

EVENT_TYPES: CodecOptions[RawBSONDocument] = CodecOptions(
    document_class=RawBSONDocument,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_MS,
)
"""
Types with which the bridge reads events, regardless of the URL. Only fields that are read are decoded, and no user's
value can fail. Partitioning depends on it: an option that changes at the next start must not change a key.
"""

_SMALLEST = 5
_NAMESPACE_BYTES = 512  # no server makes longer ones
_OBJECT_ID_KEY = b"\x16\0\0\0\x07_id\0"
_OBJECT_ID_KEY_BYTES = len(_OBJECT_ID_KEY) + 12 + 1
_ID, _DATA = b"\x03_id\0", b"\x02_data\0"
_NAMESPACE, _KEY = b"\x03ns\0", b"\x03documentKey\0"
_AFTER_KEY = (b"\x03updateDescription\0", b"\x03fullDocumentBeforeChange\0")
_IN_TRANSACTION = re.compile(rb"\x12txnNumber\0.{8}\x03lsid\0\x48\0\0\0.{67}\0", re.DOTALL).match
_INT64 = 0x12
_token_at = struct.Struct(f"<{len(_ID)}si{len(_DATA)}si").unpack_from
_BEFORE_TOKEN = len(_ID) + 4 + len(_DATA) + 4
_AROUND_TOKEN = 4 + len(_DATA) + 4 + 1
_MIDDLE = re.compile(
    rb"\0\0\x02operationType\0"
    rb"(?:\x07\0\0\0(?=insert|update|delete)|\x08\0\0\0(?=replace)|\x09\0\0\0(?=snapshot))"
    rb"(insert|update|replace|delete|snapshot)\0"
    rb"\x11clusterTime\0(.{8})"
    rb"(?:\x05collectionUUID\0\x10\0\0\0\x04.{16})?"
    rb"(?:\x09wallTime\0.{8})?"
    rb"(?:\x0afullDocument\0)?"  # a lookup without a result
    rb"(\x03fullDocument\0)?",
    re.DOTALL,
).match
_length_at = struct.Struct("<i").unpack_from
_two_numbers = struct.Struct("<II").unpack


class PlainFields(NamedTuple):
    """
    The five fields of an event in the usual form.

    Attributes:
        token: the comparable part, which is the whole token here.
        cluster_time: time of the oplog entry.
        operation: operation type.
        namespace: bytes of the namespace.
        key: bytes of the document key.
    """

    token: str
    cluster_time: Timestamp
    operation: bytes
    namespace: bytes
    key: bytes


class RawEvent(Mapping[str, Any]):
    """
    An event of `EVENT_TYPES` that can be read without decoding it.

    Args:
        raw: the bytes of the event.

    Attributes:
        raw: the bytes of the event.
        plain: the fields of an event with the usual form. None for other events.

    Raises:
        BSONError: it is not a BSON document. Raised now or when a field is read.
    """

    __slots__ = ("_decoder", "_origin", "plain", "raw")
    if TYPE_CHECKING:

        def get(self, key: str, default: Any = None) -> Any:
            """Return the value of a field, or the default."""

    def __init__(self, raw: bytes | memoryview) -> None:
        self.raw = bytes(raw)  # the driver returns large nested documents as views
        self.plain = read_plain(self.raw)
        self._decoder = None if self.plain is not None else RawBSONDocument(self.raw, EVENT_TYPES)
        self._origin: bytes | None = None

    def __getitem__(self, name: str) -> Any:
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __len__(self) -> int:
        return len(self._decoded)

    @property
    def _decoded(self) -> RawBSONDocument:
        if self._decoder is None:
            self._decoder = RawBSONDocument(self.raw, EVENT_TYPES)
        return self._decoder

    @property
    def token(self) -> dict[str, Any] | None:
        """The resume token as plain values. None if there is none."""
        if self.plain is not None:
            return {"_data": self.plain.token}
        found = self.get("_id")
        return None if found is None else dict(found)

    @property
    def origin(self) -> bytes | None:
        """
        Bytes of operation and namespace of a document's change. With the content of the change, they select handlers.
        None for other events.
        """
        if self._origin is None:
            if self.plain is not None:
                self._origin = self.plain.operation + self.plain.namespace
            else:
                fields = dict(self.items())
                operation, namespace = fields.get("operationType"), fields.get("ns")
                if "documentKey" in fields and "to" not in fields and isinstance(namespace, RawBSONDocument):
                    self._origin = str(operation).encode() + bytes(namespace.raw)
        return self._origin

    @property
    def object_id(self) -> tuple[bytes, bytes] | None:
        """The bytes of the namespace and of the ObjectId, if that is the whole document key. None for other keys."""
        if self.plain is not None:
            namespace, key = self.plain.namespace, self.plain.key
        else:
            ns, document_key = self.get("ns"), self.get("documentKey")
            if not isinstance(ns, RawBSONDocument) or not isinstance(document_key, RawBSONDocument):
                return None
            namespace, key = bytes(ns.raw), bytes(document_key.raw)
        is_plain = len(key) == _OBJECT_ID_KEY_BYTES and key.startswith(_OBJECT_ID_KEY)
        return (namespace, key[len(_OBJECT_ID_KEY) : -1]) if is_plain and len(namespace) <= _NAMESPACE_BYTES else None


def read_plain(raw: bytes) -> PlainFields | None:
    """
    Return the five fields of an event in the usual form. None for any other.

    Each field begins where the length of the one before it ends. There is no search, and every byte outside a
    document must be the expected one.
    """
    try:
        transaction = _IN_TRANSACTION(raw, 4) if raw[4] == _INT64 else None
        start = 4 if transaction is None else transaction.end()
        id_, outer, data, inner = _token_at(raw, start)
        token = start + _BEFORE_TOKEN
        middle = _MIDDLE(raw, token + inner - 1)
        end = len(raw) - 1
        if (
            middle is None
            or (id_, data) != (_ID, _DATA)
            or not 0 < inner == outer - _AROUND_TOKEN
            or _length_at(raw)[0] != end + 1
            or raw[end]
        ):
            return None
        operation, time, document = middle.groups()
        at = middle.end() if document is None else _find_end(raw, middle.end())
        namespace = at + len(_NAMESPACE)
        namespace_end = _find_end(raw, namespace)
        key = namespace_end + len(_KEY)
        key_end = at_end = _find_end(raw, key)
        if key_end != end:
            for name in _AFTER_KEY:
                if raw.startswith(name, at_end):
                    at_end = _find_end(raw, at_end + len(name))
        if at_end != end or raw[at:namespace] != _NAMESPACE or raw[namespace_end:key] != _KEY:
            return None
        increment, seconds = _two_numbers(time)
        return PlainFields(
            raw[token : middle.start()].decode(),
            Timestamp(seconds, increment),
            operation,
            raw[namespace:namespace_end],
            raw[key:key_end],
        )
    except (struct.error, IndexError, ValueError):  # the event is too short, or the token is not text
        return None


def _find_end(raw: bytes, start: int) -> int:
    """
    Return the end of the document that starts there.

    Raises:
        ValueError: there is no document.
    """
    length: int = _length_at(raw, start)[0]
    if length < _SMALLEST or raw[start + length - 1]:
        raise ValueError(start)
    return start + length
