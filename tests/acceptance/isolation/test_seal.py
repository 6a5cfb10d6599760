"""What a worker honours of a message is signed, or has no power; keys are exchanged while changes flow (I16)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.state import signing
from mongo_celery.errors import CommandRefusedError
from tests.fixtures.messages import body_of, with_body
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

_TASK: Document = {"task": "mongo_celery.commit", "args": ["x"], "kwargs": {}, "options": {}, "subtask_type": None}
_HEADERS: list[Mapping[str, Any]] = [
    {"timelimit": [None, 0.2]},
    {"timelimit": [0.2, None]},
    {"expires": "2020-01-01T00:00:00+00:00"},
    {"eta": "2999-01-01T00:00:00+00:00"},
    {"retries": 99},
    {"stamped_headers": ["mine"], "stamps": {"mine": ["1"]}},
    {"id": "easily-guessed"},
    {"id": [1]},
    {"get": "gone", "is_eager": True},  # a method of the request
]
_EMBEDDED: list[Mapping[str, Any]] = [
    {"callbacks": [_TASK]},
    {"errbacks": [_TASK]},
    {"chord": _TASK},
    {"chain": [_TASK]},
    {"chain": None},
]


def _tampered(message: bytes, headers: Mapping[str, Any], embedded: Mapping[str, Any]) -> bytes:
    """A message as it was found, but for some headers and some of what follows the task."""
    found = json.loads(message)
    args, kwargs, others = body_of(found)
    found = with_body(found, [args, kwargs, {**others, **embedded}])
    return json.dumps({**found, "headers": {**found["headers"], **headers}}).encode()


def _dropped(chain: Deployment) -> Document:
    found: Document = (chain.state["drops"].find_one({"_id": "chain"}) or {}).get("dropped", {})
    return found


def test_a_queued_message_that_was_tampered_with_is_dropped_and_its_change_is_handled(
    deployment: MakeDeployment,
) -> None:
    """P11: time limits, expiry, ETA, stamps, links: taken from the broker, changed and put back, they have no power."""
    changes: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(headers, {}) for headers in _HEADERS]
    changes += [({}, embedded) for embedded in _EMBEDDED]
    chain = deployment("skipping", options={"partitions": len(changes), "queues": len(changes)})
    chain.listener()
    for index in range(len(changes)):
        chain.write("skipping", next(chain.keys("skipping", index)), 1, seconds=0.4)
    with chain.broker as broker:
        for index, change in enumerate(changes):
            queue = f"chain.{index}"
            message = wait_for(partial(broker.rpop, queue))
            broker.rpush(queue, _tampered(message, *change))
    worker = chain.worker("-P", "threads", concurrency=4)
    chain.wait_done()
    wait_for(lambda: _dropped(chain).get("tampered") == len(changes), message=lambda: str(_dropped(chain)))
    chain.judge(spare=0)
    assert len(chain.effects()) == len(changes), "nothing was skipped"
    assert worker.running
    assert "Traceback" not in worker.text


def _malformed(message: bytes) -> list[bytes]:
    """Messages that most often end Celery's consumer, made of one that the listener has sent."""
    found = json.loads(message)
    changed: list[Document] = [
        with_body(found, None),
        with_body(found, 7),
        {**found, "content-type": "application/data", "content-encoding": "binary"},
        {**found, "headers": [1]},
        {**found, "headers": {**found["headers"], "task": ["x"]}},
        {**found, "headers": {}},
        {**found, "properties": None},
        {**found, "headers": {**found["headers"], "compression": "none of all"}},
    ]
    return [*(json.dumps(each).encode() for each in changed), b"text", b"\xff", b"[" * 100_000, b"null"]


