"""TOML tables <-> frozen dataclasses: type-checked reading, dotted overrides, and writing back.

`from_mapping` builds nested dataclasses from the tables of a TOML file and refuses what does not fit, naming the dotted
key. `apply_overrides` edits the tables before that. `to_toml` writes a config so that reading it gives an equal value.
What a value means is left to the dataclass, which validates itself in `__post_init__`.
"""

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moe_runtime.core.errors import ConfigError

T = TypeVar("T")

_REST = "moe_runtime.rest"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def rest_field() -> Any:
    """A dataclass field, typed `Mapping[str, object]`, that takes every key of its table which no other field names."""
    return dataclasses.field(default_factory=dict, metadata={_REST: True})


def read_toml(path: Path) -> dict[str, object]:
    """The tables of a TOML file; a missing, unreadable or malformed file is a ConfigError that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text, got byte {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error


def from_mapping(cls: type[T], mapping: Mapping[str, object], path: str = "") -> T:
    """The frozen dataclass `cls` with the values of `mapping`; absent keys take their defaults.

    `path` is the dotted name of this table, used in messages. An integer is accepted for a float, a boolean is not an
    integer, an array becomes a tuple. Unknown keys, missing keys and wrong types raise ConfigError.
    """
    return _build(cls, mapping, path, known_names(cls, path))


def known_names(cls: type, path: str = "") -> list[str]:
    """The dotted names of every table and key that `cls` knows, tables before their keys."""
    names: list[str] = []
    for field, hint in _typed_fields(cls):
        if not _is_rest(field):
            name = _join(path, field.name)
            names.append(name)
            if dataclasses.is_dataclass(hint):
                names.extend(known_names(typing.cast(type, hint), name))
    return names


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted name that `name` most likely means, or None when nothing is near.

    A key of the same last part in another table ('train.lr' for 'optim.lr') is nearer than any similar spelling.
    """
    names = list(known)
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]
    matches = difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(name, names, n=1)
    return matches[0] if matches else None


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a key nobody reads; it proposes the nearest known one, or lists what its table knows."""
    names = list(known)
    guess = nearest(name, names)
    if guess is not None:
        return ConfigError(f"unknown key '{name}'; did you mean '{guess}'?")
    parent = name.rpartition(".")[0]
    siblings = [candidate for candidate in names if candidate.rpartition(".")[0] == parent]
    return ConfigError(f"unknown key '{name}'; expected one of {', '.join(siblings or names)}")


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of `mapping` with each 'a.b=value' of `overrides` set, later ones last.

    A value that reads as a TOML value is one (`3`, `3e-4`, `true`, `[1, 2]`, `"3"`); anything else is taken as a plain
    string. Whether the key exists is decided by `from_mapping`, which sees file and overrides alike.
    """
    result = _copy_tables(mapping)
    for override in overrides:
        name, separator, text = override.partition("=")
        keys = name.strip().split(".")
        if not separator or not all(keys):
            raise ConfigError(f"an override must read section.key=value, got '{override}'")
        table = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"cannot set '{name.strip()}': '{'.'.join(keys[:depth])}' is a value, not a table")
            table = inner
        table[keys[-1]] = _parse_value(text.strip())
    return result


def to_toml(config: object) -> str:
    """TOML text of a config dataclass, defaults included; reading it with `from_mapping` gives an equal value."""
    lines = _table_lines(_as_table(config, ""), "")
    return "\n".join(lines).strip("\n") + "\n"


# ---- reading ----


