"""
A Django project for the admin pages: settings and Celery app in one module, in a process of its own.

`ADMIN_MONGO_URL` and `ADMIN_DATABASE` say where its MongoDB is. Django's own tables are SQLite's.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change

SECRET_KEY = "none"
DEBUG = False
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.integration.admin_checks"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "ATOMIC_REQUESTS": True}}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "mongo_celery.contrib.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATIC_URL = "/static/"
USE_TZ = True
MONGO_CELERY_APP = "tests.integration.admin_project:app"

URL = os.environ["ADMIN_MONGO_URL"]
NAME = os.environ["ADMIN_DATABASE"]

app = Celery("shop", broker="memory://", set_as_current=False)
bridge = Bridge(app, URL, name="shop", autodiscover=False, partitions=1)
client: MongoClient[dict[str, Any]] = MongoClient(URL, tz_aware=True)
database = client[NAME]

failing: list[str] = []
"""What handlers fail with; none while it is empty."""
handled: list[Any] = []


def _handle(change: Change) -> None:
    if failing:
        raise ValueError(failing[0])
    handled.append(change.document_key["_id"])


@bridge.on_change(f"{NAME}.halting", max_retries=0)
def stop(change: Change) -> None:
    """Halts its partition where it fails."""
    _handle(change)


@bridge.on_change(f"{NAME}.letters", failure_policy="dead_letter", max_retries=0)
def collect(change: Change) -> None:
    """Sets aside what fails."""
    _handle(change)
