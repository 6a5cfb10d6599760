"""Which documents' entries may go to the broker by one command."""

from __future__ import annotations

from typing import Any

from bson import ObjectId

from mongo_celery.outbox.delivery import HeldDocument
from mongo_celery.outbox.groups import groups_of, size_together


def held(name: str, *events: Any) -> HeldDocument:
    return HeldDocument(document_id=name, events=list(events), owner=ObjectId(), claimed_at=0.0)


def groups(*documents: HeldDocument) -> list[list[Any]]:
    return [[document.document_id for document in group] for group in groups_of(documents)]


def task(size: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": "e", "kind": "task", "name": "shop.ship", "payload": "x" * size, **more}


def test_plain_tasks_go_together_in_their_order() -> None:
    assert groups() == []
    assert groups(held("a", task()), held("b", task(), task()), held("c", task())) == [["a", "b", "c"]]


def test_what_is_several_messages_has_failed_or_cannot_be_read_goes_alone() -> None:
    """Also what somebody else has written."""
    for alone in (task(name="celery.group"), task(name="celery.chord"), task(attempts=1), "none", 5):
        assert groups(held("a", task()), held("b", task(), alone), held("c", task())) == [["a"], ["b"], ["c"]]
    odd = [task(payload=7), task(name=["x"]), {}, task(attempts="many")]
    assert groups(held("a", *odd), held("b", task())) == [["a", "b"]]


def test_a_group_is_bounded_in_messages_and_bytes() -> None:
    """A document that is larger than the bound by itself is a group of one."""
    many = [held(str(number), *[task()] * 40) for number in range(5)]
    assert groups(*many) == [["0", "1"], ["2", "3"], ["4"]]
    large = [held("a", task(700_000)), held("b", task(700_000)), held("c", task(2_000_000)), held("d", task())]
    assert groups(*large) == [["a"], ["b"], ["c"], ["d"]]


def test_what_is_counted_are_bytes() -> None:
    """A text of other letters than ASCII's is longer in a message than it looks."""
    latin, greek = (held(name, {**task(), "payload": letter * 2**18}) for name, letter in (("a", "x"), ("b", "ω")))
    assert (size_together(latin), size_together(greek)) == (2**18, 2**19)
