"""Messages that are repeated, reordered, lost or forged change timing only; the broker is disposable."""

from __future__ import annotations

import json
import random
import re
from base64 import b64decode, b64encode
from collections import Counter
from typing import Any

import bson
import pytest
from bson import Int64

from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.broker.late_notes import HELD_SECONDS
from tests.fixtures.messages import body_of, with_body
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]
PLAIN = "tests.rig.scripted.handlers.plain"
OTHER = "tests.rig.scripted.handlers.other"
COMMIT = "mongo_celery.commit"


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    """Give a bridge with two handlers; what is not acknowledged is redelivered after two seconds."""
    options = {"partitions": 2, "max_crashes": 9}
    return deployment("plain", "other", options=options, transport={"visibility_timeout": 2})


def _queues(chain: Deployment) -> list[str]:
    return [f"chain.{index}" for index in range(chain.partitions)]


def _waiting(chain: Deployment) -> dict[str, list[bytes]]:
    with chain.broker as broker:
        return {name: list(broker.lrange(name, 0, -1)) for name in _queues(chain)}


def _push(chain: Deployment, queue: str, *messages: bytes) -> None:
    with chain.broker as broker:
        broker.lpush(queue, *messages)


def _seen(chain: Deployment) -> set[bytes]:
    """Messages that wait or are being worked on, and for each run the commit behind it."""
    with chain.broker as broker:
        taken: Any = broker.hvals("unacked")
    found = {message for messages in _waiting(chain).values() for message in messages}
    found |= {json.dumps(json.loads(value)[0]).encode() for value in taken}
    commits = set()
    for message in map(json.loads, found):
        if message["headers"]["task"] != COMMIT:
            commits.add(_forge(message, COMMIT, _envelopes(message)[1]))
    return found | commits


def test_repeated_and_reordered_messages_run_nothing_twice(chain: Deployment) -> None:
    """P6, P8: copies of runs and commits on any queue, in any order, long after they are done."""
    chain.listener()
    shuffled = random.Random(7)
    keys = [next(chain.keys("plain", 0)), next(chain.keys("plain", 1))]
    chain.write_many("plain", keys, 8, seconds=2 * HELD_SECONDS)  # so that Redis has a note of each message
    wait_for(lambda: all(_waiting(chain).values()))
    seen = _seen(chain)
    chain.worker()

    def done() -> bool:
        seen.update(_seen(chain))
        for queue in _queues(chain):
            _push(chain, queue, shuffled.choice(sorted(seen)))
        return bool(sum(each["committed"] for each in chain.state["partitions"].find()) >= 16)

    wait_for(done)
    chain.judge()
    assert len({json.loads(message)["headers"]["id"] for message in seen}) > 8


def test_lost_messages_are_dispatched_again(chain: Deployment) -> None:
    """P1, P8: popped by nobody's worker, then the whole broker emptied under a running handler."""
    chain.listener()
    first = chain.write("plain", "lost", 1, gate="open")
    queue = f"chain.{chain.partition_of('plain', 'lost')}"
    with chain.broker as broker:
        wait_for(lambda: broker.lpop(queue))
        chain.worker()
        chain.wait_started(first)
        second = chain.write("plain", "lost", 2)
        broker.flushall()
    chain.open_gate("open")
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(second)) == 1


def test_redis_may_be_killed_and_come_back_empty(chain: Deployment) -> None:
    """
    P1, P6, P8: nothing but time is lost, and running handlers are not repeated.

    Some versions of kombu end the worker when Redis refuses connections, so a supervisor is played here.
    """
    listener, _ = chain.both()
    running = chain.write("plain", "running", 1, gate="open")
    chain.wait_started(running)
    chain.redis.kill()
    chain.write_many("other", ["x", "y"], 3)
    listener.wait_for_output("could not send messages")
    chain.open_gate("open")
    chain.redis.restart()
    chain.worker(name="restarted")
    chain.wait_done()
    chain.judge()


def test_a_handler_slower_than_the_visibility_timeout_starts_once(chain: Deployment) -> None:
    """P6: the broker redelivers it again and again meanwhile; the claim drops the copies."""
    _, worker = chain.both()
    item = chain.write("plain", "slow", 1, seconds=6)
    chain.write("plain", "slow", 2)
    chain.wait_done()
    chain.judge()
    start = chain.starts(item)[0]
    ids = re.findall(rf"\[(chain\.plain\.{start.partition}\.{start.seq}\.\w+)\] received", worker.text)
    assert max(Counter(ids).values()) > 1


