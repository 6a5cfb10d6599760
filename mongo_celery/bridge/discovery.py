"""
Modules named `changes` are found as Celery finds those named `tasks`.

One receiver for all apps: Celery's own way, `app.autodiscover_tasks`, keeps an app alive for as long as the process.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, signals

from mongo_celery.bridge.wiring import BRIDGES


@signals.import_modules.connect(weak=False)
def _discover(sender: Any = None, **_arguments: Any) -> None:
    """Where a worker, a command or a test imports the modules of an app with a bridge that has `autodiscover`."""
    if not isinstance(sender, Celery) or not any(each.given.get("autodiscover", True) for each in BRIDGES.of(sender)):
        return
    sender.autodiscover_tasks(related_name="changes", force=True)  # Django's applications
    sender.autodiscover_tasks(lambda: _packages(sender), related_name="changes", force=True)


def _packages(app: Celery) -> list[str]:
    """Packages of the modules that the app includes: a module named `changes` may stand beside them."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})
