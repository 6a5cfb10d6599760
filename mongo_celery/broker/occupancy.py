"""
Messages that a broker holds of some queues: those that wait, and those that workers have not acknowledged.

Transports answer differently. Redis knows no consumers, and keeps each message until a worker acknowledges it.
RabbitMQ counts consumers, and does not say which messages they hold. An unknown value is None, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from kombu import Connection

_UNACKED_MAX = 1000
_UNACKED_BYTES_MAX = 8 << 20

_UNACKED_SCRIPT = """
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[1]) then return false end
local found, bytes = {}, 0
for _, tag in ipairs(redis.call('HKEYS', KEYS[1])) do
    bytes = bytes + redis.call('HSTRLEN', KEYS[1], tag)
    if bytes > tonumber(ARGV[2]) then return false end
    local message = redis.call('HGET', KEYS[1], tag)
    local queue, task = string.match(message, '"([^"]*)"%]$') or '', string.match(message, '"task": *"([^"]*)"') or ''
    found[queue] = found[queue] or {}
    found[queue][task] = true
end
return cjson.encode(found)
"""
"""Return queue and task of each unacknowledged message: only these names travel, not the messages."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """
    One queue at one moment.

    Attributes:
        waiting: number of messages that nobody has taken.
        consumers: their number; None if the broker does not count them.
        unacknowledged: tasks of messages that workers have not acknowledged; None if the broker does not name them.
    """

    waiting: int
    consumers: int | None = None
    unacknowledged: AbstractSet[str] | None = None

    def lacks(self, task: str) -> bool:
        """Return True if neither the queue nor a worker has a message of this task, as far as the broker knows it."""
        if self.waiting:
            return False
        return self.consumers == 0 if self.unacknowledged is None else task not in self.unacknowledged


def read_occupancy(connection: Connection, queues: Collection[str]) -> dict[str, Occupancy]:
    """
    Return what the broker holds of these queues: one round trip on Redis, one for each queue elsewhere.

    On Redis more than a thousand unacknowledged messages, or eight megabytes of them, are not read, and unknown.

    Raises:
        Exception: of the broker's client, which got no answer.
    """
    if connection.transport.driver_type == "redis":
        return _of_redis(connection.default_channel, list(queues))
    return {queue: _read_declared(connection, queue) for queue in queues}


def _of_redis(channel: Any, queues: list[str]) -> dict[str, Occupancy]:
    keys = [channel._q_for_pri(queue, step) for queue in queues for step in channel.priority_steps]  # noqa: SLF001
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.llen(key)
        unacked = f"{channel.global_keyprefix}{channel.unacked_key}"
        pipe.eval(_UNACKED_SCRIPT, 1, unacked, _UNACKED_MAX, _UNACKED_BYTES_MAX)
        *lengths, names = pipe.execute(raise_on_error=False)
    for length in lengths:
        if isinstance(length, Exception):
            raise length
    tasks = _tasks_by_queue(names)
    steps = len(channel.priority_steps)
    return {
        queue: Occupancy(
            sum(lengths[number * steps : (number + 1) * steps]),
            unacknowledged=None if tasks is None else tasks.get(queue, frozenset()),
        )
        for number, queue in enumerate(queues)
    }


def _tasks_by_queue(found: Any) -> dict[str, set[str]] | None:
    """Return None if the server refused the script, or the script found too much."""
    text = found.decode(errors="replace") if isinstance(found, bytes) else found
    return {queue: set(tasks) for queue, tasks in json.loads(text).items()} if isinstance(text, str) else None


def _read_declared(connection: Connection, queue: str) -> Occupancy:
    """Ask by a passive declaration. A queue that does not exist holds nothing."""
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
