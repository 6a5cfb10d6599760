"""The Django application: its checks are registered when Django starts, and nothing else happens then."""

from __future__ import annotations

from django.apps import AppConfig


class MongoCeleryConfig(AppConfig):  # type: ignore[misc] # has no types
    """The application that Django finds for `"mongo_celery.contrib.django"` in INSTALLED_APPS."""

    name = "mongo_celery.contrib.django"
    label = "mongo_celery"
    verbose_name = "Celery and MongoDB"

    def ready(self) -> None:
        """Have `manage.py check` look at the project."""
        from mongo_celery.contrib.django.checks import register_checks

        register_checks()
