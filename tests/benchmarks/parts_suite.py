"""What the parts of a change cost in one process, in CPU time alone: reading, taking in, looking, sealing, sending."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import bson
from bson import ObjectId, Timestamp
from bson.raw_bson import RawBSONDocument
from celery import Celery

from mongo_celery.bench.stage import Stage
from mongo_celery.bridge.change import Change, read_token
from mongo_celery.bridge.handlers import make_handler
from mongo_celery.bridge.listener.dispatcher import Dispatch, Dispatcher
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from mongo_celery.bridge.listener.subscription import Subscription, TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import partitioner
from mongo_celery.bridge.state.signing import Sealing
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Item
from mongo_celery.bridge.stream.reader import StreamReader
from mongo_celery.bridge.stream.source import Scope, strip_flags
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from tests.benchmarks.readings import Reading, reading
from tests.benchmarks.sizes import Sizes
from tests.fixtures.samples import image, token_data, verify_run

MICROSECONDS = "us"
RUN = 200
"""Changes of a long run."""

_REFERENCE = "decode"
_TOGETHER = 16
_PARTITIONS = 16
_KEY = b"k" * 32
_QUEUE = "parts.0"
_NAME = "parts"
_IMAGE = image(
    committed=7,
    token={"_data": token_data(7)},
    data=token_data(7),
    claim={"owner": "a", "first": 8, "last": 8, "ttl": 30_000, "until": datetime(2024, 1, 1, tzinfo=UTC)},
    live=True,
    fencing_token=8,
    term=1,
)


@dataclass(slots=True)
class PartsResults:
    """
    What the suite has found.

    Attributes:
        parts: CPU microseconds of each part; the ratio is to decoding the same event whole, once.
        event_bytes: of the event.
    """

    parts: list[Reading] = field(default_factory=list)
    event_bytes: int = 0


Work = Callable[[], int]
"""Does some of a part, and says how many times."""


def run_parts(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> PartsResults:
    """Measure each part for itself, all of them in each round."""
    events = [_event(number) for number in range(sizes.parts)]
    results = PartsResults(event_bytes=len(events[0]))
    app = Celery(_NAME, broker=stage.redis_url, set_as_current=False)
    dispatcher = Dispatcher(app, BridgeOptions(name=_NAME), lambda: Sealing(_KEY, "here"), [_QUEUE])
    with closing(dispatcher):
        parts = dict(_parts(events, dispatcher))
        found: dict[str, list[float]] = {name: [] for name in parts}
        for number in range(sizes.rounds):
            for name, work in parts.items():
                announce(f"{name}, round {number + 1} of {sizes.rounds}")
                found[name].append(_cost(work))
                stage.broker.delete(_QUEUE)
    for name, rounds in found.items():
        beside = None if name == _REFERENCE else (_REFERENCE, found[_REFERENCE])
        results.parts.append(reading(name, MICROSECONDS, rounds, beside))
    return results


def _cost(work: Work) -> float:
    began = time.thread_time()
    times = work()
    return (time.thread_time() - began) * 1e6 / times


def _parts(events: Sequence[bytes], dispatcher: Dispatcher) -> Iterator[tuple[str, Work]]:
    yield _REFERENCE, lambda: _each(events, bson.decode)
    yield "look", lambda: _look(len(events))
    yield "read", lambda: len(_read(events))
    items = _read(events)
    yield "take_in", lambda: _take_in(items)
    yield "pass_over", lambda: _take_in(items, "shop.invoices")
    one, many = _run(events[:1]), _run(events[:RUN])
    yield "seal", lambda: _each(range(len(events) // 4), lambda _: sign_run("run", one, _KEY, "here"))
    yield "seal_run", lambda: RUN * _each(range(len(events) // RUN), lambda _: sign_run("run", many, _KEY, "here"))
    yield "publish", lambda: _publish(dispatcher, one, len(events) // 4)
    yield "publish_run", lambda: RUN * _publish(dispatcher, many, len(events) // RUN)
    sealed = sign_run("run", many, _KEY, "here")
    yield "open_run", lambda: RUN * _each(range(len(events) // RUN), lambda _: verify_run("run", sealed, _KEY))
    yield "token", lambda: _each(events, read_token)
    yield "change", lambda: _each(events, _change)
    yield "change_read", lambda: _each(events, lambda raw: _change(raw).operation_type)


def _change(raw: bytes) -> Change:
    """As a worker makes it."""
    return Change.unread(lambda: strip_flags(bson.decode(raw)), partition=1, seq=2, fencing_token=3)


def _each(items: Sequence[Any], call: Callable[[Any], object]) -> int:
    for item in items:
        call(item)
    return len(items)


def _look(count: int) -> int:
    """Images of a partition whose handler takes its time."""
    partition = Partition("parts/summarise/0/0", _IMAGE, 1, GracePeriods(30.0, 5.0), 0.0)
    images = [replace(_IMAGE, due_in=-number / 1000) for number in range(100)]
    for number in range(count // len(images)):
        for each in images:
            partition.observe(each, number / 10)
    return count // len(images) * len(images)


def _read(events: Sequence[bytes]) -> list[ChangeEvent]:
    """As the reader takes what the driver gives."""
    found: list[Item] = []
    scope = Scope("shop", None, (), {})
    reader = StreamReader(_no_client, scope, Position(None, None), deliver=found.extend, room=10 * len(events))
    reader._hand_over([RawBSONDocument(raw) for raw in events])
    return [each for each in found if isinstance(each, ChangeEvent)]


def _no_client(_timeout: float) -> Any:
    raise NotImplementedError


def _take_in(items: Sequence[ChangeEvent], source: str = "shop.orders") -> int:
    """By a handler that is owed all of them, or, of another source, none."""
    subscription = _subscription(source)
    for item in items:
        subscription.ingest_item(item)
    assert subscription.window.count in {0, len(items)}
    return len(items)


def _subscription(source: str = "shop.orders") -> Subscription:
    options = BridgeOptions(name=_NAME, partitions=_PARTITIONS)
    handler = make_handler(
        handle,
        (source,),
        options,
        task_name="parts.handle",
        given={},
    )
    layout = Layout(0, _PARTITIONS, "blake2b-64:_id")
    rule = partitioner(None, None, None)
    plan = TermFacts(handler, handler.selector(None), rule, layout, 1, Timestamp(1, 1), None)
    partitions = {
        index: Partition(f"parts/handle/0/{index}", image(index=index), 1, GracePeriods(30.0, 5.0), 0.0)
        for index in range(_PARTITIONS)
    }
    return Subscription(options, plan, partitions)


def handle(_change: Change) -> None:
    """A handler."""


def _run(changes: Sequence[bytes]) -> Run:
    return Run(_NAME, "handle", 0, 0, 1, 1, len(changes), tuple(changes), Carrier("a" * 40, "b" * 64), hash=7)


def _publish(dispatcher: Dispatcher, run: Run, count: int) -> int:
    """In batches of as many as there are partitions, as a listener under load does."""
    dispatch = Dispatch(replace(run, carrier=None), "parts.handle", 0, "(shop.orders insert seq=1)", _QUEUE)
    for left in range(count, 0, -_TOGETHER):
        done = dispatcher.publish([dispatch] * min(left, _TOGETHER))
        assert done.failure is None, done.failure
    return count


def _event(number: int) -> bytes:
    """An insert of about a kilobyte, as the server sends it."""
    key = ObjectId(number.to_bytes(12, "big"))
    document = {
        "_id": key,
        "customer": number,
        "lines": [{"article": f"A-{line}", "count": line, "price": line * 1.5} for line in range(8)],
        "text": "x" * 200,
        "at": datetime(2024, 1, 1, tzinfo=UTC),
    }
    return bson.encode(
        {
            "_id": {"_data": token_data(number + 1)},
            "operationType": "insert",
            "clusterTime": Timestamp(1000, number + 1),
            "wallTime": datetime(2024, 1, 1, tzinfo=UTC),
            "fullDocument": document,
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": key},
        }
    )
