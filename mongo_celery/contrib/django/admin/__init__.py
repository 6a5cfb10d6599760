"""
Admin pages of bridges, dead letters, outboxes and two-phase transactions.

They act by the functions that `celery -A app changes`, `outbox` and `transactions` use, and show what those say. Django
imports this where `django.contrib.admin` is installed.
"""

from __future__ import annotations

from django.contrib import admin

from mongo_celery.contrib.django.admin.bridge_pages import BridgeAdmin
from mongo_celery.contrib.django.admin.dead_letter_pages import DeadLetterAdmin
from mongo_celery.contrib.django.admin.outbox_pages import OutboxAdmin
from mongo_celery.contrib.django.admin.transaction_pages import TransactionAdmin
from mongo_celery.contrib.django.models import ChangeBridge, ChangeDeadLetter, TaskOutbox, TwoPhaseTransaction

admin.site.register(ChangeBridge, BridgeAdmin)
admin.site.register(ChangeDeadLetter, DeadLetterAdmin)
admin.site.register(TaskOutbox, OutboxAdmin)
admin.site.register(TwoPhaseTransaction, TransactionAdmin)

__all__ = ["BridgeAdmin", "DeadLetterAdmin", "OutboxAdmin", "TransactionAdmin"]
