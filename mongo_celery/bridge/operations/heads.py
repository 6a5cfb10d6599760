"""
The change at which a partition stands, as an operator sees it: with its bytes, as far as they are stored.

That is the change at which it halted; else the first one that is stored and not committed. What has stood for a shorter
time than `spill_after`, and did not halt, is in the listener's memory only: then the partition alone is told.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.bridge.change import FLAGS, decode_event, describe, token_data
from mongo_celery.bridge.operations.acts import reached, refuse_unknown
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Head:
    """
    The first change of a partition that is not committed, as far as it is known.

    Attributes:
        state: of its partition.
        key: namespace, operation and document key; None where the change is not known.
        token: its resume token's `_data`; `skip` passes over this change only. None where it is not known.
        committed: number of the last change before it.
        error: why it halted, failed last, is refused, or what it waits for.
        since: since when it waits for MongoDB or the broker, or something of its partition is stored; ISO, in UTC.
        due_seconds: until a parked one may run again.
        bytes: of the event; None where it is not stored.
        event: as relaxed extended JSON; None where it is not stored, or cannot be read.
        raw: the bytes in base64, of an event that cannot be read; else None.
    """

    subscription: str
    index: int
    state: str
    key: str | None
    token: str | None
    committed: int
    error: str | None
    retries: int = 0
    crashes: int = 0
    since: str | None = None
    due_seconds: float = 0.0
    bytes: int | None = None
    event: Mapping[str, Any] | None = None
    raw: str | None = None


def choose(
    wiring: Wiring, store: Store, handler: str | None, partition: int | None
) -> tuple[Mapping[str, int], Sequence[Image]]:
    """
    Return the partitions that a command names, and the terms of their handlers' partitionings.

    Raises:
        CommandRefusedError: nothing has that name.
    """
    layouts = layouts_in_force(store.subscriptions.read_all())
    if not layouts or (handler is not None and handler not in layouts):
        raise refuse_unknown(wiring, handler or "", layouts)
    if partition is not None and handler is None and len(layouts) != 1:
        raise CommandRefusedError(f"Name the handler of partition {partition}: one of {', '.join(layouts)}.")
    chosen = [handler] if handler is not None else list(layouts)
    generations = {name: layouts[name].term for name in chosen}
    images = store.partitions.of(generations)
    if partition is not None:
        images = [image for image in images if image.index == partition]
        if not images:
            raise CommandRefusedError(
                f"Handler {chosen[0]} has no partition {partition}: its partitions are 0 to "
                f"{layouts[chosen[0]].partitions - 1}.",
            )
    return generations, sorted(images, key=lambda image: (image.subscription, image.index))


def sentence_on(image: Image, text: str) -> str:
    """Return a sentence on a partition."""
    return f"Partition {image.index} of {image.subscription} {text}."


def find_skip_objection(image: Image) -> str | None:
    """Return why the change of a partition cannot be skipped; None if it can."""
    if image.state == "halted":
        return None
    return f"is {visible_state(image)}, not halted: only the change at which a partition halted can be skipped"


def read_head(wiring: Wiring, handler: str, partition: int) -> Head:
    """
    Return the change at which a partition is blocked.

    Raises:
        CommandRefusedError: it is not blocked, or nothing has that name.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    image, change = _read(wiring, handler, partition)
    if change is None and visible_state(image) == "flowing":
        raise CommandRefusedError(sentence_on(image, "flows, and nothing of it is stored: no change blocks it"))
    return _head(image, change)


def read_halted(wiring: Wiring, handler: str, partition: int | None = None) -> list[Head]:
    """
    Return the changes at which partitions of a handler have halted.

    Args:
        partition: this one only.

    Raises:
        CommandRefusedError: that one is not halted, or nothing has that name.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    if partition is not None:
        image, change = _read(wiring, handler, partition)
        objection = find_skip_objection(image)
        if objection or image.head is None:
            raise CommandRefusedError(sentence_on(image, objection or "does not know its change: retry it once"))
        return [_head(image, change)]
    with reached(wiring) as store:
        _, images = choose(wiring, store, handler, None)
    found = []
    for image in images:
        if image.state == "halted" and image.head is not None:
            with suppress(CommandRefusedError):  # it is halted no more
                found += read_halted(wiring, handler, image.index)
    return found


def _read(wiring: Wiring, handler: str, partition: int) -> tuple[Image, StoredChange | None]:
    """A partition, and what is stored where it stands; once more where it has moved on between the two."""
    with reached(wiring) as store:
        generations, (image,) = choose(wiring, store, handler, partition)
        partition_id = store.partitions.partition_id(image.subscription, generations[image.subscription], image.index)
        for _ in range(_ROUNDS):
            change = _change_at(store, partition_id, image)
            if change is not None or image.spilled is None:
                break
            image = next(iter(store.partitions.look([partition_id])), image)
    return image, change


def _change_at(store: Store, partition_id: str, image: Image) -> StoredChange | None:
    if image.head is not None:
        data = token_data(image.head["resumeToken"])
        return store.backlog.fetch(partition_id, [data]).get(data)
    if image.spilled is None:
        return None
    found = store.backlog.read(partition_id, image.data, image.spilled["to"], 1)
    return found[0] if found else None


def _head(image: Image, change: StoredChange | None) -> Head:
    key = token = None
    if image.head is not None:
        key, token = image.head["key"], token_data(image.head["resumeToken"])
    elif change is not None:
        key, token = describe(change.raw), change.data
    refusal = change.refusal.reason if change is not None and change.refusal is not None else None
    since = image.head.get("at") if image.head is not None else (image.waiting or image.spilled or {}).get("since")
    event = event_as_json(change.raw) if change is not None else None
    return Head(
        subscription=image.subscription,
        index=image.index,
        state=visible_state(image),
        key=key,
        token=token,
        committed=int(image.committed),
        error=image.error or refusal or (image.waiting or {}).get("cause"),
        retries=int(image.retries),
        crashes=int(image.crashes),
        since=iso(since),
        due_seconds=max(image.due_in, 0.0),
        bytes=len(change.raw) if change is not None else None,
        event=event,
        raw=base64.b64encode(change.raw).decode() if change is not None and event is None else None,
    )


def event_as_json(raw: bytes) -> Mapping[str, Any] | None:
    """An event as relaxed extended JSON, without what the bridge itself has asked the server to add."""
    try:
        event = {name: value for name, value in decode_event(raw).items() if name != FLAGS}
        found: dict[str, Any] = json.loads(json_util.dumps(event, json_options=json_util.RELAXED_JSON_OPTIONS))
    except Exception:  # noqa: BLE001 - whatever users' documents hold: then its bytes are all that can be shown
        return None
    return found
