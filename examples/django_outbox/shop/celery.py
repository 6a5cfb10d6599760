"""The shop's app: `celery -A shop worker`, `celery -A shop beat`."""

import os

from celery import Celery
from django.db import connection

from mongo_celery import OutboxCollection

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

# Of Django's own connection, so that it can take part in Django's transactions.
outbox = OutboxCollection(
    app, lambda: connection.get_collection("shop_outbox"), name="outbox", sweep_after=1, sweep_every=1, claim_ttl=2
)
