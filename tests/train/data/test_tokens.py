"""Batches against hand-worked values and a token-by-token reference; the files' layout and permissions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.train.data.tokens import SplitWriter, TokenSplit, open_split, token_dtype


def split_of(lengths, *, document_mask=True) -> TokenSplit:
    """Documents of the given lengths (end-of-text included); token t has id 100 + t, end-of-text is 0."""
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(100, 100 + (ends[-1] if len(ends) else 0), dtype=np.uint16)
    tokens[ends - 1] = 0
    return TokenSplit(tokens_T=tokens, doc_ends_N=ends, document_mask=document_mask)


def test_labels_and_positions_by_hand():
    # tokens:     100 101   0 | 103   0 | 105 106 107 108   0 |   0 | 111 112   0
    # sequence 0: 100 101   0   103     sequence 1: 0 105 106 107     sequence 2: 108 0 0 111
    batch = split_of([3, 2, 5, 1, 3]).sequences(np.array([2, 0, 1]), 4)
    assert batch.input_ids_BS.tolist() == [[108, 0, 0, 111], [100, 101, 0, 103], [0, 105, 106, 107]]
    assert batch.labels_BS.tolist() == [[0, 0, 111, 112], [101, 0, 103, 0], [105, 106, 107, 108]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 1, 2]]
    assert {tensor.dtype for tensor in (batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS)} == {torch.int64}


def test_positions_run_through_without_document_mask():
    batch = split_of([3, 2, 5, 1, 3], document_mask=False).sequences(np.array([2, 0]), 4)
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.input_ids_BS.tolist() == [[108, 0, 0, 111], [100, 101, 0, 103]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_length=st.integers(1, 8),
    data=st.data(),
)
def test_sequences_match_a_token_by_token_reference(lengths, seq_length, data):
    split = split_of(lengths)
    num_sequences = split.num_sequences(seq_length)
    assert num_sequences * seq_length + 1 <= max(split.num_tokens, 1) < (num_sequences + 1) * seq_length + 1
    if num_sequences == 0:
        return
    rows = np.array(data.draw(st.lists(st.integers(0, num_sequences - 1), max_size=5)), dtype=np.int64)
    batch = split.sequences(rows, seq_length)
    starts = {0, *split.doc_ends_N.tolist()}
    assert batch.position_ids_BS.shape == (len(rows), seq_length)
    for row, sequence in enumerate(rows.tolist()):
        position = 0
        for column in range(seq_length):
            token = sequence * seq_length + column
            position = 0 if column == 0 or token in starts else position + 1
            assert batch.position_ids_BS[row, column] == position
            assert batch.input_ids_BS[row, column] == split.tokens_T[token]
            assert batch.labels_BS[row, column] == split.tokens_T[token + 1]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_number_of_sequences_at_its_edges(num_tokens, expected):
    split = TokenSplit(tokens_T=np.zeros(num_tokens, np.uint16), doc_ends_N=np.array([num_tokens]))
    assert split.num_sequences(4) == expected


@pytest.mark.parametrize("rows", [[-1], [3], [0, 1 << 40], [[0]], [0.0]], ids=str)
def test_bad_indices_are_refused(rows):
    with pytest.raises(ValueError, match=r"indices must be .*got"):
        split_of([13]).sequences(np.array(rows), 4)


def test_written_documents_read_back(tmp_path):
    writer = SplitWriter(tmp_path, "train", vocab_size=300, eos_id=7)
    writer.add("a", np.array([1, 2]))
    writer.add("a", np.array([3]))  # a second piece of the same document
    writer.add("b", np.array([], dtype=np.int64))  # text that a tokenizer drops altogether
    writer.add("c", np.array([299]))
    writer.close()
    split = open_split(tmp_path, "train", vocab_size=300, document_mask=True)
    assert split.tokens_T.tolist() == [1, 2, 3, 7, 7, 299, 7]
    assert split.doc_ends_N.tolist() == [4, 5, 7]
    assert (split.num_tokens, split.num_documents) == (writer.num_tokens, writer.num_documents) == (7, 3)
    assert split.tokens_T.dtype == np.uint16 and split.doc_ends_N.dtype == np.int64
    assert not split.tokens_T.flags.writeable
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_largest_id_survives_storage(tmp_path, vocab_size, dtype):
    writer = SplitWriter(tmp_path, "train", vocab_size=vocab_size, eos_id=0)
    writer.add("a", np.array([vocab_size - 1, 1]))
    writer.close()
    split = open_split(tmp_path, "train", vocab_size=vocab_size, document_mask=True)
    assert np.dtype(token_dtype(vocab_size)) == split.tokens_T.dtype == dtype
    batch = split.sequences(np.array([0]), 2)
    assert batch.input_ids_BS.tolist() == [[vocab_size - 1, 1]] and batch.labels_BS.tolist() == [[1, 0]]


def test_empty_split_opens(tmp_path):
    SplitWriter(tmp_path, "train", vocab_size=300, eos_id=0).close()
    split = open_split(tmp_path, "train", vocab_size=300, document_mask=True)
    assert (split.num_tokens, split.num_documents, split.num_sequences(1)) == (0, 0, 0)
