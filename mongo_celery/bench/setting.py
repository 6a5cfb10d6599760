"""The setting of a measured process, in one environment variable, because addresses may contain passwords."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bson import Timestamp
from celery import Celery

from mongo_celery import Bridge

VARIABLE = "MONGO_CELERY_BENCH"
RAW_CHAIN = "raw_chain"
BRIDGE_BULK = "bridge_bulk"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetting:
    """
    The setting of one measurement.

    Attributes:
        name: the unique name of its queue, bridge, database and state.
        mode: the kind of measurement.
        clock: the stopwatch's directory.
        start: the cluster time at which streams begin, as seconds and increment.
        bridge: the options of the bridge or the outbox.
    """

    mongo_url: str = "mongodb://127.0.0.1:27017/?replicaSet=rs0"
    redis_url: str = "redis://127.0.0.1:6379/0"
    name: str = "bench"
    mode: str = ""
    clock: str = ""
    start: tuple[int, int] = (1, 1)
    bridge: Mapping[str, Any] = field(default_factory=dict)

    @property
    def database(self) -> str:
        """The database with the watched collection, `orders`."""
        return f"{self.name}_data"

    @property
    def state_database(self) -> str:
        """The database with the bridge's state."""
        return f"{self.name}_state"

    @property
    def timestamp(self) -> Timestamp:
        """`start` as a MongoDB timestamp."""
        return Timestamp(*self.start)

    def environment(self) -> dict[str, str]:
        """Return the variable for a process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> BenchSetting:
        """
        Return the setting of this process. Without one, return the defaults, so that its modules can be imported
        anywhere.
        """
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        if "start" in given:
            given["start"] = tuple(given["start"])
        return cls(**given)


def make_app(setting: BenchSetting) -> Celery:
    """Return an app whose tasks go to the measurement's queue."""
    app = Celery("mongo_celery_bench", broker=setting.redis_url)
    app.conf.task_default_queue = setting.name
    return app


def make_bridge(app: Celery, setting: BenchSetting) -> Bridge:
    """Return the app's bridge, with name, databases, start and options of the setting."""
    return Bridge(
        app,
        setting.mongo_url,
        name=setting.name,
        database=setting.state_database,
        start_from=setting.timestamp,
        autodiscover=False,
        **setting.bridge,
    )
