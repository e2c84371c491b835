"""prepare: what it writes, when it builds again, who builds, and that nothing half-written is ever used."""

import errno
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data import DataConfig, cache
from moe_runtime.train.data.cache import prepare
from moe_runtime.train.data.sources import open_source

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Forty small files, a third of them held out."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"file {index} says hello to the reader, " * 3)
    return DataConfig(
        source=str(folder), vocab_size=300, seq_length=8, validation_fraction=0.3, cache_dir=str(tmp_path / "cache")
    )


def entries(config) -> list[str]:
    return sorted(path.name for path in Path(config.cache_dir).iterdir() if path.suffix != ".lock")


def decode(data, split) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(data.tokenizer_path))
    starts = [0, *split.doc_ends_N.tolist()]
    documents = [split.tokens_T[start:end].tolist() for start, end in itertools.pairwise(starts)]
    assert all(document[-1] == data.eos_id and data.eos_id not in document[:-1] for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def no_build(*_args, **_kwargs):
    pytest.fail("built again")


def user_tokenizer(path: Path, vocab: dict[str, int]) -> str:
    model = tokenizers.models.WordLevel(vocab, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


def test_splits_hold_the_documents_in_order_and_nothing_twice(config):
    data = prepare(config, model_vocab_size=300)
    train, validation = decode(data, data.train), decode(data, data.validation)
    texts = [path.read_text() for path in sorted(Path(config.source).iterdir())]
    assert sorted(train + validation) == sorted(texts) and len(validation) > 3
    assert [text for text in texts if text in set(train)] == train
    assert (data.vocab_size, data.eos_id) == (300, 0)


def test_text_longer_than_a_batch_keeps_its_document_whole(config, monkeypatch):
    monkeypatch.setattr(cache, "BATCH_CHARS", 10)
    monkeypatch.setattr("moe_runtime.train.data.sources.PIECE_CHARS", 16)
    data = prepare(config, model_vocab_size=300)
    texts = [path.read_text() for path in sorted(Path(config.source).iterdir())]
    assert sorted(decode(data, data.train) + decode(data, data.validation)) == sorted(texts)


def test_second_prepare_reads_the_cache_at_any_sequence_length(config, monkeypatch):
    first = prepare(config, model_vocab_size=300)
    monkeypatch.setattr(cache, "_build", no_build)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # a warm start does not load it
    second = prepare(replace(config, seq_length=16, document_mask=False), model_vocab_size=5000)
    assert second.train.tokens_T.tolist() == first.train.tokens_T.tolist()
    assert first.train.document_mask and not second.train.document_mask
    assert second.tokenizer_path == first.tokenizer_path


def test_files_and_folders_are_private(config):
    old = os.umask(0)
    try:
        prepare(config, model_vocab_size=300)
    finally:
        os.umask(old)
    root = Path(config.cache_dir)
    modes = {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")] if path.is_dir()} == {0o700}


@pytest.mark.parametrize(
    "change", ["content", "mtime", "new_file", "renamed", "vocab_size", "fraction", "tokenizer", "eos"]
)
def test_everything_that_decides_the_tokens_is_in_the_key(config, tmp_path, change):
    words = user_tokenizer(tmp_path / "w.json", {"[UNK]": 0, "file": 1, "</s>": 2, "<eos>": 3})
    if change == "eos":
        config = replace(config, tokenizer=words, vocab_size=4096)
    prepare(config, model_vocab_size=300)
    path = Path(config.source) / "00.txt"
    match change:
        case "content":
            path.write_text("something else of another length")
        case "mtime":
            os.utime(path, ns=(0, 1))
        case "new_file":
            path.with_name("extra.txt").write_text("more")
        case "renamed":
            path.rename(path.with_name("000.txt"))
        case "vocab_size":
            config = replace(config, vocab_size=299)
        case "fraction":
            config = replace(config, validation_fraction=0.31)
        case "tokenizer":
            config = replace(config, tokenizer=words, vocab_size=4096)
        case "eos":
            config = replace(config, eos_token="<eos>")
    prepare(config, model_vocab_size=300)
    assert len(entries(config)) == 2


def test_same_names_sizes_and_times_in_two_folders_are_two_sources(config, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in Path(config.source).iterdir():
        copy = other / path.name
        copy.write_text(path.read_text().upper())
        os.utime(path, ns=(0, 0))
        os.utime(copy, ns=(0, 0))
    first = prepare(config, model_vocab_size=300)
    second = prepare(replace(config, source=str(other)), model_vocab_size=300)
    assert first.tokenizer_path != second.tokenizer_path
    assert decode(second, second.train) == [text.upper() for text in decode(first, first.train)]


def test_users_tokenizer_is_used_and_kept(config, tmp_path):
    path = user_tokenizer(tmp_path / "w.json", {"[UNK]": 0, "file": 1, "reader": 5, "</s>": 70_000})
    data = prepare(replace(config, tokenizer=path, vocab_size=70_001), model_vocab_size=70_001)
    assert (data.vocab_size, data.eos_id) == (70_001, 70_000)
    assert data.train.tokens_T.dtype == np.uint32
    assert set(np.unique(data.train.tokens_T).tolist()) == {0, 1, 5, 70_000}
    assert data.tokenizer_path.read_bytes() == Path(path).read_bytes()


@pytest.mark.parametrize("warm", [False, True])
def test_tokenizer_larger_than_the_model_is_refused(config, tmp_path, warm):
    path = user_tokenizer(tmp_path / "w.json", {"[UNK]": 0, "</s>": 99})
    given = replace(config, tokenizer=path, vocab_size=4096)
    if warm:
        prepare(given, model_vocab_size=100)
        prepare(config, model_vocab_size=300)
    with pytest.raises(ConfigError, match=r"w\.json' has 100 ids, the model's vocabulary holds 99"):
        prepare(given, model_vocab_size=99)
    with pytest.raises(ConfigError, match=r"has 300 ids, the model's vocabulary holds 299"):
        prepare(config, model_vocab_size=299)
    assert warm or not Path(config.cache_dir).exists() or entries(config) == []


def test_vocab_size_that_contradicts_the_tokenizer_is_refused(config, tmp_path):
    path = user_tokenizer(tmp_path / "w.json", {"[UNK]": 0, "</s>": 999})
    with pytest.raises(ConfigError, match=r"data\.vocab_size .*that one's 1000, got 300"):
        prepare(replace(config, tokenizer=path), model_vocab_size=5000)
    assert prepare(replace(config, tokenizer=path, vocab_size=4096), model_vocab_size=5000).vocab_size == 1000


@pytest.mark.parametrize("name", ["missing.json", "folder", "~no-such-user-here/t.json"])
def test_tokenizer_that_cannot_be_read(config, tmp_path, name):
    (tmp_path / "folder").mkdir()
    path = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be a tokenizer\.json, got"):
        prepare(replace(config, tokenizer=path), model_vocab_size=300)


def test_sequence_longer_than_a_split_is_refused_with_the_numbers(config):
    data = prepare(config, model_vocab_size=300)
    fits = data.validation.num_tokens - 1
    prepare(replace(config, seq_length=fits), model_vocab_size=300)
    with pytest.raises(ConfigError, match=rf"the validation split .*seq_length {fits + 1} .*got {fits + 1} tokens in"):
        prepare(replace(config, seq_length=fits + 1), model_vocab_size=300)
    with pytest.raises(ConfigError, match=r"the train split must hold one sequence"):
        prepare(replace(config, seq_length=10**6), model_vocab_size=300)


def test_one_text_file_is_enough(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {index} of a book\n" for index in range(300)))
    config = DataConfig(source=str(path), vocab_size=300, seq_length=16, cache_dir=str(tmp_path / "cache"))
    data = prepare(config, model_vocab_size=300)
    assert data.train.num_documents == data.validation.num_documents == 1
    assert decode(data, data.train)[0] + decode(data, data.validation)[0] == path.read_text()


def test_error_inside_a_build_leaves_nothing_and_the_next_succeeds(config, monkeypatch):
    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.TextTokenizer, "encode", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, model_vocab_size=300)
    assert entries(config) == []
    assert prepare(config, model_vocab_size=300).train.num_tokens > 0


def test_full_disk_is_one_sentence_and_leaves_nothing(config, monkeypatch):
    def fail(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match=r"data\.cache_dir must be .*got .*cache: No space left on device$"):
            prepare(config, model_vocab_size=300)
    assert entries(config) == []
    prepare(config, model_vocab_size=300)


def test_cache_dir_that_is_a_file(config, tmp_path):
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir must be a folder"):
        prepare(replace(config, cache_dir=str(tmp_path / "plain")), model_vocab_size=300)


@pytest.mark.parametrize("damage", ["truncated", "odd", "missing", "meta", "meta_keys", "meta_type", "tokenizer"])
def test_damaged_cache_is_noticed_and_built_again(config, caplog, damage):
    good = prepare(config, model_vocab_size=300)
    expected, folder = good.train.tokens_T.tolist(), good.tokenizer_path.parent
    match damage:
        case "truncated":
            os.truncate(folder / "train.tokens", 20)
        case "odd":
            os.truncate(folder / "train.tokens", 21)
        case "missing":
            (folder / "validation.ends").unlink()
        case "meta":
            (folder / "meta.json").write_text("{")
        case "meta_keys":
            (folder / "meta.json").write_text("{}")
        case "meta_type":
            (folder / "meta.json").write_text("[]")
        case "tokenizer":
            (folder / "tokenizer.json").write_text("{}")
    again = prepare(config, model_vocab_size=300)
    assert again.train.tokens_T.tolist() == expected
    assert [record.levelno for record in caplog.records if "is damaged" in record.message] == [logging.WARNING]
    assert entries(config) == [folder.name] and not (folder / "damaged").exists()


def test_source_that_changes_during_the_build_is_refused(config, monkeypatch):
    write_splits = cache._write_splits

    def change(*args, **kwargs):
        (Path(config.source) / "late.txt").write_text("late")
        return write_splits(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write_splits", change)
        with pytest.raises(ConfigError, match=r"must not change while it is tokenized, got changes in"):
            prepare(config, model_vocab_size=300)
    assert entries(config) == []
    prepare(config, model_vocab_size=300)


def test_waiting_process_gives_up_by_name(config, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_SECONDS", 0.2)
    prepare(config, model_vocab_size=300)
    (name,) = entries(config)
    folder = Path(config.cache_dir)
    (folder / name / "meta.json").unlink()
    with (
        cache.exclusive(folder / f"{name}.lock", timeout_seconds=1),
        pytest.raises(ConfigError, match=rf"lock file {folder / name}\.lock .*no progress"),
    ):
        prepare(config, model_vocab_size=300)


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [("/x/cache", "/x/cache/moe_runtime"), ("relative", "/h/.cache/moe_runtime"), ("", "/h/.cache/moe_runtime")],
)
def test_default_cache_folder(monkeypatch, xdg, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/h")
    assert cache.cache_folder(DataConfig()) == Path(expected)
    assert cache.cache_folder(DataConfig(cache_dir="~/mine")) == Path("/h/mine")


WORKER = """
import sys, time
from pathlib import Path
from moe_runtime.train.data import DataConfig, cache
from moe_runtime.train.data.cache import prepare

signals, mode = Path(sys.argv[1]), sys.argv[2]
source, cache_dir = sys.argv[3], sys.argv[4]
build, write_splits = cache._build, cache._write_splits

def slow_build(folder, plan, lock):
    (signals / f"built-{mode}").touch()
    time.sleep(0.5)
    build(folder, plan, lock)

def stuck_after_writing(folder, *args, **kwargs):
    counts = write_splits(folder, *args, **kwargs)
    (signals / "stuck").touch()
    time.sleep(300)
    return counts

cache._build = slow_build
if mode == "stuck":
    cache._write_splits = stuck_after_writing
(signals / f"ready-{mode}").touch()
while mode != "stuck" and len(list(signals.glob("ready-*"))) < 2:
    time.sleep(0.01)
config = DataConfig(source=source, vocab_size=300, seq_length=8, validation_fraction=0.3, cache_dir=cache_dir)
data = prepare(config, model_vocab_size=300)
print(data.train.tokens_T.tolist(), data.validation.tokens_T.tolist(), data.tokenizer_path)
"""


def start_worker(config, signals: Path, mode: str) -> subprocess.Popen[str]:
    signals.mkdir(exist_ok=True)
    command = [sys.executable, "-c", WORKER, str(signals), mode, config.source, config.cache_dir]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_and_one_builds(config, tmp_path):
    signals = tmp_path / "signals"
    workers = [start_worker(config, signals, mode) for mode in ("one", "two")]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert outputs[0][1] == outputs[1][1] == ""
    assert len(list(signals.glob("built-*"))) == 1


def test_killed_build_is_never_used_and_the_next_cleans_up(config, tmp_path):
    signals = tmp_path / "signals"
    with start_worker(config, signals, "stuck") as worker:
        deadline = time.monotonic() + 120
        while not (signals / "stuck").exists() and worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.send_signal(signal.SIGKILL)
        worker.wait(timeout=30)
    assert (signals / "stuck").exists()
    (left,) = entries(config)
    assert left.endswith(".tmp") and (Path(config.cache_dir) / left / "train.tokens").stat().st_size > 0
    data = prepare(config, model_vocab_size=300)
    assert entries(config) == [data.tokenizer_path.parent.name]
    assert not entries(config)[0].endswith(".tmp")


@pytest.mark.slow
def test_standard_library_end_to_end(tmp_path):
    config = DataConfig(cache_dir=str(tmp_path))
    data = prepare(config, model_vocab_size=4096)
    assert data.vocab_size == 4096 and data.train.num_tokens > 1_000_000 and data.validation.num_tokens > 20_000
    num_chars = sum(len(piece.text) for piece in open_source("stdlib").all_pieces())
    assert sum(map(len, decode(data, data.train) + decode(data, data.validation))) == num_chars
    assert json.loads((data.tokenizer_path.parent / "meta.json").read_text())["source"] == "stdlib"
    start = time.monotonic()
    prepare(config, model_vocab_size=4096)
    assert time.monotonic() - start < 0.5
