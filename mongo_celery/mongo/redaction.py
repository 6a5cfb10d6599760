"""Words of drivers without the credentials of URLs."""

from __future__ import annotations

import logging
import re
import traceback

from mongo_celery.visible import Lines

_USER_INFO = re.compile(r"(?:(\w+://)[^\s\"'(]*|[^\s\"'(]+)@")
"""
Also the pieces into which drivers cut a URL whose password is not escaped. An `@` with nothing before it hides nothing:
it is a decorator's, which some of our sentences name.
"""

_COMMAND = re.compile(r"(to execute command \{ \w+: [^,]*),.*", re.DOTALL)
"""What a server without a right repeats of a command: whole documents, and its signature."""

_URL_USER_INFO = re.compile(r"(://)[^\s\"']*@")
_LINE_TAIL = re.compile(r"( \(configured timeouts:|, Timeout:|, full error:).*$", re.MULTILINE)
_LINE_COMMAND = re.compile(r"(to execute command \{ \w+: [^,\n]*),.*$", re.MULTILINE)

_TAILS = (" (configured timeouts:", ", Timeout:", ", full error:")


def without_credentials(text: str) -> str:
    """A text whose URLs show no user and no password."""
    return _USER_INFO.sub(r"\1***@", text)


def short(error: BaseException) -> str:
    """An error's own words, without what drivers append, and without credentials."""
    text = str(error) or type(error).__name__
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
    return without_credentials(_COMMAND.sub(r"\1, ... }", text).rstrip("."))


def terse(text: str) -> str:
    """
    A text of somebody else's (an error of a handler, a traceback) without what drivers append, line by line.

    Of URLs the user and the password go; other words with an `@` may be anybody's, and stay.
    """
    return _URL_USER_INFO.sub(r"\1***@", _LINE_COMMAND.sub(r"\1, ... }", _LINE_TAIL.sub("", text)))


def traceback_of(error: BaseException) -> Lines:
    """Its traceback as Python prints it, made `terse`: for logs, in the place of `exc_info`."""
    return Lines(terse("".join(traceback.format_exception(error)).rstrip("\n")))


def keep_commands_out_of_logs() -> None:
    """
    At `-l DEBUG` PyMongo would log each command: whole documents, and the signing key as it is read.

    Whoever wants that sets the level of the logger `pymongo.command`, or `pymongo`, explicitly. Called
    where logging is set up and where clients are made: an app that sets up logging by itself sends no signal.
    """
    commands = logging.getLogger("pymongo.command")
    if commands.level == logging.NOTSET and logging.getLogger("pymongo").level == logging.NOTSET:
        commands.setLevel(logging.INFO)
