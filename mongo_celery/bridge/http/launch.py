"""From an address as it was typed to what serves there; imports nothing of a server before that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.process import Beside


def serving(text: str, app_argument: object = None, *, tried: bool = False) -> Beside:
    """
    What `run_listeners` runs beside its listeners.

    Args:
        text: the address.
        app_argument: what was given to `celery -A`, for the commands that are shown.
        tried: look at once whether it can be served there, and leave it again.

    Raises:
        ConfigurationError: it is no address, or it cannot be served there.
    """
    from mongo_celery.bridge.http.address import http_address
    from mongo_celery.bridge.http.server import HttpListener
    from mongo_celery.bridge.http.service import HttpService

    address = http_address(text)
    if tried:
        HttpListener(address, lambda _path, _accept: None).stop()
    return lambda app, activities: HttpService(app, activities, address, app_argument)
