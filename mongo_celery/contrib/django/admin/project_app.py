"""Things of the project's Celery app by their kinds and names, as the pages' addresses and forms give them."""

from __future__ import annotations

from typing import TypeVar

from mongo_celery.app import Named, Registry
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.command_line import CommandLine
from mongo_celery.contrib.django.project import app_address, celery_app
from mongo_celery.errors import CommandRefusedError

T = TypeVar("T", bound=Named)


def all_in_project(registry: Registry[T]) -> list[T]:
    """
    All of a kind.

    Raises:
        ConfigurationError: the app cannot be had.
    """
    return registry.of(celery_app())


def one_in_project(registry: Registry[T], name: str) -> T:
    """
    The one of that name.

    Raises:
        CommandRefusedError: there is none.
        ConfigurationError: the app cannot be had.
    """
    found = registry.find(celery_app(), name)
    if found is None:
        raise CommandRefusedError(f"There is no {registry.kind} {name!r} any more: go back to the list.")
    return found


def line_in_project(bridge: str) -> CommandLine:
    """How commands on a bridge are typed in this project."""
    several = len(BRIDGES.of(celery_app())) > 1
    return CommandLine(app_address(), bridge if several else None)
