"""
The life cycle of a listener: wait for the servers, be a standby, lead, step down, be a standby again.

`run` returns after `stop`, and raises an error that waiting cannot fix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pymongo
from kombu.exceptions import OperationalError
from pymongo.errors import PyMongoError

from mongo_celery.bridge.identity import Identity, build_identity, ways_out
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.leader import Leader
from mongo_celery.bridge.listener.periodic_requests import PeriodicRequests
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import begin_term
from mongo_celery.bridge.state.audit import make_record, user_at_host
from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.stream.isolator import find_refused_matches
from mongo_celery.bridge.stream.source import Scope, Selector
from mongo_celery.broker.connection import reach_broker
from mongo_celery.errors import (
    ConfigurationError,
    ForeignBridgeError,
    HistoryLostError,
    LeaseLostError,
    MongoCeleryError,
    ServerUnavailableError,
)
from mongo_celery.mongo.driver_internals import replace_connections
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.oplog import check_topology
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import brief, explain_error, is_transient, raise_if_final
from mongo_celery.signals import leader_changed, send_signal

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_PROTOCOL = 2
_NOTING_SECONDS = 5.0
_STANDBY_PAUSES = Pauses(first=0.4, longest=0.4, jitter=0.5)  # spreads standbys
_SERVER_PAUSE = 1.0
_ATTEMPT_SECONDS = 10.0


class Listener:
    """
    The listener of one bridge. Any number may run, but only one leads.

    Args:
        wiring: the wiring of the bridge.
        on_history_lost: overrides the option for this process.
        take_over: lead once even if the lease has the identity of another environment or app.
        reason: the reason of a take-over, for the audit record.

    Attributes:
        activity: the activity of the listener, for observers in any thread.
        has_lease: True if this listener may hold the lease. Otherwise the process may end in the middle of a call
            without loss.
    """

    def __init__(
        self,
        wiring: Wiring,
        on_history_lost: str | None = None,
        *,
        take_over: bool = False,
        reason: str | None = None,
    ) -> None:
        self._wiring = wiring
        self._on_history_lost = on_history_lost
        self._takes_over, self._reason = take_over, reason
        self._options = wiring.options
        self._stopping = threading.Event()
        self.has_lease = False
        self._leader: Leader | None = None
        self._waits_for: object = None
        self._noted_at = float("-inf")
        names = [handler.name for handler in wiring.handlers]
        self.activity = Activity(wiring.name, names, wiring.options.lease_ttl)

    def stop(self) -> None:
        """Step down and return from `run`. Any thread may call this."""
        self._stopping.set()
        leader = self._leader
        if leader is not None:
            leader.wake()

    def run(self) -> None:
        """
        Listen until `stop` is called.

        Afterwards the lease is released, and a standby can take over immediately. Running handlers continue, and the
        next listener adopts them.

        Raises:
            ConfigurationError: there is nothing to listen for, or an option or source is wrong.
            DeploymentError: the topology is wrong, a right is missing, servers do not answer, or another app or
                environment has a bridge of this name on the same MongoDB.
            StreamError: the stream cannot continue. Includes HistoryLostError.
        """
        check_app(self._wiring.app)
        selectors, scope = self._plan()
        self._wait_for_servers()
        leases = self._wiring.store.leases
        identity = build_identity(self._wiring)
        while not self._stopping.is_set():
            term = self._try_to_lead(leases, identity)
            if term is not None:
                self._lead(leases, term, selectors, scope)
                self._pause()  # the same cause may end the next term as fast: avoid a hot loop

    def _plan(self) -> tuple[list[Selector], Scope]:
        if not self._wiring.handlers:
            raise ConfigurationError(
                f"bridge {self._options.name} has no handlers, so the listener has nothing to do. Import the module "
                "with the @bridge.on_change functions, for example with include=[...] of the Celery app.",
            )
        return self._wiring.stream()

    def _wait_for_servers(self) -> None:
        """Wait until both servers have answered once, within `start_timeout`. Later outages have no time limit."""
        until = time.monotonic() + self._options.start_timeout
        while not self._stopping.is_set():
            self.activity.note_turn()
            missing = self._missing_server()
            if missing is None:
                return
            name, said = missing
            if time.monotonic() > until:
                raise ServerUnavailableError(
                    f"{name} did not answer within {self._options.start_timeout:.0f} s (start_timeout). Check its URL, "
                    f"the network and the server. Last error: {said}",
                )
            logger.warning("waiting for %s: %s", name, said, extra={"event": "server_awaited"})
            self._stopping.wait(_SERVER_PAUSE)

    def _missing_server(self) -> tuple[str, str] | None:
        # By default the driver would search for a server longer than a short `start_timeout`.
        bound = min(max(self._options.start_timeout / 4, _SERVER_PAUSE), _ATTEMPT_SECONDS)
        try:
            with pymongo.timeout(bound):
                check_topology(self._wiring.client)
            self._wiring.store.leases.ensure()
        except PyMongoError as error:
            raise_if_final(error, self._wiring.state_concern)
            return "MongoDB", brief(error)
        try:
            reach_broker(self._wiring.app, int(bound))
        except (OperationalError, OSError) as error:
            return "the broker", short(error)
        return None

    def _try_to_lead(self, leases: Leases, identity: Identity) -> Term | None:
        """
        Try once to acquire the lease. Without it, pause briefly.

        Raises:
            ForeignBridgeError: the bridge belongs to another app or environment.
        """
        self.activity.note_turn()
        try:
            lease = leases.read() or {}
            difference = self._compare(lease, identity)
            term = None if lease.get("live") else self._acquire(leases, identity, lease, difference)
            if term is not None:
                return term
            if not lease:
                leases.ensure()  # the document was removed, and only an existing one can be acquired
            self.activity.note_standby()
            self._log_standby(lease, identity)
            if time.monotonic() - self._noted_at >= _NOTING_SECONDS:
                leases.note_standby()
                self._noted_at = time.monotonic()
        except PyMongoError as error:
            self.has_lease = False
            final = explain_error(error, self._wiring.state_concern)
            if final is not None:
                raise final from error
            logger.warning(
                "MongoDB does not answer, and this listener tries again: %s",
                brief(error),
                extra={"event": "server_awaited"},
            )
        self._pause()
        return None

    def _compare(self, lease: Mapping[str, Any], identity: Identity) -> str | None:
        """
        Compare the lease's identity with this process. Return a difference that the process may ignore.

        Raises:
            ForeignBridgeError: there is a difference that this process must not ignore.
        """
        difference = identity.difference(lease.get("identity"))
        if difference is None or self._takes_over:
            return difference
        leader = (
            f"listener: process {lease['pid']} on {lease['host']}" if lease.get("live") else "no listener is running"
        )
        raise ForeignBridgeError(
            f"another app or environment uses bridge {self._wiring.name} in the state database "
            f"{self._options.database}: {difference} ({leader}). {ways_out(self._wiring.line)}",
        )

    def _acquire(
        self,
        leases: Leases,
        identity: Identity,
        lease: Mapping[str, Any],
        difference: str | None,
    ) -> Term | None:
        self.has_lease = True  # before reading `_stopping`: its setter reads this
        if self._stopping.is_set():
            return None
        term = leases.acquire(identity.plain(), lease.get("identity"))
        self.has_lease = term is not None
        if term is not None:
            self._takes_over, self._waits_for = False, None
            send_signal(
                leader_changed,
                self._wiring.name,
                term=term.number,
                host=term.document["host"],
                pid=term.document["pid"],
                previous_host=lease.get("host"),
                previous_pid=lease.get("pid"),
            )
        if term is not None and difference:
            logger.warning(
                "this listener has taken over bridge %s from another app or environment: %s",
                self._wiring.name,
                difference,
                extra={"event": "bridge_taken_over"},
            )
            self._keep_record(difference)
        return term

    def _keep_record(self, difference: str) -> None:
        """Store the audit record of a take-over. If that fails, lead the bridge anyway."""
        audit = self._wiring.store.audit
        handlers, effect = build_identity(self._wiring).handlers, {"difference": difference}
        record = make_record("listener", ["--take-over"], self._reason, user_at_host(), handlers, effect)
        try:
            audit.prepare()
            audit.add(record)
        except PyMongoError as error:
            logger.error(
                "the audit record of this take-over could not be stored, so `changes history` does not show it: %s",
                short(error),
                extra={"event": "audit_record_failed"},
            )

    def _log_standby(self, lease: Mapping[str, Any], identity: Identity) -> None:
        """Log, once per term of another listener, that this one is a standby."""
        if not lease.get("live") or lease["listenerId"] == self._waits_for:
            return
        self._waits_for = lease["listenerId"]
        lacking = sorted(identity.handlers.keys() - (lease.get("identity") or {"handlers": {}})["handlers"].keys())
        logger.info(
            "standing by: another listener leads (process %s on %s)%s",
            lease["pid"],
            lease["host"],
            f". It does not have {', '.join(lacking)}, so their changes wait until it ends" if lacking else "",
            extra={"event": "standing_by"},
        )

    def _pause(self) -> None:
        self._stopping.wait(_STANDBY_PAUSES.nth())

    def _lead(self, leases: Leases, term: Term, selectors: list[Selector], scope: Scope) -> None:
        """Run one term, from its acquisition to its end."""
        logger.info(
            "leading bridge %s with term %d",
            self._options.name,
            term.number,
            extra={"event": "lease_acquired", "term": term.number},
        )
        renewal = Renewal(leases, self._wiring.store.signing, term, self._options.lease_ttl)
        renewal.start()
        self.activity.note_term_begin()
        ended_by: Exception | None = None
        try:
            renewal.read_key()
            self._lead_term(renewal, selectors, scope)
        except LeaseLostError:
            replace_connections(self._wiring.client)  # they may be the reason for the lack of progress
            logger.warning("this listener has lost the lease and is standing by", extra={"event": "lease_lost"})
        except PyMongoError as failure:
            renew_connections(self._wiring.client, failure)
            ended_by = explain_error(failure, self._wiring.state_concern)
            if ended_by is not None:
                raise ended_by from failure
            if not is_transient(failure):
                ended_by = failure
                raise
            logger.warning(
                "this listener has given up the lease and is standing by: %s",
                brief(failure),
                extra={"event": "lease_lost"},
            )
        except Exception as failure:
            ended_by = failure
            raise
        finally:
            self._leader = None
            self.activity.note_standby()
            renewal.stop()
            self._release(leases, renewal, ended_by)
            self.has_lease = False

    def _lead_term(self, renewal: Renewal, selectors: list[Selector], scope: Scope) -> None:
        refused = find_refused_matches(self._wiring.stream_client, scope)
        if refused:
            selectors, scope = self._wiring.stream(without=refused)
        for name, said in refused.items():
            logger.error(
                "handler %s gets no changes, because MongoDB refuses its match (%s). Its position is kept. Correct "
                "match= and restart the listener",
                name,
                said,
                extra={"event": "match_refused", "handler": name},
            )
        led = [each for each in self._wiring.handlers if each.name not in refused]
        beginning = begin_term(self._wiring, renewal, list(zip(led, selectors, strict=True)), self._wiring.handlers)
        self._leader = Leader(
            self._wiring,
            renewal,
            beginning,
            scope,
            self._stopping,
            self._on_history_lost or self._options.on_history_lost,
            self.activity,
            refused,
        )
        self._leader.housekeeping.add(PeriodicRequests(self._wiring.app).send_due)
        self._leader.lead()

    def _release(self, leases: Leases, renewal: Renewal, ended_by: Exception | None) -> None:
        state = "idle" if ended_by is None else ("history_lost" if isinstance(ended_by, HistoryLostError) else "failed")
        try:
            if leases.release(renewal.term, state, _sentence(ended_by)):
                logger.info("lease released", extra={"event": "lease_released"})
        except PyMongoError as failure:
            logger.warning(
                "this listener could not release its lease. The next one waits until the lease expires: %s",
                brief(failure),
                extra={"event": "lease_not_released"},
            )


def _sentence(error: Exception | None) -> str | None:
    """Return the text that the lease stores for the exception that ended a term: the class of an unexpected one."""
    if error is None:
        return None
    return str(error) if isinstance(error, MongoCeleryError) else f"{type(error).__name__}: {short(error)}"


def check_app(app: Celery) -> None:
    """
    Refuse an app that a bridge cannot use for its messages.

    Raises:
        ConfigurationError: a Celery setting would drop the commit after a handler.
    """
    if app.conf.task_always_eager:
        raise ConfigurationError(
            "task_always_eager=True drops Celery chains, so no change would be committed. Unset it for listeners."
        )
    if app.conf.task_protocol != _PROTOCOL:
        raise ConfigurationError("task_protocol=1 cannot carry Celery chains. Use the default, task_protocol=2.")
