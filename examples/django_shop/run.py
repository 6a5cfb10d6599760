"""
A Django project with its page, listener, worker and beat sells more than it has; one of its processes is killed.

    python examples/django_shop/run.py
    python examples/django_shop/run.py serve      # until Ctrl-C, for a browser
"""

import http.cookiejar
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.server import free_port

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
LAMPS, CUSTOMERS = 4, 5
CELERY = [sys.executable, "-m", "celery", "-A", "shop", "--quiet"]
BEAT = ["beat", "--schedule", os.devnull, "--scheduler", "celery.beat:Scheduler"]
SECONDS = 180  # four interpreters with Django and Celery take their time on a busy machine


def main() -> int:
    """Sell all lamps, one of them in a process that is killed; then look whether all is as it should be."""
    with running() as address:
        killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
        print(f"one order, in a process that ended by {signal.Signals(-killed).name}")
        visitor = Visitor(address)
        for number in range(1, CUSTOMERS):
            has_one = visitor.order(f"customer-{number}", "lamp")
            print(f"customer-{number} {'has a lamp' if has_one else 'comes too late'}")
        return judge(visitor)


def serve() -> int:
    """Sell lamps to whoever comes, until somebody has enough."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running() as address:
        password = secrets.token_urlsafe(12)
        from django.contrib.auth.models import User

        User.objects.create_superuser("operator", password=password)
        print(f"{address} and {address}admin/ for operator with {password}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


@contextmanager
def running() -> Iterator[str]:
    """Servers and all processes of the shop; gives the address of its page."""
    with MongoReplicaSet() as mongo, RedisServer() as redis:
        os.environ.update(
            MONGO_URL=mongo.url, REDIS_URL=redis.url, PYTHONPATH=str(HERE), DJANGO_SETTINGS_MODULE="shop.settings"
        )
        prepare()
        port = free_port()
        web = [sys.executable, str(HERE / "manage.py"), "runserver", "--noreload", f"127.0.0.1:{port}"]
        commands = [[*CELERY, "listener"], [*CELERY, "worker", "--concurrency", "2"], [*CELERY, *BEAT], web]
        processes = [start(command) for command in commands]
        try:
            address = f"http://127.0.0.1:{port}/"
            wait_for_page(Visitor(address), processes[-1])
            yield address
        finally:
            end(processes)


def prepare() -> None:
    """Django with this folder's project, its collections, and some lamps."""
    import django

    sys.path.insert(0, str(HERE))
    django.setup()
    from django.core.management import call_command
    from shop.models import Article

    call_command("migrate", run_syncdb=True, verbosity=0)
    Article.objects.create(name="lamp", left=LAMPS)


class Visitor:
    """Somebody with a browser: cookies, and the form's token."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.cookies = http.cookiejar.CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def page(self) -> str:
        with self.opener.open(self.address, timeout=SECONDS) as answer:
            return str(answer.read().decode())

    def order(self, customer: str, article: str) -> bool:
        self.page()
        token = next(each.value for each in self.cookies if each.name == "csrftoken")
        fields = {"customer": customer, "article": article, "csrfmiddlewaretoken": token}
        try:
            self.opener.open(self.address, urllib.parse.urlencode(fields).encode(), SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            return False
        return True


def judge(visitor: Visitor) -> int:
    """Wait for what can still come, then look."""
    from django.db import connection
    from shop.models import Article, Order

    deadline = time.monotonic() + SECONDS
    outbox = connection.get_collection("shop_outbox")
    while time.monotonic() < deadline and (visitor.page().count(", confirmed") < LAMPS or outbox.count_documents({})):
        time.sleep(0.1)
    sold, left = Order.objects.count(), Article.objects.get(name="lamp").left
    confirmed, shown = Order.objects.filter(confirmed=True).count(), visitor.page().count("<li>")
    print(f"{sold} sold, {left} left, {confirmed} confirmed, {shown} on the page")
    right = (sold, left, confirmed, shown) == (LAMPS, 0, LAMPS, LAMPS)
    if not right:
        failed("WRONG")
    print("what was sold is confirmed and shown, and nothing else")
    return 0


def place_and_die() -> None:
    """Be killed when the transaction has been committed, and nothing of it has been sent yet."""
    import django

    django.setup()
    from celery.signals import before_task_publish
    from shop.models import Order
    from shop.orders import place

    def die(**_: object) -> None:
        if Order.objects.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    before_task_publish.connect(die, weak=False)
    place("customer-0", "lamp")
    os.kill(os.getpid(), signal.SIGKILL)  # at the latest: what has not been sent yet is in MongoDB


def wait_for_page(visitor: Visitor, server: "subprocess.Popen[bytes]") -> None:
    """Until the web server answers."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            visitor.page()
        except OSError:
            if server.poll() is not None:
                failed(f"the web server has ended with {server.returncode}")
            if time.monotonic() > deadline:
                failed("the page did not come")
            time.sleep(0.1)
        else:
            return


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log is shown if something does not come."""
    return subprocess.Popen(command, stdout=LOG, stderr=LOG)


def end(processes: "list[subprocess.Popen[bytes]]") -> None:
    """As a supervisor does: whoever does not end within its time is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def failed(what: str) -> NoReturn:
    """End with status 1, and with what the processes have said."""
    sys.stderr.write(os.pread(LOG.fileno(), LOG_BYTES_MAX, 0).decode(errors="replace"))
    sys.exit(what)


if __name__ == "__main__":
    if sys.argv[1:] == ["place-and-die"]:
        place_and_die()
    if sys.argv[1:] == ["serve"]:
        sys.exit(serve())
    sys.exit(main())
