"""Prepared data: the token cache on disk, built once by whichever process comes first, then mapped by all.

<cache_dir>/tokens-<key>/ holds tokenizer.json, meta.json and both splits (tokens.py); <cache_dir>/tokens-<key>.lock
serializes the builders. The key hashes everything that decides the tokens, so a changed source, tokenizer or setting
is another folder; the sequence length, document mask and model are not part of it. A folder appears by one rename
after all its files are on the disk: a build that is killed leaves a temporary folder, which the next build removes.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_runtime.core import env
from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger, warn_once
from moe_runtime.train.data.config import DEFAULT_VOCAB_SIZE, DataConfig
from moe_runtime.train.data.lock import HeldLock, exclusive
from moe_runtime.train.data.sources import Source, open_source
from moe_runtime.train.data.split import SplitRule, plan_split, training_text
from moe_runtime.train.data.tokenizer import TRAINER_VERSION, TextTokenizer, load_tokenizer, train_bpe
from moe_runtime.train.data.tokens import SplitWriter, TokenSplit, create_private, open_split, sync_and_close

FORMAT_VERSION = 1
LOCK_TIMEOUT_SECONDS = 15 * 60
TRAINING_CHARS = 16 << 20  # of the tokenizer; all of the standard library, a spread sample of anything larger
BATCH_CHARS = 1 << 21  # tokenized at once: bounds memory, and gives every core some pieces
LOG_SECONDS = 30
TRAIN, VALIDATION = "train", "validation"

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedData:
    """Both splits, and the tokenizer that made them. `vocab_size` is the tokenizer's largest id plus one."""

    train: TokenSplit
    validation: TokenSplit
    tokenizer_path: Path
    vocab_size: int
    eos_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What a build needs to know. `tokenizer_json` is None where the tokenizer is trained here."""

    config: DataConfig
    source: Source
    tokenizer_json: bytes | None
    model_vocab_size: int


def prepare(config: DataConfig, *, model_vocab_size: int) -> PreparedData:
    """Tokens of `config.source`, from the cache or built into it.

    Needs no process group; any number of processes may call it at once, and one of them builds. ConfigError, before
    any token is written, for a source that cannot be read or a tokenizer with more ids than `model_vocab_size`; after
    that, for a split shorter than one sequence. ImportError names the extra that holds a missing package.
    """
    tokenizer_json = _read_tokenizer(config)
    if tokenizer_json is None:
        _check_vocab(config, config.vocab_size, model_vocab_size)
    source = open_source(config.source)
    plan = _Plan(config=config, source=source, tokenizer_json=tokenizer_json, model_vocab_size=model_vocab_size)
    folder = cache_folder(config)
    with _cache_errors(folder):
        name = f"tokens-{_cache_key(plan)}"
        data = _read(folder / name, config) or _build_once(folder, name, plan)
    _check_vocab(config, data.vocab_size, model_vocab_size)
    for split_name, split in ((TRAIN, data.train), (VALIDATION, data.validation)):
        _check_length(config, split_name, split)
    return data


def cache_folder(config: DataConfig) -> Path:
    """`cache_dir`, or moe_runtime under XDG_CACHE_HOME where that is an absolute path, or under ~/.cache."""
    base = env.get("XDG_CACHE_HOME") or ""
    try:
        if config.cache_dir:
            return Path(os.path.abspath(Path(config.cache_dir).expanduser()))
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moe_runtime"
    except RuntimeError as error:
        raise ConfigError(f"data.cache_dir must name a folder, got {config.cache_dir!r}: {error}") from error


def _read_tokenizer(config: DataConfig) -> bytes | None:
    if not config.tokenizer:
        return None
    try:
        return Path(config.tokenizer).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"data.tokenizer must be a tokenizer.json, got {config.tokenizer!r}: {error}") from error


def _cache_key(plan: _Plan) -> str:
    """SHA-256 over all that decides the tokens, as 64 hex digits."""
    config, source = plan.config, plan.source
    if plan.tokenizer_json is None:
        tokenizer: list[Any] = ["trained", config.vocab_size, TRAINER_VERSION, TRAINING_CHARS]
    else:
        tokenizer = ["given", hashlib.sha256(plan.tokenizer_json).hexdigest(), config.eos_token]
    parts = {
        "format": FORMAT_VERSION,
        "source": [source.is_stdlib, str(source.root)],
        "files": [(file.name, file.num_bytes, file.mtime_ns) for file in source.files],
        "python": [sys.implementation.name, sys.version] if source.is_stdlib else None,
        "tokenizer": tokenizer,
        "tokenizers": _library_version(),
        "validation_fraction": config.validation_fraction,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _library_version() -> str:
    try:
        return metadata.version("tokenizers")
    except metadata.PackageNotFoundError as error:
        raise ImportError("moe_runtime.train.data needs tokenizers: pip install 'moe-runtime[train]'") from error


def _read(entry: Path, config: DataConfig) -> PreparedData | None:
    """The cache folder `entry`, or None where it does not exist or a file is not what meta.json says."""
    if not entry.exists():
        return None
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        vocab_size, eos_id = meta["vocab_size"], meta["eos_id"]
        expected = {**meta["splits"], "tokenizer": meta["tokenizer_sha256"]}
        splits = {
            name: open_split(entry, name, vocab_size=vocab_size, document_mask=config.document_mask)
            for name in (TRAIN, VALIDATION)
        }
        found: dict[str, Any] = {name: _counts(split) for name, split in splits.items()}
        tokenizer_path = entry / "tokenizer.json"
        found["tokenizer"] = hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        warn_once(logger, f"the token cache {entry} is damaged and will be built again: {error}")
        return None
    if found != expected:
        warn_once(logger, f"the token cache {entry} is damaged and will be built again: got {found} for {expected}")
        return None
    return PreparedData(
        train=splits[TRAIN],
        validation=splits[VALIDATION],
        tokenizer_path=tokenizer_path,
        vocab_size=vocab_size,
        eos_id=eos_id,
    )


def _build_once(folder: Path, name: str, plan: _Plan) -> PreparedData:
    """Build the entry `name` under its lock, unless another process has by the time the lock is ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry = folder / name
    with exclusive(folder / f"{name}.lock", timeout_seconds=LOCK_TIMEOUT_SECONDS) as lock:
        data = _read(entry, plan.config)
        if data is not None:
            return data
        for stale in folder.glob(f"{name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".tmp", dir=folder))
        try:
            _build(temporary, plan, lock)
            if entry.exists():  # damaged, or it would have been returned
                entry.rename(temporary / "damaged")
            temporary.rename(entry)
            shutil.rmtree(entry / "damaged", ignore_errors=True)
            _sync_folder(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        data = _read(entry, plan.config)
    if data is None:
        raise ConfigError(f"the token cache {entry} was expected to be readable after its build, got other contents")
    return data


def _build(folder: Path, plan: _Plan, lock: HeldLock) -> None:
    """Write a whole cache entry into `folder` and bring it to the disk."""
    config, source = plan.config, plan.source
    start = time.monotonic()
    logger.info("preparing %r: %d files into the token cache", source.label, len(source.files))
    if source.num_ignored:
        logger.info("%d hidden files or files of other kinds in %s are not read", source.num_ignored, source.root)
    tokenizer_json, tokenizer = plan.tokenizer_json, None
    if tokenizer_json is not None:
        tokenizer = load_tokenizer(tokenizer_json, origin=repr(config.tokenizer), eos_token=config.eos_token)
        _check_vocab(config, tokenizer.vocab_size, plan.model_vocab_size)
    rule = plan_split(source, config.validation_fraction)
    _log_exceptions(rule)
    if tokenizer_json is None or tokenizer is None:
        tokenizer_json = train_bpe(training_text(source, rule, max_chars=TRAINING_CHARS), config.vocab_size)
        tokenizer = load_tokenizer(tokenizer_json, origin="the trained one")
        lock.beat()
    counts = _write_splits(folder, source, rule, tokenizer=tokenizer, lock=lock)
    if open_source(config.source).files != source.files:
        raise ConfigError(f"data.source must not change while it is tokenized, got changes in {source.root}; run again")
    meta = {
        "format": FORMAT_VERSION,
        "source": config.source,
        "validation_fraction": config.validation_fraction,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer_sha256": hashlib.sha256(tokenizer_json).hexdigest(),
        "splits": counts,
    }
    for name, data in (("tokenizer.json", tokenizer_json), ("meta.json", json.dumps(meta, indent=1).encode())):
        stream = create_private(folder / name)
        stream.write(data)
        sync_and_close(stream)
    _sync_folder(folder)
    if source.is_stdlib:
        _log_undecodable(source, counts, rule)
    logger.info("tokens by split, after %.1f s: %s", time.monotonic() - start, counts)


def _write_splits(
    folder: Path, source: Source, rule: SplitRule, *, tokenizer: TextTokenizer, lock: HeldLock
) -> dict[str, dict[str, int]]:
    """Tokenize every document into its split, batch by batch; return the counts that meta.json keeps."""
    train = SplitWriter(folder, TRAIN, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    validation = SplitWriter(folder, VALIDATION, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    logged = time.monotonic()
    try:
        for batch in _batches(source, rule):
            ids = tokenizer.encode([piece.text for _, piece in batch])
            for (held_out, piece), piece_ids in zip(batch, ids, strict=True):
                (validation if held_out else train).add(piece.document, piece_ids)
            lock.beat()
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logger.info("%d tokens so far, at %s", train.num_tokens + validation.num_tokens, batch[-1][1].document)
        train.close()
        validation.close()
    finally:
        train.abandon()
        validation.abandon()
    return {TRAIN: _counts(train), VALIDATION: _counts(validation)}


def _batches(source: Source, rule: SplitRule) -> Iterator[list[tuple[bool, Any]]]:
    batch, num_chars = [], 0
    for held_out, piece in rule.assign(source.all_pieces()):
        batch.append((held_out, piece))
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _counts(split: TokenSplit | SplitWriter) -> dict[str, int]:
    return {"tokens": split.num_tokens, "documents": split.num_documents}


def _log_exceptions(rule: SplitRule) -> None:
    if rule.cut_chars is not None:
        logger.info("the source is one document: its text from character %d on is the validation split", rule.cut_chars)
    if rule.moved is not None:
        logger.info("few documents: %s was moved so that both splits have one", rule.moved)


def _log_undecodable(source: Source, counts: dict[str, dict[str, int]], rule: SplitRule) -> None:
    num_documents = sum(split["documents"] for split in counts.values()) - (rule.cut_chars is not None)
    num_skipped = sum(file.num_bytes > 0 for file in source.files) - num_documents
    if num_skipped:
        logger.info("%d of %d Python files do not decode and are skipped", num_skipped, len(source.files))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """One sentence for a full disk or a folder without permission."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir must be a folder that can be written, got {folder}: {error.strerror or error}"
        ) from error


def _check_vocab(config: DataConfig, vocab_size: int, model_vocab_size: int) -> None:
    name = repr(config.tokenizer) if config.tokenizer else "of data.vocab_size"
    if vocab_size > model_vocab_size:
        raise ConfigError(f"the tokenizer {name} has {vocab_size} ids, the model's vocabulary holds {model_vocab_size}")
    if config.tokenizer and config.vocab_size not in (DEFAULT_VOCAB_SIZE, vocab_size):
        raise ConfigError(
            f"data.vocab_size is the size of a tokenizer that is trained; with data.tokenizer it must be left out "
            f"or be that one's {vocab_size}, got {config.vocab_size}"
        )


def _check_length(config: DataConfig, name: str, split: TokenSplit) -> None:
    if split.num_sequences(config.seq_length) == 0:
        raise ConfigError(
            f"the {name} split must hold one sequence of data.seq_length {config.seq_length} and the token after it, "
            f"got {split.num_tokens} tokens in {split.num_documents} documents of {config.source!r}"
        )
