"""Samples to rows: which samples share a row, and the batch tensors of rows, with only what is learned as labels.

A sample of n tokens takes n - 1 places of a row: inputs are all its tokens but the last, labels all but the first.
Positions restart at 0 with each sample and with the padding at a row's end, which is how Hugging Face models are told
not to look across; the label of anything that is not learned, padding included, is IGNORED.
"""

# N samples   T tokens of all samples   R rows   S places of a row   B rows of a batch

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger
from moe_runtime.train.data.instructions import TooLong
from moe_runtime.train.data.tokens import IGNORED, Batch

_LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedSplit:
    """Tokenized samples and their places in rows. Small enough for memory: 5 bytes a token.

    ids_T      [T] int32, samples back to back
    learned_T  [T] bool
    starts_N   [N + 1] int64, where each sample begins; the last is T
    order_N    [N] int64, samples in the order in which rows hold them
    rows_R     [R + 1] int64, where each row begins in `order_N`
    """

    ids_T: np.ndarray
    learned_T: np.ndarray
    starts_N: np.ndarray
    order_N: np.ndarray
    rows_R: np.ndarray
    seq_length: int
    pad_id: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def num_documents(self) -> int:
        return len(self.starts_N) - 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides what a row holds, as 64 hex digits."""
        digest = hashlib.sha256(f"{self.seq_length} {self.pad_id}".encode())
        for array in (self.ids_T, self.learned_T, self.starts_N, self.order_N, self.rows_R):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def num_sequences(self, seq_length: int) -> int:
        """Rows."""
        self._check_length(seq_length)
        return len(self.rows_R) - 1

    def num_labels(self, indices: np.ndarray, seq_length: int) -> int:
        """Tokens of these rows that are learned."""
        self._check_length(seq_length)
        return sum(int(self.learned_T[start + 1 : end].sum()) for row in indices for start, end in self._spans(row))

    def sequences(self, indices: np.ndarray, seq_length: int) -> Batch:
        """The rows `indices` [B]; ValueError for one outside [0, num_sequences)."""
        num_rows = self.num_sequences(seq_length)
        if np.any((indices < 0) | (indices >= num_rows)):
            raise ValueError(f"indices must be in [0, {num_rows}), got {indices.min()} to {indices.max()}")
        ids_BS = np.full((len(indices), seq_length), self.pad_id, dtype=np.int64)
        labels_BS = np.full((len(indices), seq_length), IGNORED, dtype=np.int64)
        positions_BS = np.zeros((len(indices), seq_length), dtype=np.int64)
        for b, row in enumerate(indices):
            place = 0
            for start, end in self._spans(row):
                stop = place + end - start - 1
                ids_BS[b, place:stop] = self.ids_T[start : end - 1]
                labels_BS[b, place:stop] = np.where(
                    self.learned_T[start + 1 : end], self.ids_T[start + 1 : end], IGNORED
                )
                positions_BS[b, place:stop] = np.arange(stop - place)
                place = stop
            positions_BS[b, place:] = np.arange(seq_length - place)
        return Batch(
            input_ids_BS=torch.from_numpy(ids_BS),
            labels_BS=torch.from_numpy(labels_BS),
            position_ids_BS=torch.from_numpy(positions_BS),
        )

    def _spans(self, row: int) -> list[tuple[int, int]]:
        """[start, end) in `ids_T` of each sample of a row."""
        samples = self.order_N[self.rows_R[row] : self.rows_R[row + 1]]
        return [(int(self.starts_N[n]), int(self.starts_N[n + 1])) for n in samples]

    def _check_length(self, seq_length: int) -> None:
        if seq_length != self.seq_length:
            raise ValueError(f"rows were packed for seq_length {self.seq_length}, got {seq_length}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedInstructions:
    """Both splits, and the tokenizer that made them; `fingerprint` tells other data apart."""

    train: PackedSplit
    validation: PackedSplit
    tokenizer_path: Path
    fingerprint: str


def pack(
    samples: Iterable[tuple[Sequence[int], Sequence[bool]]],
    *,
    name: str,
    seq_length: int,
    pad_id: int,
    packing: bool,
    too_long: TooLong,
) -> PackedSplit:
    """Rows of (ids, learned) samples. `name` is the split's, for messages.

    Samples without a token to learn in their places are left out, and counted in the log. ConfigError for one that is
    longer than a row and may not be, and where nothing is left.
    """
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    num_long, longest, num_empty = 0, 0, 0
    for ids, learned in samples:
        ids_n, learned_n = np.asarray(ids, dtype=np.int32), np.asarray(learned, dtype=bool)
        if len(ids_n) > seq_length + 1:
            num_long, longest = num_long + 1, max(longest, len(ids_n) - 1)
            if too_long == "drop":
                continue
            ids_n, learned_n = ids_n[: seq_length + 1], learned_n[: seq_length + 1]
        if not learned_n[1:].any():
            num_empty += 1
            continue
        kept.append((ids_n, learned_n))
    if num_long and too_long == "refuse":
        raise ConfigError(
            f"data.seq_length must hold every sample to {name}, got {seq_length} with {num_long} longer ones, the "
            f"longest {longest}; raise it, or set data.too_long to 'drop' or 'truncate'"
        )
    if not kept:
        raise ConfigError(f"there must be a sample to {name} with a token to learn, got none")
    if num_long or num_empty:
        done = {"drop": "dropped", "truncate": "cut"}.get(too_long, "")
        _LOGGER.info(
            "%s: %d samples longer than a row %s, %d without a token to learn", name, num_long, done, num_empty
        )
    lengths = [len(ids_n) - 1 for ids_n, _ in kept]
    rows = _best_fit(lengths, seq_length) if packing else [[n] for n in range(len(kept))]
    return PackedSplit(
        ids_T=np.concatenate([ids_n for ids_n, _ in kept]),
        learned_T=np.concatenate([learned_n for _, learned_n in kept]),
        starts_N=np.concatenate(([0], np.cumsum([length + 1 for length in lengths]))).astype(np.int64),
        order_N=np.array([n for row in rows for n in row], dtype=np.int64),
        rows_R=np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64),
        seq_length=seq_length,
        pad_id=pad_id,
    )


def _best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Items in bins of `size`, longest first, each into the fullest bin that holds it; of equals, into the oldest."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (places left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect.bisect_left(room, (lengths[item], -1))
        if at == len(room):
            bins.append([item])
            left, index = size - lengths[item], len(bins) - 1
        else:
            left, index = room.pop(at)
            bins[index].append(item)
            left -= lengths[item]
        bisect.insort(room, (left, index))
    return bins
