"""Ways in which changes come that meet each other: lists, latest changes, parked keys, snapshots, rewinds, replays."""

from __future__ import annotations

from typing import Any

import pytest

from mongo_celery import Changes
from mongo_celery.errors import CommandRefusedError, StaleFencingTokenError
from tests.integration.pairs_rig import TABLE, Shop, label

row = TABLE.row


def noting(shop: Shop, *, lists: bool = False, **options: Any) -> None:
    """A handler that notes what it was given, and fails where that is asked for."""

    def handle(given: Any) -> None:
        for change in given if lists else [given]:
            try:
                shop.fail(change)
            except OSError as error:
                raise (given.failed_at(change) if lists else error) from error
            shop.seen.append(label(change))

    (shop.bridge.on_changes if lists else shop.bridge.on_change)(shop.orders.full_name, **options)(handle)


def seen(shop: Shop) -> list[str]:
    """What was noted since the last time."""
    found, shop.seen = shop.seen, []
    return found


@row("lists-lists", "of two handlers of one source each has lists of its own, and one that fails holds no other")
def _(shop: Shop) -> None:
    noting(shop, lists=True, failure_policy="dead_letter")

    @shop.bridge.on_changes(shop.orders.full_name)
    def other(changes: Changes) -> None:
        for change in changes:
            shop.add(label(change))

    with shop.run() as runner:
        shop.put(1, 2, 3)
        shop.failing[2] = 1
        runner.deliver(raises=False)
        assert len(shop.letters()) == 1
    assert (seen(shop), shop.counted()) == (["1.0", "3.0"], {"1.0": 1, "2.0": 1, "3.0": 1})


@row("lists-coalesce", "each document's last change is given, and what is passed over is lost nowhere")
def _(shop: Shop) -> None:
    noting(shop, lists=True, coalesce=True)
    with shop.run() as runner:
        for n in range(3):
            shop.put(1, 2, n=n)
        shop.orders.delete_one({"_id": 1})
        shop.arrive(runner)
        runner.deliver()
    assert seen(shop) == ["2.2", "1.None"]


@row("lists-parked", "the changes of a key that fails are taken out of lists, and come when it is released")
def _(shop: Shop) -> None:
    noting(shop, lists=True, failure_policy="park_key")
    with shop.run() as runner:
        shop.put(1, 2)
        shop.put(1, 3, n=1)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert seen(shop) == ["2.0", "3.1"]
        shop.replay(runner)
    assert seen(shop) == ["1.0", "1.1"]


@row("lists-snapshot", "documents that existed and live changes come in lists, each once")
def _(shop: Shop) -> None:
    noting(shop, lists=True)
    shop.put(1, 2, 3)
    with shop.run() as runner:
        runner.snapshot("handle")
        shop.put(4)
        runner.deliver()
    assert sorted(seen(shop))[:4] == ["1.0", "2.0", "3.0", "4.0"]


@row("lists-rewind", "a rewound handler gets the same changes in the same order")
def _(shop: Shop) -> None:
    noting(shop, lists=True)
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        shop.put(1, 2)
        shop.put(1, n=1)
        runner.deliver()
        assert seen(shop) == ["0.0", "1.0", "2.0", "1.1"]
        shop.rewind(runner, "handle", first)
    assert seen(shop) == ["1.0", "2.0", "1.1"]


@row("lists-replay", "the replay of a dead letter is a list of one")
def _(shop: Shop) -> None:
    noting(shop, lists=True, failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1, 2, 3)
        shop.failing[2] = 1
        runner.deliver(raises=False)
        (call,) = shop.replay(runner).calls
    assert ([len(call.changes), call.changes[0].replayed], seen(shop)) == ([1, True], ["1.0", "3.0", "2.0"])


@row("coalesce-coalesce", "what a coalescing handler writes another one coalesces: all end as the source", run_size=10)
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", coalesce=True)
    shop.mirror("copies", "thirds", coalesce=True)
    with shop.run() as runner:
        for n in range(3):
            shop.put(1, 2, n=n)
        runner.crash("called", after=1)
        runner.deliver()
    assert shop.documents("orders") == shop.documents("copies") == shop.documents("thirds")


@row("coalesce-parked", "a key that fails is parked alone, and its last change comes when it is released")
def _(shop: Shop) -> None:
    noting(shop, lists=True, coalesce=True, failure_policy="park_key")
    with shop.run() as runner:
        shop.put(1, 2)
        shop.put(1, 2, n=1)
        shop.arrive(runner)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert "2.1" in seen(shop)
        shop.put(1, n=2)
        runner.deliver(raises=False)
        assert seen(shop) == []
        shop.replay(runner)
        assert shop.letters() == []
    assert seen(shop)[-1] == "1.2"


@row("coalesce-snapshot", "a document that existed and then changes ends with its last change", run_size=10)
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", coalesce=True)
    shop.put(1, 2, 3)
    with shop.run() as runner:
        runner.snapshot("to_copies")
        shop.put(1, n=1)
        shop.put(1, n=2)
        shop.orders.delete_one({"_id": 2})
        runner.deliver()
    assert shop.documents("copies") == shop.documents("orders")


@row("coalesce-rewind", "the last change of what comes again is given")
def _(shop: Shop) -> None:
    noting(shop, lists=True, coalesce=True)
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        shop.put(1)
        runner.deliver()
        shop.put(1, n=1)
        runner.deliver()
        seen(shop)
        shop.rewind(runner, "handle", first)
    assert seen(shop)[-1] == "1.1"


