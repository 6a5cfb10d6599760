"""An assertion about the idempotency records of `once`."""

from __future__ import annotations

from typing import Any

from mongo_celery.mongo.opening import Source, plain_types, resolve_collection, with_majority

__tracebackhide__ = True  # for pytest: show the line of the test or the handler


def assert_once(marks: Source, key: Any, *, task: str | None = None, ran: bool = True) -> None:
    """
    Assert that a function with this key completed under `once`, or did not run, in any process.

    ::

        pay.apply([10])
        assert_once(records, 10, task="shop.pay")
        assert_once(records, 11, task="shop.pay", ran=False)

    Args:
        marks: the collection given to `once`, or a callable that returns it.
        key: with `task`, the value that `key=` of `once` returns. Otherwise the task's id.
        task: name of the task, or `module.function` for a step.
        ran: False to assert that there is no record: the function did not run or failed, or its record has expired.

    Raises:
        AssertionError: the record shows the opposite.
    """
    identity = _as_stored(key) if task is None else {"t": task, "k": _as_stored(key)}
    collection = resolve_collection(marks)
    found = with_majority(collection, plain_types(collection)).find_one({"_id": identity})
    state = None if found is None else found["state"]
    if state == ("done" if ran else None):
        return
    without = "has no idempotency record, so it has not run or has failed"
    said = {None: without, "done": "has run"}.get(state, "is running")
    raise AssertionError(f"{_describe_record(identity)} {said}, by {collection.full_name}.")


def _as_stored(value: Any) -> Any:
    """Return the value in MongoDB's form, in which tuples are lists."""
    if isinstance(value, dict):
        return {name: _as_stored(each) for name, each in value.items()}
    return [_as_stored(each) for each in value] if isinstance(value, (list, tuple)) else value


def _describe_record(identity: Any) -> str:
    if isinstance(identity, dict) and set(identity) == {"t", "k"}:
        return f"{identity['t']} with key {identity['k']!r}"
    return f"task {identity!r}"
