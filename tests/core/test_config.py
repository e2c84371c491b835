"""TOML <-> frozen dataclasses: what is accepted, the sentence for what is not, and the round trip."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.core.config import apply_overrides, from_mapping, nearest, read_toml, rest_field, to_toml
from moe_runtime.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    steps: int
    rate: float = 0.5
    name: Literal["adamw", "sgd"] = "adamw"
    sizes: tuple[int, ...] = ()
    on: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    kind: str = ""
    fields: Mapping[str, object] = rest_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    inner: Inner
    model: Free = field(default_factory=Free)
    labels: Mapping[str, object] = field(default_factory=dict)
    title: str = ""


def test_defaults_nesting_and_conversions():
    root = from_mapping(Root, {"inner": {"steps": 3, "rate": 2, "sizes": [1, 2]}, "model": {"kind": "x", "width": 8}})
    assert root == Root(inner=Inner(steps=3, rate=2.0, sizes=(1, 2)), model=Free(kind="x", fields={"width": 8}))
    assert type(root.inner.rate) is float


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ({"inner": {"step": 3}}, "unknown key 'inner.step'; did you mean 'inner.steps'?"),
        ({"steps": 3}, "unknown key 'steps'; did you mean 'inner.steps'?"),
        ({"model": {}, "iner": {}}, "unknown key 'iner'; did you mean 'inner'?"),
        ({"inner": {"steps": 3, "zzzzqqqq": 1}}, "unknown key 'inner.zzzzqqqq'; expected one of inner.steps, "),
        ({}, "missing key 'inner.steps', expected an integer"),
        ({"inner": {"steps": "3"}}, "inner.steps must be an integer, got '3' (a string)"),
        ({"inner": {"steps": True}}, "inner.steps must be an integer, got true (a boolean)"),
        ({"inner": {"steps": 3.0}}, "inner.steps must be an integer, got 3.0 (a float)"),
        ({"inner": {"steps": 3, "rate": False}}, "inner.rate must be a number, got false (a boolean)"),
        ({"inner": {"steps": 3, "rate": 10**400}}, "inner.rate must fit a 64-bit float, got an integer of 401 digits"),
        ({"inner": {"steps": 3, "on": 1}}, "inner.on must be true or false, got 1 (an integer)"),
        ({"inner": {"steps": 3, "name": "adam"}}, "inner.name must be one of 'adamw', 'sgd', got 'adam'"),
        ({"inner": {"steps": 3, "name": ["adamw"]}}, "inner.name must be one of 'adamw', 'sgd', got ['adamw']"),
        ({"inner": {"steps": 3, "sizes": 4}}, "inner.sizes must be an array, each item an integer, got 4 (an integer)"),
        ({"inner": {"steps": 3, "sizes": [4, "5"]}}, "inner.sizes[1] must be an integer, got '5' (a string)"),
        ({"inner": {"steps": 3, "limit": "x"}}, "inner.limit must be a number, got 'x' (a string)"),
        ({"inner": 3}, "inner must be a table, got 3 (an integer)"),
        ({"inner": {"steps": 3}, "labels": [1]}, "labels must be a table, got [1] (an array)"),
        (
            {"inner": {"steps": 3}, "model": {"day": tomllib.loads("x = 2026-01-01")["x"]}},
            "model.day must be a string, ",
        ),
        ({"inner": {"steps": 3}, "title": "\udcff"}, "title must be UTF-8 text, got '\\udcff'"),
        ({"inner": {"steps": 0}}, "[inner] steps must be at least 1, got 0"),
    ],
)
def test_refusals_name_the_key_and_both_sides(mapping: dict[str, object], sentence: str):
    with pytest.raises(ConfigError) as caught:
        from_mapping(Root, mapping)
    assert str(caught.value).startswith(sentence)


def test_the_path_prefixes_names_and_suggestions():
    with pytest.raises(ConfigError, match=r"'train.step'; did you mean 'train.steps'"):
        from_mapping(Inner, {"step": 1}, path="train")


def test_nearest_prefers_the_same_key_of_another_table():
    known = ["train", "train.steps", "train.log_every", "optim", "optim.lr"]
    assert nearest("train.lr", known) == "optim.lr"
    assert nearest("train.stps", known) == "train.steps"
    assert nearest("qqqqqqqqqqqqqq", known) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("3", 3), ("3e-4", 3e-4), ("true", True), ('"3"', "3"), ("[1, 2]", [1, 2]), ("{ a = 1 }", {"a": 1})],
        *[("runs/x-1", "runs/x-1"), ("", ""), ("a=b", "a=b"), ("1\nsmuggled = 2", "1\nsmuggled = 2"), (".5", ".5")],
    ],
)
def test_override_values_are_toml_or_plain_strings(text: str, value: object):
    assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_copy_and_the_last_one_wins():
    original = {"inner": {"steps": 1}}
    changed = apply_overrides(original, ["inner.steps=2", "inner.steps=4", "model.new_field.deep=1"])
    assert original == {"inner": {"steps": 1}}
    root = from_mapping(Root, changed)
    assert root.inner.steps == 4 and root.model.fields == {"new_field": {"deep": 1}}


@pytest.mark.parametrize("override", ["a.b", "=3", "a..b=1", ".a=1", "a.=1", ""])
def test_a_malformed_override_is_refused(override: str):
    with pytest.raises(ConfigError, match=r"must read section.key=value"):
        apply_overrides({}, [override])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"cannot set 'inner.steps.x': 'inner.steps' is a value, not a table"):
        apply_overrides({"inner": {"steps": 1}}, ["inner.steps.x=1"])


def test_an_unknown_override_is_refused_like_a_key_of_the_file():
    with pytest.raises(ConfigError, match=r"unknown key 'inner.stepps'; did you mean 'inner.steps'"):
        from_mapping(Root, apply_overrides({"inner": {"steps": 1}}, ["inner.stepps=2"]))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a = ", "is not valid TOML: "),
        (b"a = '\xff'", "must be UTF-8 text, got byte 0xff"),
        (None, "No such file or directory"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, sentence: str):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(path) in str(caught.value) and sentence in str(caught.value)


numbers = st.floats(allow_nan=False)
free_values = st.recursive(
    st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
free_tables = st.dictionaries(st.text(), free_values, max_size=4)


@settings(deadline=None, max_examples=150)
@given(
    inner=st.builds(
        Inner,
        steps=st.integers(min_value=1),
        rate=numbers,
        name=st.sampled_from(["adamw", "sgd"]),
        sizes=st.lists(st.integers()).map(tuple),
        on=st.booleans(),
        limit=st.none() | numbers,
    ),
    free=st.builds(
        Free, kind=st.text(), fields=free_tables.map(lambda table: {k: v for k, v in table.items() if k != "kind"})
    ),
    labels=free_tables,
    title=st.text(),
)
def test_round_trip(inner: Inner, free: Free, labels: dict[str, object], title: str):
    root = Root(inner=inner, model=free, labels=labels, title=title)
    again = from_mapping(Root, tomllib.loads(to_toml(root)))
    assert again == root
    assert all(
        math.copysign(1, getattr(again.inner, f.name)) == math.copysign(1, getattr(inner, f.name))
        for f in fields(inner)
        if isinstance(getattr(inner, f.name), float)
    )


def test_a_value_toml_lacks_is_refused_when_written():
    with pytest.raises(ConfigError, match=r"labels\.x must be a string, number, boolean, array or table, got None"):
        to_toml(Root(inner=Inner(steps=1), labels={"x": None}))
