"""
Django support for bridges, outboxes and transactions: `"mongo_celery.contrib.django"` in INSTALLED_APPS.

It needs Django. Only code for models that are stored in MongoDB needs django-mongodb-backend. Nothing connects when
Django starts. Public names are imported at first use, because Django imports this package before its models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mongo_celery.lazy import load_lazily

if TYPE_CHECKING:
    from mongo_celery.contrib.django.instances import instance
    from mongo_celery.contrib.django.project import celery_app
    from mongo_celery.contrib.django.queries import transactional

__getattr__, __dir__ = load_lazily(
    __name__, {"project": ("celery_app",), "instances": ("instance",), "queries": ("transactional",)}
)

__all__ = ["celery_app", "instance", "transactional"]
