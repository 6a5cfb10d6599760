"""
Admin pages of bridges and dead letters. They show the same snapshot and plans as the commands.

Django imports this package if `django.contrib.admin` is installed.
"""

from __future__ import annotations

from django.contrib import admin

from mongo_celery.contrib.django.admin.bridge_pages import BridgeAdmin
from mongo_celery.contrib.django.admin.dead_letter_pages import DeadLetterAdmin
from mongo_celery.contrib.django.models import ChangeBridge, ChangeDeadLetter

admin.site.register(ChangeBridge, BridgeAdmin)
admin.site.register(ChangeDeadLetter, DeadLetterAdmin)

__all__ = ["BridgeAdmin", "DeadLetterAdmin"]
