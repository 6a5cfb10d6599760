"""`celery -A app changes grants`: the MongoDB roles for a bridge's users, ready for mongosh."""

from __future__ import annotations

import json

import click

from mongo_celery.cli.apps import all_of, json_option, one_sentence_errors, say

_ROLES = ("listener", "worker", "operator", "viewer")  # as in operations.grants, which the help must not import


@click.command(epilog="Example: celery -A shop changes grants --role worker --user shop_worker")
@click.option("--bridge", metavar="NAME", help="The bridge. Default: all bridges of the app.")
@click.option(
    "--role",
    "roles",
    type=click.Choice(_ROLES),
    multiple=True,
    help="Print this role only. May be repeated. Default: all four.",
)
@click.option("--user", metavar="NAME", help="Also print the command that grants the roles to this user of admin.")
@click.option(
    "--update",
    is_flag=True,
    help="Print commands for roles that exist, for example after you added a handler, a source or an option.",
)
@click.option("--without-optional", is_flag=True, help="Leave out rights that are marked as optional.")
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
    Print the minimal MongoDB roles for a bridge's users.

    It prints one role each for listeners, workers, operators of `changes`, and viewers. A role is limited to the
    databases and collections that the bridge uses. Paste the output into mongosh as a user who may create roles. The
    command does not connect to MongoDB and changes nothing.

    A process with two purposes, such as `worker --listener`, needs both roles. Add the rights that your handlers need
    for reads and writes.
    """
    from mongo_celery.bridge.operations.grants import ROLES, grant_command, list_rights, role_command
    from mongo_celery.bridge.wiring import BRIDGES

    for each in all_of(ctx, BRIDGES, bridge):
        for role in roles or _ROLES:
            with one_sentence_errors():
                rights = list_rights(each, role)
            if without_optional:
                rights = [right for right in rights if right.without is None]
            commands = [role_command(each.name, role, rights, update=update)]
            commands += [grant_command(each.name, [role], user)] if user else []
            if as_json:
                optional = [{**right.privilege, "without": right.without} for right in rights if right.without]
                found = {"bridge": each.name, "role": role, "commands": commands, "optional": optional}
                click.echo(json.dumps(found))
                continue
            say(f"// The {role} of bridge {each.name}: {ROLES[role]}.")
            for right in rights:
                optional_note = f" Optional. Without it {right.without}." if right.without else ""
                say(f"// - {right.words}: {right.purpose}.{optional_note}")
            for command in commands:
                for line in f"db.adminCommand({json.dumps(command, indent=2)})\n".split("\n"):
                    say(line)
