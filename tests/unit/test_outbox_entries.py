"""What is stored for a task or event: its ids, and the `_id` of its document where it is known and where it is not."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Decimal128, Int64, ObjectId, Regex
from celery import Celery, chain, group
from kombu.serialization import loads

from mongo_celery import STORED_ID, Event
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox.canvas import bind_message
from mongo_celery.outbox.entries import Entry, bind_event, make_event_entry, make_task_entries

NOW = datetime(2024, 2, 29, 12, 0, 0, tzinfo=UTC)
KEY = ObjectId("1" * 24)


def task_entry(*given: Any) -> Entry:
    (entry,) = make_task_entries(*given)
    return entry


@pytest.fixture(name="app")
def an_app() -> Iterator[Celery]:
    app = Celery("shop", set_as_current=False, backend="cache+memory://")
    app.conf.accept_content = ["json", "pickle"]
    yield app
    app.close()


@pytest.fixture(name="note")
def a_task(app: Celery) -> Any:
    def note(*args: Any, **kwargs: Any) -> None: ...

    return app.task(name="note", shared=False)(note)


def decoded(entry: Entry) -> Any:
    return loads(entry.payload, entry.content_type, entry.content_encoding, accept={entry.content_type})


def ids_in(canvas: Any) -> set[str]:
    found = set()
    if isinstance(canvas, dict):
        found |= {canvas["task_id"]} if isinstance(canvas.get("task_id"), str) else set()
        canvas = list(canvas.values())
    for each in canvas if isinstance(canvas, list | tuple) else ():
        found |= ids_in(each)
    return found


@pytest.mark.parametrize(
    ("identity", "argument"),
    [(KEY, "1" * 24), (Int64(7), 7), (Decimal128("1.5"), "1.5"), ({"a": KEY}, {"a": "1" * 24})],
)
def test_a_known_id_stands_where_stored_id_stood(app: Celery, note: Any, identity: Any, argument: Any) -> None:
    """In lists and dicts too; nothing is left to be bound, and the signature may be used again."""
    signature = note.s(STORED_ID, [1, {"of": STORED_ID}], key=(STORED_ID,))
    entry = task_entry(app, signature, NOW, identity)
    stored = decoded(entry)
    assert (stored["args"], stored["kwargs"]) == ([argument, [1, {"of": argument}]], {"key": [argument]})
    assert (entry.bind, stored["options"]["task_id"]) == ("", entry.id)
    assert signature.args[0] is STORED_ID
    assert "task_id" not in signature.options
    assert ids_in(stored).isdisjoint(ids_in(decoded(task_entry(app, signature, NOW, identity))))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(OutboxRefusedError):
        task_entry(app, note.s(endless), NOW)


def test_an_id_of_the_users_is_refused_where_that_of_the_document_is_not_known(app: Celery, note: Any) -> None:
    """The write may go to several documents."""
    mine = note.s().set(task_id="mine")
    for canvas in (mine, chain(note.si(1), mine), group(mine, note.si(1))):
        with pytest.raises(OutboxRefusedError):
            task_entry(app, canvas, NOW)
    assert task_entry(app, mine, NOW, 1).bind == ""


CANVASES: dict[str, Any] = {
    "task": lambda note: note.s(STORED_ID),
    "chain": lambda note: chain(note.si(STORED_ID), group(note.si(1), note.si(STORED_ID)), note.si(2)),
    "with a link": lambda note: note.s(1).set(link=note.si(STORED_ID)),
    "with links": lambda note: note.s(1).on_error(note.si(STORED_ID)),
}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("make", CANVASES.values(), ids=CANVASES.keys())
def test_what_is_bound_late_has_ids_of_its_own_in_each_document(
    app: Celery, note: Any, make: Any, serializer: str
) -> None:
    """The same at each dispatch, others in each document, and everywhere the `_id` of that document."""
    app.conf.task_serializer = note.serializer = serializer
    canvas = make(note)
    before = repr(dict(canvas))
    entry = task_entry(app, canvas, NOW)
    keys = (KEY, KEY, 0.1, Decimal128("0.1"), "0.1")
    first, again, *others = (bind_message(decoded(entry), entry.bind, each) for each in keys)
    assert repr(first) == repr(again)
    stored = ids_in(decoded(entry))
    assert {len(ids_in(each)) for each in (first, *others)} == {len(stored)}
    assert len(stored.union(*map(ids_in, (first, *others)))) == 5 * len(stored)
    assert entry.bind not in repr(first)
    assert repr(first).count("1" * 24) == repr(decoded(entry)).count(entry.bind) > 0
    assert repr(dict(canvas)) == before
    Celery("relay", set_as_current=False).signature(first)  # a relay can make a canvas of it


@pytest.mark.parametrize("identity", [KEY, 7, b"\x00\xff", Regex("a"), {"a": [b"\x01", KEY]}, NOW])
def test_an_event_is_bound_like_a_task(identity: Any) -> None:
    """Its id, its subject unless it has one, and its body. JSON has one form of whatever an `_id` can be."""
    entry = make_event_entry(Event("placed", {"of": [STORED_ID]}), NOW, source="/s", document_id=NO_ID)
    late, other = (bind_event(entry, each) for each in (identity, "other"))
    known = make_event_entry(Event("placed", {"of": [STORED_ID]}), NOW, source="/s", document_id=identity)
    found = [json.loads(each.payload) for each in (late, known)]
    assert found[0]["data"] == found[1]["data"]
    assert found[0].get("subject") == found[1].get("subject")
    assert found[0]["id"] == late.id
    assert len({entry.id, late.id, other.id}) == 3
    named = make_event_entry(Event("placed", subject="own"), NOW, source="/s", document_id=NO_ID)
    assert json.loads(bind_event(named, KEY).payload)["subject"] == "own"


def test_stored_id_is_one_value_that_cannot_become_text() -> None:
    """Else it would be sent as a text that says nothing."""
    assert copy.deepcopy(STORED_ID) is STORED_ID is pickle.loads(pickle.dumps(STORED_ID))
    for spoiled in (str, "order {}".format, lambda value: f"order {value}"):
        with pytest.raises(TypeError, match="STORED_ID"):
            spoiled(STORED_ID)
