"""
Modules named `changes` are found as Celery finds those named `tasks`.

One receiver for all apps: Celery's own way, `app.autodiscover_tasks`, keeps an app alive for as long as the process.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, signals

from mongo_celery.bridge.wiring import BRIDGES


def discover_last() -> None:
    """
    Look for modules when an app imports its own, after all that listens for that so far.

    Celery's fixup sets Django up then, for apps that were made before; until it has, no module with a model can be
    imported, and it says of no Django application that it is there. To be called for each app that is bound.
    """
    signals.import_modules.disconnect(_discover)
    signals.import_modules.connect(_discover, weak=False)


def _discover(sender: Any = None, **_arguments: Any) -> None:
    """Import the modules of an app with a bridge that has `autodiscover`, as workers, commands and tests do."""
    if not isinstance(sender, Celery) or not any(each.given.get("autodiscover", True) for each in BRIDGES.of(sender)):
        return
    sender.autodiscover_tasks(related_name="changes", force=True)  # Django's applications
    sender.autodiscover_tasks(lambda: _packages(sender), related_name="changes", force=True)


def _packages(app: Celery) -> list[str]:
    """Packages of the modules that the app includes: a module named `changes` may be beside them."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})
