"""
The preflight: everything outside our code that a bridge depends on, tried rather than believed; and what stands.

Nothing is left behind: rights on the state database are tried in a transaction that is aborted, the change
stream is opened and closed. A server that does not answer is a finding, and the rest is still looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mongo_celery.bridge.declarations import find_stray_handlers
from mongo_celery.bridge.operations.broker_check import check_broker
from mongo_celery.bridge.operations.deployment import check_mongodb
from mongo_celery.bridge.operations.encryption import check_encryption
from mongo_celery.bridge.operations.lease_check import check_lease
from mongo_celery.bridge.operations.source_check import check_sources
from mongo_celery.bridge.operations.state_check import check_state
from mongo_celery.bridge.operations.worker_check import check_time_limits, check_workers
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker.tasks import overridden_attributes
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import collect_findings

_TASK_PROTOCOL = 2


def check(wiring: Wiring, line: CommandLine | None = None) -> list[Finding]:
    """
    Look at everything that a bridge needs, and at what it has stored, for some seconds.

    Afterwards MongoDB and the broker are as before. Not promised: that what is well now stays so.

    Args:
        line: how the person who is told types commands.

    Raises:
        ConfigurationError: an option is wrong; then there is nothing to check yet.
    """
    assert wiring.options, "wrong options are refused before anything is looked at"
    concern = wiring.state_concern
    found = collect_findings("celery", lambda: _check_celery(wiring), concern)
    mongodb = collect_findings("mongodb", lambda: check_mongodb(wiring.reach(), wiring), concern)
    found += mongodb
    answers = not _is_wrong(mongodb, {"mongodb", "state_rights"})
    if answers:
        found += collect_findings("sources", lambda: check_sources(wiring), concern)
    found += ask(wiring, lease=answers)
    found += collect_findings("exposure", lambda: check_encryption(wiring), concern)
    if not answers:
        return found
    judged = collect_findings("state", lambda: check_state(wiring, found, line or CommandLine()), concern)
    return [*found, *judged] if _is_wrong(judged, {"state"}) else judged


def ask(wiring: Wiring, *, lease: bool = True) -> list[Finding]:
    """What a verdict takes beside the status: of the broker, the workers, and the `lease` where it can be read."""
    concern = wiring.state_concern
    found = collect_findings("lease", lambda: check_lease(wiring), concern) if lease else []
    broker = collect_findings("broker", lambda: check_broker(wiring.app, wiring.queue_names), concern)
    found += broker
    if not _is_wrong(broker, {"broker"}):
        found += collect_findings("workers", lambda: check_workers(wiring), concern)
    return found


def _is_wrong(found: Iterable[Finding], names: Collection[str]) -> bool:
    return any(finding.code in names and finding.severity == "failing" for finding in found)


def _check_celery(wiring: Wiring) -> Iterable[Finding]:
    conf = wiring.app.conf
    if conf.task_always_eager:
        yield failing("task_always_eager", "It drops chains, so no change would be committed; unset it.")
    if conf.task_protocol != _TASK_PROTOCOL:
        yield failing("task_protocol", "task_protocol=1 cannot carry chains; use Celery's default, 2.")
    yield _check_handlers(wiring)
    yield check_time_limits(wiring)
    yield from _check_shared(wiring)
    overridden = overridden_attributes(wiring.app)
    for task, attributes in sorted(overridden.items()):
        yield failing(
            "task_annotations",
            f"They override {', '.join(attributes)} of {task}, which the bridge depends on; exclude the task there.",
        )
    if not overridden:
        yield ok("task_annotations", "They leave the bridge's tasks alone.")


def _check_handlers(wiring: Wiring) -> Finding:
    names = [handler.name for handler in wiring.handlers]
    if names:
        return ok("handlers", f"{len(names)} registered: {', '.join(names)}.")
    return failing(
        "handlers",
        "None is registered: import the module with the @bridge.on_change functions, for example with include=[...] "
        "of the Celery app.",
    )


def _check_shared(wiring: Wiring) -> Iterable[Finding]:
    """A handler for a bridge that nobody has made is a subscription that silently does not exist."""
    names = {bridge.name for bridge in BRIDGES.of(wiring.app)}
    for function, name in find_stray_handlers(names):
        yield degraded(
            "shared_handlers",
            f"{function} is shared with bridge {name!r}, which this app has not; unless it is for another app's, write "
            f"bridge={min(names)!r}.",
        )