def _build(cls: type[T], mapping: object, path: str, names: Sequence[str]) -> T:
    if not isinstance(mapping, Mapping):
        raise _wrong_type(path, "a table", mapping)
    fields = {field.name: (field, hint) for field, hint in _typed_fields(cls)}
    rest = next((name for name, (field, _) in fields.items() if _is_rest(field)), None)
    values: dict[str, Any] = {}
    extra: dict[str, object] = {}
    for key, value in mapping.items():
        name = _join(path, key)
        if key in fields and key != rest:
            values[key] = _convert(fields[key][1], value, name, names)
        elif rest is not None:
            extra[key] = _free_form(value, name)
        else:
            raise unknown_key(name, names)
    for key, (field, hint) in fields.items():
        if key == rest:
            values[key] = extra
        elif key not in values and dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), {}, _join(path, key), names)
        elif key not in values and _is_required(field):
            raise ConfigError(f"missing key '{_join(path, key)}', expected {_expected(hint)}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"[{path}] {error}" if path else str(error)) from error


def _convert(hint: Any, value: object, name: str, names: Sequence[str]) -> object:
    """`value` as the annotated type `hint`, or a ConfigError that names the key."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, name, names)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if value is None and len(inner) < len(arguments):
            return None
        if len(inner) == 1:
            return _convert(inner[0], value, name, names)
    if origin is typing.Literal:
        if value in arguments and isinstance(value, type(arguments[arguments.index(value)])):
            return value
        raise ConfigError(f"{name} must be {_expected(hint)}, got {_shown(value)}")
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        if not isinstance(value, list | tuple):
            raise _wrong_type(name, _expected(hint), value)
        return tuple(_convert(arguments[0], item, f"{name}[{i}]", names) for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong_type(name, "a table", value)
        return _free_form(value, name)
    return _convert_scalar(hint, value, name)


def _convert_scalar(hint: type, value: object, name: str) -> object:
    if hint not in _SCALARS:
        raise TypeError(f"{name}: config fields of type {hint} are not supported")
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(name, _expected(hint), value)
    if isinstance(value, str):
        return _unicode(value, name)
    if hint is float:
        try:
            return float(typing.cast(float, value))
        except OverflowError as error:
            raise ConfigError(f"{name} must fit a 64-bit float, got an integer of {len(str(value))} digits") from error
    return value


def _free_form(value: object, name: str) -> object:
    """A plain copy of nested TOML values whose keys nobody here knows."""
    if isinstance(value, Mapping):
        return {str(key): _free_form(item, _join(name, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_free_form(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, str):
        return _unicode(value, name)
    if isinstance(value, bool | int | float):
        return value
    raise _wrong_type(name, "a string, number, boolean, array or table", value)


def _unicode(text: str, name: str) -> str:
    """`text`, refused when it holds bytes that are not UTF-8 (surrogate escapes from a command line)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} must be UTF-8 text, got {text!a}") from error
    return text


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A text with a line break could smuggle in further keys; then it is not one value but a plain string.
    return parsed["value"] if parsed.keys() == {"value"} else text


def _copy_tables(mapping: Mapping[str, object]) -> dict[str, object]:
    return {key: _copy_tables(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


# ---- what was expected, what came ----

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_KINDS = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}


def _expected(hint: Any) -> str:
    """The annotated type in a reader's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        choices = [_shown(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is tuple:
        return f"an array, each item {_expected(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(argument) for argument in arguments if argument is not types.NoneType)
    if origin is not None or dataclasses.is_dataclass(hint):
        return "a table"
    return _SCALARS.get(hint, str(hint))


def _shown(value: object) -> str:
    text = _scalar_text(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong_type(name: str, expected: str, value: object) -> ConfigError:
    kind = _KINDS.get(type(value), f"a {type(value).__name__}")
    return ConfigError(f"{name or 'the config'} must be {expected}, got {_shown(value)} ({kind})")


# ---- writing ----


def _as_table(value: Any, name: str) -> dict[str, object]:
    """One dataclass as a plain table, its rest field spread among its keys and None left out."""
    table: dict[str, object] = {}
    for field in dataclasses.fields(value):
        item, item_name = getattr(value, field.name), _join(name, field.name)
        if _is_rest(field):
            for key, extra in item.items():
                table[key] = _free_form(extra, _join(name, key))
        elif dataclasses.is_dataclass(item):
            table[field.name] = _as_table(item, item_name)
        elif item is not None:
            table[field.name] = _free_form(item, item_name)
    return table


def _table_lines(table: Mapping[str, object], path: str) -> list[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [f"{_key_text(key)} = {_value_text(value)}" for key, value in table.items() if key not in inner]
    for key, value in inner.items():
        name = _join(path, _key_text(key))
        lines += ["", f"[{name}]", *_table_lines(value, name)]
    return lines


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value_text(item) for item in value)}]"
    if isinstance(value, dict):
        items = ", ".join(f"{_key_text(key)} = {_value_text(item)}" for key, item in value.items())
        return f"{{{items}}}"
    return _scalar_text(value)


def _scalar_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """A TOML basic string: backslash, quote and control characters escaped, everything else as it is."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match.group()):04x}", escaped) + '"'


# ---- fields ----


def _typed_fields(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _is_rest(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get(_REST))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
