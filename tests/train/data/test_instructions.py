"""Instruction records: what is read, how it is split, and what is refused, with file and line."""

import json
from pathlib import Path

import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.instructions import InstructionConfig, read_instructions
from moe_runtime.train.data.split import name_hash

PAIR = {"prompt": "2+2=", "completion": "4"}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return str(path)


def test_both_kinds_are_read_and_blank_lines_are_not(tmp_path: Path) -> None:
    train = lines(tmp_path / "a.jsonl", PAIR, "\n", {**CHAT, "tools": [{"name": "f"}], "id": 7})
    held = lines(tmp_path / "b.jsonl", PAIR)
    first, second = read_instructions(InstructionConfig(source=train, validation_source=held))[0]
    assert (first.name, first.prompt, first.completion, first.messages) == ("a.jsonl:1", "2+2=", "4", None)
    assert (second.name, second.messages, second.tools) == ("a.jsonl:3", tuple(CHAT["messages"]), ({"name": "f"},))


def test_a_folder_is_read_in_the_order_of_names_and_split_by_them(tmp_path: Path) -> None:
    for name in ("b", "a", "sub"):
        folder = tmp_path / name if name == "sub" else tmp_path
        folder.mkdir(exist_ok=True)
        lines(folder / f"{name}.jsonl", *[PAIR] * 60)
    (tmp_path / "notes.txt").write_text("no record")
    train, held = read_instructions(InstructionConfig(source=str(tmp_path), validation_fraction=0.25))
    names = [f"{file}:{number}" for file in ("a.jsonl", "b.jsonl", "sub/sub.jsonl") for number in range(1, 61)]
    assert [record.name for record in held] == [name for name in names if name_hash(name) < 0.25]
    assert [record.name for record in train] == [name for name in names if name_hash(name) >= 0.25]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("{]\n", "must be a JSON object with either 'messages', or 'prompt' and 'completion', got invalid JSON"),
        ("[1]\n", "got a JSON list"),
        ({"text": "x"}, "must have either 'messages', or 'prompt' and 'completion', got the fields ['text']"),
        ({**PAIR, **CHAT}, "got the fields ['completion', 'messages', 'prompt']"),
        ({"prompt": "x"}, "must have a string 'completion', got the fields ['prompt']"),
        ({"prompt": 3, "completion": "x"}, "must have a string 'prompt', got a int"),
        ({"prompt": "x", "completion": ""}, "must have a completion to learn, got an empty one"),
        ({"messages": []}, "must have 'messages', a list of objects and not empty, got '[]'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "role 'assistant' to learn, got the roles ['user']"),
    ],
)
def test_a_record_that_is_none_is_named_by_file_and_line(tmp_path: Path, record: object, sentence: str) -> None:
    source = lines(tmp_path / "a.jsonl", PAIR, record)
    with pytest.raises(ConfigError) as caught:
        read_instructions(InstructionConfig(source=source))
    assert str(caught.value).startswith(f"data.source: {source} line 2 ") and sentence in str(caught.value)


def test_no_records_and_no_held_out_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source must be 'stdlib', a \.jsonl file, or a folder of them, got"):
        read_instructions(InstructionConfig(source=str(tmp_path)))
    one = lines(tmp_path / "a.jsonl", PAIR)
    with pytest.raises(ConfigError, match="must leave records to hold out, got 1 records"):
        read_instructions(InstructionConfig(source=one, validation_fraction=1e-9))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("source", "", "data.source must be"),
        ("chat_template", "a\0b", "data.chat_template must be a string without NUL characters"),
        ("seq_length", 0, "data.seq_length must be at least 1, got 0"),
        ("validation_fraction", 1.0, "data.validation_fraction must be between 0 and 1"),
    ],
)
def test_a_bad_value_is_refused(field: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InstructionConfig(**{field: value})  # pyright: ignore[reportArgumentType]
    assert str(caught.value).startswith(sentence)


def test_the_standard_librarys_task_holds_out_whole_modules_and_leaks_no_pair() -> None:
    train, held = read_instructions(InstructionConfig())
    assert len(train) > 5000 and len(held) > 100
    assert {name_hash(record.name) < 0.05 for record in held} == {True}
    assert {name_hash(record.name) < 0.05 for record in train} == {False}
    known = {(record.prompt, record.completion) for record in train}
    assert not known & {(record.prompt, record.completion) for record in held}
    assert (
        "def textwrap.dedent(text)\nsummary:",
        " Remove any common leading whitespace from every line in `text`.",
    ) in known
    assert dict(known)["class json.decoder.JSONDecodeError(ValueError)\nsummary:"].startswith(" Subclass of ValueError")
