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
from mongo_celery.outbox.entries import (
    Entry,
    bind_event,
    make_event_entry,
    make_task_entries,
    read_entries,
)

NOW = datetime(2024, 2, 29, 12, 0, 0, tzinfo=UTC)
KEY = ObjectId("1" * 24)


def task_entry(*given: Any) -> Entry:
    """Return the one entry of a task."""
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
    def note(*args: Any, **kwargs: Any) -> None:
        """Take anything."""

    return app.task(name="note", shared=False)(note)


def decoded(entry: Entry) -> Any:
    return loads(entry.payload, entry.content_type, entry.content_encoding, accept={entry.content_type})


def ids_in(canvas: Any) -> set[str]:
    """Every task id in a stored canvas, wherever it stands."""
    found = set()
    if isinstance(canvas, dict):
        found |= {canvas["task_id"]} if isinstance(canvas.get("task_id"), str) else set()
        canvas = list(canvas.values())
    for each in canvas if isinstance(canvas, list | tuple) else ():
        found |= ids_in(each)
    return found


@pytest.mark.parametrize(
    ("identity", "argument"),
    [(KEY, "1" * 24), (7, 7), (Int64(7), 7), ("k", "k"), (Decimal128("1.5"), "1.5"), ({"a": KEY}, {"a": "1" * 24})],
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
    assert "STORED_ID" in entry.argsrepr


def test_an_id_of_the_users_is_refused_where_that_of_the_document_is_not_known(app: Celery, note: Any) -> None:
    """The write may go to several documents."""
    mine = note.s().set(task_id="mine")
    for canvas in (mine, chain(note.si(1), mine), group(mine, note.si(1))):
        with pytest.raises(OutboxRefusedError, match="has a fixed task id"):
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
    entry = task_entry(app, make(note), NOW)
    first, again, other = (bind_message(decoded(entry), entry.bind, each) for each in (KEY, KEY, 7))
    assert repr(first) == repr(again)
    stored = ids_in(decoded(entry))
    assert len(stored) == len(ids_in(first)) == len(ids_in(other))
    assert len(stored | ids_in(first) | ids_in(other)) == 3 * len(stored)
    assert entry.bind not in repr(first) + repr(other)
    assert repr(first).count("1" * 24) == repr(decoded(entry)).count(entry.bind) > 0
    Celery("relay", set_as_current=False).signature(first)  # a relay can make a canvas of it


def test_ids_that_are_not_the_canvas_s_own_stay(app: Celery, note: Any) -> None:
    """A parent that runs already, and a text that only looks like what stands for the `_id`."""
    entry = task_entry(app, note.s("mongo_celery.STORED_ID:x").set(parent_id="p", root_id="r"), NOW)
    found = bind_message(decoded(entry), entry.bind, 7)
    assert (found["options"]["parent_id"], found["options"]["root_id"]) == ("p", "r")
    assert found["args"] == ["mongo_celery.STORED_ID:x"]
    alone = bind_message(decoded(task_entry(app, note.s(), NOW)), "x", 7)
    assert alone["options"]["root_id"] == alone["options"]["task_id"]


def test_numbers_that_are_close_are_two_documents(app: Celery, note: Any) -> None:
    """Two decimals that share a float are two `_id`s, and so are a text and a number."""
    entry = task_entry(app, note.s(), NOW)
    keys = [0.1, Decimal128("0.1"), "0.1", b"0.1"]
    assert len({bind_message(decoded(entry), entry.bind, key)["options"]["task_id"] for key in keys}) == len(keys)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("make", CANVASES.values(), ids=CANVASES.keys())
def test_a_canvas_that_is_stored_twice_has_other_ids_each_time(
    app: Celery, note: Any, make: Any, is_grouped: bool
) -> None:
    """Nothing is written into what the user holds, or its second run would be a duplicate of the first."""
    canvas = group(group(make(note), note.si(3)), note.si(4)) if is_grouped else make(note)
    before = repr(dict(canvas))
    first, second = ([ids_in(decoded(each)) for each in make_task_entries(app, canvas, NOW, 1)] for _ in range(2))
    assert len(first) == len(second) == (3 if is_grouped else 1)
    assert not set().union(*first) & set().union(*second)
    assert repr(dict(canvas)) == before


def test_an_event_is_bound_like_a_task() -> None:
    """Its id, its subject unless it has one, and its body."""
    entry = make_event_entry(Event("placed", {"of": [STORED_ID]}), NOW, source="/s", document_id=NO_ID)
    [one, other] = [bind_event(entry, each) for each in (KEY, b"\x00\xff")]
    told = json.loads(one.payload)
    assert (told["id"], told["subject"], told["data"]) == (one.id, "1" * 24, {"of": ["1" * 24]})
    assert json.loads(other.payload)["data"] == {"of": ["00ff"]}
    assert len({entry.id, one.id, other.id}) == 3
    named = make_event_entry(Event("placed", subject="own"), NOW, source="/s", document_id=NO_ID)
    assert json.loads(bind_event(named, KEY).payload)["subject"] == "own"


@pytest.mark.parametrize("identity", [KEY, 7, b"\x00\xff", Regex("a"), {"a": [b"\x01", KEY]}, NOW])
def test_an_event_tells_the_same_id_whether_it_is_known_or_bound_late(identity: Any) -> None:
    """Whatever an `_id` can be, JSON has one form of it."""
    event = Event("placed", [STORED_ID])
    known = make_event_entry(event, NOW, source="/s", document_id=identity)
    late = bind_event(make_event_entry(event, NOW, source="/s", document_id=NO_ID), identity)
    assert json.loads(known.payload)["data"] == json.loads(late.payload)["data"]
    assert [json.loads(each.payload).get("subject") for each in (known, late)].count(None) in {0, 2}


def test_stored_id_is_one_value_that_cannot_become_text() -> None:
    """Else it would be sent as a text that says nothing."""
    assert copy.deepcopy(STORED_ID) is STORED_ID is pickle.loads(pickle.dumps(STORED_ID))
    for spoiled in (str, "order {}".format, lambda value: f"order {value}"):
        with pytest.raises(TypeError, match="whole argument"):
            spoiled(STORED_ID)


def test_what_cannot_be_read_or_is_not_trusted_stays_as_it_is_stored(app: Celery, note: Any) -> None:
    """Whoever meets it sets it aside."""
    stored = task_entry(app, note.s(1), NOW).to_document()
    spoiled: list[Any] = [{}, {**stored, "attempts": float("inf")}, "x"]
    assert read_entries(spoiled, lambda _: True) == [*spoiled[:-1], {"value": "x"}]
    assert read_entries([stored], lambda _: False) == [stored]


def test_an_argument_that_contains_itself_is_refused(app: Celery, note: Any) -> None:
    """Looking for `STORED_ID` in it must end."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(OutboxRefusedError, match="contains itself"):
        task_entry(app, note.s(endless), NOW)
