"""
The peer's process: `python -m tests.benchmarks.peer_program peer DIRECTORY` becomes `node`, under the same number.

Before that it leaves a position at the setting's start, as an earlier run of the peer would have: without one the peer
begins with the present, and has no option for another start.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import redis
from pymongo import MongoClient

from mongo_celery.bench.setting import BenchSetting
from tests.benchmarks.peer_package import KEY_PREFIX

_SCRIPT = Path(__file__).with_name("peer.cjs")


def leave_position(setting: BenchSetting) -> None:
    """A token of the start, where the peer looks for one."""
    stage = {"$changeStream": {"startAtOperationTime": setting.timestamp}}
    client: MongoClient[dict[str, Any]]
    with MongoClient(setting.mongo_url) as client, redis.Redis.from_url(setting.redis_url) as broker:
        answer = client[setting.database].command("aggregate", "orders", pipeline=[stage], cursor={"batchSize": 0})
        token = json.dumps(answer["cursor"]["postBatchResumeToken"])
        broker.set(f"{KEY_PREFIX}:{setting.database}:orders:changeStreamToken", token)


if __name__ == "__main__":
    leave_position(BenchSetting.from_environment())
    os.execvpe("node", ["node", str(_SCRIPT)], {**os.environ, "NODE_PATH": str(Path(sys.argv[2]) / "node_modules")})
