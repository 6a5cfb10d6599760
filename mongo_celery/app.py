"""Which bridges belong to a Celery app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.bridge import Bridge

_ATTRIBUTE = "_mongo_celery_bridges"


def add_bridge(app: Celery, bridge: Bridge) -> bool:
    """
    Note a bridge of an app.

    Returns:
        Whether it is the app's first.

    Raises:
        ConfigurationError: the app already has another bridge of that name.
    """
    bridges: dict[str, Bridge] = app.__dict__.setdefault(_ATTRIBUTE, {})
    if bridges.setdefault(bridge.name, bridge) is not bridge:
        raise ConfigurationError(f"the app already has a bridge named {bridge.name!r}; give this one another name.")
    return len(bridges) == 1


def find_bridge(app: Celery, name: str) -> Bridge | None:
    """A bridge by its name."""
    return bridges_by_name(app).get(name)


def bridges_by_name(app: Celery) -> dict[str, Bridge]:
    """All bridges of an app."""
    found: dict[str, Bridge] = app.__dict__.get(_ATTRIBUTE, {})
    return found


def chosen_bridges(app: Celery, names: Sequence[str]) -> list[Bridge]:
    """
    The bridges that a command names, or all of them.

    Raises:
        ConfigurationError: there is none, or one of the names is unknown.
    """
    bridges = bridges_by_name(app)
    if not bridges:
        raise ConfigurationError(
            "this app has no bridge: create one with mongo_celery.Bridge(app, 'mongodb://...') where the app is made, "
            "and name the app with -A.",
        )
    for name in names:
        if name not in bridges:
            raise ConfigurationError(f"there is no bridge {name!r}; this app has {', '.join(sorted(bridges))}.")
    return [bridges[name] for name in names] if names else list(bridges.values())
