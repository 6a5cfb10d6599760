"""What the writer will write: orders, their updates, and customers that are renamed meanwhile. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UPDATES = 4
"""How often each order is updated after its insert."""

RENAMES = 4
"""How often each customer is renamed after its insert."""

THREADS = 4
PARTS = ("calm", "rest")
"""A run's first part, in which nothing is broken, and the other."""

_ORDERS_A_CUSTOMER = 10
_LEAST_CUSTOMERS = 2
_OPEN_KEYS = 10  # that one thread writes at the same time: so few that an order's updates follow each other


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """
    One write: an insert where the number is the first of its key, else an update.

    Attributes:
        key: of the order or customer.
        number: `n` of an order, from 0; `version` of a customer, from 1.
        customer: an order's customer; None for a customer.
    """

    key: str
    number: int
    customer: str | None


def order_key(index: int) -> str:
    """`_id` of an order."""
    return f"order-{index:05d}"


def name_of(customer: str, version: int) -> str:
    """The name that a customer has in a version."""
    return f"{customer} (name {version})"


def first_order(orders: int) -> str:
    """The order that the rest begins with."""
    return order_key(orders // 2)


def total(orders: int, parts: Sequence[str] = PARTS) -> int:
    """How many writes a run of so many orders, or a part of it, has."""
    return sum(len(writes) for part in parts for writes in _keys(orders, part))


def plan(orders: int, part: str, thread: int) -> Iterator[PlannedWrite]:
    """
    One thread's writes in a part of the run.

    The writes of one key are all in one thread, so that their order is known; which key comes next is chance
    with a fixed seed: an order may come before its customer.
    """
    chance = random.Random(f"{orders}/{part}/{thread}")  # noqa: S311 - no secret
    keys = list(_keys(orders, part))[thread::THREADS]
    chance.shuffle(keys)
    keys.sort(key=lambda writes: writes[0].key != first_order(orders))  # its faults want time
    waiting = [list(reversed(writes)) for writes in keys]
    left = [waiting.pop(0) for _ in range(min(_OPEN_KEYS, len(waiting)))]
    while left:
        place = chance.randrange(len(left))
        yield left[place].pop()
        if not left[place]:
            left[place] = left[-1]
            left.pop()
            if waiting:
                left.append(waiting.pop())


def _keys(orders: int, part: str) -> Iterator[list[PlannedWrite]]:
    """The writes of each key: orders with customers of their own part."""
    count = max(_LEAST_CUSTOMERS, orders // _ORDERS_A_CUSTOMER)
    calm = part == "calm"
    customers = range(count // 2) if calm else range(count // 2, count)
    for index in customers:
        yield [PlannedWrite(f"customer-{index:04d}", version, None) for version in range(1, RENAMES + 2)]
    for index in range(orders // 2) if calm else range(orders // 2, orders):
        customer = f"customer-{customers[index % len(customers)]:04d}"
        yield [PlannedWrite(order_key(index), number, customer) for number in range(UPDATES + 1)]
