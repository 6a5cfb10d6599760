"""The deployment rig: a bridge with listeners, workers, a broker and the recorded facts of the app in `scripted`."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol, Self, TypeVar, overload

import pytest
import redis
from pymongo import MongoClient

from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.embedded import RedisServer
from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.mongo import MakeClient, MakeReplicaSet, sparse
from tests.fixtures.process import PATIENCE_SECONDS, Processes, ProjectProcess, wait_for
from tests.fixtures.rabbitmq import QUEUES, virtual_host
from tests.rig.conformance import record
from tests.rig.history import Due, Effect, Fact, SetAside, Started, Wrote, violations
from tests.rig.keeper import Keeper, Role
from tests.rig.oplog import read_oplog
from tests.rig.project import Project

Document = dict[str, Any]

SHORT_TIMES: dict[str, Any] = {
    "lease_ttl": 2,
    "claim_ttl": 2,
    "dispatch_grace": 1.5,
    "commit_grace": 1,
    "transaction_seconds": 2,
    "max_crashes": 1,
    "partitions": 4,
}
_PROMPT_RESTORE = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
_WHERE = ("handler", "key", "n", "partition", "seq", "fence")
_WARNINGS_OF_FORKING = ("opened before fork", "MongoClient was forked")


class Deployment(Project):
    """
    The bridge of the scripted app, with a Redis of its own and databases of its own on the given MongoDB.

    Args:
        client: the test's own client; facts and judgements go through it.
        url: of the MongoDB for data, state and facts; failpoints name the bridge's clients, not that of the facts.
        options: of the bridge, over `SHORT_TIMES`.

    Attributes:
        is_recorded: whether `judge` can read all that the bridge has stored. False once a test has rolled the oplog
            over, or has written to the state itself.
    """

    app = "tests.rig.scripted.application"

    def __init__(
        self,
        client: MongoClient[Document],
        url: str,
        directory: Path,
        *,
        handlers: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
        include: str = "",
        transport: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        redis: Sequence[str] = (),
    ) -> None:
        self.options = {**SHORT_TIMES, **(options or {})}
        self.partitions: int = self.options["partitions"]
        self.redis = RedisServer(options=redis)
        own_directory = Path(mkdtemp(dir=directory))
        super().__init__(Processes(own_directory), client, url, "")
        self._other_broker = virtual_host(self.names)
        self.written: list[Due] = []
        self._spare: Counter[Due] = Counter()
        self._without_effect: set[Due] = set()
        self._standing: set[Due] = set()
        self.is_recorded = True
        own = {"confirm_publish": True} if self._other_broker else _PROMPT_RESTORE
        self._gates = own_directory / "gates"
        self._gates.mkdir()
        included = {"include": [include]} if include else {}
        self.environment |= {
            "SCRIPTED_FACTS": url,
            "SCRIPTED_GATES": str(self._gates),
            "SCRIPTED_HANDLERS": ",".join(handlers),
            "SCRIPTED_TRANSPORT": json.dumps({"visibility_timeout": 60, **own, **(transport or {})}),
            "SCRIPTED_CONF": json.dumps({"worker_prefetch_multiplier": 4, **included, **_queues(), **(conf or {})}),
        }
        self._given = environment or {}

    def __enter__(self) -> Self:
        self.redis.start()
        self.environment |= {"PROJECT_BROKER": self._other_broker or self.redis.url, **self._given}
        self._since = operation_time(self.client)
        self.data.create_collection("sink")  # else a transaction would have to create it
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__()
        self.redis.stop()
        super().__exit__()

    # -- processes ---------------------------------------------------------------------------------

    def url_of(self, process: str) -> str:
        """Return MongoDB's address with the name by which failpoints know a process."""
        return f"{self.url}&appName={self.app_name(process)}"

    def app_name(self, process: str) -> str:
        return f"{self.names}.{process}"

    def changes(self, command: str, *arguments: str, **variables: str) -> Document:
        """Run `celery -A app changes COMMAND --json` to its end, and return what it says, whatever its status."""
        done = self.run("changes", command, *arguments, "--json", **variables)
        assert done.stdout, done.stderr
        answer: Document = json.loads(done.stdout)
        return answer

    def both(self) -> tuple[ProjectProcess, ProjectProcess]:
        """Start a listener and a worker at the same time, and wait for both."""
        listener = self.listener(awaited="")
        worker = self.worker()
        listener.wait_for_output("reading from")
        return listener, worker

    @contextmanager
    def kept_worker(self) -> Iterator[Role]:
        """Start a worker, and while the block lasts start it again whenever it has ended."""
        with Keeper(self._processes) as keeper:
            role = keeper.keep("worker", lambda name: self.worker(name=name, awaited=""))
            role.process.wait_for_output(r" ready\.")
            yield role

    @property
    def logs(self) -> dict[str, str]:
        return {process.output.name: process.text for process in self._processes.started}

    @property
    def broker(self) -> Any:
        """A `redis.Redis` of the own server; use it in a `with`."""
        if self._other_broker is not None:
            pytest.skip("it looks into Redis")
        return redis.Redis.from_url(self.redis.url)

    def open_gate(self, name: str) -> None:
        """Let handlers pass that wait, or will wait, at a gate."""
        (self._gates / name).touch()

    # -- writing -----------------------------------------------------------------------------------

    def write(self, handler: str, key: str, n: int, **do: Any) -> Due:
        """Write one change: the number replaces the document, so that the change itself carries it all."""
        document: Document = {"n": n}
        if do:
            document["do"] = do
        self.data[handler].replace_one({"_id": key}, document, upsert=True)
        item = Due(handler, key, n)
        self.written.append(item)
        return item

    def stand(self, item: Due) -> Due:
        """From now on, this change is not waited for: its partition stands still."""
        self._standing.add(item)
        return self.give_up(item)

    def write_many(self, handler: str, keys: Iterable[str], count: int, **do: Any) -> list[Due]:
        """Write `count` changes for each key, in turns."""
        chosen = list(keys)
        return [self.write(handler, key, n, **do) for n in range(1, count + 1) for key in chosen]

    def partition_of(self, handler: str, key: str) -> int:
        return partition_hash([self.data.name, handler, key]) % self.partitions

    def keys(self, handler: str, partition: int, prefix: str = "k") -> Iterator[str]:
        number = 0
        while True:
            key = f"{prefix}{number}"
            if self.partition_of(handler, key) == partition:
                yield key
            number += 1

    # -- facts -------------------------------------------------------------------------------------

    def starts(self, *items: Due) -> list[Started]:
        """Recorded starts in the order of time; of the given changes, or all."""
        found = self.facts["start"].find(_any_of(items)).sort("at")
        names = (*_WHERE, "at", "retries", "pid")
        return [Started(**{name: each[name] for name in names}, partitioning=_partitioning(each)) for each in found]

    def effects(self) -> list[Effect]:
        return [
            Effect(**{name: each[name] for name in _WHERE}, partitioning=_partitioning(each))
            for sink in self.data["sink"].find().sort("_id")
            for each in sink["effects"]
        ]

    def partition(self, handler: str, index: int) -> Document:
        found = sparse(self.state["partitions"]).find_one({"handler": handler, "partition": index})
        assert found is not None, f"no partition {index} of {handler}"
        return found

    @property
    def lease(self) -> Document:
        return sparse(self.state["leases"]).find_one({"_id": "chain"}) or {}

    def of(self, item: Due) -> Document:
        return self.partition(item.handler, self.partition_of(item.handler, item.key))

    def letters(self, handler: str) -> list[Document]:
        return list(self.state["dead_letters"].find({"handler": handler}).sort("_id"))

    # -- waiting -----------------------------------------------------------------------------------

    def wait_started(self, item: Due, times: int = 1, timeout: float = PATIENCE_SECONDS) -> Started:
        def started() -> Started | None:
            found = self.starts(item)
            return found[times - 1] if len(found) >= times else None

        return wait_for(started, timeout, lambda: f"{item} started {times} times: {self.starts(item)}")

    def wait_done(self, timeout: float = PATIENCE_SECONDS, *, handlers: Iterable[str] = ()) -> None:
        """Wait until every written change is committed in its partition, or passed over."""
        chosen = set(handlers) or {item.handler for item in self.written}
        owed: dict[str, int] = {}
        for item in self.written:
            if item.handler in chosen and item not in self._standing:
                place = f"{item.handler}/{self.partition_of(item.handler, item.key)}"
                owed[place] = owed.get(place, 0) + 1
        last = dict.fromkeys(owed, 0)

        def done() -> bool:
            for document in self.state["partitions"].find({"term": {"$gt": 0}}):
                last[f"{document['handler']}/{document['partition']}"] = document["committed"]
            return all(last[place] >= count for place, count in owed.items())

        wait_for(done, timeout, lambda: f"committed {owed}, found {last}")

    def wait_effects(self, *, but: Iterable[Due] = (), timeout: float = PATIENCE_SECONDS) -> None:
        """Wait until every written change has had its effect, whatever its partition. Some need not."""
        owed = set(self.written) - self._without_effect - set(but)

        def left() -> set[Due]:
            return owed - {effect.due for effect in self.effects()}

        wait_for(lambda: not left(), timeout, lambda: f"without effect: {sorted(left())[:10]}")

    def wait_state(
        self, item: Due, condition: Callable[[Document], object], timeout: float = PATIENCE_SECONDS
    ) -> Document:
        def found() -> Document | None:
            document = self.of(item)
            return document if condition(document) else None

        return wait_for(found, timeout, lambda: f"{item}: {self.of(item)}")

    # -- judging -----------------------------------------------------------------------------------

    def allow(self, item: Due, again: int = 1) -> Due:
        """From now on, this change may start so much oftener than once: it retries, or a fault hits it."""
        self._spare[item] += again
        return item

    def give_up(self, item: Due) -> Due:
        """From now on, this change need not have an effect: it is set aside, skipped, ignored or at a halt."""
        self._without_effect.add(item)
        return item

    def history(self) -> list[Fact]:
        """All that has happened so far: writes, starts in the order of time, effects in that of each sink."""
        written = [Wrote(item.key, item.n, handler=item.handler) for item in self.written]
        return [*written, *self.starts(), *self.effects(), *map(SetAside, self._without_effect)]

    def judge(self, *, spare: int | None = None) -> list[Fact]:
        """
        Assert that the history has no violation, the state is as the models allow, and no client crossed a fork.

        Args:
            spare: how often each change may start again; by default as `allow` was told.
        """
        history = self.history()
        found = violations(history, spare=self._spare if spare is None else spare)
        assert not found, "\n".join(found)
        unlike = record(self.client, self.state.name, self._since).wrong if self.is_recorded else []
        assert not unlike, "\n".join(unlike)
        for name, text in self.logs.items():
            for words in _WARNINGS_OF_FORKING:
                assert words not in text, f"{name} says {words!r}"
        return history

    def judge_oplog(self, *, spare: int | None = None) -> list[Fact]:
        """As `judge`, and again in the order of the oplog, with all terms, positions and stored changes."""
        self.judge(spare=spare)
        history = self.read_oplog()
        found = violations(history, spare=self._spare if spare is None else spare)
        assert not found, "\n".join(found)
        return history

    def read_oplog(self) -> list[Fact]:
        databases = {"data": self.data, "state": self.state, "facts": self.facts}
        # What needs no effect comes last: no watermark may rely on what a test expects.
        return [*read_oplog(self.client, self._since, **databases), *map(SetAside, self._without_effect)]


