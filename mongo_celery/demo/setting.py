"""What all processes of one run share: URLs, names and the bridge's options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bson import Timestamp

VARIABLE = "MONGO_CELERY_DEMO"
"""Environment variable that carries the setting of a run to its processes."""

SUMMARISE = "summarise"
NAME_FROM_CUSTOMER = "name_from_customer"
NAME_INTO_ORDER = "name_into_order"
HANDLERS = (SUMMARISE, NAME_FROM_CUSTOMER, NAME_INTO_ORDER)

LEASE_TTL = 5.0
_TIMES: dict[str, Any] = {"lease_ttl": LEASE_TTL, "claim_ttl": 4.0, "dispatch_grace": 3.0}
"""Shorter than the defaults, so that the faults are repaired while somebody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetting:
    """
    One run of the demo.

    Attributes:
        run: part of all names in the servers, so that runs on given servers do not meet.
        start: time in the oplog before the first write, as seconds and increment.
        freeze: `"<order>:<n>"`, the update whose handler freezes just before its write; None for no such fault.
    """

    run: str
    mongo_url: str
    redis_url: str
    start: tuple[int, int] | None = None
    freeze: str | None = None

    @property
    def database(self) -> str:
        """The database of orders, customers and what handlers make of them."""
        return f"mongo_celery_demo_{self.run}"

    @property
    def key_prefix(self) -> str:
        """Before every key in Redis."""
        return f"mongo_celery_demo_{self.run}."

    @property
    def bridge_options(self) -> dict[str, Any]:
        """Options of the run's bridge."""
        start: Any = Timestamp(*self.start) if self.start else "oldest"
        return {
            "name": "demo",
            "database": f"{self.database}_state",
            "partitions": 8,
            "start_from": start,
            "autodiscover": False,
            **_TIMES,
        }

    def collection(self, name: str) -> str:
        """`"db.collection"` of one of the run's collections."""
        return f"{self.database}.{name}"

    def environment(self) -> dict[str, str]:
        """
        This process's environment and the setting in it.

        Celery's own variables are left out: `CELERY_BROKER_URL` would win over the demo's broker.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
        return {**kept, VARIABLE: self.to_json()}

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def from_environment(environment: Mapping[str, str] = os.environ) -> DemoSetting:
    """The setting of the run that this process belongs to; without one, servers at their usual ports."""
    text = environment.get(VARIABLE)
    if text is None:
        return DemoSetting(
            run="local", mongo_url="mongodb://127.0.0.1/?replicaSet=rs0", redis_url="redis://127.0.0.1/0"
        )
    fields = json.loads(text)
    start = fields.pop("start")
    return DemoSetting(**fields, start=(start[0], start[1]) if start else None)
