"""
A broker's messages in some queues: waiting ones, and those that workers have not acknowledged.

Transports answer differently. Redis does not know consumers, and keeps each message until a worker acknowledges it.
RabbitMQ counts consumers, but does not report which messages they hold. An unknown value is None, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from kombu import Connection

_UNACKED_SCRIPT = """
if redis.call('HLEN', KEYS[1]) > 1000 then return false end
local found, bytes = {}, 0
for _, tag in ipairs(redis.call('HKEYS', KEYS[1])) do
    bytes = bytes + redis.call('HSTRLEN', KEYS[1], tag)
    if bytes > 8388608 then return false end
    local message = redis.call('HGET', KEYS[1], tag)
    local queue, task = string.match(message, '"([^"]*)"%]$') or '', string.match(message, '"task": *"([^"]*)"') or ''
    found[queue] = found[queue] or {}
    found[queue][task] = true
end
return cjson.encode(found)
"""
"""Returns queue and task of each unacknowledged message, so that only names travel."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """
    One queue at one time.

    Attributes:
        waiting: number of messages that no worker has taken.
        consumers: number of consumers. None if the broker does not count them.
        unacknowledged: tasks of unacknowledged messages. None if the broker does not name them.
    """

    waiting: int
    consumers: int | None = None
    unacknowledged: AbstractSet[str] | None = None

    def lacks(self, task: str) -> bool:
        """Return True if, as far as the broker knows, neither the queue nor a worker has a message of this task."""
        if self.waiting:
            return False
        return self.consumers == 0 if self.unacknowledged is None else task not in self.unacknowledged


def read_occupancy(connection: Connection, queues: Collection[str]) -> dict[str, Occupancy]:
    """
    Return the broker's messages in these queues. This takes two round trips on Redis, otherwise one per queue.

    On Redis, more than a thousand unacknowledged messages, or eight megabytes, count as unknown and are not read.

    Raises:
        Exception: the error of the broker's client, without an answer.
    """
    if connection.transport.driver_type == "redis":
        return _read_redis(connection.default_channel, queues)
    return {queue: _read_declared(connection, queue) for queue in queues}


def _read_redis(channel: Any, queues: Collection[str]) -> dict[str, Occupancy]:
    steps = channel.priority_steps
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for queue, step in product(queues, steps):
            pipe.llen(channel._q_for_pri(queue, step))  # noqa: SLF001 - kombu's own question is about one queue
        lengths = iter(pipe.execute())
    # Queues first: a message that a worker takes meanwhile is seen twice, never missed.
    waiting = {queue: sum(islice(lengths, len(steps))) for queue in queues}
    try:
        with channel.conn_or_acquire() as client:
            found = client.eval(_UNACKED_SCRIPT, 1, f"{channel.global_keyprefix}{channel.unacked_key}")
    except channel.ResponseError:
        found = None  # the server refuses scripts
    if not found:
        return {queue: Occupancy(count) for queue, count in waiting.items()}
    tasks = json.loads(found.decode(errors="replace") if isinstance(found, bytes) else found)
    return {queue: Occupancy(count, unacknowledged=set(tasks.get(queue, ()))) for queue, count in waiting.items()}


def _read_declared(connection: Connection, queue: str) -> Occupancy:
    """Query a queue with a passive declaration. A missing queue is empty."""
    channel: Any = connection.channel()  # a refusal closes it
    try:
        answer = channel.queue_declare(queue=queue, passive=True)
    except connection.channel_errors:
        return Occupancy(0, consumers=0)
    finally:
        if channel.connection is not None:
            channel.close()
    counts_consumers = connection.transport.driver_type == "amqp"
    return Occupancy(int(answer.message_count), consumers=int(answer.consumer_count) if counts_consumers else None)
