"""
The top-level elements of a BSON document, found by walking its bytes from length to length.

Nothing is searched for: what a user's value holds, a text that looks like a field's name among it, is stepped over by
its own length. Nothing is decoded either, so that it costs the same however much a document holds.

Only what a decoder takes without a doubt is walked. Of a document with anything else (a kind of value that is rare at
this level, a length that does not fit, a name twice) nothing is said, and whoever asks decodes it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

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
