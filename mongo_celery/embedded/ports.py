"""Ports on the loopback interface."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from mongo_celery.errors import EmbeddedServerError

HOST = "127.0.0.1"

_LOWEST_PORT = 20000
_EPHEMERAL_PORTS_FROM = 32768  # Linux's default
_PROBES_MAX = 100
_chance = random.SystemRandom()


def free_port() -> int:
    """
    Name a port of 127.0.0.1 on which nobody listens at this moment.

    Another process may take it before the caller does: whoever uses it has to be ready to ask
    again. The port lies below the range from which the kernel takes the ports of outgoing
    connections. Above, a client that knocks on a stopped server's port can be given that very port
    as its own, connect to itself, and keep the server from coming back. It is drawn from the
    machine's own chance: processes that were given one seed would all ask for the same ports.
    """
    for _ in range(_PROBES_MAX):
        port = _chance.randrange(_LOWEST_PORT, _lowest_ephemeral_port())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise EmbeddedServerError(f"No free port was found on {HOST} in {_PROBES_MAX} probes: is the network up?")


def _lowest_ephemeral_port() -> int:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        lowest = _EPHEMERAL_PORTS_FROM
    return lowest if lowest > _LOWEST_PORT + _PROBES_MAX else 65536
