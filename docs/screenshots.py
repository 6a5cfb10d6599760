"""
Screenshots of a running bridge: `python docs/screenshots.py` writes them into docs/pictures.

It starts MongoDB, Redis, a listener, a worker and Django's admin with a project of two handlers, breaks one of them on
purpose, and takes pictures by the machine's Chromium when the verdict is failing. It needs `pip install -e '.[dev]'`,
chromium and chromium-driver, and takes about a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from mongo_celery.embedded import MongoReplicaSet, RedisServer

PICTURES = Path(__file__).parent / "pictures"
SECONDS_MAX = 120.0
USER = PASSWORD = "ann"  # noqa: S105 - of a site that lives for a minute

FILES = {
    "shop/__init__.py": "from shop.celery import app, bridge\n",
    "shop/celery.py": """
import os

from celery import Celery
from mongo_celery import Bridge

app = Celery("shop", broker=os.environ["REDIS_URL"], include=["shop.changes"])
bridge = Bridge(app, os.environ["MONGO_URL"], name="shop", partitions=8)
""",
    "shop/changes.py": """
import time

from shop.celery import bridge

@bridge.on_change("shop.orders", time_limit=60)
def summarise(change):
    total = sum(line["price"] for line in change.full_document["lines"])
    change.fenced("shop.order_summaries").replace_one(change.document_key, {"total": total}, upsert=True)

@bridge.on_change("shop.orders", operations={"insert"}, failure_policy="dead_letter", time_limit=60)
def send_receipt(change):
    time.sleep(0.02)
    if "@" not in change.full_document["customer"]:
        raise ValueError(f"{change.full_document['customer']!r} is no address")
""",
    "shop/site.py": """
from pathlib import Path

SECRET_KEY = "of a minute"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "shop.urls"
STATIC_URL = "static/"
MONGO_CELERY_APP = "shop.celery:app"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).parent / "site.sqlite3"}}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "mongo_celery.contrib.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
PROCESSORS = ("template.context_processors.request", "contrib.auth.context_processors.auth",
              "contrib.messages.context_processors.messages")
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [f"django.{each}" for each in PROCESSORS]},
}]
""",
    "shop/urls.py": """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
""",
}


class Project:
    """A project in a directory of its own, and its processes."""

    def __init__(self, directory: Path, mongo_url: str, redis_url: str) -> None:
        self._directory = directory
        self._environment = {
            **os.environ,
            "MONGO_URL": mongo_url,
            "REDIS_URL": redis_url,
            "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
        }
        for name, text in FILES.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    @contextmanager
    def start(self, *arguments: str, settings: str | None = None) -> Iterator[None]:
        """Run a module of Python until the block ends."""
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", *arguments],
            cwd=self._directory,
            env=self._environment | ({"DJANGO_SETTINGS_MODULE": settings} if settings else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(SECONDS_MAX)

    def run(self, *arguments: str, settings: str | None = None) -> str:
        """Run a module of Python to its end, and return its output."""
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", *arguments],
            cwd=self._directory,
            env=self._environment | {"COLUMNS": "100"} | ({"DJANGO_SETTINGS_MODULE": settings} if settings else {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        return done.stdout


class Camera:
    """The machine's Chromium, without a window."""

    def __init__(self, directory: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
        for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", f"user-data-dir={directory}"):
            options.add_argument(f"--{flag}")
        self.browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))

    def take(self, name: str, width: int = 1000) -> None:
        """Write a picture of the whole page that is open."""
        self._size(width, 200)
        height = self.browser.execute_script("return document.documentElement.scrollHeight")
        self._size(width, height)
        self.browser.save_screenshot(str(PICTURES / f"{name}.png"))

    def _size(self, width: int, height: int) -> None:
        self._emulate("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _emulate(self, command: str, **arguments: Any) -> None:
        self.browser.execute_cdp_cmd(f"Emulation.{command}", arguments)


def wait_for(condition: Callable[[], Any], text: str) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + SECONDS_MAX
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise TimeoutError(text)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Return True if a server listens on a port."""
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def read_verdict(project: Project) -> dict[str, Any]:
    """Return the verdict with its findings."""
    found: dict[str, Any] = json.loads(project.run("celery", "-A", "shop", "changes", "status", "--ask", "--json"))
    return found


def write_orders(mongo_url: str) -> None:
    """Two hundred good orders, two without a valid address, one without a price."""
    with MongoClient[dict[str, Any]](mongo_url) as client:
        orders = client.shop.orders
        orders.insert_many([{"customer": f"{number}@example.com", "lines": [{"price": 5}]} for number in range(200)])
        orders.insert_many([{"customer": name, "lines": [{"price": 3}]} for name in ("Ann", "Bob")])
        orders.insert_one({"_id": 4711, "customer": "eve@example.com", "lines": [{"article": "lamp"}]})


def show_terminal(browser: Any, directory: Path, command: str, output: str) -> None:
    """Open a page that looks like a terminal."""
    page = directory / "terminal.html"
    style = "margin:0;padding:16px 20px;background:#1b1f24;color:#e6edf3;font:14px/1.45 monospace;white-space:pre-wrap"
    page.write_text(f'<body style="margin:0"><pre style="{style}">$ {escape(command)}\n{escape(output)}</pre>')
    browser.get(page.as_uri())


def log_in(browser: Any, url: str) -> None:
    """Log in to the admin, at the page of the bridges."""
    browser.get(f"{url}/admin/login/?next=/admin/mongo_celery/changebridge/")
    browser.find_element(By.NAME, "username").send_keys(USER)
    browser.find_element(By.NAME, "password").send_keys(PASSWORD)
    browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()


def main() -> None:
    """Start everything, and take the pictures."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mongo, redis = stack.enter_context(MongoReplicaSet()), stack.enter_context(RedisServer())
        project = Project(directory, mongo.url, redis.url)
        page, site = free_port(), free_port()
        project.run("django", "migrate", settings="shop.site")
        create = ("createsuperuser", "--noinput", "--username", USER, "--email", "ann@example.com")
        project.run("django", *create, settings="shop.site")
        stack.enter_context(project.start("celery", "-A", "shop", "listener", "--http", str(page)))
        stack.enter_context(project.start("celery", "-A", "shop", "worker", "-c", "2"))
        stack.enter_context(
            project.start("django", "runserver", "--noreload", f"127.0.0.1:{site}", settings="shop.site")
        )
        wait_for(lambda: read_verdict(project)["verdict"] == "healthy", "the bridge is not healthy")
        write_orders(mongo.url)
        wait_for(
            lambda: {"halted", "dead_letters"} <= {each["code"] for each in read_verdict(project)["findings"]},
            "the findings are missing",
        )
        wait_for(lambda: listens(page) and listens(site), "a page does not answer")

        camera = Camera(directory / "chromium")
        stack.callback(camera.browser.quit)
        camera.browser.get(f"http://127.0.0.1:{page}/")
        wait_for(lambda: "FAILING" in camera.browser.page_source.upper(), "the page does not show the verdict")
        camera.take("page")
        command = "celery -A shop changes status --ask"
        show_terminal(camera.browser, directory, command, project.run(*command.split()))
        camera.take("status")
        log_in(camera.browser, f"http://127.0.0.1:{site}")
        camera.browser.find_element(By.LINK_TEXT, "shop").click()
        camera.take("admin", 1300)


if __name__ == "__main__":
    main()