D = TypeVar("D", bound=Deployment)

Make = Callable[..., Deployment]
"""Makes a deployment in the way of one file of tests."""


class MakeDeployment(Protocol):
    @overload
    def __call__(self, *handlers: str, kind: type[D], start: str = "", **given: Any) -> D: ...
    @overload
    def __call__(self, *handlers: str, start: str = "", **given: Any) -> Deployment: ...


def _make(stack: ExitStack, client: MongoClient[Document], url: str, directory: Path) -> MakeDeployment:
    def make(*handlers: str, kind: type[Deployment] = Deployment, start: str = "", **given: Any) -> Any:
        made = kind(**{"client": client, "url": url, "directory": directory, "handlers": handlers, **given})
        stack.enter_context(made)
        if start == "both":
            made.both()
        elif start:
            made.listener()
        return made

    return make


@pytest.fixture
def deployment(
    mongo_client: MongoClient[Document],
    mongo_url: str,
    make_replica_set: MakeReplicaSet,
    make_client: MakeClient,
    tmp_path: Path,
) -> Iterator[MakeDeployment]:
    """
    Give a function that sets up a deployment of some handlers; what it is given is that of `Deployment`.

    With `start` it also starts a `listener`, or `both` a listener and a worker. Faults come from `failpoint`,
    `make_proxy`, signals, and `SCRIPTED_POINT` (`scripted/points.py`).
    """
    del make_replica_set, make_client  # what they make must outlast the deployment
    with ExitStack() as stack:
        yield _make(stack, mongo_client, mongo_url, tmp_path)


@pytest.fixture(scope="module")
def shared_deployment(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeDeployment]:
    """Give the same for deployments that all tests of a module share."""
    with ExitStack() as stack:
        yield _make(stack, mongo_client, mongo_url, tmp_path_factory.mktemp("deployment"))


@contextmanager
def frozen(process: ProjectProcess, pid: int | None = None) -> Iterator[None]:
    """Keep one child of a process stopped, or the process with all of them; it goes on afterwards."""
    assert pid is None or pid in process.children(), f"{pid} is no child of {process.name}"
    send = process.send_group if pid is None else partial(os.kill, pid)
    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def _queues() -> dict[str, Any]:
    """Celery's settings for the type of queues that the tests are to have on RabbitMQ."""
    if os.environ.get(QUEUES) != "quorum":
        return {}
    return {"task_create_missing_queue_type": "quorum", "task_default_queue_type": "quorum"}


def _partitioning(fact: Mapping[str, Any]) -> int:
    """Only where layouts change it matters, and not every project records it."""
    return int(fact.get("partitioning", 0))


def _any_of(items: Iterable[Due]) -> Document:
    chosen = [{"handler": item.handler, "key": item.key, "n": item.n} for item in items]
    return {"$or": chosen} if chosen else {}
