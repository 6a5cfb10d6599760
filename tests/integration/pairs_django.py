"""The process of the rows that need Django: its settings, one model, and the program that runs them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from functools import partial
from typing import Any

import django
from django.conf import settings
from pymongo import MongoClient

URL, DATABASE = os.environ["PAIRS_MONGO"], os.environ["PAIRS_DATABASE"]
settings.configure(
    DATABASES={"default": {"ENGINE": "django_mongodb_backend", "HOST": URL, "NAME": DATABASE}},
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
    USE_TZ=True,
)
django.setup()

from django.db import connection, models  # noqa: E402 - they need settings


class Paid(models.Model):  # type: ignore[misc] # noqa: DJ008 - nobody looks at it
    """What was done for a key in a shop."""

    shop = models.CharField(max_length=40)
    key = models.CharField(max_length=40)

    class Meta:  # noqa: D106 - Django's
        app_label = "pairs"

    @classmethod
    def counted(cls, shop: Any) -> dict[str, int]:
        """How often each effect is there."""
        return dict(Counter(each.key for each in cls.objects.filter(shop=shop.db.name)))


def main() -> None:
    """Run all rows that need Django, and print the error of each that fails, as JSON."""
    from mongo_celery.bridge.stream import cursor, reader
    from tests.integration import test_pairs
    from tests.integration.pairs_rig import TABLE, Shop

    for module in (cursor, reader):
        vars(module)["AWAIT_SECONDS"] = 0.1
    assert test_pairs.ROWS, "it has filled the table"
    with connection.schema_editor() as editor:
        editor.create_model(Paid)
    errors: dict[str, str] = {}
    wanted = sys.argv[1:]
    with MongoClient[dict[str, Any]](URL) as client:
        for row in TABLE.rows.values():
            if row.needs_django and (not wanted or row.id in wanted):
                with Shop(URL, client, **row.options).open() as shop:
                    shop.counters.append(partial(Paid.counted, shop))
                    try:
                        row.program(shop)
                    except Exception:  # noqa: BLE001 - shown by the test
                        errors[row.id] = traceback.format_exc()
    sys.stdout.write(f"\n{json.dumps(errors)}\n")
