"""`change.fence` for a store that no fenced view reaches: what the replay of a dead letter may write there."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations import dead_letter_commands as commands
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for

Document = dict[str, Any]


@pytest.mark.parametrize("over_newer", [False, True])
@pytest.mark.parametrize("stamped", ["row", "partition"])
def test_a_replay_is_older_than_its_partition_and_not_older_than_its_row(
    database: Database[Document], mongo_url: str, stamped: str, over_newer: bool
) -> None:
    """P3: a newer change of another document refuses it where one stamp stands for all of them, unless it is asked."""
    bridge = Bridge(
        Celery("shop", broker="memory://", set_as_current=False), mongo_url, name="shop", partitions=1, run_size=1
    )
    failing, written = {1}, list[int]()
    stamps = dict[object, Document]()

    @bridge.on_change(f"{database.name}.orders", failure_policy="dead_letter")
    def note(change: Change) -> None:
        key = change.document_key["_id"]
        if key in failing:
            raise ValueError("no")
        place = key if stamped == "row" else change.partition
        stamps[place] = change.fence.stamp(stamps.get(place))  # raises StaleFencingTokenError
        written.append(key)

    def letters() -> Any:
        return commands.find(bridge.wiring).letters

    with BridgeRunner(bridge) as runner:
        database.orders.insert_many([{"_id": 1}, {"_id": 2}])
        runner.deliver(raises=False)
        failing.clear()
        bridge.operations.replay_dead_letters(over_newer=over_newer).run()
        wait_for(lambda: any(call.changes[0].replayed for call in runner.deliver(raises=False).calls))
        is_refused = stamped == "partition" and not over_newer
        assert written == ([2] if is_refused else [2, 1])
        assert [StaleFencingTokenError.__name__ in each.error for each in letters()] == [True] * is_refused
