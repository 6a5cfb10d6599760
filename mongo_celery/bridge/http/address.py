"""Where HTTP is served, and by which names: an address as it is typed, and the header `Host` of a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from mongo_celery.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
_PORT_MAX = 65_535
_GIVEN = re.compile(r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:\s]*):)?(?P<port>\d{1,5})")
_HOST_HEADER = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:\s]+)(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """
    Where to serve.

    Attributes:
        host: a name or an IP address, an IPv6 one without brackets.
        port: 0 for one that is free; the log says which.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


def http_address(text: str) -> HttpAddress:
    """
    An address from `HOST:PORT`, `[IPV6]:PORT`, `:PORT` or `PORT`; without a host that of loopback.

    Raises:
        ConfigurationError: it is none of these.
    """
    found = _GIVEN.fullmatch(text.strip())
    if found is None or int(found["port"]) > _PORT_MAX:
        raise ConfigurationError(
            f"{text!r} is no address to serve HTTP at: give HOST:PORT, or PORT for this machine alone; 0.0.0.0:9100 is "
            "port 9100 of all its addresses, and [::1]:9100 an IPv6 one."
        )
    return HttpAddress((found["host"] or LOOPBACK).strip("[]"), int(found["port"]))


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def answers_to(header: str | None, address: HttpAddress) -> bool:
    """
    Whether a request that names this host is answered.

    A page of somebody else's in a browser on this machine can have its own name point to 127.0.0.1 and read what is
    served there. Its requests carry that name; so what is served to this machine alone answers to this machine's own
    names, and to addresses, which nobody can point elsewhere. What others are served has names that are not known here.
    """
    if header is None or not address.is_loopback:  # no browser leaves it out
        return True
    found = _HOST_HEADER.fullmatch(header.strip())
    if found is None:
        return False
    host = found["host"].strip("[]")
    if is_loopback(host):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
