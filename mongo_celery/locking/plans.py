"""
What is asked of a server, said once for threads and for asyncio.

A *plan* is a generator. It calls a client, yields what that has returned, and goes on with the answer: of a
`MongoClient` that is the same thing, of an `AsyncMongoClient` it is awaited first. So both send the same commands and
judge the same errors, and differ in awaiting only. A `pymongo.timeout` inside a plan holds for what it encloses, since
a generator runs in the context of whoever carries it out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

Plan = Generator[Any, Any, Result]


def carried_out(plan: Plan[Result]) -> Result:
    """The result of a plan whose client is a `MongoClient`."""
    answer = None
    while True:
        try:
            answer = plan.send(answer)
        except StopIteration as ended:
            result: Result = ended.value
            return result


async def awaited(plan: Plan[Result]) -> Result:
    """The result of a plan whose client is an `AsyncMongoClient`; what is raised meanwhile, a cancel too, it judges."""
    go_on: Callable[[], Awaitable[Any]] = partial(plan.send, None)
    while True:
        try:
            called = go_on()
        except StopIteration as ended:
            result: Result = ended.value
            return result
        try:
            go_on = partial(plan.send, await called)
        except BaseException as error:  # noqa: BLE001 - the plan raises it again, or what it makes of it
            go_on = partial(plan.throw, error)