@pytest.fixture
def held(chain: Deployment) -> tuple[Deployment, Due, dict[str, Any], bytes]:
    """Give a handler that is running, the message that started it, and the bridge's signing key."""
    chain.listener()
    item = chain.write("plain", "held", 1, gate="open")
    queue = f"chain.{chain.partition_of('plain', 'held')}"
    message = wait_for(lambda: next(iter(_waiting(chain)[queue]), None))
    chain.worker()
    chain.wait_started(item)
    found = chain.state["bridge_keys"].find_one({"_id": "chain"})
    assert found is not None
    return chain, item, json.loads(message), bytes(found["key"])


def _forge(message: dict[str, Any], task: str, *args: Any, **kwargs: Any) -> bytes:
    body = [list(args), kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    headers = {**message["headers"], "task": task, "id": f"forged-{random.random()}"}
    return json.dumps(with_body({**message, "headers": headers}, body)).encode()


def _envelopes(message: dict[str, Any]) -> tuple[str, str]:
    args, _, embedded = body_of(message)
    return args[0], embedded["chain"][0]["args"][0]


def _forgeries(message: dict[str, Any], key: bytes, forged: Due) -> list[bytes]:
    run, commit = _envelopes(message)
    body = bson.decode(b64decode(run)[32:])
    event = bson.decode(body["c"])
    event["fullDocument"] = {"_id": forged.key, "n": forged.n}
    event["documentKey"] = {"_id": forged.key}
    changed = bson.encode({**body, "c": bson.encode(event)})
    deep: Document = {}
    for _ in range(150):
        deep = {"d": deep}
    nested = b64encode(bytes(32) + bson.encode({"b": "chain", "d": deep})).decode()
    unknown = b64encode(bytes(32) + bson.encode({"b": "no-such-bridge"})).decode()

    def signed(**values: Any) -> str:
        given = {**body, **values}
        first, last = given["n"]
        made = Run(given["b"], given["s"], given["g"], given["i"], given["v"], first, last, [given["c"]], Carrier("id"))
        return sign_run(given["k"], made, key)

    odd: list[tuple[Any, ...]] = [(), ("",), ("garbage",), ("\u00fc",), (None,), (7,), ([],), ({"b": 1},)]
    odd += [(nested,), (unknown,)]
    return [
        _forge(message, COMMIT, commit),  # valid, but nothing is handled yet
        _forge(message, COMMIT, run),
        _forge(message, PLAIN, commit),
        _forge(message, OTHER, run),  # the other handler's subscription
        _forge(message, PLAIN, b64encode(b64decode(run)[:32] + changed).decode()),  # another body, the old signature
        _forge(message, PLAIN, b64encode(bytes(32) + changed).decode()),
        _forge(message, PLAIN, signed(v=Int64(body["v"] + 1), c=bson.encode(event))),  # even with the key
        _forge(message, PLAIN, signed(n=[2, 2], c=bson.encode(event))),
        _forge(message, PLAIN, signed(b="no-such-bridge")),
        _forge(message, COMMIT, signed(k="commit", i=99)),
        *(_forge(message, task, *args) for task in (PLAIN, COMMIT) for args in odd),
        _forge(message, COMMIT, commit, "more", than="needed"),
        _forge(message, PLAIN, run, "more", than="needed"),
    ]


def test_forged_messages_change_nothing(held: tuple[Deployment, Due, dict[str, Any], bytes]) -> None:
    """P11: bare commits, wrong signatures, other tasks, higher versions, garbage; all while a handler runs."""
    chain, item, message, key = held
    forged = Due("plain", "forged", 1)
    before = chain.of(item)
    messages = _forgeries(message, key, forged)
    for queue in _queues(chain):
        _push(chain, queue, *messages)
    worker = next(process for process in chain._processes.started if process.name == "worker")
    wait_for(lambda: worker.text.count("[forged-") >= 2 * 2 * len(messages))
    after = chain.of(item)
    for name in ("committed", "fencingToken", "handled", "term", "resumeToken", "state"):
        assert after[name] == before[name], name
    chain.open_gate("open")
    chain.write("plain", "held", 2)
    chain.wait_done()
    chain.judge()
    assert worker.running
    assert "Traceback" not in worker.text
