"""Instruction data: records of `messages`, or of `prompt` and `completion`, from .jsonl files or a built-in task.

A record's name is its file's path relative to the source with the line, or a module of the standard library, so that a
split by name is the same on every machine. Nothing is tokenized here, and torch is not imported.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.config import STANDARD_LIBRARY
from moe_runtime.train.data.docstrings import docstring_pairs
from moe_runtime.train.data.split import name_hash

ASSISTANT = "assistant"
TooLong = Literal["refuse", "drop", "truncate"]
_FIELDS = "either 'messages', or 'prompt' and 'completion'"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionConfig:
    """Where instructions are and how they become rows of tokens. ConfigError names a bad field.

    source               "stdlib" (the first line of a docstring from its signature), a .jsonl file, or a folder of them
    validation_source    the same, never trained on; "" = a share of `source`
    validation_fraction  that share, picked by a hash of the records' names; of "stdlib" by whole modules
    tokenizer            a folder with a tokenizer, or a tokenizer.json; "" = the base's
    chat_template        a Jinja file that renders `messages`; "" = the tokenizer's
    eos_token            what ends a completion; "" = the tokenizer's, or the first usual one that it knows
    seq_length           tokens in a row
    packing              several samples in a row, none of which sees another; False: one a row
    too_long             what becomes of a sample longer than a row
    """

    source: str = STANDARD_LIBRARY
    validation_source: str = ""
    validation_fraction: float = 0.05
    tokenizer: str = ""
    chat_template: str = ""
    eos_token: str = ""
    seq_length: int = 256
    packing: bool = True
    too_long: TooLong = "refuse"

    def __post_init__(self) -> None:
        for field in ("source", "validation_source", "tokenizer", "chat_template", "eos_token"):
            if "\0" in getattr(self, field):
                raise ConfigError(f"data.{field} must be a string without NUL characters, got {getattr(self, field)!r}")
        if not self.source:
            raise ConfigError(
                f'data.source must be "{STANDARD_LIBRARY}", a .jsonl file or a folder, got an empty string'
            )
        if self.seq_length < 1:
            raise ConfigError(f"data.seq_length must be at least 1, got {self.seq_length}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ConfigError(
                f"data.validation_fraction must be between 0 and 1, both excluded, got {self.validation_fraction}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample: a conversation, or a prompt and what follows it. `where` names it in messages to the user.

    messages  as a chat template takes them; None: prompt and completion are plain text
    tools     what the template may be given beside them
    """

    name: str
    where: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    prompt: str = ""
    completion: str = ""


def read_instructions(config: InstructionConfig) -> tuple[list[Record], list[Record]]:
    """(records to train on, records held out). ConfigError names the file and line of a record that is none.

    Of "stdlib" a held-out record that reads like one to train on, word for word, is left out of both.
    """
    records = list(_records(config.source, "data.source"))
    if config.validation_source:
        return records, list(_records(config.validation_source, "data.validation_source"))
    held_out = [name_hash(record.name) < config.validation_fraction for record in records]
    train = [record for record, held in zip(records, held_out, strict=True) if not held]
    validation = [record for record, held in zip(records, held_out, strict=True) if held]
    if config.source == STANDARD_LIBRARY:
        seen = {(record.prompt, record.completion) for record in train}
        validation = [record for record in validation if (record.prompt, record.completion) not in seen]
    for name, part in (("train on", train), ("hold out", validation)):
        if not part:
            raise ConfigError(
                f"data.source must leave records to {name}, got {len(records)} records of {config.source!r} with "
                f"data.validation_fraction = {config.validation_fraction}; change it or give data.validation_source"
            )
    return train, validation


def _records(source: str, key: str) -> Iterator[Record]:
    if source == STANDARD_LIBRARY:
        for module, prompt, completion in docstring_pairs():
            yield Record(name=module, where=module, prompt=prompt, completion=completion)
        return
    root, files = _files(source, key)
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            with open(file, "rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield _record(line, f"{name}:{number}", f"{key}: {file} line {number}")
        except OSError as error:
            raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from error


def _files(source: str, key: str) -> tuple[Path, list[Path]]:
    """(folder that names are relative to, files in the order of their names)."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".jsonl":
        return path.parent, [path]
    found: list[Path] = []
    if path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(folder, name) for name in sorted(names) if name.endswith(".jsonl") and name[0] != "."]
    if not found:
        raise ConfigError(f"{key} must be {STANDARD_LIBRARY!r}, a .jsonl file, or a folder of them, got {source!r}")
    return path, found


def _record(line: bytes, name: str, where: str) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} must be a JSON object with {_FIELDS}, got invalid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a JSON object with {_FIELDS}, got a JSON {type(fields).__name__}")
    has_pair = "prompt" in fields or "completion" in fields
    if ("messages" in fields) == has_pair:
        raise ConfigError(f"{where} must have {_FIELDS}, got the fields {sorted(fields)[:10]}")
    if has_pair:
        prompt, completion = (_text(fields, key, where) for key in ("prompt", "completion"))
        if not completion:
            raise ConfigError(f"{where} must have a completion to learn, got an empty one")
        return Record(name=name, where=where, prompt=prompt, completion=completion)
    messages = _objects(fields["messages"], "messages", where)
    if not any(message.get("role") == ASSISTANT for message in messages):
        roles = [message.get("role") for message in messages]
        raise ConfigError(f"{where} must have a message of role {ASSISTANT!r} to learn, got the roles {roles[:10]}")
    tools = fields.get("tools")
    return Record(
        name=name,
        where=where,
        messages=messages,
        tools=None if tools is None else _objects(tools, "tools", where),
    )


def _text(fields: Mapping[str, Any], key: str, where: str) -> str:
    text = fields.get(key)
    if not isinstance(text, str):
        got = f"a {type(text).__name__}" if key in fields else f"the fields {sorted(fields)[:10]}"
        raise ConfigError(f"{where} must have a string {key!r}, got {got}")
    return text


def _objects(value: object, key: str, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{where} must have {key!r}, a list of objects and not empty, got {str(value)[:80]!r}")
    return tuple(value)
