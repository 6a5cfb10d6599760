"""The Django project of the examples in a browser: an order from a form to the denormalised page, and the admin."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.availability import require_server
from tests.fixtures.process import ROOT, Processes, wait_for


@pytest.mark.slow
def test_an_order_goes_from_a_request_to_the_denormalised_page(browser: Any, processes: Processes) -> None:
    """
    Web process, outbox, worker, listener and beat, all of MongoDB; what was typed is text on every page.

    In short: `acceptance/test_django_page.py` runs such a project, and `integration/test_django_admin.py` the admin.
    """
    require_server("mongod")
    require_server("redis-server")
    shop = processes.python("shop", str(ROOT / "examples/django_shop/run.py"), "serve")
    address, password = shop.wait_for_output(r"(http\S+) and \S+ for operator with (\S+)\n", timeout=300).groups()

    def reloaded() -> str:
        browser.get(address)
        return str(browser.find_element("tag name", "body").text)

    assert "confirmed" not in reloaded()
    browser.find_element("name", "customer").send_keys("<b>Ann</b>")
    browser.find_element("tag name", "button").click()
    wait_for(lambda: "<b>Ann</b>: lamp, confirmed" in reloaded(), message=reloaded)

    def press(selector: str) -> None:
        wait_for(lambda: browser.find_elements("css selector", selector), message=lambda: browser.page_source)
        browser.find_element("css selector", selector).click()

    browser.get(f"{address}admin/mongo_celery/changebridge/")
    browser.find_element("name", "username").send_keys("operator")
    browser.find_element("name", "password").send_keys(password)
    press("[type=submit]")
    press(".mongo-celery tbody a")
    press("button[value=pause]")
    press(".mongo-celery [type=submit]")
    press(".messagelist")
    assert "show: partitions 0" in browser.find_element("class name", "messagelist").text
    browser.set_window_size(400, 800)
    for page in ("changebridge/", "changebridge/?bridge=shop", "changedeadletter/"):
        browser.get(f"{address}admin/mongo_celery/{page}")
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), page
    browser.get("about:blank")
    assert shop.terminate() == 0, shop.text
