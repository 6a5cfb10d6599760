"""
The app on which `test_transactions_cli.py` runs the command lines: one TwoPhaseCommit, no bridge.

`PROJECT_MONGO` and `PROJECT_NAMES` (its database) come from the environment.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit

app = Celery("transactions_cli", broker="memory://")


@cache
def _client() -> MongoClient[dict[str, Any]]:
    return MongoClient(os.environ["PROJECT_MONGO"])


bank = TwoPhaseCommit(app, lambda: _client()[os.environ["PROJECT_NAMES"]]["transfers"], timeout=2)