@row("coalesce-replay", "a letter that stood for others is refused where newer data is, and stays", run_size=10)
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", coalesce=True, failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1)
        shop.put(1, n=1)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        shop.put(1, n=2)
        runner.deliver(raises=False)
        assert [type(call.error) for call in shop.replay(runner).calls] == [StaleFencingTokenError]
        assert len(shop.letters()) == 1
    assert shop.documents("copies") == shop.documents("orders")


@row("parked-parked", "keys wait each for itself, and are released each for itself")
def _(shop: Shop) -> None:
    noting(shop, failure_policy="park_key")
    with shop.run() as runner:
        shop.put(1, 2, 3)
        shop.put(1, 2, n=1)
        shop.failing[1], shop.failing[2] = 1, 2
        runner.deliver(raises=False)
        assert seen(shop) == ["3.0"]
        shop.replay(runner)
        assert seen(shop) == ["1.0", "1.1"], "2 has failed once more"
        assert len(shop.letters()) == 2
        shop.replay(runner)
    assert seen(shop) == ["2.0", "2.1"]


@row("parked-snapshot", "a live change of a document that existed waits behind it, where that has failed")
def _(shop: Shop) -> None:
    noting(shop, failure_policy="park_key")
    shop.put(1, 2)
    with shop.run() as runner:
        runner.snapshot("handle")
        shop.failing[1] = 1
        runner.deliver(raises=False)
        shop.put(1, n=1)
        runner.deliver(raises=False)
        assert seen(shop) == ["2.0"]
        shop.replay(runner)
    assert seen(shop) == ["1.0", "1.1"]


@row("parked-rewind", "a rewound handler leaves a key parked: its changes wait for the person who releases it")
def _(shop: Shop) -> None:
    noting(shop, failure_policy="park_key")
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        shop.put(1, 2)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        seen(shop)
        shop.rewind(runner, "handle", first)
        assert seen(shop) == ["2.0"]
        shop.replay(runner)
        assert shop.letters() == []
    assert set(seen(shop)) == {"1.0"}


@row("parked-replay", "any letter of a parked key replays all of its key, from the first on")
def _(shop: Shop) -> None:
    noting(shop, failure_policy="park_key")
    with shop.run() as runner:
        for n in range(3):
            shop.put(1, n=n)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        shop.replay(runner, only="parked_behind")
        assert shop.letters() == []
    assert seen(shop) == ["1.0", "1.1", "1.2"]


@row("snapshot-snapshot", "one is refused while another runs, and afterwards gives all documents again")
def _(shop: Shop) -> None:
    noting(shop)
    shop.put(1, 2)
    with shop.run() as runner:
        runner.snapshot("handle")
        with pytest.raises(CommandRefusedError):
            runner.snapshot("handle")
        runner.deliver()
        assert sorted(seen(shop)) == ["1.0", "2.0"]
        runner.snapshot("handle")
        runner.deliver()
    assert sorted(seen(shop)) == ["1.0", "2.0"]


@row("snapshot-rewind", "behind its place changes come again, and no documents: those are asked for by a snapshot")
def _(shop: Shop) -> None:
    noting(shop)
    shop.put(1, 2)
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        runner.snapshot("handle", match={"$gt": ["$fullDocument._id", 0]})
        runner.deliver()
        shop.put(3)
        runner.deliver()
        seen(shop)
        shop.rewind(runner, "handle", first)
    assert seen(shop) == ["3.0"]


@row("snapshot-replay", "the letter of a document that existed is refused where newer data is, and stays")
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", failure_policy="dead_letter")
    shop.put(1, 2)
    with shop.run() as runner:
        runner.snapshot("to_copies")
        shop.failing.update({1: 1, 2: 1})
        runner.deliver(raises=False)
        shop.put(1, n=1)
        runner.deliver(raises=False)
        calls = shop.replay(runner).calls
        assert [type(call.error) for call in calls if call.changes[0].document_key["_id"] == 1] == [
            StaleFencingTokenError
        ]
        assert len(shop.letters()) == 1
    assert shop.documents("copies") == shop.documents("orders")


@row("rewind-rewind", "each sends the handler back, from wherever it is")
def _(shop: Shop) -> None:
    noting(shop)
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        shop.put(1)
        runner.deliver()
        seen(shop)
        for _ in range(2):
            shop.rewind(runner, "handle", first)
    assert seen(shop) == ["1.0", "1.0"]


@row("rewind-replay", "the letter of a change that came again and was handled is refused, and stays")
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(0)
        first = runner.deliver().calls[0].changes[0]
        shop.put(1)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        shop.put(1, n=1)
        runner.deliver(raises=False)
        shop.rewind(runner, "to_copies", first)
        calls = shop.replay(runner).calls
        assert [type(call.error) for call in calls if call.changes[0].document_key["_id"] == 1] == [
            StaleFencingTokenError
        ]
        assert len(shop.letters()) == 1
    assert shop.documents("copies") == shop.documents("orders")


@row("replay-replay", "one that fails stays a letter for the next; one that is done is gone")
def _(shop: Shop) -> None:
    noting(shop, failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1, 2)
        shop.failing.update({1: 2, 2: 1})
        runner.deliver(raises=False)
        shop.replay(runner)
        assert seen(shop) == ["2.0"]
        shop.replay(runner)
        assert shop.letters() == []
    assert seen(shop) == ["1.0"]
