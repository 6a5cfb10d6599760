"""
The reference, from the code: what a page asks for by a block `generated` is written there as Markdown.

    ```{generated} commands
    ```

Nothing in it is written twice: signatures and docstrings, help texts, options and their defaults, and errors are those
of the package.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import click

import mongo_celery
from mongo_celery import errors
from mongo_celery.bridge.options import SETTING_PREFIX, BridgeOptions
from mongo_celery.cli import changes, listener, outbox, tools, transactions
from mongo_celery.outbox.options import OutboxOptions, SharedOptions

_BLOCK = re.compile(r"^```\{generated\} (\w+)(.*?)\n```$", re.MULTILINE | re.DOTALL)
_CALL_ONLY = {"name", "autodiscover"}  # a name is not a setting; the URL is the one setting that is no option
_MEMBERS = "   :members:\n   :exclude-members: wiring"  # that one is what the package's own parts are handed
_WITH_APP = {
    "listener": listener.listener,
    "changes": changes.changes,
    "outbox": outbox.outbox,
    "transactions": transactions.transactions,
}


def setup(app: Any) -> dict[str, Any]:
    """Sphinx asks for this."""
    app.connect("source-read", lambda _app, _page, source: source.insert(0, generated(source.pop())))
    app.connect("autodoc-process-docstring", _set_code, priority=100)  # before napoleon looks for sections
    return {"parallel_read_safe": True}


def _set_code(*event: Any) -> None:
    """Docstrings set code in single backticks, which may stand right before a letter."""
    _app, kind, *_, lines = event
    if kind in {"attribute", "property"}:
        lines[:0] = ["..", ""]  # a comment: else what stands before a colon in the first line is taken for a type
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", "\n".join(lines)).split("\n")


def generated(page: str) -> str:
    """A page with what its blocks ask for."""
    return _BLOCK.sub(lambda block: "\n".join(_PARTS[block[1]](*block[2].split())), page)


def _api(module: str, *names: str) -> Iterator[str]:
    """Classes and functions of a module, one after the other; without names all that the package itself has not."""
    home = importlib.import_module(module)
    for name in names or [each for each in home.__all__ if each not in mongo_celery.__all__]:
        value = getattr(home, name)
        kind, members = ("class", _MEMBERS) if inspect.isclass(value) else ("function", "")
        if not callable(value):
            kind = "data"
        yield from (f"### {name}", "", "```{eval-rst}", f".. auto{kind}:: {module}.{name}", members, "```", "")


def _settings() -> Iterator[str]:
    yield "| option | Celery setting | in Django | type | default |"
    yield "|---|---|---|---|---|"
    yield "| `url` | `mongo_celery_database_url` | `CELERY_MONGO_CELERY_DATABASE_URL` | `str` | must be given |"
    for field in dataclasses.fields(BridgeOptions):
        setting = f"{SETTING_PREFIX}{field.name}"
        names = ("", "") if field.name in _CALL_ONLY else (f"`{setting}`", f"`CELERY_{setting.upper()}`")
        default = "the app's name" if field.name == "name" else _code(field.default)
        yield f"| `{field.name}` | {names[0]} | {names[1]} | {_code(field.type, plain=True)} | {default} |"


def _outbox_settings() -> Iterator[str]:
    """The options of an outbox, with the meanings that their docstring gives."""
    defaults = {field.name: field.default for field in dataclasses.fields(OutboxOptions)}
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for name, meaning in _attributes(SharedOptions).items():
        yield f"| `{name}` | {_code(defaults[name])} | {meaning} |"


def _errors() -> Iterator[str]:
    """Every class, below the one that it is a kind of."""
    yield from _error(errors.MongoCeleryError, 2)


def _error(kind: type[errors.MongoCeleryError], level: int) -> Iterator[str]:
    parent = kind.__mro__[1]
    of = "" if parent is Exception else f"A [{parent.__name__}](#{parent.__name__.lower()}). "
    again = "If you repeat the call later, it may succeed." if kind.retryable else ""
    yield from (f"{'#' * level} {kind.__name__}", "", inspect.getdoc(kind) or "", "", f"{of}{again}", "")
    for each in kind.__subclasses__():
        if each.__module__ != errors.__name__:  # the demo's own, where that was imported
            continue
        yield from _error(each, min(level + 1, 4))


def _commands() -> Iterator[str]:
    """What `--help` says, of all commands."""
    for name, command in _WITH_APP.items():
        yield from _command(command, f"celery -A app {name}", 2)
    yield from _command(tools.main, "mongo-celery", 2)


def _command(command: click.Command, path: str, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield from (f"{'#' * level} {path}", "", "```text", usage, "```", "", _prose(command.help or ""), "")
    shown = [each for each in command.get_params(context) if "--help" not in each.opts]
    options = [record for each in shown if (record := each.get_help_record(context))]
    if options:
        yield from ("| option | |", "|---|---|")
        yield from (f"| `{_cell(name)}` | {_cell(text)} |" for name, text in options)
        yield ""
    yield from (f"Example: `{str(command.epilog).removeprefix('Example: ')}`", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from _command(found, f"{path} {name}", min(level + 1, 4))


def _attributes(kind: type[Any]) -> dict[str, str]:
    """What the section `Attributes` of a docstring says of each."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    joined = re.sub(r"\n {8,}", " ", section)
    return dict(re.findall(r"^ {4}(\w+): (.*)$", joined, re.MULTILINE))


def _code(value: object, *, plain: bool = False) -> str:
    text = str(value) if plain else repr(value)
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _prose(text: str) -> str:
    """Help as Markdown: click's own mark for lines that stay as they are is none of it, and capitals are not tags."""
    return inspect.cleandoc(text).replace("\b\n", "").replace("\f", "").replace("<", "\\<")


_PARTS: dict[str, Callable[..., Iterator[str]]] = {
    "api": _api,
    "settings": _settings,
    "outbox_settings": _outbox_settings,
    "errors": _errors,
    "commands": _commands,
}
