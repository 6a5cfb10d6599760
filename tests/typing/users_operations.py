"""The commands of a bridge as users call them, and what a type checker must refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, assert_type

from celery import Celery

from mongo_celery import Bridge
from mongo_celery.plan import Plan, PlanResult

bridge = Bridge(Celery("shop"), "mongodb://localhost:27017")


def deploy() -> int:
    plan = bridge.operations.pause("orders", reason="migration")
    assert_type(plan, Plan)
    assert_type(plan.lines, Sequence[str])
    assert_type(plan.question, str | None)
    result = plan.run()
    assert_type(result, PlanResult)
    assert_type(result.fields, Mapping[str, Any])
    return int(result.fields["done"])


def confirm(user: str, seen: str) -> Sequence[str]:
    operations = bridge.operations.on_behalf_of(user)
    plans = [
        operations.skip("orders", 3, discard=True),
        operations.reset("orders", datetime(2026, 1, 1, tzinfo=UTC), key="1"),
        operations.reset("orders", "oldest"),
        operations.remove("orders", dead_letters=True, stamps=["shop.totals"]),
        operations.start_snapshot("orders", rate=500.0),
        operations.replay_dead_letters("orders", since=datetime(2026, 1, 1, tzinfo=UTC), over_newer=True),
        operations.rotate_key(overlap=0),
    ]
    assert_type(plans, list[Plan])
    assert_type(operations.history("orders"), list[dict[str, Any]])
    return [line for plan in plans if plan.seen == seen for line in plan.run().refused]


bridge.operations.skip()  # type: ignore[call-arg] # a handler must be named
bridge.operations.pause("orders", "3")  # type: ignore[arg-type] # a partition is a number
bridge.operations.pause("orders", 3, "why")  # type: ignore[call-arg] # a reason is named
