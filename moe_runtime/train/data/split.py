"""Which documents are trained on and which are held out: a pure function of the documents' names.

A document's place never depends on the other documents, the order of files, or Python's salted hash(); the one
exception is a source so small that the rule leaves a side empty.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.sources import Piece, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """document d is held out where hash(d) < validation_fraction, or the reverse for the one named `moved`.

    moved      a document that changes sides because its side held all documents; None in any larger source
    cut_chars  where the only document of a source is divided: its text from this character on is held out
    """

    validation_fraction: float
    moved: str | None = None
    cut_chars: int | None = None

    def holds_out(self, document: str) -> bool:
        """Whether `document` belongs to the validation split."""
        return (name_hash(document) < self.validation_fraction) != (document == self.moved)

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[bool, Piece]]:
        """(held out, piece) for the pieces of one or more whole documents."""
        num_seen = 0
        for piece in pieces:
            if self.cut_chars is None:
                yield self.holds_out(piece.document), piece
                continue
            num_kept = min(max(self.cut_chars - num_seen, 0), len(piece.text))
            num_seen += len(piece.text)
            if num_kept > 0:
                yield False, Piece(piece.document, piece.text[:num_kept])
            if num_kept < len(piece.text):
                yield True, Piece(piece.document, piece.text[num_kept:])


def name_hash(name: str) -> float:
    """A number in [0, 1) from a name: the same in every process, on every machine."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2.0**53


def plan_split(source: Source, validation_fraction: float) -> SplitRule:
    """The rule for `source`: reads only until both sides have a document. ConfigError where there is no text at all."""
    rule = SplitRule(validation_fraction=validation_fraction)
    lowest = highest = None
    num_documents = num_chars = 0
    current = None
    for piece in source.all_pieces():
        num_chars += len(piece.text)
        if piece.document == current:
            continue
        current = piece.document
        num_documents += 1
        place = (name_hash(current), current)
        lowest, highest = min(lowest or place, place), max(highest or place, place)
        if rule.holds_out(lowest[1]) and not rule.holds_out(highest[1]):
            return rule
    if lowest is None or highest is None:
        raise ConfigError(f"data.source must hold text, got {len(source.files)} files without any in {source.root}")
    if num_documents == 1:
        cut = round(num_chars * (1.0 - validation_fraction))
        return SplitRule(validation_fraction=validation_fraction, cut_chars=min(max(cut, 1), num_chars - 1))
    moved = highest[1] if rule.holds_out(highest[1]) else lowest[1]
    return SplitRule(validation_fraction=validation_fraction, moved=moved)


def training_text(source: Source, rule: SplitRule, *, max_chars: int) -> Iterator[str]:
    """Training text for a tokenizer: files in the order of their names' hashes, at most `max_chars` in all.

    A file gives at most its even share (and 64 Ki characters at least), so that the text is spread over the source
    whatever its size; the order makes the choice independent of how names sort.
    """
    share = max(max_chars // len(source.files), 1 << 16)
    num_left = max_chars
    for file in sorted(source.files, key=lambda file: (name_hash(file.name), file.name)):
        file_left = share
        for held_out, piece in rule.assign(source.pieces(file)):
            take = min(file_left, num_left)
            if take == 0:
                break
            if not held_out:
                text = piece.text[:take]
                file_left, num_left = file_left - len(text), num_left - len(text)
                yield text
        if num_left == 0:
            return
