"""The Django project of the examples in a browser: an order from a form to the denormalised page, and the admin."""

from __future__ import annotations

from typing import Any

from tests.fixtures.availability import require_server
from tests.fixtures.process import ROOT, Processes, wait_for


def test_an_order_goes_from_a_request_to_the_denormalised_page(browser: Any, processes: Processes) -> None:
    """Web process, outbox, worker, listener and beat, all of MongoDB; what was typed is text on every page."""
    require_server("mongod")
    require_server("redis-server")
    shop = processes.python("shop", str(ROOT / "examples/django_shop/run.py"), "serve")
    address, password = shop.wait_for_output(r"(http\S+) and \S+ for operator with (\S+)\n").groups()

    def reloaded() -> str:
        browser.get(address)
        return str(browser.find_element("tag name", "body").text)

    assert "confirmed" not in reloaded()
    browser.find_element("name", "customer").send_keys("<b>Ann</b>")
    browser.find_element("tag name", "button").click()
    wait_for(lambda: "<b>Ann</b>: lamp, confirmed" in reloaded(), message=reloaded)

    browser.get(f"{address}admin/mongo_celery/changebridge/")
    browser.find_element("name", "username").send_keys("operator")
    browser.find_element("name", "password").send_keys(password)
    browser.find_element("css selector", "[type=submit]").click()
    wait_for(lambda: "leading" in browser.page_source, message=lambda: browser.page_source)
    browser.find_element("link text", "shop").click()
    browser.find_element("css selector", "button[value=pause]").click()
    browser.find_element("css selector", ".mongo-celery [type=submit]").click()
    assert "show: paused" in browser.find_element("class name", "messagelist").text
    browser.get("about:blank")
    assert shop.terminate() == 0, shop.text
