"""What the writer will write: orders, their updates, and customers that are renamed meanwhile. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

UPDATES = 4
"""How often each order is updated after its insert."""

RENAMES = 4
"""How often each customer is renamed after its insert."""

THREADS = 4
_ORDERS_A_CUSTOMER = 10
_LEAST_CUSTOMERS = 2


@dataclass(frozen=True, slots=True)
class Write:
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


def total(orders: int) -> int:
    """How many writes a run of so many orders has."""
    return orders * (1 + UPDATES) + _customers(orders) * (1 + RENAMES)


def plan(orders: int, thread: int) -> Iterator[Write]:
    """
    One thread's writes.

    The writes of one key are all in one thread, so that their order is known; which key comes next is chance
    with a fixed seed: an order may come before its customer.
    """
    chance = random.Random(f"{orders}/{thread}")  # noqa: S311 - no secret
    keys = list(_keys(orders))[thread::THREADS]
    chance.shuffle(keys)
    keys.sort(key=lambda writes: writes[0].key != order_key(0))  # the first order's faults want time
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


_OPEN_KEYS = 10
"""Keys that one thread writes at the same time: few enough that an order's updates follow each other."""


def _keys(orders: int) -> Iterator[list[Write]]:
    customers = _customers(orders)
    for index in range(customers):
        yield [Write(f"customer-{index:04d}", version, None) for version in range(1, RENAMES + 2)]
    for index in range(orders):
        customer = f"customer-{index % customers:04d}"
        yield [Write(order_key(index), number, customer) for number in range(UPDATES + 1)]


def _customers(orders: int) -> int:
    return max(_LEAST_CUSTOMERS, orders // _ORDERS_A_CUSTOMER)
