"""The contract suite for users' own targets and brokers, run as they run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.contract_targets import MONGODB, ROOT
from tests.fixtures.rabbitmq import RabbitCluster

SUITE = "mongo_celery.testing.contract"
_SECONDS_MAX = 300


def examine(module: str, directory: Path, mongo_url: str, **configured: str) -> subprocess.CompletedProcess[str]:
    """Run a part of the suite with a configuration, elsewhere than in the checkout."""
    options = {"mongo_celery_mongodb_url": mongo_url, **configured}
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", f"{SUITE}.{module}", *given],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, MONGODB: mongo_url},
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )


@pytest.mark.parametrize("target", ["", "MongoTarget", "SqlTarget"], ids=["memory", "mongodb", "sql"])
def test_a_target_that_compares_fences_passes(target: str, tmp_path: Path, mongo_url: str) -> None:
    """P3: the package's own, and that of the example for other stores."""
    given = {"mongo_celery_fence_target": f"tests.acceptance.contract_targets:{target}"} if target else {}
    done = examine("test_fence_target", tmp_path, mongo_url, **given)
    assert done.returncode == 0, done.stdout


def test_a_target_that_mixes_partitions_up_fails(tmp_path: Path, mongo_url: str) -> None:
    """A suite that takes everything would prove nothing."""
    given = {"mongo_celery_fence_target": "tests.acceptance.contract_targets:RacingTarget"}
    done = examine("test_fence_target", tmp_path, mongo_url, **given)
    assert done.returncode == 1
    assert "test_a_newer_partitioning_begins_anew_and_ends_the_older_one" in done.stdout


@pytest.mark.parametrize("broker", ["redis", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_broker_that_delivers_passes(broker: str, tmp_path: Path, mongo_url: str, redis_url: str) -> None:
    """P1, P2, P8: a real worker on it."""
    url = redis_url if broker == "redis" else "memory://"
    done = examine("test_transport", tmp_path, mongo_url, mongo_celery_broker_url=url)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_rabbitmq_passes(tmp_path: Path, mongo_url: str, rabbit_cluster: RabbitCluster) -> None:
    """P1, P2, P8: one node of a cluster."""
    done = examine("test_transport", tmp_path, mongo_url, mongo_celery_broker_url=rabbit_cluster.nodes[0].url)
    assert done.returncode == 0, done.stdout
