"""
A Django project's settings and Celery app in one module, for the lines of its listener.

`PROJECT_LOGGING` is Django's `LOGGING` as JSON; `PROJECT_HIJACK` what Celery's `worker_hijack_root_logger` is;
`PROJECT_SETUP`: whether the project sets up logging by Celery's signal. The servers do not exist.
"""

from __future__ import annotations

import json
import logging.config
import os
from typing import Any

from celery import Celery
from celery.signals import setup_logging

from mongo_celery import Bridge, Change

SECRET_KEY = "none"
LOGGING = json.loads(os.environ["PROJECT_LOGGING"])
CELERY_WORKER_HIJACK_ROOT_LOGGER = bool(os.environ.get("PROJECT_HIJACK"))
CELERY_BROKER_URL = "redis://127.0.0.1:1/0"

if __name__ != "tests.acceptance.django_project":
    raise ImportError("one name for settings and app")

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
bridge = Bridge(app, "mongodb://127.0.0.1:1/?replicaSet=rs0", name="project", start_timeout=0.1)


@bridge.on_change("project.orders")
def record(_change: Change) -> None:
    """A handler."""


if os.environ.get("PROJECT_SETUP"):

    @setup_logging.connect
    def configure(**_: Any) -> None:
        """As many projects have it."""
        logging.config.dictConfig(LOGGING)
