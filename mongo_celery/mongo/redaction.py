"""Text without credentials: users and passwords of URLs, and values with the name of a secret, are removed."""

from __future__ import annotations

import logging
import re
import traceback

from mongo_celery.visible import Lines

_CHARS_MAX = 16_000
_LINE_CHARS_MAX = 2000
_URL_CHARS_MAX = 400
"""Text is cut before redaction: an error may have megabytes, and redaction holds the interpreter lock."""

_WORD = re.compile(r"\S+")
_URL_WITH_BLANKS = re.compile(
    r"://(?:|[^\s/?#:@]{1,128}(?!:\d{1,5}(?:[\s,;.'\")\]]|\Z))):(?!\s)"  # a port follows a host
    r"[^/?#\r\n]{0,256}[^\s/?#]@"
)
"""A URL with blanks in its password, which MongoDB's driver accepts."""

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

_HINTS = {
    "No replica set members available": "The URL's replicaSet= names a set that no server belongs to. Correct it, or "
    "make a standalone server a set with `--replSet` and `rs.initiate()`",
    'match selector "Primary()"': "There is no primary. A new set needs `rs.initiate()`, other sets elect one",
}
"""The fix for texts of the driver that do not name it, by a part of the text."""

_TAILS = (" (configured timeouts:", ", Timeout:", ", full error:")
_LINE_TAIL = re.compile(r"(?: \(configured timeouts:|, Timeout:|, full error:).*")
_COMMAND = re.compile(r"(to execute command \{ \w{1,64}: [^,\n]{0,300}),.*")
"""The command that a server repeats if a right is missing: whole documents, and its signature."""


def without_credentials(text: str) -> str:
    """
    Return a text from this package or a driver without credentials.

    It removes user and password of each URL. Drivers split URLs, so it also removes each part before an `@`, and values
    with the name of a secret, such as `password=` or `token:`. Very long text is cut.
    """
    return _WORD.sub(_without_piece, _mask_secrets(_beginning(text)))


def short(error: BaseException) -> str:
    """Return an error's message without drivers' additions and without credentials, and with a hint if it needs one."""
    text = _beginning(str(error) or type(error).__name__)
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
    command = _COMMAND.search(text)
    if command is not None:
        text = f"{text[: command.start()]}{command[1]}, ... }}"
    hint = next((f". {hint}" for part, hint in _HINTS.items() if part in text), "")
    return without_credentials(text.rstrip(".") + hint)


def terse(text: str) -> str:
    """
    Return foreign text (a handler's error, a traceback) without drivers' additions, line by line.

    Credentials are removed as in `without_credentials`, but words with an `@` outside a URL stay.
    """
    return _mask_secrets(_COMMAND.sub(r"\1, ... }", _LINE_TAIL.sub("", _beginning(text))))


def format_traceback(error: BaseException) -> Lines:
    """Return the end of Python's traceback, made `terse`. For logs, instead of `exc_info`."""
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    text = "\n".join(_beginning(line, _LINE_CHARS_MAX) for line in lines)
    if len(text) > _CHARS_MAX:
        text = text[-_CHARS_MAX:].partition("\n")[2]  # the first line may begin inside a password
    return Lines(terse(text))


def _beginning(text: str, most: int = _CHARS_MAX) -> str:
    """Cut a text. If a URL would lose its end, cut before it: only its end separates password and host."""
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
    """Keep an `@` without text before it: it belongs to a decorator, as in some of our sentences."""
    word = found.group()
    piece, end = word.lstrip("\"'`([{<"), word.rfind("@")
    begin = len(word) - len(piece)
    return word if end <= begin or "://" in word else f"{word[:begin]}***{word[end:]}"


def keep_commands_out_of_logs() -> None:
    """
    Keep PyMongo from logging each command at `-l DEBUG`, with whole documents and the signing key.

    To get these records, set the level of the logger `pymongo.command`, or `pymongo`, explicitly. Call this when
    logging is set up and when a client is made, because an app that sets up logging itself sends no signal.
    """
    commands = logging.getLogger("pymongo.command")
    if commands.level == logging.NOTSET and logging.getLogger("pymongo").level == logging.NOTSET:
        commands.setLevel(logging.INFO)
