"""The Django application. When Django starts, it only registers its checks."""

from __future__ import annotations

from django.apps import AppConfig


class MongoCeleryConfig(AppConfig):  # type: ignore[misc] # has no types
    """Django finds this application for `"mongo_celery.contrib.django"` in INSTALLED_APPS."""

    name = "mongo_celery.contrib.django"
    label = "mongo_celery"
    verbose_name = "Celery and MongoDB"

    def ready(self) -> None:
        """Register the checks for `manage.py check`."""
        from mongo_celery.contrib.django.checks import register_checks

        register_checks()
