"""The split depends on names alone, never leaves a side empty where two documents exist, and leaks nothing."""

import hashlib
import subprocess
import sys

import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.sources import Piece, open_source
from moe_runtime.train.data.split import SplitRule, name_hash, plan_split, training_text


def sides(source, rule) -> dict[bool, dict[str, str]]:
    texts: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for held_out, piece in rule.assign(source.all_pieces()):
        side = texts[held_out]
        side[piece.document] = side.get(piece.document, "") + piece.text
    return texts


def folder_of(path, num_files):
    for index in range(num_files):
        (path / f"{index:03}.txt").write_text(f"text of {index}\n")
    return open_source(str(path))


def test_name_hash_is_sha256_and_the_same_in_another_process():
    digest = int.from_bytes(hashlib.sha256(b"a/b.txt").digest()[:8], "big")
    assert name_hash("a/b.txt") == pytest.approx(digest / 2**64, abs=2**-52)
    code = "from moe_runtime.train.data.split import name_hash; print(repr(name_hash('a/b.txt')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert float(run.stdout) == name_hash("a/b.txt")


def test_name_with_undecodable_bytes_has_a_hash():
    assert 0.0 <= name_hash("\udcff.txt") < 1.0


def test_fraction_of_documents_is_held_out():
    rule = SplitRule(validation_fraction=0.2)
    share = sum(rule.holds_out(f"doc{index}") for index in range(5000)) / 5000
    assert share == pytest.approx(0.2, abs=0.03)


def test_a_document_keeps_its_side_when_others_come(tmp_path):
    small = sides(folder_of(tmp_path, 40), plan_split(folder_of(tmp_path, 40), 0.3))
    large = sides(folder_of(tmp_path, 80), plan_split(folder_of(tmp_path, 80), 0.3))
    for side in (False, True):
        assert small[side].keys() <= large[side].keys()
        assert small[side]


@pytest.mark.parametrize("num_files", [2, 3, 5])
@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_few_documents_leave_no_side_empty(tmp_path, num_files, fraction):
    source = folder_of(tmp_path, num_files)
    texts = sides(source, plan_split(source, fraction))
    assert min(len(texts[False]), len(texts[True])) == 1
    assert len(texts[False]) + len(texts[True]) == num_files
    assert bool(len(texts[True]) == 1) or fraction > 0.5


def test_empty_documents_do_not_count(tmp_path):
    (tmp_path / "0.txt").write_text("")
    (tmp_path / "1.txt").write_text("some text")
    assert plan_split(open_source(str(tmp_path)), 0.5).cut_chars == 4


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.999])
def test_only_document_is_divided_by_position(tmp_path, fraction):
    path = tmp_path / "book.txt"
    text = "".join(f"line {index}\n" for index in range(100))
    path.write_text(text)
    source = open_source(str(path))
    texts = sides(source, plan_split(source, fraction))
    assert texts[False]["book.txt"] + texts[True]["book.txt"] == text
    assert len(texts[True]["book.txt"]) == pytest.approx(len(text) * fraction, abs=1)


def test_cut_falls_at_the_same_character_however_the_text_is_pieced():
    rule = SplitRule(validation_fraction=0.5, cut_chars=5)
    for lengths in ([10], [5, 5], [4, 6], [1] * 10, [6, 4]):
        text, pieces, start = "0123456789", [], 0
        for length in lengths:
            pieces.append(Piece("d", text[start : start + length]))
            start += length
        out: dict[bool, str] = {False: "", True: ""}
        for held_out, piece in rule.assign(pieces):
            out[held_out] += piece.text
        assert out == {False: "01234", True: "56789"}


def test_no_text_at_all_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(ConfigError, match=r"must hold text, got 2 files without any"):
        plan_split(open_source(str(tmp_path)), 0.05)


def test_training_text_holds_every_training_document_and_no_other(tmp_path):
    source = folder_of(tmp_path, 60)
    rule = plan_split(source, 0.3)
    texts = list(training_text(source, rule, max_chars=1 << 20))
    assert sorted(texts) == sorted(sides(source, rule)[False].values())
    assert texts == list(training_text(source, rule, max_chars=1 << 20))


def test_training_text_is_bounded_and_spread_over_files(tmp_path):
    rule = SplitRule(validation_fraction=1e-9)
    for letter in "abcd":
        (tmp_path / f"{letter}.txt").write_text(letter * 300_000)
    texts = list(training_text(open_source(str(tmp_path)), rule, max_chars=400_000))
    counts = {letter: sum(text.count(letter) for text in texts) for letter in "abcd"}
    assert counts == dict.fromkeys("abcd", 100_000)
    texts = list(training_text(open_source(str(tmp_path)), rule, max_chars=70_000))
    assert sum(map(len, texts)) == 70_000
