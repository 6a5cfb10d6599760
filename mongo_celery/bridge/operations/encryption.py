"""Preflight of the lines: what travels unencrypted to another machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from mongo_celery.findings import Finding, degraded, ok

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_PLAIN_BROKERS = {"redis", "amqp", "pyamqp", "librabbitmq", "sentinel"}
_TRUE = {"true", "1"}


def check_encryption(wiring: Wiring) -> Iterator[Finding]:
    """Whether documents and passwords leave this machine unencrypted."""
    yield judge_hosts("mongodb_tls", "MongoDB", plain_mongodb_hosts(wiring.url), "add tls=true to its URL")
    conf = wiring.app.conf
    given = conf.broker_write_url or conf.broker_url or ""
    urls = given.split(";") if isinstance(given, str) else [str(url) for url in given]
    hosts = [] if conf.broker_use_ssl else [host for url in urls for host in plain_broker_hosts(url)]
    yield judge_hosts("broker_tls", "the broker", hosts, "use rediss:// or amqps://, or broker_use_ssl")


def judge_hosts(name: str, what: str, hosts: Sequence[str], remedy: str) -> Finding:
    """A finding from the hosts that are reached in plain text."""
    if not hosts:
        return ok(name, f"The way to {what} is encrypted, or stays on this machine.")
    return degraded(
        name,
        f"Passwords and documents travel to {what} at {', '.join(hosts)} in plain text; {remedy}, unless the network "
        "protects them.",
    )


def plain_mongodb_hosts(url: str) -> list[str]:
    """Hosts of a MongoDB URL that are neither encrypted nor on this machine."""
    scheme, _, rest = url.partition("://")
    options = {name.lower(): values[-1].lower() for name, values in parse_qs(rest.partition("?")[2]).items()}
    asked = options.get("tls", options.get("ssl"))
    encrypted = asked in _TRUE if asked is not None else scheme == "mongodb+srv"
    return [] if encrypted else _distant(rest)


def plain_broker_hosts(url: str) -> list[str]:
    """Hosts of a broker URL that are neither encrypted nor on this machine."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator or scheme.lower() not in _PLAIN_BROKERS:
        return []
    return _distant(rest)


def _distant(rest: str) -> list[str]:
    authority = rest.partition("?")[0].rpartition("@")[2].partition("/")[0]
    hosts = [_without_port(host) for host in authority.split(",") if host]
    return [host for host in hosts if not _is_here(host)]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_here(host: str) -> bool:
    if host in {"", "localhost"} or "%2f" in host.lower():  # the latter is the path of a socket
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
