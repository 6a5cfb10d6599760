"""An outbox in documents needs no replica set."""

from __future__ import annotations

from tests.fixtures.mongo import MakeClient
from tests.rig.outbox import opened


def test_a_standalone_server_keeps_and_delivers_entries(
    standalone_url: str, make_client: MakeClient, redis_url: str
) -> None:
    """The write stores its task, a sweep sends it, and the field goes."""
    database = make_client(standalone_url)["outbox_on_a_standalone"]
    with opened(database, redis_url) as rig:
        outbox = rig.outbox(at_once=False)
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 2)])
        assert rig.pending(1)["count"] == 1

        assert outbox.sweep(older_than=0).dispatched == 1

        assert rig.sent() == [[1, 2]]
        assert rig.orders.find_one({"_id": 1}) == {"_id": 1}
    database.client.drop_database(database.name)
