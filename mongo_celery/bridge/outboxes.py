"""An outbox as it was declared with a bridge: what that of each app, and its delivery by the listener, are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.registration import Registration
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.entries import FIELD
from mongo_celery.outbox.options import OutboxOptions, SharedOptions, options_of
from mongo_celery.outbox.outbox import OUTBOXES
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.watching import OPERATIONS, delivery_handler, handler_name, still_pending, watched_fields


@dataclass(frozen=True, slots=True)
class DeclaredOutbox:
    """
    The arguments of `Bridge.outbox`.

    Attributes:
        namespace: of the collection, as given.
        name: of the outbox.
        options: of `Outbox`.
        watch: whether the listener delivers.
    """

    namespace: str
    name: str
    options: Mapping[str, Any]
    watch: bool

    def check(self) -> None:
        """Refuse what cannot be options of an outbox, before there is an app to make it for."""
        known = SharedOptions.__annotations__
        own = {each.name: self.options.get(each.name, each.default) for each in fields(OutboxOptions)}
        shared = {name: value for name, value in self.options.items() if name in known or name not in own}
        options_of(shared, **{name: own[name] for name in own if name not in known})

    def plan_outbox(self, wiring: Wiring) -> PlannedOutbox:
        """
        Plan it for a bridge, whose app does not have it yet.

        Raises:
            ConfigurationError: the app has an outbox of this name, or the bridge something else for its delivery.
        """
        OUTBOXES.refuse(wiring.app, self.name)
        if not self.watch:
            return PlannedOutbox(self, wiring)
        name, field = self.name, PendingField(self.options.get("field", FIELD))
        delivery = Registration(
            delivery_handler(lambda: wiring.outboxes[name].backing.relay, self.namespace),
            (self.namespace,),
            {
                "name": handler_name(self.namespace),
                "operations": OPERATIONS,
                "fields": watched_fields(field),
                "match": still_pending(field),
                "partition_by": "_id",
                "bind": True,
            },
        )
        return PlannedOutbox(self, wiring, delivery, delivery.plan_handler(wiring))


@dataclass(frozen=True, slots=True)
class PlannedOutbox:
    """
    An outbox that a bridge can have.

    Attributes:
        declared: what was given.
        wiring: of the bridge in its app.
        delivery: by the listener; None without one.
        handler: of the delivery.
    """

    declared: DeclaredOutbox
    wiring: Wiring
    delivery: Registration | None = None
    handler: Handler | None = None

    def declare(self) -> None:
        """Have the bridge refuse what would take its place."""
        if self.handler is not None:
            self.wiring.add(self.handler)

    def make(self) -> Outbox:
        """Make it."""
        declared, wiring = self.declared, self.wiring
        made = Outbox(
            wiring.app,
            lambda: wiring.collection(declared.namespace),
            name=declared.name,
            **{"database": wiring.given.get("database", DEFAULT_DATABASE), **declared.options},
        )
        wiring.outboxes[declared.name] = made
        if self.delivery is not None and self.handler is not None:
            self.delivery.register_handler(wiring, self.handler)
        return made
