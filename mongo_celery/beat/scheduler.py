"""
A scheduler for `celery beat`. Of any number of processes one leads, by a lease in MongoDB.

Celery calls `tick` in a loop. A turn of a standby tries to acquire the lease. A turn of the leader sends the
stored runs that are not sent yet, then lets Celery send what is due. Each run is stored first (see `entries`).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery, beat
from celery.utils import uuid
from celery.utils.time import maybe_make_aware
from pymongo.errors import PyMongoError

from mongo_celery.app import app_name
from mongo_celery.beat.entries import COLLECTION, Entries
from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.broker import connection as broker
from mongo_celery.errors import ConfigurationError, ForeignBridgeError, LeaseLostError
from mongo_celery.mongo.opening import renew_connections, with_majority
from mongo_celery.mongo.oplog import check_topology
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import ErrorContext, brief, explain_error

logger = logging.getLogger("mongo_celery.beat")

_STANDBY_SECONDS = 0.3
_PAUSE_SECONDS = 1.0
_BROKER_SECONDS = 4
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(slots=True)
class _Run:
    """A run that is stored and not settled."""

    task_id: str
    is_sent: bool = False
    retry_at: float = 0.0


class Scheduler(beat.Scheduler):
    """
    A scheduler for `celery beat`. Any number of beats may run, and one of them sends.

    It reads the same entries as Celery's own scheduler, `beat_schedule` with `add_periodic_task`. An entry with
    `"enabled": False` does not run. Lease and last runs are in the collection `beat` of the state database of the app's
    first bridge. An app without a bridge sets `mongo_celery_database_url`. The option `--schedule` has no effect.

    Raises:
        ConfigurationError: the app has no MongoDB or no name, or a setting is wrong.
    """

    schedule: dict[str, Any]
    _heap: Any
    Producer: Any
    producer: Any = None  # Celery would wait here for the broker

    def __init__(self, app: Celery, *args: Any, **options: Any) -> None:
        self._wiring = next(iter(BRIDGES.of(app)), None) or Wiring(None, None, {}).of(app)
        self._options = self._wiring.options
        collection = with_majority(self._wiring.client[self._options.database])[COLLECTION]
        self._leases = Leases(collection, self._options.name, self._options.lease_ttl)
        self._entries = Entries(collection, self._options.name, self._options.lease_ttl)
        self._identity: dict[str, Any] = {"app": app_name(app), "broker": broker.read_address(app)}
        self._renewal: Renewal | None = None
        self._waits_for: object = None
        self._runs: dict[str, _Run] = {}
        self._publisher: tuple[Any, Any] | None = None
        self._outages = LogThrottle()
        self._failures: defaultdict[str, LogThrottle] = defaultdict(LogThrottle)
        self._is_busy = False
        super().__init__(app, *args, **options)

    @property
    def info(self) -> str:
        """The line about the state in Celery's banner."""
        return f"    . state -> {self._options.database}.{COLLECTION} ({self._options.name})"

    def setup_schedule(self) -> None:
        """Read the entries of the app. Their last runs are read by `tick`, when this beat leads."""
        for name, entry in self.app.conf.beat_schedule.items():
            if not name or not isinstance(name, str):
                raise ConfigurationError(f"the name of an entry of beat_schedule must be a text, not {name!r}.")
            fields = dict(entry)
            if fields.pop("enabled", True):
                self.schedule[name] = self.Entry(**{**fields, "name": name, "app": self.app})
        self.install_default_entries(self.schedule)

    def tick(self) -> float:  # type: ignore[override]
        """
        Take one turn, as standby or as leader.

        Returns:
            Seconds until the next one.

        Raises:
            ForeignBridgeError: another app or environment has the lease.
            DeploymentError: MongoDB refuses this beat, such as for a missing right.
        """
        self._is_busy = True
        try:
            return self._turn()
        except LeaseLostError:
            logger.warning("this beat has lost the lease and is standing by", extra={"event": "beat_lost"})
            self._end_term()
        except PyMongoError as error:
            renew_connections(self._wiring.client, error)
            grant = "readWrite there, or find, insert, update and remove on its collection beat, and find on drops"
            if final := explain_error(error, ErrorContext(f"the state database {self._options.database}", grant)):
                raise final from error
            self._heap = None  # Celery has removed the entry from it
            if self._outages.may_log():
                text = "this beat cannot use MongoDB, so it sends nothing and tries again: %s"
                logger.warning(text, brief(error), extra={"event": "beat_waiting"})
        finally:
            self._is_busy = False
        return _STANDBY_SECONDS

    def close(self) -> None:
        """Release the lease, so that another beat can lead immediately. A second call does nothing."""
        if self._is_busy:
            # A signal has interrupted a turn, which may hold a lock of the driver. Celery calls again after the turn.
            return
        self._end_term()
        self._close_publisher()
        super().close()

    # -- the lease -----------------------------------------------------------------------------------

    def _turn(self) -> float:
        if self._renewal is None and not self._try_to_lead():
            return _STANDBY_SECONDS
        self._check_lease()
        self._send_runs()
        pause = min(super().tick(), _PAUSE_SECONDS)
        if pause > 0:
            self._correct_future_runs()
        if pause == _PAUSE_SECONDS:  # a connection that is idle may be cut without notice
            self._close_publisher()
        return pause

    def _check_lease(self) -> int:
        """Note progress, and return the number of the term. Raises `LeaseLostError`."""
        if self._renewal is None or not self._renewal.is_trusted():
            raise LeaseLostError
        self._renewal.alive()
        return self._renewal.term.number

    def _try_to_lead(self) -> bool:
        """Try once to acquire the lease, and begin the term."""
        lease = self._leases.read()
        if lease is None:
            check_topology(self._wiring.client)
            self._leases.ensure()
            lease = {}
        if stored := lease.get("identity"):
            self._compare(stored)
        if lease.get("live"):
            if lease["listenerId"] != self._waits_for:
                self._waits_for = lease["listenerId"]
                text = "standing by: another beat leads (process %s on %s)"
                logger.info(text, lease["pid"], lease["host"], extra={"event": "beat_standing_by"})
            return False
        term = self._leases.acquire(self._identity, stored)
        if term is not None:
            self._begin_term(term)
        return term is not None

    def _compare(self, stored: dict[str, Any]) -> None:
        """Refuse the lease of another app or environment."""
        theirs, mine = (f"app {each['app']}" for each in (stored, self._identity))
        brokers = stored["broker"], self._identity["broker"]
        if all(brokers) and not broker.is_same_broker(*brokers):
            theirs, mine = (f"the broker {broker.describe_broker(each)}" for each in brokers)
        elif theirs == mine:
            return
        database, name = self._options.database, self._options.name
        raise ForeignBridgeError(
            f"another app or environment has the beat {name} in the state database {database}. It has {theirs}, but "
            f"this process has {mine}. If this is another environment or app, give its Bridge another name or "
            "database, or set mongo_celery_database. If only the broker or the app's name has changed, run in mongosh: "
            f"db.getSiblingDB({database!r}).{COLLECTION}.updateOne({{_id: {name!r}}}, {{$unset: {{identity: 1}}}})"
        )

    def _begin_term(self, term: Term) -> None:
        """Begin to renew the lease, and read the last runs."""
        self._renewal = Renewal(self._leases, None, term, self._options.lease_ttl, holder="leading beat")
        self._renewal.start()
        try:
            firsts = {name: (each.task, maybe_make_aware(each.default_now())) for name, each in self.schedule.items()}
            stored = self._entries.take_over(term.number, firsts)
            if stored.keys() != self.schedule.keys():
                raise LeaseLostError
        except BaseException:
            self._end_term()
            raise
        for name, document in stored.items():
            entry, last = self.schedule[name], maybe_make_aware(document["lastRunAt"])
            entry.last_run_at = last.astimezone(self.app.timezone)  # a crontab counts in the zone of the last run
            entry.total_run_count = document["totalRunCount"]
            if run := document.get("run"):
                self._runs[name] = _Run(run["taskId"])
        logger.info("this beat leads with term %d", term.number, extra={"event": "beat_leading", "term": term.number})

    def _end_term(self) -> None:
        """End the term of this process, if it has one, and release the lease."""
        renewal, self._renewal, self._heap = self._renewal, None, None
        self._runs.clear()
        if renewal is not None:
            renewal.stop()
            with suppress(PyMongoError):  # then it expires
                self._leases.release(renewal.term)

    # -- runs ----------------------------------------------------------------------------------------

    def _correct_future_runs(self) -> None:
        """Count from now if a clock was wrong when an entry ran. Otherwise it would wait until that time."""
        for name, entry in self.schedule.items():
            last, now = entry.last_run_at, entry.default_now()
            if maybe_make_aware(last) - maybe_make_aware(now) > _CLOCK_SKEW:
                text = "the last run of entry %s is in the future, at %s, so it counts from now. Check all clocks"
                logger.warning(text, name, last, extra={"event": "beat_clock_wrong"})
                entry.last_run_at, self._heap = now, None

    def populate_heap(self) -> None:  # type: ignore[override]
        """Order the entries by their next time. Leave out those that wait for a stored run: Celery may wait for one."""
        super().populate_heap()
        self._heap = sorted(each for each in self._heap if each.entry.name not in self._runs)

    def reserve(self, entry: Any) -> Any:
        """Store a run of an entry, before its message. Raises `LeaseLostError` if another beat leads."""
        following, run = next(entry), _Run(entry.options.get("task_id") or uuid())
        last, count = maybe_make_aware(following.last_run_at), following.total_run_count
        if not self._entries.claim(self._check_lease(), entry.name, last, count, run.task_id):
            raise LeaseLostError
        self._runs[entry.name], self.schedule[entry.name] = run, following
        return following

    def apply_entry(self, entry: Any, producer: Any = None) -> None:  # noqa: ARG002 - Celery's
        """Send the stored run of an entry. If that fails, later turns try again."""
        self._send(entry.name, self._runs[entry.name])

    def _send_runs(self) -> None:
        """Send the stored runs, until one fails."""
        for name, run in list(self._runs.items()):
            if run.retry_at <= time.monotonic():
                if not self._send(name, run):
                    break
                self._heap = None  # the entry may be due again

    def _send(self, name: str, run: _Run) -> bool:
        """Send a stored run and remove it. Return False if it could not be sent."""
        term, entry = self._check_lease(), self.schedule[name]
        if not run.is_sent:
            options = {"retry": False, **entry.options, "task_id": run.task_id}
            self.logger.info("Scheduler: Sending due task %s (%s)", name, entry.task)  # as Celery's, for users' filters
            try:
                self.apply_async(type(entry)(**{**dict(entry), "options": options}), self._open_producer(), False)
            except Exception as error:  # noqa: BLE001 - of the broker, of kombu or of the user's code
                key = name if self._publisher else ""  # a broker that is away is one failure of all entries
                self._close_publisher()
                run.retry_at, self._heap = time.monotonic() + _PAUSE_SECONDS, None
                self._runs[name] = self._runs.pop(name)  # the last one, so that the others have their turns
                if self._failures[key].may_log():
                    text = (
                        "the run of entry %s cannot be sent, so later runs of this entry wait. It is tried again. "
                        "Check broker and arguments: %s"
                    )
                    logger.error(text, name, short(error), extra={"event": "beat_run_unsent", "entry": name})
                return False
            run.is_sent = True
        self._entries.settle(term, name, run.task_id)
        del self._runs[name]
        return True

    def _open_producer(self) -> Any:
        """Return the producer. Its calls have a time limit, because a beat that waits for the broker cannot lead."""
        if self._publisher is None:
            connection = broker.bounded_connection(self.app, _BROKER_SECONDS, confirm=True)
            broker.demand_answer(connection, _BROKER_SECONDS)
            self._publisher = connection, self.Producer(connection, auto_declare=False)
        return self._publisher[1]

    def _close_publisher(self) -> None:
        opened, self._publisher = self._publisher, None
        if opened is not None:
            with suppress(Exception):  # the broker is away
                opened[0].release()
