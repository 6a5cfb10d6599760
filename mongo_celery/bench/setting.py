"""What a measured process gets, through one environment variable: addresses may carry passwords."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bson import Timestamp

VARIABLE = "MONGO_CELERY_BENCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetting:
    """
    The circumstances of one measurement.

    Attributes:
        name: of the measurement: names its queue, bridge, database and state, used once.
        clock: directory of the stopwatch.
        start: cluster time at which streams begin, as seconds and increment.
        bridge: options of the bridge, or of the outbox.
        handler: options of the handler's decorator.
        work: what the handler does with a change, as `HandlerWork` takes it; nothing when empty.
    """

    mongo_url: str = "mongodb://127.0.0.1:27017/?replicaSet=rs0"
    redis_url: str = "redis://127.0.0.1:6379/0"
    name: str = "bench"
    clock: str = ""
    start: tuple[int, int] = (1, 1)
    bridge: Mapping[str, Any] = field(default_factory=dict)
    handler: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)

    @property
    def database(self) -> str:
        """Where the watched collection is; its name is `orders`."""
        return f"{self.name}_data"

    @property
    def state_database(self) -> str:
        """Where the bridge keeps its state."""
        return f"{self.name}_state"

    @property
    def timestamp(self) -> Timestamp:
        """`start` as MongoDB takes it."""
        return Timestamp(*self.start)

    def environment(self) -> dict[str, str]:
        """The variable for a process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> BenchSetting:
        """The setting of this process; the defaults where there is none, so that modules can be imported."""
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        if "start" in given:
            given["start"] = tuple(given["start"])
        return cls(**given)
