"""
What a broker holds of some queues: messages that wait, and messages that workers have and did not acknowledge.

Transports differ in what they tell: Redis knows no consumers, but keeps what it gave away until it is acknowledged;
RabbitMQ counts consumers, and tells nobody what they hold. What is not known is None, never a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kombu import Connection

_TAKEN_MAX = 1000
_TAKEN_BYTES_MAX = 8 << 20

_TAKEN_SCRIPT = """
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[1]) then return false end
local found, bytes = {}, 0
for _, tag in ipairs(redis.call('HKEYS', KEYS[1])) do
    bytes = bytes + redis.call('HSTRLEN', KEYS[1], tag)
    if bytes > tonumber(ARGV[2]) then return false end
    local message = redis.call('HGET', KEYS[1], tag)
    found[#found + 1] = string.match(message, '"([^"]*)"%]$') or ''
    found[#found + 1] = string.match(message, '"task": *"([^"]*)"') or ''
end
return found
"""
"""Queue and task of each message that was given to a worker: only these names travel, not the messages."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """
    One queue at one moment.

    Attributes:
        waiting: messages that nobody has taken.
        consumers: how many there are; None where the broker does not tell.
        taken: messages that workers have and did not acknowledge, by task; None where the broker does not tell.
    """

    waiting: int
    consumers: int | None = None
    taken: Mapping[str, int] | None = None


def occupancy_of(connection: Connection, queues: Collection[str]) -> dict[str, Occupancy]:
    """
    What the broker holds of these queues; one round trip on Redis, one for each queue elsewhere.

    On Redis too much that was taken (a thousand messages, or eight megabytes of them) is not looked at, and unknown.

    Raises:
        Exception: of the broker's client: it gave no answer.
    """
    if connection.transport.driver_type == "redis":
        return _of_redis(connection.default_channel, list(queues))
    return {queue: _declared(connection, queue) for queue in queues}


def _of_redis(channel: Any, queues: list[str]) -> dict[str, Occupancy]:
    keys = [channel._q_for_pri(queue, step) for queue in queues for step in channel.priority_steps]  # noqa: SLF001
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.llen(key)
        unacked = f"{channel.global_keyprefix}{channel.unacked_key}"
        pipe.eval(_TAKEN_SCRIPT, 1, unacked, _TAKEN_MAX, _TAKEN_BYTES_MAX)
        *lengths, names = pipe.execute(raise_on_error=False)
    for length in lengths:
        if isinstance(length, Exception):
            raise length
    taken = _counted(names)
    steps = len(channel.priority_steps)
    return {
        queue: Occupancy(
            sum(lengths[number * steps : (number + 1) * steps]),
            taken=None if taken is None else taken.get(queue, {}),
        )
        for number, queue in enumerate(queues)
    }


def _counted(names: Any) -> dict[str, Counter[str]] | None:
    """By queue and task; None where the script was refused, or found too much."""
    if not isinstance(names, list):
        return None
    text = [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names]
    found: dict[str, Counter[str]] = {}
    for queue, task in zip(text[::2], text[1::2], strict=True):
        found.setdefault(queue, Counter())[task] += 1
    return found


def _declared(connection: Connection, queue: str) -> Occupancy:
    """By a passive declaration. A queue that is not there holds nothing."""
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
