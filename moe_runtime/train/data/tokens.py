"""Tokens on disk and the batches cut from them: flat little-endian arrays, one token stream a split.

<split>.tokens holds every document's ids followed by one end-of-text id; <split>.ends holds, for each document, the
index just past its end-of-text id (int64). Which sequences make a batch is the sampler's business.
"""

# B sequences of a batch   S tokens of a sequence   T tokens of a split   N documents of a split

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

ENDS_DTYPE = "<i8"
IGNORED = -100  # the label of a place that is not learned, as torch's cross entropy has it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """int64 CPU tensors of shape [B, S]. A document mask is read off the positions: a 0 starts a segment.

    input_ids_BS     tokens
    labels_BS        the token after each input; after an end-of-text token, the first one of the next document.
                     IGNORED where nothing is to be learned
    position_ids_BS  position in the document, counted from the sequence's start for a document that began before it;
                     0..S-1 without document mask
    """

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    position_ids_BS: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenSplit:
    """One split's tokens, memory-mapped and read-only.

    tokens_T       [T] uint16 or uint32, documents back to back, each closed by an end-of-text id
    doc_ends_N         [N] int64, exclusive end of each document, end-of-text included: doc_ends_N[-1] = T
    document_mask  whether positions restart at document ends
    """

    tokens_T: np.ndarray
    doc_ends_N: np.ndarray
    document_mask: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_documents(self) -> int:
        return len(self.doc_ends_N)

    def num_sequences(self, seq_length: int) -> int:
        """(T - 1) // S: sequences do not overlap, and the last token of each needs a next one as its label."""
        return max(self.num_tokens - 1, 0) // seq_length

    def num_labels(self, indices: np.ndarray, seq_length: int) -> int:
        """Tokens of these sequences that are learned: all."""
        return len(indices) * seq_length

    def sequences(self, indices: np.ndarray, seq_length: int) -> Batch:
        """Sequence i = tokens [i S, (i + 1) S + 1): inputs are all but the last, labels all but the first.

        indices [B] integers in [0, num_sequences); ValueError for any other. No index gives tensors of shape [0, S].
        """
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"indices must be a vector of integers, got {indices.dtype} of shape {indices.shape}")
        num_sequences = self.num_sequences(seq_length)
        if np.any((indices < 0) | (indices >= num_sequences)):
            raise ValueError(f"indices must be in [0, {num_sequences}), got {indices.min()} to {indices.max()}")
        starts_B = indices.astype(np.int64) * seq_length
        window_BS = self.tokens_T[starts_B[:, None] + np.arange(seq_length + 1)].astype(np.int64)  # S + 1 wide
        return Batch(
            input_ids_BS=torch.from_numpy(window_BS[:, :-1].copy()),
            labels_BS=torch.from_numpy(window_BS[:, 1:].copy()),
            position_ids_BS=torch.from_numpy(self._positions(starts_B, seq_length)),
        )

    def _positions(self, starts_B: np.ndarray, seq_length: int) -> np.ndarray:
        """[B, S] int64: column minus the column of the last document start at or before it in the sequence, or 0."""
        column_S = np.arange(seq_length, dtype=np.int64)
        segment_BS = np.zeros((len(starts_B), seq_length), dtype=np.int64)
        if self.document_mask:
            first_B = np.searchsorted(self.doc_ends_N, starts_B, side="right")
            last_B = np.searchsorted(self.doc_ends_N, starts_B + seq_length, side="left")
            for row, (first, last) in enumerate(zip(first_B.tolist(), last_B.tolist(), strict=True)):
                columns = self.doc_ends_N[first:last] - starts_B[row]
                segment_BS[row, columns] = columns
            np.maximum.accumulate(segment_BS, axis=1, out=segment_BS)
        return column_S - segment_BS


def token_dtype(vocab_size: int) -> str:
    """The stored type of ids below `vocab_size`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class SplitWriter:
    """Appends documents to <name>.tokens and <name>.ends in a folder; `close` ends the last one and syncs to disk."""

    def __init__(self, folder: Path, name: str, *, vocab_size: int, eos_id: int) -> None:
        self._dtype = token_dtype(vocab_size)
        self._eos = np.array([eos_id], dtype=self._dtype).tobytes()
        self._document: str | None = None
        self._tokens = create_private(folder / f"{name}.tokens")
        self._ends = create_private(folder / f"{name}.ends")
        self.num_tokens = 0
        self.num_documents = 0

    def add(self, document: str, ids: np.ndarray) -> None:
        """Append ids; another `document` than the last call's ends that one."""
        if self._document not in (None, document):
            self._end_document()
        self._document = document
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)

    def close(self) -> None:
        if self._document is not None:
            self._end_document()
        for stream in (self._tokens, self._ends):
            sync_and_close(stream)

    def abandon(self) -> None:
        """Close the files as they are; does nothing after `close`."""
        for stream in (self._tokens, self._ends):
            with contextlib.suppress(OSError):  # a full disk: the write that met it has raised
                stream.close()

    def _end_document(self) -> None:
        self._tokens.write(self._eos)
        self.num_tokens += 1
        self.num_documents += 1
        self._ends.write(np.array([self.num_tokens], dtype=ENDS_DTYPE).tobytes())
        self._document = None


def open_split(folder: Path, name: str, *, vocab_size: int, document_mask: bool) -> TokenSplit:
    """Map a split that a closed SplitWriter left."""
    return TokenSplit(
        tokens_T=_map(folder / f"{name}.tokens", token_dtype(vocab_size)),
        doc_ends_N=_map(folder / f"{name}.ends", ENDS_DTYPE),
        document_mask=document_mask,
    )


def create_private(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def sync_and_close(stream: BinaryIO) -> None:
    """Bring a file's bytes to the disk, then close it."""
    with stream:
        stream.flush()
        os.fsync(stream.fileno())


def _map(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
