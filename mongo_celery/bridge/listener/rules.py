"""
The partition rules in force: by which key the changes of each subscription belong to the partitions that it has.

That of its handler, as a rule. After `partition_by` was changed it is the one before, until the layout is another one
(`relayout`): what is under way in the old partitions belongs to them by that one alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.copying import is_counted
from mongo_celery.bridge.listener.takeover import Takeover
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME, Partitioner
from mongo_celery.errors import ConfigurationError, LayoutError


def rules_in_force(options: BridgeOptions, handlers: Iterable[Handler], takeover: Takeover) -> dict[str, Partitioner]:
    """
    By which rule the changes of each subscription are spread in its layout in force.

    Raises:
        LayoutError: it was another one than now, which is gone, and what is read belongs to partitions by that one.
    """
    rules = {}
    for handler in handlers:
        rules[handler.name] = rule = handler.partitioner(options)
        hash_name, _, name = takeover.layouts[handler.name].key.partition(":")
        if (hash_name, name) == (HASH_NAME, rule.name):
            continue
        try:
            rules[handler.name] = handler.partitioner_named(name, options)
        except ConfigurationError as error:
            if not _is_stored(takeover, handler.name):
                raise LayoutError(
                    f"partition_by of handler {handler.name} cannot change from {name} now: changes are under way in "
                    f"the old partitions, and by the old rule alone it is known in which. {error} Start with the old "
                    "rule, and the options that it needs, once more until `status` shows nothing outstanding or "
                    "standing; then change it.",
                ) from error
    return rules


def _is_stored(takeover: Takeover, name: str) -> bool:
    """Whether all that partitions have to do is stored, or lies behind what they have done: nothing has to be read."""
    token = takeover.documents[name]["resumeToken"]
    return all(
        image.data <= (token_data(token) if token else "")
        and image.claim is None
        and image.handled is None
        and (image.spilled is not None or (image.state == "flowing" and not is_counted(image)))
        and not image.parked_keys
        for image in takeover.images[name]
    )
