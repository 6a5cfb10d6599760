"""P14: an outage of MongoDB or the broker is charged to no change; what is the handler's own still counts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from pymongo import MongoClient

from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.outage_handlers"
POLICIES = ("halt", "dead_letter", "skip")
KINDS = ("plain", "fenced", "retrying", "transactional")
MATRIX = [f"{kind}_{policy}" for kind in KINDS for policy in POLICIES]

_AGAIN_SECONDS = 60
LONG_CLAIM = {"claim_ttl": 30, "dispatch_grace": 20}
"""Nothing may lapse meanwhile: what is judged is what the worker itself says."""


@pytest.fixture
def make_chain(deployment: MakeDeployment, mongo_client: MongoClient[Document], mongo_url: str) -> Make:
    def make(
        *handlers: str,
        options: Document | None = None,
        visibility_timeout: int = 3600,
        servers: Document | None = None,
        **environment: str,
    ) -> Deployment:
        chain: Deployment = deployment(
            *handlers,
            include=HANDLERS,
            options={"partitions": 1, **(options or {})},
            transport={"visibility_timeout": visibility_timeout},  # Celery's own: nothing is delivered twice meanwhile
            environment={"SCRIPTED_FACTS": mongo_url, "OUTAGE_PATIENCE": "1", **environment},
            **(servers or {}),
        )
        chain.facts = mongo_client[chain.facts.name]
        return chain

    return make


def _log(chain: Deployment, event: str = "") -> str:
    text = next(text for name, text in chain.logs.items() if "worker" in name)
    return "\n".join(line for line in text.splitlines() if event in line)


def _nothing_is_charged(chain: Deployment, items: Iterable[Due]) -> None:
    """Each change took effect; no policy was applied, no retry and no crash was counted."""
    handlers = {item.handler for item in items}
    chain.wait_done(handlers=handlers)
    blocked = {"handler": {"$in": [*handlers]}, "state": {"$ne": "flowing"}}
    assert chain.state["partitions"].count_documents(blocked) == 0
    assert [letter for handler in handlers for letter in chain.letters(handler)] == []
    for item in items:
        starts = list(chain.facts["start"].find({"handler": item.handler, "key": item.key, "n": item.n}))
        assert starts, item
        assert {(each["retries"], each["crashes"]) for each in starts} == {(0, 0)}, item
    assert {effect.due for effect in chain.effects()} >= {*items}


def _together(chain: Deployment, handlers: Iterable[str], gate: str = "open", n: int = 1) -> list[Due]:
    """One change for each handler; all of them have started, and wait at one gate."""
    items = [chain.write(handler, "key", n, gate=gate) for handler in handlers]
    for item in items:
        chain.wait_started(item)
    return items


def _wait_for_outcomes_that_wait(chain: Deployment, items: list[Due], count: int | None = None) -> None:
    """Wait until the worker has an outcome of each change that MongoDB does not take."""
    wanted = len(items) if count is None else count
    wait_for(lambda: _log(chain, "as soon as it answers").count("the outcome 'waiting' of") >= wanted)


# -- MongoDB is away ---------------------------------------------------------------------------------


def test_an_outage_of_mongodb_is_charged_to_no_change(
    make_chain: Make, make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """
    P14: away longer than all waits, in the middle of each kind of handler with each policy, and of README's own.

    Then it freezes: what was on its way arrives when it wakes, and no claim is left behind to count as a crash.
    """
    own = make_replica_set()
    url = f"{own.url}&serverSelectionTimeoutMS=1500&socketTimeoutMS=2000"
    chain = make_chain("readme", *MATRIX, servers={"client": make_client(own.url), "url": url})
    chain.listener()
    chain.worker("-P", "threads", concurrency=14)
    items = _together(chain, ["readme", *MATRIX])
    own.kill()
    chain.open_gate("open")
    _wait_for_outcomes_that_wait(chain, items)
    own.restart()
    _nothing_is_charged(chain, items)

    again = _together(chain, ["readme", "plain_halt", "transactional_skip"], "again", 2)
    said = _log(chain, "as soon as it answers").count("the outcome 'waiting' of")
    own.pause()
    chain.open_gate("again")
    _wait_for_outcomes_that_wait(chain, again, said + len(again))
    own.resume()
    _nothing_is_charged(chain, [*items, *again])


def test_an_outcome_that_mongodb_keeps_waiting_is_written_later(make_chain: Make, failpoint: Failpoint) -> None:
    """A success whose record got no answer for longer than the worker waits counts all the same: it runs once."""
    chain = make_chain("fenced_halt", options=LONG_CLAIM)
    chain.both()
    item = chain.write("fenced_halt", "key", 1, late_gate="open")
    chain.wait_started(item)
    wait_for(chain.effects)
    with failpoint(failCommands=["update"], appName=chain.app_name("worker"), errorCode=189):
        chain.open_gate("open")
        wait_for(lambda: _log(chain, "'handled' of"))
    _nothing_is_charged(chain, [item])
    assert len(chain.starts(item)) == 1


def test_errors_of_mongodb_are_waited_for_and_the_handlers_own_count(make_chain: Make, failpoint: Failpoint) -> None:
    """
    P14, P16: what waits is shown with its cause, also where the handler tells it in words of its own (`from error`).

    A duplicate key is the handler's failure, and so is an error of MongoDB that it has named in `autoretry_for`.
    """
    chain = make_chain("plain_halt", "translating", "duplicating", "naming", OUTAGE_PATIENCE="20")
    chain.both()
    with failpoint(
        failCommands=["update"], appName=chain.app_name("worker"), namespace=f"{chain.data.name}.sink", errorCode=189
    ):
        item, translated = (chain.write(handler, "key", 1) for handler in ("plain_halt", "translating"))
        mine, named = (chain.give_up(chain.write(handler, "key", 1)) for handler in ("duplicating", "naming"))
        chain.wait_done(handlers=["duplicating", "naming"])
        for each in (item, translated):
            stored = chain.wait_state(each, lambda state: ((state["retry"] or {}).get("waiting") or {}).get("count"))
            assert (stored["retry"]["count"], stored["retry"]["crashes"]) == (0, 0)

        def shown() -> Document | None:
            (handler,) = [each for each in chain.changes("status")["handlers"] if each["name"] == "plain_halt"]
            return next((each for each in handler["partitions"] if each["state"] == "waiting"), None)

        partition = wait_for(shown, message="the status shows what waits")
        assert partition["since"]
        assert partition["error"].startswith("PrimarySteppedDown, code 189: ")
    _nothing_is_charged(chain, [item, translated])
    assert chain.of(item)["retry"] is None, "a real outcome clears it"
    errors = [letter["error"].partition(":")[0] for each in (mine, named) for letter in chain.letters(each.handler)]
    assert errors == ["DuplicateKeyError", "NotPrimaryError"]
    assert [[start.retries for start in chain.starts(each)] for each in (mine, named)] == [[0], [0, 1]]


def test_a_transaction_that_hinders_itself_counts_in_the_end(make_chain: Make) -> None:
    """One `session=` is forgotten: what the driver then says looks like an outage, but MongoDB answers."""
    handler = "waiting_for_itself"
    chain = make_chain(handler, options={"transaction_seconds": 1.0, **LONG_CLAIM}, OUTAGE_PAUSE="0.1")
    chain.both()
    item = chain.give_up(chain.write(handler, "key", 1))
    chain.wait_done()
    assert len(chain.letters(handler)) == 1
    assert len(_log(chain, "waits, and runs again").splitlines()) == 3
    assert len(chain.starts(item)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_messages_that_come_again_while_mongodb_is_away_charge_no_change(
    make_chain: Make, make_replica_set: MakeReplicaSet, make_client: MakeClient, fault: str
) -> None:
    """P14: with the bounds as they are by default, they take the lapsed claims the moment MongoDB answers."""
    own = make_replica_set()
    options = {"lease_ttl": 10, "claim_ttl": 10, "dispatch_grace": None, "commit_grace": 3, "transaction_seconds": 30}
    chain = make_chain(
        "readme",
        *MATRIX,
        servers={"client": make_client(own.url), "url": own.url},
        options=options,
        visibility_timeout=_AGAIN_SECONDS,
        OUTAGE_PATIENCE="30",
    )
    chain.listener()
    chain.worker("-P", "threads", concurrency=14)
    items = _together(chain, ["readme", *MATRIX])
    until = time.monotonic() + _AGAIN_SECONDS
    (own.kill if fault == "killed" else own.pause)()
    chain.open_gate("open")
    wait_for(lambda: time.monotonic() > until)
    (own.restart if fault == "killed" else own.resume)()
    _nothing_is_charged(chain, items)


# -- the broker is away ------------------------------------------------------------------------------


def test_a_handler_that_cannot_start_a_task_waits_for_the_broker(make_chain: Make) -> None:
    """`delay()` raises kombu's OperationalError; MongoDB is well, so the wait is stored at once."""
    chain = make_chain("starting")
    chain.both()
    item = chain.write("starting", "key", 1, gate="open")
    chain.wait_started(item)
    chain.redis.kill()
    chain.open_gate("open")
    stored = chain.wait_state(item, lambda state: (state["retry"] or {}).get("waiting"))
    assert "OperationalError" in stored["retry"]["waiting"]["cause"]
    assert (stored["retry"]["count"], stored["retry"]["crashes"]) == (0, 0)
    chain.redis.restart()
    chain.worker(name="restarted")
    chain.give_up(item)
    chain.wait_done()
    assert chain.letters("starting") == []
