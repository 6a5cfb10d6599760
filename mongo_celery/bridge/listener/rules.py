"""
The partition rules in force: by which key the changes of each subscription belong to the partitions that it has.

That of its handler, as a rule. After `partition_by` was changed it is the one before, until the handler has other
partitions (`repartitioning`): what is under way in the old ones belongs to them by that one alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.takeover import Takeover
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME, Partitioner
from mongo_celery.errors import ConfigurationError, LayoutError


@dataclass(frozen=True, slots=True)
class Rules:
    """
    The rules of some handlers.

    Attributes:
        in_force: by handler.
        missing: by handler, why its rule cannot be found. What is read for it belongs to partitions by that rule alone.
    """

    in_force: Mapping[str, Partitioner]
    missing: Mapping[str, LayoutError]


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
                    "again, with the options that it needs, until `status` shows nothing outstanding or standing for "
                    "the handler. Then change it."
                )
    return Rules(rules, missing)
