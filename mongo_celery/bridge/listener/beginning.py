"""
The beginning of a term: which handlers it leads, by which partition rule, and from where.

The rule of a handler is that of its code, as a rule. After `partition_by` was changed it is the one before, until the
handler has other partitions (`repartitioning`): what is under way in the old ones belongs to them by that one alone.
If the old rule is not registered any more, the handler is stopped, and the others are led. As soon as nothing is under
way in its partitions any more, as after `changes resume`, the term ends, and the next one leads it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.handlers import Handler, token_seconds
from mongo_celery.bridge.listener.starts import Start, find_starts
from mongo_celery.bridge.listener.subscription import Subscription, TermFacts, make_partitions
from mongo_celery.bridge.listener.takeover import Takeover, find_undeliverable, take_over
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME, Partitioner
from mongo_celery.errors import ConfigurationError, LayoutError

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Rules:
    """
    The partition rules of some handlers.

    Attributes:
        in_force: by handler.
        missing: by handler, why its rule cannot be found. What is read for it belongs to partitions by that rule alone.
    """

    in_force: Mapping[str, Partitioner]
    missing: Mapping[str, LayoutError]


@dataclass(frozen=True, slots=True)
class Beginning:
    """
    The handlers, starts and take-over that a term begins with.

    Attributes:
        takeover: what its take-over has found.
        subscriptions: those that it leads, by name.
        starts: from where it reads, by name.
        stopped: why a handler is stopped, by name.
    """

    takeover: Takeover
    subscriptions: Mapping[str, Subscription] = field(default_factory=dict)
    starts: Mapping[str, Start] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)

    @property
    def owed_snapshots(self) -> list[tuple[TermFacts, Timestamp]]:
        """Subscriptions that begin with snapshots, each with the start that was pinned with that."""
        starts = [(each.plan, self.starts[each.name].owed_from) for each in self.subscriptions.values()]
        return [(plan, owed_from) for plan, owed_from in starts if owed_from is not None]


def begin_term(
    wiring: Wiring, renewal: Renewal, led: Sequence[tuple[Handler, Selector]], handlers: Sequence[Handler]
) -> Beginning:
    """
    Take over, and find out from where each handler is read.

    Args:
        led: those whose changes the stream gives, each with its source and filter.
        handlers: all of the bridge.

    Raises:
        LayoutError: none of them can be led.
        LeaseLostError: the term has ended.
    """
    store, options = wiring.store, wiring.options
    takeover = take_over(store, renewal, options, handlers)
    renewal.alive()
    rules = find_rules(options, handlers, takeover)
    _log_stopped(rules, [handler.name for handler, _ in led])
    starts = find_starts(store, wiring.client, renewal, options, handlers, takeover)
    subscriptions: dict[str, Subscription] = {}
    for handler, selector in led:
        name = handler.name
        if name in rules.missing:
            continue
        start, rule, layout = starts[name], rules.in_force[name], takeover.layouts[name]
        plan = TermFacts(
            handler,
            selector,
            rule,
            layout,
            takeover.version,
            start.time,
            start.watermark,
            find_undeliverable(store, renewal, takeover, name, rule, start.watermark),
            token_seconds=token_seconds(wiring.app, handler.task_name),
        )
        images = takeover.images[name]
        partitions = make_partitions(images, store.partitions, layout.generation, takeover.version, options)
        subscriptions[name] = Subscription(options, plan, partitions)
    renewal.alive()
    return Beginning(
        takeover,
        subscriptions,
        {name: starts[name] for name in subscriptions},
        {name: str(error) for name, error in rules.missing.items()},
    )


def find_rules(options: BridgeOptions, handlers: Sequence[Handler], takeover: Takeover) -> Rules:
    """Find the rule by which the changes of each handler are spread in its layout in force."""
    rules: dict[str, Partitioner] = {}
    missing: dict[str, LayoutError] = {}
    for handler in handlers:
        rules[handler.name] = rule = handler.partitioner(options)
        hash_name, _, name = takeover.layouts[handler.name].key.partition(":")
        if (hash_name, name) == (HASH_NAME, rule.name):
            continue
        try:
            rules[handler.name] = handler.partitioner_named(name, options, handlers)
        except ConfigurationError as error:
            if not takeover.is_settled(handler.name):
                missing[handler.name] = LayoutError(
                    f"partition_by of handler {handler.name} cannot change from {name} now: changes are under way in "
                    f"the old partitions, and by the old rule alone it is known in which. {error} Deploy the old rule "
                    "again, with the options that it needs, until `status` shows nothing outstanding and nothing "
                    "blocked for the handler. Then change it."
                )
    return Rules(rules, missing)


def _log_stopped(rules: Rules, led: Sequence[str]) -> None:
    """Log which handlers are stopped. Raise `LayoutError` if no other is left."""
    for name, error in rules.missing.items():
        if all(each in rules.missing for each in led):
            raise error
        logger.error(
            "handler %s is stopped, and the others are led: %s",
            name,
            str(error),
            extra={"event": "handler_stopped", "subscription": name},
        )


class StoppedHandlers:
    """
    The handlers that a term has stopped, while it lasts.

    Args:
        wiring: of the bridge.
        beginning: of the term.
        wake: ends the leading thread's wait.

    Attributes:
        may_lead: names of those that could be led now: nothing is under way in their partitions any more.
    """

    def __init__(self, wiring: Wiring, beginning: Beginning, wake: Callable[[], None]) -> None:
        self.may_lead: list[str] = []
        self._store = wiring.store
        self._takeover = beginning.takeover
        self._names = list(beginning.stopped)
        self._wake = wake

    def check(self) -> float:
        """Read their partitions. Return the seconds until the next time."""
        if not self._names:
            return math.inf
        generations = {name: self._takeover.layouts[name].generation for name in self._names}
        try:
            images = self._store.partitions.of(generations)
        except PyMongoError:  # those who need it say that MongoDB does not answer
            return _CHECK_SECONDS
        by_name = {name: [each for each in images if each.subscription == name] for name in self._names}
        now = replace(self._takeover, images=by_name)
        self.may_lead = [name for name in self._names if by_name[name] and now.is_settled(name)]
        if not self.may_lead:
            return _CHECK_SECONDS
        logger.info(
            "handlers %s can be led now, so this term ends and the next one leads them",
            ", ".join(self.may_lead),
            extra={"event": "term_renewed", "subscriptions": self.may_lead},
        )
        self._wake()
        return math.inf
