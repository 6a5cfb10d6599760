"""Steps of a lock, for threads and for asyncio; and the kind of collection that each of them takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo._csot import get_timeout

from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import asynchronous, select_for_update
from mongo_celery.locking.call import Steps, run_async, run_sync

URL = "mongodb://127.0.0.1:1"


def summed(call: Callable[[int], Any]) -> Steps[int]:
    """Two calls, of which the second depends on the first; a refusal is answered with another call."""
    first = yield call(1)
    try:
        second = yield call(first + 1)
    except LookupError:
        second = yield call(100)
    return int(first + second)


def refused(number: int) -> int:
    if number == 2:
        raise LookupError
    return number


def later(call: Callable[[int], int]) -> Callable[[int], Awaitable[int]]:
    async def answer(number: int) -> int:
        await asyncio.sleep(0)
        return call(number)

    return answer


@pytest.mark.parametrize(("call", "expected"), [(abs, 3), (refused, 101)])
def test_both_ways_have_the_same_answers_and_judge_the_same_errors(call: Callable[[int], int], expected: int) -> None:
    assert run_sync(summed(call)) == expected
    assert asyncio.run(run_async(summed(later(call)))) == expected


def test_an_error_that_the_steps_do_not_catch_passes() -> None:
    """From where the call stands, in both ways."""

    def broken(_: int) -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_sync(summed(broken))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run_async(summed(later(broken))))


def test_a_cancel_reaches_the_steps_and_passes() -> None:
    """So a time limit that the steps have begun ends."""
    seen: list[object] = []

    def steps() -> Steps[None]:
        with pymongo.timeout(5):
            try:
                yield asyncio.sleep(3600)
            except asyncio.CancelledError:
                seen.append(get_timeout())
                raise

    async def main() -> None:
        task = asyncio.create_task(run_async(steps()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == [5]


def test_a_time_limit_in_the_steps_holds_for_what_is_awaited_inside() -> None:
    """And no longer."""
    seen: list[object] = []

    async def call() -> None:
        await asyncio.sleep(0)
        seen.append(get_timeout())

    def steps() -> Steps[None]:
        with pymongo.timeout(5):
            yield call()
        yield call()

    asyncio.run(run_async(steps()))
    assert seen == [5, None]


def test_a_collection_of_the_other_kind_is_refused() -> None:
    """Before anything is sent: its session is of another client, too."""
    with MongoClient[Any](URL, connect=False) as client, client.start_session() as session:
        session.start_transaction()
        theirs: Any = AsyncMongoClient[Any](URL, connect=False)["shop"]["seats"]
        with pytest.raises(ConfigurationError, match="locks in a Collection, as its session's client has, not Async"):
            select_for_update(theirs, {}, session=session)

    async def main() -> None:
        async with AsyncMongoClient[Any](URL, connect=False) as client, client.start_session() as session:
            await session.start_transaction()
            ours: Any = MongoClient[Any](URL, connect=False)["shop"]["seats"]
            with pytest.raises(ConfigurationError, match="asynchronous locks in an AsyncCollection"):
                await asynchronous.select_for_update(ours, {}, session=session)

    asyncio.run(main())
