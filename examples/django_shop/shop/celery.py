"""The shop's app: `celery -A shop listener`, `celery -A shop worker`, `celery -A shop beat`."""

import os

from celery import Celery
from django.db import connection

from mongo_celery import Bridge, OutboxCollection

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

# It has a client of its own; its handlers are found in the applications' changes.py.
bridge = Bridge(app, os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"), name="shop")

# Of Django's own connection, so that it can take part in Django's transactions. The times are short, so that the
# example is: leave them out in a project of yours.
outbox = OutboxCollection(
    app, lambda: connection.get_collection("shop_outbox"), name="outbox", sweep_after=1, sweep_every=1, claim_ttl=2
)
