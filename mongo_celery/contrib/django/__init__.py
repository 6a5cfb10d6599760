"""
Django's side of bridges, outboxes and transactions: `"mongo_celery.contrib.django"` in INSTALLED_APPS.

It needs Django, and django-mongodb-backend only for what handles models that are stored in MongoDB. Nothing connects
when Django starts. Public names are imported when they are first used: Django imports this package before its models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_celery.contrib.django.instances import instance
    from mongo_celery.contrib.django.project import celery_app
    from mongo_celery.contrib.django.queries import transactional

_HOMES = {"celery_app": "project", "instance": "instances", "transactional": "queries"}

__all__ = ["celery_app", "instance", "transactional"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
