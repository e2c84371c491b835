"""Listing and reading: order, names, exact text, and one sentence for everything that cannot be read."""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data import sources
from moe_runtime.train.data.sources import Piece, list_standard_library, open_source


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def documents(source) -> dict[str, str]:
    texts: dict[str, str] = {}
    for piece in source.all_pieces():
        assert piece.text
        texts[piece.document] = texts.get(piece.document, "") + piece.text
    return texts


def write_parquet(path: Path, **columns) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    return path


def test_folder_is_read_recursively_in_name_order(tmp_path):
    write(tmp_path / "b.txt", "bee")
    write(tmp_path / "a" / "z.jsonl", '{"text": "one"}\n\n{"text": "", "id": 1}\n{"text": "th\\u00e9"}')
    write(tmp_path / "a" / "A.TXT", "\ufeffupper")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "notes.md", "not read")
    write(tmp_path / ".hidden" / "c.txt", "not read")
    write_parquet(tmp_path / "p.parquet", text=["r0", "", "r2"], other=[1, 2, 3])
    source = open_source(str(tmp_path))
    assert [file.name for file in source.files] == ["a/A.TXT", "a/z.jsonl", "b.txt", "empty.txt", "p.parquet"]
    assert source.num_ignored == 2
    assert list(documents(source).items()) == [
        ("a/A.TXT", "upper"),
        ("a/z.jsonl:1", "one"),
        ("a/z.jsonl:4", "thé"),
        ("b.txt", "bee"),
        ("p.parquet:0", "r0"),
        ("p.parquet:2", "r2"),
    ]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize(
    "text",
    ["x" * 1000, "ab\n" * 400, "\n" * 64, "é𝄞\n" * 100, "a" * 7 + "\n" + "b" * 50],
    ids=["no-newline", "lines", "newlines", "wide", "ragged"],
)
def test_long_document_comes_in_bounded_pieces_that_add_up(tmp_path, monkeypatch, kind, text):
    monkeypatch.setattr(sources, "PIECE_CHARS", 16)
    path = write(tmp_path / f"long.{kind}", text if kind == "txt" else json.dumps({"text": text}))
    pieces = list(open_source(str(path)).all_pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= 32 for piece in pieces) and len(pieces) > 1
    assert len({piece.document for piece in pieces}) == 1


def test_links_are_followed_without_going_round(tmp_path):
    write(tmp_path / "real" / "a.txt", "a")
    write(tmp_path / "elsewhere.txt", "b")
    (tmp_path / "real" / "up").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "b.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert documents(open_source(str(tmp_path / "real"))) == {"a.txt": "a", "b.txt": "b"}


def test_special_files_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    write(tmp_path / "a.txt", "a")
    assert documents(open_source(str(tmp_path))) == {"a.txt": "a"}
    with pytest.raises(ConfigError, match=r"must be a folder or a .* file, got"):
        open_source(str(tmp_path / "pipe.txt"))


def test_home_is_expanded_and_names_never_reach_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "$(touch owned); *.txt", "safe")
    assert documents(open_source("~/$(touch owned); *.txt")) == {"$(touch owned); *.txt": "safe"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"body": "b"}\n', r"x\.jsonl line 2 must be .*'text', got the fields \['body'\]"),
        ("x.jsonl", '{"text": "a"}\n\n{"text": ', r"x\.jsonl line 3 must be .*got invalid JSON"),
        ("x.jsonl", "[1, 2]\n", r"line 1 must be .*got a JSON list"),
        ("x.jsonl", '{"text": null}', r"line 1 must be .*got a `text` of type NoneType"),
        ("x.jsonl", '{"text": "\\ud800"}', r"line 1 must be .*not Unicode"),
        ("x.jsonl", "[" * 100_000, r"line 1 must be .*got invalid JSON"),
        ("x.jsonl", '{"text": ' + "9" * 5000 + "}", r"line 1 must be .*got invalid JSON"),
        ("x.jsonl", b'{"text": "\xff"}', r"line 1 must be .*got invalid JSON"),
        ("x.txt", b"\xe9t\xe9 ", r"x\.txt must be UTF-8 text, got"),
        ("x.parquet", b"PAR1 not at all", r"x\.parquet must be a readable parquet file, got"),
    ],
)
def test_bad_content_names_file_and_line(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=message) as raised:
        documents(open_source(str(write(tmp_path / name, content))))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, r"one column 'text', got the columns \['body'\]"),
        ({"text": [1, 2]}, r"strings in column 'text', got int64"),
        ({"text": ["a", "b", "c", None]}, r"row 3 must hold a string in column 'text', got null"),
    ],
)
def test_bad_parquet_names_column_or_row(tmp_path, columns, message):
    with pytest.raises(ConfigError, match=message):
        documents(open_source(str(write_parquet(tmp_path / "x.parquet", **columns))))


