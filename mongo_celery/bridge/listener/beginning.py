"""
The beginning of a term: which handlers it leads, by which partition rule, and from where.

The rule of a handler is that of its code, as a rule. After `partition_by` was changed it is the one before, until the
handler has other partitions (`repartitioning`): what is under way in the old ones belongs to them by that one alone.
If the old rule is not registered any more, the handler is led, but stopped: nothing more is read for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mongo_celery.bridge.handlers import Handler, token_seconds
from mongo_celery.bridge.listener.starts import Start, find_starts
from mongo_celery.bridge.listener.subscription import Plan, Subscription, make_partitions
from mongo_celery.bridge.listener.takeover import Takeover, find_undeliverable, take_over
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring


@dataclass(frozen=True, slots=True)
class Beginning:
    """
    The handlers, starts and take-over that a term begins with.

    Attributes:
        takeover: what its take-over has found.
        subscriptions: those that it leads, by name.
        starts: from where it reads, by name.
    """

    takeover: Takeover
    subscriptions: Mapping[str, Subscription]
    starts: Mapping[str, Start]

    @property
    def owed_snapshots(self) -> list[tuple[Plan, Timestamp]]:
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
        LeaseLostError: the term has ended.
    """
    store, options = wiring.store, wiring.options
    takeover = take_over(store, renewal, options, handlers)
    renewal.alive()
    starts = find_starts(store, wiring.client, renewal, options, handlers, takeover)
    subscriptions: dict[str, Subscription] = {}
    for handler, selector in led:
        name = handler.name
        start, layout = starts[name], takeover.layouts[name]
        rule = find_rule(handler, layout, options, handlers)
        plan = Plan(
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
    return Beginning(takeover, subscriptions, {name: starts[name] for name in subscriptions})


def find_rule(handler: Handler, layout: Layout, options: BridgeOptions, handlers: Sequence[Handler]) -> Partitioner:
    """Return the rule by which a handler's changes are spread in a layout. That of its code if it is not registered."""
    rule = handler.partitioner(options)
    if layout.key == rule.layout_key:
        return rule
    try:
        return handler.partitioner_named(layout.key.partition(":")[2], options, handlers)
    except ConfigurationError:
        return rule
