"""Where text comes from: the listing of a source's files, and a stream of named text pieces from each.

A document is one .txt or .py file, one line of a .jsonl file, or one row of a .parquet file. Its name is the file's
path relative to the source (with the line or row), so a split by name is the same on every machine. Nothing is
cached or tokenized here.
"""

import json
import os
import re
import stat
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.config import STANDARD_LIBRARY

PIECE_CHARS = 1 << 18
PARQUET_ROWS = 256

# Third-party packages and tests are not the library; config-* and _sysconfigdata* are written by each Python's build
# and differ from machine to machine.
_STDLIB_SKIPS = re.compile(
    r"site-packages|dist-packages|test|tests|idle_test|__pycache__|config-.*|_sysconfigdata.*\.py"
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its name relative to the source, and what tells one version of it from the next."""

    name: str
    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Piece:
    """At least one character of a document. A document's pieces follow each other; their texts add up to its text."""

    document: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The files of `data.source`, sorted by name. `num_ignored` counts a folder's files of other kinds."""

    label: str
    root: Path
    files: tuple[SourceFile, ...]
    num_ignored: int = 0

    @property
    def is_stdlib(self) -> bool:
        return self.label == STANDARD_LIBRARY

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """The text of one file; empty documents yield nothing. ConfigError names the file (and line) it cannot read."""
        read = _read_python if self.is_stdlib else _READERS[file.path.suffix.lower()]
        try:
            yield from read(file)
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise ConfigError(f"data.source: {file.path} cannot be read: {reason}") from error

    def all_pieces(self) -> Iterator[Piece]:
        """The text of every file, in the order of their names."""
        for file in self.files:
            yield from self.pieces(file)


def open_source(source: str) -> Source:
    """List what `data.source` names. ConfigError where there is nothing to read."""
    if source == STANDARD_LIBRARY:
        return list_standard_library(Path(sysconfig.get_paths()["stdlib"]))
    try:
        path = Path(source).expanduser().resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"data.source must be {STANDARD_LIBRARY!r}, a file or a folder, got {source!r}: {error}"
        ) from error
    if stat.S_ISDIR(mode):
        return _list_folder(source, path)
    if not stat.S_ISREG(mode) or path.suffix.lower() not in _READERS:
        raise ConfigError(f"data.source must be a folder or a {_KINDS} file, got {source!r}")
    return Source(label=source, root=path.parent, files=(_source_file(path.name, path, path.stat()),))


def list_standard_library(root: Path) -> Source:
    """The .py files of the standard library under `root`, without tests, third-party packages and build products."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _STDLIB_SKIPS.fullmatch(name)]
        for name in names:
            if name.endswith(".py") and not _STDLIB_SKIPS.fullmatch(name):
                path = Path(folder, name)
                if path.is_file():
                    files.append(_source_file(path.relative_to(root).as_posix(), path, path.stat()))
    if not files:
        raise ConfigError(
            f"data.source = {STANDARD_LIBRARY!r} needs the standard library's .py files under {root}, found none; "
            "give a file or a folder"
        )
    return Source(label=STANDARD_LIBRARY, root=root, files=tuple(sorted(files, key=lambda file: file.name)))


def _list_folder(label: str, root: Path) -> Source:
    files: list[SourceFile] = []
    num_ignored = 0
    pending, seen = [root], set[tuple[int, int]]()
    while pending:
        folder = pending.pop()
        try:
            info = folder.stat()
            if (info.st_dev, info.st_ino) in seen:  # a link back up the tree
                continue
            seen.add((info.st_dev, info.st_ino))
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                path = Path(entry.path)
                if entry.name.startswith("."):
                    num_ignored += 1
                elif entry.is_dir():
                    pending.append(path)
                elif path.suffix.lower() in _READERS and (entry.is_file() or not path.exists()):
                    files.append(_source_file(path.relative_to(root).as_posix(), path, entry.stat()))
                else:
                    num_ignored += 1
        except OSError as error:
            raise ConfigError(f"data.source: {error.filename or folder} cannot be read: {error.strerror}") from error
    if not files:
        raise ConfigError(
            f"data.source must hold a {_KINDS} file, got the folder {root} with {num_ignored} other files"
        )
    files.sort(key=lambda file: file.name)
    return Source(label=label, root=root, files=tuple(files), num_ignored=num_ignored)


def _source_file(name: str, path: Path, info: os.stat_result) -> SourceFile:
    return SourceFile(name=name, path=path, num_bytes=info.st_size, mtime_ns=info.st_mtime_ns)


def _read_python(file: SourceFile) -> Iterator[Piece]:
    """One Python file in the encoding it declares; nothing where it does not decode, which the caller counts."""
    try:
        with tokenize.open(file.path) as stream:
            text = stream.read()
    except (SyntaxError, LookupError, UnicodeDecodeError):
        return
    yield from _cut(file.name, text)


def _read_text(file: SourceFile) -> Iterator[Piece]:
    with open(file.path, encoding="utf-8-sig") as stream:
        try:
            while text := stream.read(PIECE_CHARS):
                yield Piece(file.name, text + stream.readline(PIECE_CHARS))
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.source: {file.path} must be UTF-8 text, got {error.reason}") from error


def _read_jsonl(file: SourceFile) -> Iterator[Piece]:
    with open(file.path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield from _cut(f"{file.name}:{number}", _json_text(line, where=f"{file.path} line {number}"))


def _json_text(line: bytes, *, where: str) -> str:
    expected = f"data.source: {where} must be a JSON object with a string field 'text'"
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}, got invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{expected}, got a JSON {type(record).__name__}")
    if "text" not in record:
        raise ConfigError(f"{expected}, got the fields {sorted(record)[:10]}")
    text = record["text"]
    if not isinstance(text, str):
        raise ConfigError(f"{expected}, got a `text` of type {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no character
        raise ConfigError(f"{expected}, got a `text` that is not Unicode ({error.reason})") from error
    return text


def _read_parquet(file: SourceFile) -> Iterator[Piece]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"reading {file.path} needs: pip install 'moe-runtime[train]'") from error
    where, row = f"data.source: {file.path}", 0
    try:
        with parquet.ParquetFile(file.path) as table:
            _check_text_column(table.schema_arrow, types=arrow.types, where=where)
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=["text"]):
                for value in batch.column(0):
                    text = value.as_py()
                    if text is None:
                        raise ConfigError(f"{where} row {row} must hold a string in column 'text', got null")
                    yield from _cut(f"{file.name}:{row}", text)
                    row += 1
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} row {row} must be UTF-8 text, got {error.reason}") from error
    except arrow.ArrowException as error:
        raise ConfigError(f"{where} must be a readable parquet file, got: {' '.join(str(error).split())}") from error


def _check_text_column(schema: Any, *, types: Any, where: str) -> None:
    if schema.names.count("text") != 1:
        raise ConfigError(f"{where} must have one column 'text', got the columns {schema.names[:10]}")
    kind = schema.field("text").type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise ConfigError(f"{where} must have strings in column 'text', got {kind}")


def _cut(document: str, text: str) -> Iterator[Piece]:
    """`text` in pieces of PIECE_CHARS, each extended to its line's end where that is near: memory stays bounded."""
    start = 0
    while start < len(text):
        least = start + PIECE_CHARS
        end = text.find("\n", least, least + PIECE_CHARS) + 1 or least
        yield Piece(document, text[start:end])
        start = end


_READERS: dict[str, Callable[[SourceFile], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
_KINDS = ".txt, .jsonl or .parquet"
