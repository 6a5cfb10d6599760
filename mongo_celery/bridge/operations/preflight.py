"""
The preflight: a check of a bridge's external needs, with real attempts if possible, and of its state.

It leaves nothing behind. If a server does not answer, that is a finding, and the rest is still checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mongo_celery.bridge.operations.bridge_facts import read_facts
from mongo_celery.bridge.operations.bridge_snapshot import Workers
from mongo_celery.bridge.operations.broker_check import ask_servers, check_time_limits
from mongo_celery.bridge.operations.judgement import NO_HANDLERS, judge
from mongo_celery.bridge.operations.mongodb_check import check_encryption, check_mongodb
from mongo_celery.bridge.operations.snapshot_reader import LOOK_SECONDS, shape
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import SEVERITIES, Finding, failing, ok
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.outbox.watching import TASK_PREFIX

_TASK_PROTOCOL = 2


def check(wiring: Wiring, line: CommandLine | None = None) -> list[Finding]:
    """
    Check a bridge's needs and its state, for some seconds.

    Afterwards MongoDB and the broker are unchanged. The result is valid only for this moment.

    Args:
        line: the beginning of commands in findings.

    Returns:
        Findings, the worst first.

    Raises:
        ConfigurationError: an option is wrong, so nothing can be checked yet.
    """
    assert wiring.options, "reading the options raises an error if one is wrong"
    line, concern = line or wiring.line, wiring.state_concern
    found = collect_findings("celery", lambda: _check_celery(wiring), concern)
    mongodb = collect_findings("state_unreadable", lambda: check_mongodb(wiring.reach(), wiring), concern)
    failed = {each.code for each in mongodb if each.severity == "failing"}
    found += mongodb
    workers, asked = ask_servers(wiring, line)
    found += [*collect_findings("exposure", lambda: check_encryption(wiring), concern), *asked]
    if not failed & {"state_unreadable", "topology", "state_rights"}:
        state = collect_findings("state", lambda: _judge_state(wiring, line, workers, asked), concern)
        judged = {each.code for each in state}
        judged |= set() if "state" in judged else {"no_worker"}  # the state shows the work that waits for workers
        found = [*state, *(each for each in found if each.code not in judged)]
    return sorted(found, key=lambda each: -SEVERITIES.index(each.severity))


def _judge_state(
    wiring: Wiring, line: CommandLine, workers: Workers | None, asked: Sequence[Finding]
) -> Iterator[Finding]:
    seen = judge(replace(shape(read_facts(wiring, LOOK_SECONDS)), workers=workers), line, asked)
    yield from seen.findings
    if seen.leader is not None:
        yield ok("leader", f"Leader: {seen.leader.host}, pid {seen.leader.pid}.")


def _check_celery(wiring: Wiring) -> Iterator[Finding]:
    conf = wiring.app.conf
    if conf.task_always_eager:
        text = "task_always_eager is set. It drops chains, so no change would be committed. Unset it."
        yield failing("task_always_eager", text)
    if conf.task_protocol != _TASK_PROTOCOL:
        yield failing("task_protocol", "task_protocol=1 cannot carry chains. Use Celery's default, 2.")
    names = [handler.name for handler in wiring.handlers]
    if names:
        text = f"{len(names)} registered: {', '.join(names)}."
        if all(handler.task_name.startswith(f"{TASK_PREFIX}.") for handler in wiring.handlers):
            text += (
                " These belong to outboxes. If you have @bridge.on_change functions, import their module, for example "
            )
            text += "with include=[...] of the Celery app."
        yield ok("handlers", text)
    else:
        yield failing("handlers", NO_HANDLERS)
    yield check_time_limits(wiring)
