"""Text without credentials: of URLs the user and the password go, and the values that carry the name of a secret."""

from __future__ import annotations

import logging
import re
import traceback

from mongo_celery.visible import Lines

_CHARS_MAX = 16_000
_LINE_CHARS_MAX = 2000
_URL_CHARS_MAX = 400
"""Text is cut before it is redacted: an error may hold megabytes, and the interpreter lock is held meanwhile."""

_WORD = re.compile(r"\S+")
_URL_WITH_BLANKS = re.compile(
    r"://(?:|[^\s/?#:@]{1,128}(?!:\d{1,5}(?:[\s,;.'\")\]]|\Z))):(?!\s)"  # what follows a host is a port
    r"[^/?#\r\n]{0,256}[^\s/?#]@"
)
"""A URL whose password has blanks, which MongoDB's driver accepts."""

_SECRET = re.compile(
    r"((?:password|passwd|passphrase|pwd|secret|token|signature|(?:api|access|account|private)[_-]?key)[\w-]{0,32}"
    r"[\"']?[ \t]{0,4}[=:](?!=)[ \t]{0,4})"
    r"(?![{\[(])(?:\"[^\"\n]*(?:\"|\Z)|'[^'\n]*(?:'|\Z)|[^\s&;,]+)",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(
    r"(\bauthorization[\"']?[ \t]{0,4}[=:][ \t]{0,4}[\"']?(?:(?:basic|bearer|digest)[ \t]{1,4})?)[^\s,;\"']+"
    r"|(\bbearer[ \t]{1,4})(?=[^\s\d]{0,256}\d)[\w.~+/=-]{8,}",
    re.IGNORECASE,
)

_TAILS = (" (configured timeouts:", ", Timeout:", ", full error:")
_LINE_TAIL = re.compile(r"(?: \(configured timeouts:|, Timeout:|, full error:).*")
_COMMAND = re.compile(r"(to execute command \{ \w{1,64}: [^,\n]{0,300}),.*")
"""The part of a command that a server repeats when a right is missing: whole documents, and its signature."""


def without_credentials(text: str) -> str:
    """
    Return a text of ours or of a driver without credentials.

    Of each URL user and password go, and of the pieces into which drivers cut a URL whatever is before an `@`. A value
    with the name of a secret, such as `password=` or `token:`, goes too. Of a very long text the beginning is left.
    """
    return _WORD.sub(_without_piece, _mask_secrets(_beginning(text)))


def short(error: BaseException) -> str:
    """Return an error's own words, without what drivers append and without credentials."""
    text = _beginning(str(error) or type(error).__name__)
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
    command = _COMMAND.search(text)
    if command is not None:
        text = f"{text[: command.start()]}{command[1]}, ... }}"
    return without_credentials(text.rstrip("."))


def terse(text: str) -> str:
    """
    Return a text of somebody else's (an error of a handler, a traceback) without what drivers append, line by line.

    Credentials go as of `without_credentials`, but words with an `@` that are no URL may be anybody's, and stay.
    """
    return _mask_secrets(_COMMAND.sub(r"\1, ... }", _LINE_TAIL.sub("", _beginning(text))))


def format_traceback(error: BaseException) -> Lines:
    """Return the end of a traceback as Python prints it, made `terse`: for logs, in the place of `exc_info`."""
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    text = "\n".join(_beginning(line, _LINE_CHARS_MAX) for line in lines)
    if len(text) > _CHARS_MAX:
        text = text[-_CHARS_MAX:].partition("\n")[2]  # the first line may begin inside of a password
    return Lines(terse(text))


def _beginning(text: str, most: int = _CHARS_MAX) -> str:
    """Cut a text, before a URL that would lose its end, which tells the password from a host."""
    if len(text) <= most:
        return text
    at = text.rfind("://", most - _URL_CHARS_MAX, most)
    return text[: most if at < 0 else at]


def _mask_secrets(text: str) -> str:
    text = _AUTHORIZATION.sub(lambda found: f"{found[1] or found[2]}***", text)
    return _SECRET.sub(r"\1***", _WORD.sub(_without_user, _URL_WITH_BLANKS.sub("://***@", text)))


def _without_user(found: re.Match[str]) -> str:
    word = found.group()
    begin, end = word.find("://"), word.rfind("@")
    return f"{word[: begin + 3]}***{word[end:]}" if 0 <= begin < end else word


def _without_piece(found: re.Match[str]) -> str:
    """An `@` with nothing before it hides nothing: it is a decorator's, which some of our sentences name."""
    word = found.group()
    piece, end = word.lstrip("\"'`([{<"), word.rfind("@")
    begin = len(word) - len(piece)
    return word if end <= begin or "://" in word else f"{word[:begin]}***{word[end:]}"


def keep_commands_out_of_logs() -> None:
    """
    At `-l DEBUG` PyMongo would log each command: whole documents, and the signing key as it is read.

    Whoever wants that sets the level of the logger `pymongo.command`, or `pymongo`, explicitly. Called
    where logging is set up and where clients are made: an app that sets up logging by itself sends no signal.
    """
    commands = logging.getLogger("pymongo.command")
    if commands.level == logging.NOTSET and logging.getLogger("pymongo").level == logging.NOTSET:
        commands.setLevel(logging.INFO)