def test_dictionary_encoded_parquet_is_text(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "x.parquet", text=arrow.array(["a", "b", "a"]).dictionary_encode())
    assert list(documents(open_source(str(path))).values()) == ["a", "b", "a"]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"x\.parquet needs: pip install 'moe-runtime\[train\]'"):
        documents(open_source(str(path)))


def test_missing_and_unusable_paths(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.source must be 'stdlib', a file or a folder, got .*nowhere"):
        open_source(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"must be a folder or a \.txt, \.jsonl or \.parquet file, got .*x\.csv"):
        open_source(str(write(tmp_path / "x.csv", "a,b")))
    with pytest.raises(ConfigError, match=r"must hold a \.txt.* file, got the folder .* with 1 other files"):
        open_source(str(tmp_path))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read: No such file"):
        open_source(str(tmp_path))
    with pytest.raises(ConfigError, match="a file or a folder"):
        open_source("~no-such-user-here/x")


def test_file_that_disappears_before_it_is_read(tmp_path):
    path = write(tmp_path / "a.txt", "a")
    source = open_source(str(path))
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: No such file"):
        documents(source)


def test_standard_library_listing_leaves_out_tests_packages_and_build_products(tmp_path):
    kept = ["ast.py", "json/__init__.py", "json/decoder.py", "testing.py", "unittest/mock.py"]
    skipped = [
        "site-packages/torch.py",
        "dist-packages/x.py",
        "test/test_ast.py",
        "lib2to3/tests/data.py",
        "idlelib/idle_test/x.py",
        "json/__pycache__/x.py",
        "_sysconfigdata__linux_x86_64.py",
        "config-3.11-x86_64/python-config.py",
        "json/data.txt",
    ]
    for name in kept + skipped:
        write(tmp_path / name, "x = 1\n")
    assert [file.name for file in list_standard_library(tmp_path).files] == kept


def test_standard_library_reads_declared_encodings_and_skips_the_undecodable(tmp_path):
    write(tmp_path / "latin.py", "# coding: latin-1\ns = 'é'\n".encode("latin-1"))
    write(tmp_path / "bad_bytes.py", b"s = '\xff'\n")
    write(tmp_path / "bad_cookie.py", b"# coding: klingon\n")
    write(tmp_path / "not_text.py", b"# coding: hex\n")
    write(tmp_path / "empty.py", b"")
    source = list_standard_library(tmp_path)
    assert list(source.all_pieces()) == [Piece("latin.py", "# coding: latin-1\ns = 'é'\n")]


def test_absent_standard_library_is_one_sentence(tmp_path):
    with pytest.raises(
        ConfigError, match=r"needs the standard library's \.py files under .*python311\.zip, found none"
    ):
        list_standard_library(tmp_path / "python311.zip")


def test_listing_of_this_python():
    source = open_source("stdlib")
    names = [file.name for file in source.files]
    assert source.is_stdlib and source.root == Path(sysconfig.get_paths()["stdlib"])
    assert names == sorted(set(names)) and len(names) > 300
    assert {"ast.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
