"""The command line and its settings, from the declarations that parsers, variables and files are made of."""

import dataclasses
import typing
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from isthmus_services.settings.command import Command, installed
from isthmus_services.settings.resolve import Setting, fields

WHERE = (
    "A flag wins over a variable, a variable over a TOML file (`--config FILE`, `ISTHMUS_CONFIG`), the file over what "
    "the command does by itself, which stands in parentheses. In the file, a name at the top is for every command "
    "and a table, `[syncer]`, for one. `--show-settings` prints what holds and where it came from."
)


def commands_page() -> str:
    """Return the page of all commands."""
    out = [
        "# Command line",
        "Every command, from the declarations that its parser is made of; `isthmus COMMAND --help` says the same.",
        WHERE,
        "Exit codes: 0 done; 1 the check failed; 2 bad usage or input, with one line that says what and where; 3 a "
        "learner that has done its steps and was never merged; 130 interrupted; 143 a learner that was told to stop "
        "before it had done its steps.",
    ]
    for command in installed()[0]:
        out += [f"## isthmus {command.name}", f"{command.help[:1].upper()}{command.help[1:]}."]
        groups: dict[type, list[Setting]] = defaultdict(list)
        for setting in fields(command.settings):
            groups[setting.owner].append(setting)
        for owner, settings in groups.items():
            if owner is not command.settings:
                out.append(f"*{_first(owner)}*")
            out.append(_table(("flag", "variable", "values", "what it is"), [_row(s) for s in settings]))
    return "\n\n".join(out) + "\n"


def settings_page() -> str:
    """Return the page of all settings by name: which commands take each."""
    takers: dict[str, list[tuple[Command, Setting]]] = defaultdict(list)
    for command in installed()[0]:
        for setting in fields(command.settings):
            if not setting.flag_only:
                takers[setting.name].append((command, setting))
    rows = []
    for name, taken in sorted(takers.items()):
        setting = taken[0][1]
        where = ", ".join(f"[{c.name}](commands.md#isthmus-{c.name.replace(' ', '-')})" for c, _ in taken)
        kinds = {(_values(s), s.description) for _, s in taken}
        said = setting.description if len(kinds) == 1 else "see the commands"
        values = _values(setting) if len(kinds) == 1 else "–"
        rows.append((f"`{name}`", f"`{setting.variable}`", values, _cell(said), where))
    out = [
        "# Settings",
        WHERE,
        "What is asked for once, such as `--apply`, is a flag alone and stands with its [command](commands.md). "
        "Passwords have no flag: everybody on a machine can read a command line.",
        _table(("name in a file", "variable", "values", "what it is", "taken by"), rows),
    ]
    return "\n\n".join(out) + "\n"


def _first(owner: type) -> str:
    return _cell((owner.__doc__ or "").splitlines()[0].rstrip("."))


def _row(setting: Setting) -> tuple[str, ...]:
    variable = "" if setting.flag_only else f"`{setting.variable}`"
    needed = ". Required" if setting.default is dataclasses.MISSING else ""
    return (_flag(setting), variable, _values(setting), _cell(setting.description) + needed)


def _flag(setting: Setting) -> str:
    if setting.secret:
        return "none: a command line can be read by everybody"
    if setting.positional:
        return f"`{setting.flag}`"
    if setting.is_switch:
        both = f", `--no-{setting.flag[2:]}`" if setting.default is not False else ""
        return f"`{setting.flag}`{both}"
    names = f"{setting.short}, {setting.flag}" if setting.short else setting.flag
    metavar = "" if setting.choices else f" {setting.metavar or setting.field.upper()}"
    return f"`{names}{metavar}`"


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.is_switch:
        return "yes or no"
    kind, meta = typing.get_args(setting.type)
    many = "" if not setting.is_list else "list of "
    name = {int: "whole number", float: "number", str: "text"}.get(setting.item if setting.is_list else kind, "text")
    name += "s" if setting.is_list else ""
    assert isinstance(meta, msgspec.Meta)
    bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
              if bound is not None]  # fmt: skip
    return many + name + "".join(f", {bound}" for bound in bounds)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f'<div class="whole-words" markdown>\n\n{table}\n\n</div>'


def _cell(text: str) -> str:
    """Return text as it may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[[", "\\[[").replace("*", "\\*").replace("_", "\\_")