def test_messages_that_are_none_of_celerys_end_no_worker_and_fill_no_log(deployment: MakeDeployment) -> None:
    """P8, P11, P12: they are dropped and counted, wherever they say they come from, and the next one is handled."""
    chain = deployment("skipping", options={"partitions": 1})
    chain.listener()
    chain.write("skipping", "first", 1)
    with chain.broker as broker:
        message = wait_for(lambda: next(iter(broker.lrange("chain.0", 0, -1)), None))
        malformed = _malformed(message)
        for each in malformed:
            broker.lpush("chain.0", *[each] * 20, each.replace(b'"chain.0"', b'"elsewhere"'))
        unknown = json.loads(message)
        unknown["headers"]["task"] = "chain.unknown"
        broker.lpush("chain.0", *[json.dumps(unknown)] * 100)
    worker = chain.worker("-P", "threads", "-Q", "chain.0")
    wait_for(lambda: _dropped(chain).get("malformed") == 21 * len(malformed), message=lambda: str(_dropped(chain)))
    chain.write("skipping", "second", 1)
    chain.wait_done()
    chain.judge(spare=0)
    assert worker.running
    assert "Traceback" not in worker.text
    assert worker.text.count("ropped") + worker.text.count("chain.unknown") < 6


def test_revokes_by_guessed_ids_hit_nothing(deployment: MakeDeployment) -> None:
    """
    P11: partition, number and dispatch are easily guessed; the rest of an id is not.

    What was signed, and is done, starts nothing again, as often as it comes.
    """
    chain = deployment("plain", options={"partitions": 1})
    chain.listener()
    item = chain.write("plain", "held", 1, gate="open")
    with chain.broker as broker:
        message = wait_for(lambda: next(iter(broker.lrange("chain.0", 0, -1)), None))
        worker = chain.worker()
        chain.wait_started(item)
        heads = [f"chain.plain.0.{seq}" for seq in (1, 2)]
        guesses = [f"{head}{dispatch}{end}" for head in heads for dispatch in ("", ".d1") for end in ("", ".commit")]
        told = {"task_id": guesses, "terminate": True, "signal": "SIGKILL"}
        with Celery(broker=chain.redis.url) as outsider:
            (answer,) = wait_for(lambda: outsider.control.broadcast("revoke", told, reply=True, timeout=2, limit=1))
        assert [each["ok"] for each in answer.values()] == ["terminate: tasks unknown"]
        chain.open_gate("open")
        chain.wait_done()
        broker.lpush("chain.0", *[message] * 5)
    name = json.loads(message)["headers"]["id"]
    wait_for(lambda: worker.text.count(f"[{name}] received") >= 6)
    chain.write("plain", "held", 2)
    chain.wait_done()
    chain.judge(spare=0)
    assert "Discarding revoked task" not in worker.text


@pytest.mark.slow
def test_a_key_is_exchanged_under_load_without_a_drop(
    deployment: MakeDeployment, mongo_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of the old key and of the new one are in the queues at once; none is dropped, and none waits."""
    chain = deployment("plain")
    listener = chain.listener()
    worker = chain.worker()
    keys = [f"k{number}" for number in range(8)]
    sent: list[Due] = chain.write_many("plain", keys, 1)
    before = chain.state["bridge_keys"].find_one({"_id": "chain"})
    assert before is not None
    monkeypatch.setattr(signing, "ANNOUNCED_SECONDS", signing.KEY_SECONDS + 1)
    operator = Bridge(Celery("chain"), mongo_url, name="chain", database=chain.state.name, autodiscover=False)
    Operations(operator.wiring).rotate_key(overlap=600).run()
    with pytest.raises(CommandRefusedError, match="already has a new key"):
        Operations(operator.wiring).rotate_key(overlap=60).run()
    operator.client.close()

    def exchanged() -> bool:
        if chain.facts["end"].count_documents({}) > len(sent) - 5 * len(keys):  # a backlog, and no endless one
            n = len(sent) // len(keys) + 1
            sent.extend(chain.write("plain", key, n) for key in keys)
        found = chain.state["bridge_keys"].find_one({"_id": "chain"})
        assert found is not None
        return bool(found["key"] != before["key"])

    wait_for(exchanged)
    listener.wait_for_output("signs messages with the new key")
    chain.write_many("plain", [f"after{number}" for number in range(8)], 3)
    chain.wait_done()
    chain.judge(spare=0)
    assert not _dropped(chain)
    assert "dropped" not in worker.text
    found = chain.state["bridge_keys"].find_one({"_id": "chain"})
    assert found is not None
    assert [bytes(each["key"]) for each in found["previous"]] == [bytes(before["key"])]
