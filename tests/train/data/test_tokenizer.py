"""The trained BPE is reproducible byte for byte; a user's tokenizer is taken as it is or refused with a sentence."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.tokenizer import EOS_CANDIDATES, load_tokenizer, train_bpe

pytest.importorskip("tokenizers")

TEXTS = [f"def f{i % 7}(x):\n    return x + {i}  # é\n" for i in range(200)]
TRAIN_AND_HASH = """
import hashlib
from moe_runtime.train.data.tokenizer import train_bpe
texts = [f"def f{i % 7}(x):\\n    return x + {i}  # \\u00e9\\n" for i in range(200)]
print(hashlib.sha256(train_bpe(texts, 320)).hexdigest())
"""


def word_level(vocab: dict[str, int], *, special: tuple[str, ...] = ("</s>",), **model) -> bytes:
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in special
    ]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"} | model,
        }
    ).encode()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_training_gives_the_same_bytes_in_every_process(threads):
    settings = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    run = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_HASH], capture_output=True, text=True, timeout=120, check=True, env=settings
    )
    assert run.stdout.strip() == hashlib.sha256(train_bpe(TEXTS, 320)).hexdigest()
    assert run.stderr == ""


def test_trained_tokenizer_layout_and_round_trip():
    tokenizer = load_tokenizer(train_bpe(TEXTS, 320), origin="test")
    assert 257 < tokenizer.vocab_size <= 320 and tokenizer.eos_id == 0
    text = "def unseen(y):\n\treturn 'naïve 𝄞' \x00\n"
    (ids,) = tokenizer.encode([text])
    assert ids.dtype == np.int64 and 0 not in ids
    assert tokenizer._backend.decode(ids.tolist()) == text


def test_small_corpus_gives_a_smaller_vocabulary():
    assert load_tokenizer(train_bpe(["ab"], 4096), origin="test").vocab_size == 257


def test_end_of_text_spelled_out_in_a_document_is_ordinary_text():
    tokenizer = load_tokenizer(train_bpe(TEXTS, 320), origin="test")
    text = "a<|endoftext|>b"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.eos_id not in ids
    assert tokenizer._backend.decode(ids.tolist()) == text


def test_vocabulary_size_is_the_largest_id_plus_one():
    tokenizer = load_tokenizer(word_level({"[UNK]": 0, "a": 1, "</s>": 900}), origin="test")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (901, 900)


def test_template_truncation_and_padding_of_a_users_tokenizer_are_off():
    data = json.loads(word_level({"[UNK]": 0, "a": 1, "</s>": 2}))
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[UNK]",
    }
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    (ids,) = load_tokenizer(json.dumps(data).encode(), origin="test").encode(["a a a a"])
    assert ids.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("first", range(len(EOS_CANDIDATES)))
def test_end_of_text_token_is_the_first_usual_one(first):
    present = EOS_CANDIDATES[first:]
    vocab = {"[UNK]": 0} | {token: 10 - index for index, token in enumerate(present)}
    assert load_tokenizer(word_level(vocab, special=()), origin="test").eos_id == 10


def test_end_of_text_token_by_name():
    data = word_level({"[UNK]": 0, "</s>": 1, "<|im_end|>": 2})
    assert load_tokenizer(data, origin="test", eos_token="<|im_end|>").eos_id == 2
    with pytest.raises(ConfigError, match=r"one of \['<bye>'\], got test without"):
        load_tokenizer(data, origin="test", eos_token="<bye>")


def test_no_end_of_text_token_lists_what_was_looked_for():
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(word_level({"[UNK]": 0, "a": 1}, special=()), origin="'my.json'")
    assert all(repr(token) in str(raised.value) for token in EOS_CANDIDATES)
    assert "'my.json'" in str(raised.value) and "data.eos_token" in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "Magic"}}', b"\x80\x04K\x01."])
def test_file_that_is_no_tokenizer(data):
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be a tokenizer\.json, got 'my\.json'"):
        load_tokenizer(data, origin="'my.json'")


def test_tokenizer_that_cannot_encode_the_text():
    tokenizer = load_tokenizer(word_level({"a": 0, "</s>": 1}), origin="test")
    with pytest.raises(ConfigError, match=r"must be able to encode any text, got: WordLevel error"):
        tokenizer.encode(["a b"])


def test_programming_errors_are_not_hidden():
    with pytest.raises(TypeError):
        load_tokenizer(train_bpe(["ab"], 300), origin="test").encode([3])  # type: ignore[list-item]


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-runtime\[train\]'"):
        train_bpe(["a"], 300)
