"""Fragments of a large event are joined to the event that the server would have sent whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.stream.isolator import join_fragments

TOKEN = {"_data": "82AB"}
EVENT: dict[str, Any] = {
    "operationType": "update",
    "documentKey": {"_id": 1},
    "fullDocument": {"_id": 1, "text": "new" * 1000},
    "fullDocumentBeforeChange": {"_id": 1, "text": "old" * 1000},
}


def raw(document: dict[str, Any]) -> RawBSONDocument:
    return RawBSONDocument(bson.encode(document))


def fragments_of(*groups: list[str]) -> list[RawBSONDocument]:
    """The event's fields in as many fragments, as the server cuts them: each with a token of its own."""
    return [
        raw(
            {"_id": {"_data": f"82AB0{number}"}, "splitEvent": {"fragment": number, "of": len(groups)}}
            | {name: EVENT[name] for name in group}
        )
        for number, group in enumerate(groups, start=1)
    ]


@pytest.mark.parametrize(
    "groups",
    [
        [["operationType", "documentKey", "fullDocument", "fullDocumentBeforeChange"]],
        [["operationType", "documentKey", "fullDocument"], ["fullDocumentBeforeChange"]],
        [["operationType", "documentKey"], ["fullDocument"], ["fullDocumentBeforeChange"]],
    ],
    ids=len,
)
def test_joined_fragments_are_the_event_under_the_token_of_the_whole_one(groups: list[list[str]]) -> None:
    """A fragment's token could not be resumed from by a stream that does not split."""
    event = join_fragments(fragments_of(*groups), TOKEN)
    assert event is not None
    assert bson.decode(event.raw) == {"_id": TOKEN, **EVENT}


def test_no_more_fragments_are_read_than_the_event_has() -> None:
    """A read behind the last one would wait for the next change of the stream."""
    first, second = fragments_of(["operationType", "documentKey"], ["fullDocument"])

    def stream() -> Iterator[RawBSONDocument]:
        yield first
        yield second
        raise AssertionError("one read too many")

    assert join_fragments(stream(), TOKEN) is not None


def test_an_event_with_a_missing_fragment_is_none() -> None:
    """Never half of one."""
    first, _, third = fragments_of(["operationType"], ["fullDocument"], ["fullDocumentBeforeChange"])
    for broken in ([], [first], [first, third], [third], [raw({"_id": TOKEN, **EVENT})]):
        assert join_fragments(broken, TOKEN) is None
