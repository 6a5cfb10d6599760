"""
The preflight: everything outside our code that a bridge depends on, tried where that can be, and the bridge's state.

Nothing is left behind. A server that does not answer is a finding, and the rest is still checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from mongo_celery.bridge.declarations import find_stray_handlers
from mongo_celery.bridge.operations.broker_check import ask_servers, check_time_limits
from mongo_celery.bridge.operations.judgement import CODES, NO_HANDLERS, judge
from mongo_celery.bridge.operations.mongodb_check import check_encryption, check_mongodb, check_sources
from mongo_celery.bridge.operations.snapshot_reader import LOOK_SECONDS, read_unjudged
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker.tasks import overridden_attributes
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import collect_findings

_TASK_PROTOCOL = 2


def check(wiring: Wiring, line: CommandLine | None = None) -> list[Finding]:
    """
    Check everything that a bridge needs, and its state, for some seconds.

    Afterwards MongoDB and the broker are as before. Not promised: that what is well now stays so.

    Args:
        line: beginning of the commands that findings print.

    Raises:
        ConfigurationError: an option is wrong; then there is nothing to check yet.
    """
    assert wiring.options, "wrong options are refused before anything is checked"
    concern = wiring.state_concern
    line = line or wiring.line
    found = collect_findings("celery", lambda: _check_celery(wiring), concern)
    mongodb = collect_findings("mongodb", lambda: check_mongodb(wiring.reach(), wiring), concern)
    answers = not _has_failed(mongodb, {"mongodb", "topology", "state_rights"})
    found += mongodb
    if not _has_failed(mongodb, {"mongodb", "state_rights"}):
        found += collect_findings("sources", lambda: check_sources(wiring), concern)
    workers, asked = ask_servers(wiring)
    found += collect_findings("exposure", lambda: check_encryption(wiring), concern)
    state: list[Finding] = []
    is_judged = False
    if answers:

        def read() -> Iterator[Finding]:
            nonlocal is_judged
            seen = judge(replace(read_unjudged(wiring, line, LOOK_SECONDS), workers=workers), line, asked)
            is_judged = True
            yield from seen.findings
            if seen.leader is not None:
                yield ok("leader", f"Leader: {seen.leader.host}, pid {seen.leader.pid}.")

        state = collect_findings("state", read, concern)
    judged = {each.code for each in state}
    # A finding about workers is judged with the state: it knows of what waits for them.
    told = [each for each in asked if each.severity == "ok" or not is_judged or each.code not in CODES]
    return [*state, *(each for each in (*found, *told) if each.code not in judged)]


def _has_failed(found: Iterable[Finding], codes: Collection[str]) -> bool:
    return any(each.code in codes and each.severity == "failing" for each in found)


def _check_celery(wiring: Wiring) -> Iterator[Finding]:
    conf = wiring.app.conf
    if conf.task_always_eager:
        yield failing("task_always_eager", "It drops chains, so no change would be committed. Unset it.")
    if conf.task_protocol != _TASK_PROTOCOL:
        yield failing("task_protocol", "task_protocol=1 cannot carry chains. Use Celery's default, 2.")
    names = [handler.name for handler in wiring.handlers]
    if names:
        yield ok("handlers", f"{len(names)} registered: {', '.join(names)}.")
    else:
        yield failing("handlers", NO_HANDLERS)
    yield check_time_limits(wiring)
    bridges = {bridge.name for bridge in BRIDGES.of(wiring.app)}
    for function, name in find_stray_handlers(bridges):
        yield degraded(
            "shared_handlers",
            f"{function} is shared with bridge {name!r}, which this app has not. Unless it is for another app, write "
            f"bridge={min(bridges)!r}.",
        )
    for task, attributes in sorted(overridden_attributes(wiring.app).items()):
        yield failing(
            "task_annotations",
            f"task_annotations override {', '.join(attributes)} of {task}, which the bridge depends on. Exclude the "
            "task there.",
        )
