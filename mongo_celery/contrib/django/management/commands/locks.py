"""`manage.py locks`."""

from __future__ import annotations

from mongo_celery.contrib.django.management.celery_command import command

Command = command("locks")
