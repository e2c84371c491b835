"""DataConfig refuses every bad value with the field, what was expected and what came."""

import dataclasses

import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data import DataConfig


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(DataConfig()) == {
        "source": "stdlib",
        "tokenizer": "",
        "eos_token": "",
        "vocab_size": 4096,
        "seq_length": 256,
        "validation_fraction": 0.05,
        "cache_dir": "",
        "document_mask": True,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", "a\0b"),
        ("source", 3),
        ("tokenizer", None),
        ("cache_dir", "\0"),
        ("eos_token", 0),
        ("eos_token", "</s>"),  # without a tokenizer that could know it
        ("vocab_size", 256),
        ("vocab_size", 4096.0),
        ("vocab_size", True),
        ("seq_length", 0),
        ("seq_length", "256"),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
        ("validation_fraction", float("nan")),
        ("validation_fraction", 0),
        ("validation_fraction", "0.1"),
        ("document_mask", 1),
    ],
)
def test_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"data\.{field} .*got") as raised:
        DataConfig(**{field: value})
    assert repr(value) in str(raised.value) or value == ""


def test_eos_token_of_the_trained_tokenizer_may_be_named():
    assert DataConfig(eos_token="<|endoftext|>").eos_token == "<|endoftext|>"
    assert DataConfig(eos_token="</s>", tokenizer="t.json").eos_token == "</s>"
