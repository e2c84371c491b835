"""Keep docs/configuration.md in step with the dataclasses of a run: python docs/sync_configuration.py [--check] [PAGE]

The sections, keys, values and defaults of the page come from moe_runtime.train.config; prose and the meaning of a key
are written by hand and kept. `--check` changes nothing and exits 1 with what is out of step.
"""

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from moe_runtime.train.config import Config

PAGE = Path(__file__).with_name("configuration.md")
HEADER = ["| key | value | default | meaning |", "|---|---|---|---|"]
KINDS = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    arguments = parser.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    wanted = synchronized(page)
    unexplained = re.findall(r"^\| `([^`]+)` .*\|\s*\|$", wanted, flags=re.MULTILINE)
    if not arguments.check:
        arguments.page.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        difference = difflib.unified_diff(page.splitlines(), wanted.splitlines(), "page", "config.py", n=0, lineterm="")
        print("run python docs/sync_configuration.py:", *difference, sep="\n")
        return 1
    for key in unexplained:
        print(f"{key}: no meaning is written")
    return 1 if unexplained else 0


def synchronized(page: str) -> str:
    """`page` with one section a table of the configuration, in its order, one row a key; prose and meanings kept."""
    head, *sections = re.split(r"^(?=## \[)", page, flags=re.MULTILINE)
    meanings = dict(re.findall(r"^\| `([^`]+)` \|.*\|([^|]*)\|$", page, flags=re.MULTILINE))
    prose = {
        section.split("]")[0].removeprefix("## ["): [line for line in section.splitlines()[1:] if line[:1] != "|"]
        for section in sections
    }
    result = [head.rstrip()]
    for name, section in typing.get_type_hints(Config).items():
        words = "\n".join(prose.get(name, [])).strip()
        rows = [
            f"| `{key}` | {value} | {default} | {meanings.get(key, '').strip()} |"
            for key, value, default in keys(name, section)
        ]
        result += [f"\n## [{name}]", *([f"\n{words}"] if words else []), "", *HEADER, *rows]
    return "\n".join(result) + "\n"


def keys(name: str, section: type) -> list[tuple[str, str, str]]:
    """(dotted key, what it takes, default) of each field of one table; a field that takes the rest is `name.*`."""
    hints = typing.get_type_hints(section)
    rows = []
    for field in dataclasses.fields(section):
        if typing.get_origin(hints[field.name]) is Mapping:
            rows.append((f"{name}.*", "any", ""))
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "required" if required else shown(field.default)
        rows.append((f"{name}.{field.name}", kind(hints[field.name]), default))
    return rows


def kind(hint: typing.Any) -> str:
    """What a key takes, in a reader's words."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(shown(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(kind(choice) for choice in typing.get_args(hint) if choice is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return f"array of {kind(typing.get_args(hint)[0])}"
    return KINDS.get(hint, "table")


def shown(value: object) -> str:
    """A default as TOML writes it; None is an absent key."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
