"""
The demo's Celery app: `celery -A mongo_celery.demo.app listener` and `... worker`.

Each order is written several times, with an increasing number `n`. The handler writes one summary per order, and
appends the number of each change. So the summary shows which changes took effect, in which order, and how often.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bson import Timestamp
from celery import Celery
from pymongo.errors import PyMongoError

from mongo_celery import Bridge, Change

VARIABLE = "MONGO_CELERY_DEMO"
LEASE_TTL = 5.0


@dataclass(frozen=True, slots=True)
class DemoSetting:
    """
    The setting of one run. All its processes read it from an environment variable.

    Attributes:
        name: the name of the run's databases and queues, so that runs on the same servers do not collide.
        start: the oplog time before the first write, as seconds and increment.
    """

    mongo_url: str = "mongodb://127.0.0.1/?replicaSet=rs0"
    redis_url: str = "redis://127.0.0.1/0"
    name: str = "mongo_celery_demo"
    start: tuple[int, int] = (1, 1)

    @property
    def state_database(self) -> str:
        """The database with the bridge's state."""
        return f"{self.name}_state"

    def environment(self) -> dict[str, str]:
        """
        Return this process's environment with the setting, but without Celery's variables, which would
        override it.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
        return {**kept, VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> DemoSetting:
        """Return the setting of this process's run."""
        given: dict[str, Any] = json.loads(environment.get(VARIABLE, "{}"))
        return cls(**{**given, "start": tuple(given.get("start", (1, 1)))})


setting = DemoSetting.from_environment()
app = Celery("mongo_celery.demo", broker=setting.redis_url, broker_connection_retry_on_startup=True)
app.conf.broker_transport_options = {"global_keyprefix": f"{setting.name}."}
bridge = Bridge(
    app,
    setting.mongo_url,
    name="demo",
    database=setting.state_database,
    partitions=8,
    start_from=Timestamp(*setting.start),
    autodiscover=False,
    # Shorter than the defaults, so that faults are repaired while you watch:
    lease_ttl=LEASE_TTL,
    claim_ttl=4.0,
    dispatch_grace=3.0,
)


@bridge.on_change(f"{setting.name}.orders", autoretry_for=(PyMongoError,), retry_backoff=True, max_retries=8)
def summarise(change: Change) -> None:
    """Write the summary of an order through the fence: a newer execution refuses a stale one."""
    order = change.full_document
    assert order is not None, "an order is only ever inserted and replaced"
    update = {"$set": {"total": 10 * order["n"]}, "$push": {"seen": order["n"]}}
    change.fenced(f"{setting.name}.summaries").update_one({"_id": order["_id"]}, update, upsert=True)
