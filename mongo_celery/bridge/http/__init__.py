"""Probes, metrics and a status page beside the listeners of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.process import Beside


def make_http_service(address: str, *, tried: bool = False) -> Beside:
    """
    Return the HTTP service for `run_listeners`. No server is imported before this call.

    Args:
        address: `[HOST:]PORT`.
        tried: True to bind the address once and release it.

    Raises:
        ConfigurationError: it is not an address, or it cannot be bound (with `tried`).
    """
    from mongo_celery.bridge.http.server import HttpServer, parse_address
    from mongo_celery.bridge.http.service import HttpService

    parse_address(address)
    if tried:
        HttpServer(address, lambda _path: None).server_close()
    return lambda app, activities: HttpService(app, activities, address)
