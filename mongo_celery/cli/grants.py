"""`celery -A app changes grants`: the roles that a bridge's users need in MongoDB, ready for mongosh."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import all_of, json_option, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.grants import Right

_WIDTH = 80
_ROLES = ("listener", "worker", "operator", "viewer")  # as in operations.grants, which the help need not import


@click.command()
@click.option("--bridge", metavar="NAME", help="The bridge, where the app has several.")
@click.option("--role", "roles", type=click.Choice(_ROLES), multiple=True, help="Of whom; may be repeated. All four.")
@click.option("--user", metavar="NAME", help="Also the command that gives the roles to this user of admin.")
@click.option("--update", is_flag=True, help="For roles that exist: after a handler, a source or an option has come.")
@click.option("--without-optional", is_flag=True, help="Leave out what is marked as optional.")
@json_option("role")
@click.pass_context
def grants(
    ctx: click.Context,
    bridge: str | None,
    roles: tuple[str, ...],
    user: str | None,
    update: bool,
    without_optional: bool,
    as_json: bool,
) -> None:
    """
    Print the least rights that bridges need in MongoDB.

    A role each for listeners, for workers, for the people who run `changes` and for those who only look, on the
    databases and collections that the bridge really uses. Paste it into mongosh as a user who may create roles. Nothing
    is asked of MongoDB and nothing is changed.

    A process that does two things (`worker --listener`) needs both roles. What handlers themselves read and write is
    not in them.
    """
    from mongo_celery.bridge.operations.grants import grant_command, rights_of, role_command
    from mongo_celery.bridge.wiring import BRIDGES

    chosen = roles or _ROLES
    for each in all_of(ctx, BRIDGES, bridge):
        with one_sentence_errors():
            found = {role: rights_of(each, role) for role in chosen}
        if without_optional:
            found = {role: [right for right in rights if right.without is None] for role, rights in found.items()}
        for role, rights in found.items():
            create = role_command(each.name, role, rights, update=update)
            grant = grant_command(each.name, [role], user) if user else None
            if as_json:
                click.echo(json.dumps(_answer(each.name, role, [create, *filter(None, [grant])], rights)))
            else:
                for line in [*_script(each.name, role, create, rights), *_granting(grant), ""]:
                    say(line)


def _answer(bridge: str, role: str, commands: Sequence[dict[str, Any]], rights: Sequence[Right]) -> dict[str, Any]:
    optional = [{**right.privilege, "without": right.without} for right in rights if right.without is not None]
    return {"bridge": bridge, "role": role, "commands": list(commands), "optional": optional}


def _script(bridge: str, role: str, create: dict[str, Any], rights: Sequence[Right]) -> Iterator[str]:
    """The command for mongosh, each privilege with what it is for."""
    from mongo_celery.bridge.operations.grants import ROLES

    command, name = next(iter(create.items()))
    yield from _comment(f"The {role} of bridge {bridge}: {ROLES[role]}.", "")
    yield "db.adminCommand({"
    yield f"  {command}: {json.dumps(name)},"
    yield "  privileges: ["
    for right in rights:
        yield from _comment(right.purpose, "    ")
        if right.without is not None:
            yield from _comment(f"optional; without it {right.without}", "    ")
        yield "    {"
        yield f"      resource: {_object(right.resource)},"
        yield f"      actions: {json.dumps(list(right.actions))},"
        yield "    },"
    yield "  ],"
    yield "  roles: [],"
    yield "})"


def _granting(grant: dict[str, Any] | None) -> Iterator[str]:
    if grant is None:
        return
    yield "db.adminCommand({"
    yield f"  grantRolesToUser: {json.dumps(grant['grantRolesToUser'])},"
    yield f"  roles: [{', '.join(_object(each) for each in grant['roles'])}],"
    yield "})"


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}// {line}" for line in textwrap.wrap(text, _WIDTH - len(indent) - len("// "))]


def _object(fields: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()) + " }"
