"""
Whether this process may lead its bridge: not for another app, and not while newer definitions stand by.

The rules and their fields are those of `state/candidates.py`; here is what a process does and says about them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.definitions import definitions_of
from mongo_celery.bridge.state.candidates import has_failed, is_of_this_term, is_other_app
from mongo_celery.bridge.state.drops import FOREIGN
from mongo_celery.bridge.state.leases import Term, has_begun
from mongo_celery.errors import ConfigurationError, ForeignBridgeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

FORMER_NAME = "default"
"""Of a bridge without a name, before it took the app's."""

_SHOWN = 4
_COMPLAINT_SECONDS = 30.0


class Candidacy:
    """
    One listener's claim to lead.

    Args:
        wiring: of the bridge.
        selectors: resolved sources and filters, in the order of the handlers.
    """

    def __init__(self, wiring: Wiring, selectors: Iterable[Selector]) -> None:
        self.definitions = definitions_of(wiring, selectors)
        self._wiring = wiring
        self._leases = wiring.store.leases
        self._period = wiring.options.lease_ttl / 3
        self._announced_at = -self._period
        self._said: str | None = None

    def refuse_forgotten_name(self) -> None:
        """
        A bridge that took the app's name must not begin anew beside the positions that it had without a name.

        Raises:
            ConfigurationError: there are such positions, and none under the app's name.
        """
        name = self._wiring.name
        if self._wiring.given_name is not None or name == FORMER_NAME or has_begun(self._leases.read()):
            return
        former = self._leases.of(FORMER_NAME).read()
        if has_begun(former) and former is not None and not is_other_app(former, self.definitions):
            raise ConfigurationError(
                f"the state database {self._wiring.options.database} has a bridge named {FORMER_NAME!r} and none named "
                f"{name!r}: a bridge without a name was called {FORMER_NAME!r} before, and is called like its app now. "
                f"Give Bridge name={FORMER_NAME!r} to go on where it stands; or name={name!r} to begin anew, as "
                "start_from says.",
            )

    def renew(self) -> None:
        """
        Say that this process is there, three times in a lease's ttl; call it often while standing by.

        Raises:
            ForeignBridgeError: the lease serves another app.
        """
        if time.monotonic() - self._announced_at < self._period:
            return
        lease = self._leases.read()
        if lease is None:
            return
        self.refuse_other_app(lease)
        self._leases.announce(self.definitions)
        self._announced_at = time.monotonic()

    def refuse_other_app(self, lease: Mapping[str, Any]) -> None:
        """
        Look whom a lease serves.

        Raises:
            ForeignBridgeError: another app.
        """
        if not is_other_app(lease, self.definitions):
            return
        handlers = sorted(lease.get("tasks") or {})
        shown = ", ".join(handlers[:_SHOWN]) + (" ..." if len(handlers) > _SHOWN else "")
        who = f"process {lease.get('pid')} on {lease.get('host')}" if lease["listenerId"] else "nobody now"
        raise ForeignBridgeError(
            f"the name {self._wiring.name!r} belongs to the bridge of another app in the state database "
            f"{self._wiring.options.database}: app {lease.get('app') or 'without a name'}, handlers {shown}, led "
            f"by {who}. Give this app's Bridge another name='...'. If it is the same app under "
            "another name, or with entirely new handlers, stop the other listeners and run `changes adopt`.",
        )

    def acquire(self, observed: Mapping[str, Any] | None = None) -> Term | None:
        """
        The lease, if it is free for these definitions (`observed` as in `Leases.acquire`).

        Raises:
            ForeignBridgeError: another app was first.
        """
        term = self._leases.acquire(self.definitions, observed=observed)
        if term is None:
            return None
        self._said = None
        try:
            self.refuse_other_app(term.document)
        except ForeignBridgeError:
            self._leases.release(term, self.definitions)
            raise
        return term

    def say(self) -> None:
        """Log why this process stands by, once for each reason."""
        lease = self._leases.read() or {}
        mine = (lease.get("candidates") or {}).get(self.definitions.digest) or {}
        reason = "same"
        if mine and is_of_this_term(lease) and lease["served"] != self.definitions.digest:
            reason = "older" if lease["definedAt"] > mine["definedAt"] else "newer"
        if reason == "newer" and has_failed(mine):
            reason = "failed"
        if reason != self._said:
            self._said = reason
            _LOG[reason](lease)


class ForeignMessages:
    """Says in the listener's log, too, that workers have met messages of another app's bridge of this name."""

    def __init__(self) -> None:
        self._known: int | None = None
        self._said_at = -_COMPLAINT_SECONDS

    def notice(self, lease: Mapping[str, Any]) -> None:
        """Compare the count with that of the last reading; the first one says nothing of now."""
        count = (lease.get("dropped") or {}).get(FOREIGN, 0)
        if self._known is not None and count > self._known and time.monotonic() - self._said_at >= _COMPLAINT_SECONDS:
            self._said_at = time.monotonic()
            logger.error(
                "another app uses this bridge's name on this broker, with a state database of its own: workers have "
                "dropped %d of its messages so far, the last sent by %s. Give each bridge a name of its own with "
                "name='...', or each app a broker database of its own",
                count,
                lease.get("foreignSender") or "an unknown listener",
                extra={"event": "foreign_messages"},
            )
        self._known = count


def _log_same(_lease: Mapping[str, Any]) -> None:
    logger.info("standing by: another listener leads", extra={"event": "standing_by"})


def _log_newer(lease: Mapping[str, Any]) -> None:
    logger.info(
        "standing by: another listener leads (process %s on %s), with older definitions of the handlers; it steps down "
        "for this one",
        lease.get("pid"),
        lease.get("host"),
        extra={"event": "standing_by"},
    )


def _log_older(lease: Mapping[str, Any]) -> None:
    logger.warning(
        "standing by: another listener leads (process %s on %s), with newer definitions of the handlers, first seen at "
        "%s; this one leads when the last of those has ended",
        lease.get("pid"),
        lease.get("host"),
        lease.get("definedAt"),
        extra={"event": "standing_by_older"},
    )


def _log_failed(_lease: Mapping[str, Any]) -> None:
    logger.warning(
        "standing by: another listener leads, and these definitions do not replace its own for some minutes, since a "
        "listener with them has failed or was killed",
        extra={"event": "standing_by_failed"},
    )


_LOG = {"same": _log_same, "newer": _log_newer, "older": _log_older, "failed": _log_failed}
