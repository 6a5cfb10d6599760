"""The pages of bridges: problems, blocked partitions, handlers, and their actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import pymongo
from django.http import HttpRequest, QueryDict

from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus, PartitionStatus, unreadable
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.contrib.django.admin.pages import (
    READ_SECONDS,
    AdminCell,
    AdminPage,
    AdminRow,
    AdminTable,
    OperationsAdmin,
    make_operations,
    to_sentence,
)
from mongo_celery.contrib.django.models import ChangeDeadLetter
from mongo_celery.contrib.django.project import celery_app
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan
from mongo_celery.quantities import duration, moment

_BLOCKED_MAX = 50
_ACTIONS: Mapping[str, tuple[str, ...]] = {"halted": ("retry", "skip"), "retrying": ("retry",), "paused": ("resume",)}
"""The actions for a partition, by its state."""


class BridgeAdmin(OperationsAdmin):
    """Pages for all bridges of the project's app, or one of them."""

    labels: Mapping[str, str] = {"pause": "Pause", "resume": "Resume", "retry": "Retry", "skip": "Skip"}
    names = ("bridge", "handler", "partition")

    def read_page(self, request: HttpRequest) -> AdminPage:
        """Read one bridge, or all of them concurrently, so that silent servers cost only one wait."""
        if name := request.GET.get("bridge"):
            return self._show_bridge(request, _read(make_operations(request, name), name))
        names = [each.name for each in BRIDGES.of(celery_app())]
        operations = [make_operations(request, each) for each in names]
        with ThreadPoolExecutor(len(names) or 1, thread_name_prefix="mongo-celery-admin") as threads:
            rows = [self._list_bridge(each) for each in threads.map(_read, operations, names)]
        return AdminPage(
            title="Bridges", tables=[AdminTable(rows=rows, none="The project's Celery app has no bridge.")]
        )

    def _list_bridge(self, seen: BridgeSnapshot) -> AdminRow:
        cells = {
            "Bridge": AdminCell(seen.bridge, url=f"?{urlencode({'bridge': seen.bridge})}"),
            "Health": AdminCell(seen.verdict, style=seen.verdict),
            "State": seen.state.replace("_", " "),
            "Lag": duration(seen.lag_seconds),
            "Dead letters": seen.dead_letters,
            "Problem": seen.findings[0].sentence if seen.findings else seen.note or "",
        }
        return AdminRow(cells)

    def _show_bridge(self, request: HttpRequest, seen: BridgeSnapshot) -> AdminPage:
        title = f"Bridge {seen.bridge}"
        problems = AdminTable(title="Problems", none="No problems.", rows=[
            AdminRow({
                "Severity": AdminCell(each.severity, style=each.severity),
                "Problem": each.sentence,
                "Commands": AdminCell("\n".join(each.commands), style="command"),
                "Code": AdminCell(each.code, style="code"),
            })
            for each in seen.findings
        ])  # fmt: skip
        if not seen.is_readable:
            return AdminPage(title=title, tables=[problems])
        leader = seen.leader
        led = "none" if leader is None else f"{leader.host}, pid {leader.pid}, since {moment(leader.since)}"
        health = f"Health: {seen.verdict}. Lag: {duration(seen.lag_seconds)}. Listener: {led}."
        blocked = [(each, part) for each in seen.handlers for part in each.partitions if part.is_blocked]
        more = len(blocked) - _BLOCKED_MAX
        letters = self._letters_url(request, seen.bridge)
        tables = [
            problems,
            AdminTable(
                title=f"Blocked partitions{f', and {more} more' if more > 0 else ''}",
                none="No blocked partitions.",
                rows=[self._show_partition(seen.bridge, *each) for each in blocked[:_BLOCKED_MAX]],
            ),
            AdminTable(title="Handlers", none="No handlers.", rows=[
                self._show_handler(seen.bridge, each, letters) for each in seen.handlers
            ]),
            AdminTable(title="Dead letters by error", rows=[
                AdminRow({
                    "Handler": each.handler,
                    "Error": each.error,
                    "Newest": moment(each.newest_at),
                    "Dead letters": AdminCell(each.count, url=_filter_letters(letters, each.handler)),
                })
                for each in seen.dead_letter_groups[:_BLOCKED_MAX]
            ]),
        ]  # fmt: skip
        return AdminPage(title=title, lines=[health, *filter(None, [seen.note])], tables=tables)

    def _show_handler(self, bridge: str, each: HandlerStatus, letters: str) -> AdminRow:
        cells = {
            "Handler": each.name,
            "State": AdminCell(each.state.replace("_", " "), style=each.state),
            "Lag": duration(each.lag_seconds),
            "Partitions": len(each.partitions),
            "Committed": each.committed,
            "Stored": "?" if each.stored is None else each.stored,
            "Dead letters": AdminCell(
                each.dead_letters, url=_filter_letters(letters, each.name) if each.dead_letters else ""
            ),
        }
        actions = {name: self.labels[name] for name in ("pause", "resume", "retry")}
        return AdminRow(cells, actions, {"bridge": bridge, "handler": each.name})

    def _show_partition(self, bridge: str, handler: HandlerStatus, each: PartitionStatus) -> AdminRow:
        cells = {
            "Handler": handler.name,
            "Partition": each.partition,
            "State": AdminCell(each.state, style=each.state),
            "Change": each.key or "",
            "Error": each.error or "",
            "Retries": each.retries,
        }
        actions = {name: self.labels[name] for name in _ACTIONS.get(each.state, ())}
        return AdminRow(cells, actions, {"bridge": bridge, "handler": handler.name, "partition": str(each.partition)})

    def _letters_url(self, request: HttpRequest, bridge: str) -> str:
        """Return the address of the bridge's dead letters. Empty if there are none, or the user may not see them."""
        may_view = any(
            request.user.has_perm(f"{self.opts.app_label}.{verb}_changedeadletter") for verb in ("view", "change")
        )
        if not may_view or not self.admin_site.is_registered(ChangeDeadLetter):
            return ""
        return f"{self.url('changelist', ChangeDeadLetter)}?{urlencode({'bridge': bridge})}"

    def make_plan(self, operations: Operations, action: str, form: QueryDict, reason: str | None) -> Plan:
        """Plan to pause, resume, retry or skip. Without a partition, the plan is for the whole handler."""
        handler, partition = form.get("handler", ""), form.get("partition", "")
        if not handler or not re.fullmatch("[0-9]{0,9}", partition):
            raise CommandRefusedError("Choose a handler or one of its partitions.")
        index = int(partition) if partition else None
        plan: Plan = getattr(operations, action)(handler, index, reason=reason)
        return plan


def _read(operations: Operations, bridge: str) -> BridgeSnapshot:
    with pymongo.timeout(READ_SECONDS):  # the timeout applies to one thread
        try:
            return operations.read_status()
        except Exception as error:  # noqa: BLE001 - it is raised again unless users can fix it
            return unreadable(bridge, to_sentence(error))


def _filter_letters(url: str, handler: str) -> str:
    return f"{url}&{urlencode({'handler': handler})}" if url else ""
