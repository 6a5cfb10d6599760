"""
A change event as its bytes, of which only what is asked for is decoded.

A listener reads five fields of each event (token, time, operation, namespace, document key), and the documents that
it carries are the larger part of it. So a field is read from its own place, and whatever is odd is left to PyMongo's
decoder, as if there were nothing else.

The change of one document comes from a server with the same fields in the same order each time. Such an event is
recognised by one match, from its first byte to its last, and the five fields with it; all others are walked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import ItemsView, Iterator, Mapping
from functools import lru_cache
from typing import Any

from bson import ObjectId, Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument

Place = tuple[int, int, int]
"""Kind of a value, and where its bytes begin and end."""

DOUBLE, TEXT, DOCUMENT, BINARY, OBJECT_ID, BOOL, DATE, NULL, INT32, TIMESTAMP, INT64 = (
    *(0x01, 0x02, 0x03, 0x05, 0x07, 0x08, 0x09, 0x0A),
    *(0x10, 0x11, 0x12),
)
_LENGTHS = {DOUBLE: 8, OBJECT_ID: 12, BOOL: 1, DATE: 8, NULL: 0, INT32: 4, TIMESTAMP: 8, INT64: 8}
_SMALLEST = 5
_NESTED_BINARY = 2  # a subtype with a second length inside
_length_at = struct.Struct("<i").unpack_from


def places(document: bytes) -> Mapping[str, Place] | None:
    """By name, where the values of a document are, in its order; None where a decoder should say what it is."""
    try:
        return _walk_document(document)
    except (struct.error, IndexError, ValueError):  # it ends too early, or a name is no text
        return None


def _walk_document(document: bytes) -> dict[str, Place] | None:
    end = len(document) - 1
    if end + 1 < _SMALLEST or _length_at(document)[0] != end + 1 or document[end]:
        return None
    found: dict[str, Place] = {}
    at, count = 4, 0
    while at < end:
        kind = document[at]
        start = document.index(0, at + 1) + 1
        if kind == DOCUMENT:  # most of an event's bytes, and asked for first since it is the most frequent
            (length,) = _length_at(document, start)
            stop = start + length
            if length < _SMALLEST or document[stop - 1]:
                return None
        elif kind in _LENGTHS:
            stop = start + _LENGTHS[kind]
            if kind == BOOL and document[start] > 1:
                return None
        else:
            stop = _find_end(document, kind, start)
        if stop > end:
            return None
        found[document[at + 1 : start - 1].decode()] = kind, start, stop
        at = stop
        count += 1
    return found if at == end and len(found) == count else None


def _find_end(document: bytes, kind: int, start: int) -> int:
    """Return the end of a text or binary data; after the document if its length does not fit, or for another kind."""
    length: int = _length_at(document, start)[0]
    if kind == TEXT and length > 0 and not document[start + length + 3]:
        return start + length + 4
    if kind == BINARY and length >= 0 and document[start + 4] != _NESTED_BINARY:
        return start + length + 5
    return len(document)


EVENT_TYPES: CodecOptions[RawBSONDocument] = CodecOptions(
    document_class=RawBSONDocument,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_MS,
)
"""
How the bridge itself reads events, whatever the URL says: only the fields that are read are decoded, and no user's
value fails. Partitions rest on it: a key must not depend on an option that the next start may have otherwise.
"""

_NAMESPACES = 4096
_NAMESPACE_BYTES = 512  # no server makes longer ones
_TOKEN = b"\x02_data\0"
_TOKEN_BEGINS = 4 + len(_TOKEN) + 4
_ORIGIN_BYTES = 600
_PLAIN_KEY = b"\x16\0\0\0\x07_id\0"
_PLAIN_KEY_BYTES = len(_PLAIN_KEY) + 12 + 1
_SHORTEST_TOKEN = _TOKEN_BEGINS + 2
_NOWHERE = 0, 0, 0
_FIRST_FIELDS = re.compile(
    rb".{4}\x03_id\0.{4}\x02_data\0.{4}([0-9A-Fa-f]+)\0\0"
    rb"\x02operationType\0.{4}([A-Za-z]+)\0"
    rb"\x11clusterTime\0(.{8})"
    rb"(?:\x09wallTime\0.{8})?"
    rb"(\x03fullDocument\0)?",
    re.DOTALL,
).match
_AT_TOKEN_DOCUMENT = 4 + len(b"\x03_id\0")
_AT_TOKEN_TEXT = _AT_TOKEN_DOCUMENT + 4 + len(_TOKEN)
_AROUND_TOKEN = 4 + len(_TOKEN) + 4 + 2
_NAMESPACE = b"\x03ns\0"
_KEY = b"\x03documentKey\0"
_UPDATE = b"\x03updateDescription\0"
_DOCUMENTS = (_NAMESPACE, _KEY, _UPDATE)
_AFTER_DOCUMENT = (b"", *_DOCUMENTS)  # whose name is read already
_READ_PLAIN = frozenset({"operationType", "ns", "documentKey"})

Plain = tuple[str, bytes, bytes, bytes, bytes]
"""Token, time, operation, namespace and document key of an event of the usual form: the first as text, else bytes."""

_two_numbers_at = struct.Struct("<II").unpack_from


class RawEvent(RawBSONDocument):
    """
    An event, or a document in one: a `RawBSONDocument` by `EVENT_TYPES` that need not be decoded to be read.

    Args:
        raw: its bytes.

    Raises:
        BSONError: it is no BSON document, now or when a field is read.
    """

    __slots__ = ("_decoder", "_found", "_origin", "_plain", "_values", "raw")
    raw: bytes

    def __init__(self, raw: bytes | memoryview) -> None:
        if not isinstance(raw, bytes):
            raw = bytes(raw)  # the driver gives large documents within others so
        self.raw = raw
        self._values: dict[str, Any] = {}
        self._origin: bytes | None = None
        self._found: Mapping[str, Place] | None = None
        self._decoder: RawBSONDocument | None = None
        self._plain = read_plain(raw)
        if self._plain is None:
            found = places(raw)
            self._found = found if found is not None else {}
            self._decoder = RawBSONDocument(raw, EVENT_TYPES) if found is None else None

    @property
    def token(self) -> dict[str, Any] | None:
        """The resume token as plain values; None where there is none."""
        if self._plain is not None:
            return {"_data": self._plain[0]}
        kind, start, stop = self._places.get("_id", _NOWHERE)
        if kind == DOCUMENT and stop - start >= _SHORTEST_TOKEN:
            raw, begin = self.raw, start + _TOKEN_BEGINS
            if (
                raw.startswith(_TOKEN, start + 4)
                and _length_at(raw, begin - 4)[0] == stop - begin - 1
                and not raw[stop - 2]
            ):
                return {"_data": raw[begin : stop - 2].decode("utf-8", "replace")}
        found = self.get("_id")
        return None if found is None else dict(found)

    @property
    def place(self) -> tuple[str, bytes] | None:
        """Of an event of the usual form the token's one field, and the bytes of its time; None of any other."""
        return None if self._plain is None else self._plain[:2]

    @property
    def origin(self) -> bytes | None:
        """
        Bytes of operation and namespace of a change of a document: handlers are chosen by them, and by what the change
        holds. None for other events.
        """
        found = self._origin
        if found is not None:
            return found
        if self._plain is not None:
            _, _, operation, namespace, _ = self._plain
            if len(operation) + len(namespace) <= _ORIGIN_BYTES:
                found = self._origin = operation + namespace
        elif "documentKey" in self._places and "to" not in self._places:
            kind, start, stop = self._places.get("operationType", _NOWHERE)
            also, begin, end = self._places.get("ns", _NOWHERE)
            if kind == TEXT and also == DOCUMENT and stop - start + end - begin <= _ORIGIN_BYTES:
                found = self._origin = self.raw[start:stop] + self.raw[begin:end]
        return found

    @property
    def plain_key(self) -> tuple[bytes, bytes] | None:
        """Bytes of the namespace, and of an ObjectId that is all of the document key; None for all other keys."""
        if self._plain is not None:
            _, _, _, namespace, key = self._plain
        else:
            kind, start, stop = self._places.get("documentKey", _NOWHERE)
            also, begin, end = self._places.get("ns", _NOWHERE)
            if kind != DOCUMENT or also != DOCUMENT:
                return None
            namespace, key = self.raw[begin:end], self.raw[start:stop]
        if len(key) != _PLAIN_KEY_BYTES or not key.startswith(_PLAIN_KEY) or len(namespace) > _NAMESPACE_BYTES:
            return None
        return namespace, key[len(_PLAIN_KEY) : -1]

    @property
    def summary(self) -> tuple[bytes, str, bytes] | None:
        """Bytes of the namespace, operation, and bytes of the ObjectId of a change of the usual form. Else None."""
        if self._plain is None:
            return None
        _, _, operation, namespace, key = self._plain
        if len(key) != _PLAIN_KEY_BYTES or not key.startswith(_PLAIN_KEY) or len(namespace) > _NAMESPACE_BYTES:
            return None
        return namespace, operation[4:-1].decode(), key[len(_PLAIN_KEY) : -1]

    @property
    def _places(self) -> Mapping[str, Place]:
        if self._found is None:
            self._found = places(self.raw) or {}
        return self._found

    def __getitem__(self, item: str) -> Any:
        if self._decoder is not None:
            return self._decoder[item]
        values = self._values
        if item not in values:
            values[item] = self._read_plain(item) or self._read(item, *self._places[item])
        return values[item]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, or the default."""
        if key in self._values:
            return self._values[key]
        return self[key] if key in self else default  # noqa: SIM401 - this is what it would call

    def __contains__(self, key: object) -> bool:
        if self._plain is not None and key in _READ_PLAIN:
            return True
        return key in self._places if self._decoder is None else key in self._decoder

    def __iter__(self) -> Iterator[str]:
        return iter(self._places if self._decoder is None else self._decoder)

    def __len__(self) -> int:
        return len(self._places if self._decoder is None else self._decoder)

    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, RawBSONDocument) else NotImplemented

    __hash__ = None

    def items(self) -> ItemsView[str, Any]:
        """Names and values of its fields."""
        return self._decoded.items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.raw!r})"

    def __reduce__(self) -> tuple[type[RawEvent], tuple[bytes]]:
        return RawEvent, (self.raw,)

    @property
    def _decoded(self) -> RawBSONDocument:
        return self._decoder if self._decoder is not None else RawBSONDocument(self.raw, EVENT_TYPES)

    def _read_plain(self, name: str) -> str | RawEvent | None:
        """Return one of the fields by which an event of the usual form was recognised. None for all others."""
        if self._plain is None or name not in _READ_PLAIN:
            return None
        _, _, operation, namespace, key = self._plain
        if name == "operationType":
            return operation[4:-1].decode()
        if name == "documentKey":
            return RawEvent(key)
        return _namespace(namespace) if len(namespace) <= _NAMESPACE_BYTES else RawEvent(namespace)

    def _read(self, name: str, kind: int, start: int, stop: int) -> Any:
        raw = self.raw
        if kind == TEXT:
            return raw[start + 4 : stop - 1].decode("utf-8", "replace")
        if kind == DOCUMENT:
            is_namespace = name == "ns" and stop - start <= _NAMESPACE_BYTES
            return _namespace(raw[start:stop]) if is_namespace else RawEvent(raw[start:stop])
        if kind == OBJECT_ID:
            return ObjectId(raw[start:stop])
        if kind == TIMESTAMP:
            increment, seconds = _two_numbers_at(raw, start)
            return Timestamp(seconds, increment)
        return None if kind == NULL else self._decoded[name]


def read_plain(raw: bytes) -> Plain | None:
    """
    Return the five fields of an event that has the usual form; None for any other.

    Each field is where the one before it ends by its own length. Nothing is searched for, and every byte that is not
    within a document belongs to a field that was expected there.
    """
    first = _FIRST_FIELDS(raw)
    if first is None:
        return None
    end = len(raw) - 1
    token, operation, time_, document = first.groups()
    begin, at = first.start(2) - 4, first.end()
    found: dict[bytes, slice] = {}
    try:
        if (
            _length_at(raw)[0] != end + 1
            or raw[end]
            or _length_at(raw, _AT_TOKEN_DOCUMENT)[0] != len(token) + _AROUND_TOKEN
            or _length_at(raw, _AT_TOKEN_TEXT)[0] != len(token) + 1
            or _length_at(raw, begin)[0] != len(operation) + 1
        ):
            return None
        for name in _DOCUMENTS if document is None else _AFTER_DOCUMENT:
            if not raw.startswith(name, at):
                break
            start = at + len(name)
            (length,) = _length_at(raw, start)
            at = start + length
            if length < _SMALLEST or at > end or raw[at - 1]:
                return None
            found[name] = slice(start, at)
    except struct.error:  # it ends too early
        return None
    if at != end or _KEY not in found:
        return None
    return token.decode(), time_, raw[begin : first.end(2) + 1], raw[found[_NAMESPACE]], raw[found[_KEY]]


@lru_cache(maxsize=_NAMESPACES)
def _namespace(raw: bytes) -> RawEvent:
    """There are few of them, and one stream has them again and again."""
    return RawEvent(raw)
