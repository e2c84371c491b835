"""Rows of samples: every place of every row against the samples it was made of."""

# R rows   S places

import numpy as np
import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.packing import PackedSplit, pack
from moe_runtime.train.data.tokens import IGNORED

PAD = 0


def sample(first: int, length: int, prompt: int) -> tuple[list[int], list[bool]]:
    """`length` tokens first, first + 1, ..., learned after the first `prompt`."""
    return list(range(first, first + length)), [place >= prompt for place in range(length)]


def packed(samples: list[tuple[list[int], list[bool]]], seq_length: int = 8, **options: object) -> PackedSplit:
    given = {"name": "train on", "pad_id": PAD, "packing": True, "too_long": "refuse", **options}
    return pack(samples, seq_length=seq_length, **given)  # pyright: ignore[reportArgumentType]


def test_a_row_token_by_token() -> None:
    # Five and three places fill one row of eight; four leave four of padding.
    split = packed([sample(10, 4, 2), sample(20, 6, 3), sample(30, 5, 4)])
    assert split.num_sequences(8) == 2 and split.num_tokens == 15 and split.num_documents == 3
    batch = split.sequences(np.array([0, 1]), 8)
    assert batch.input_ids_BS.tolist() == [[20, 21, 22, 23, 24, 10, 11, 12], [30, 31, 32, 33, PAD, PAD, PAD, PAD]]
    ignored = IGNORED
    assert batch.labels_BS.tolist() == [
        [ignored, ignored, 23, 24, 25, ignored, 12, 13],
        [ignored, ignored, ignored, 34, ignored, ignored, ignored, ignored],
    ]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert split.num_labels(np.array([0, 1]), 8) == 6 and split.num_labels(np.array([1]), 8) == 1


@pytest.mark.parametrize("packing", [True, False])
def test_every_sample_is_in_one_row_whole(packing: bool) -> None:
    rng = np.random.default_rng(0)
    samples = [sample(1000 * n + 1, int(rng.integers(2, 18)), 1) for n in range(200)]
    split = packed(samples, seq_length=16, packing=packing)
    batch = split.sequences(np.arange(split.num_sequences(16)), 16)
    found = []
    for ids_S, labels_S, positions_S in zip(
        batch.input_ids_BS.tolist(), batch.labels_BS.tolist(), batch.position_ids_BS.tolist(), strict=True
    ):
        for place, (token, label, position) in enumerate(zip(ids_S, labels_S, positions_S, strict=True)):
            if token == PAD:
                assert label == IGNORED
                continue
            assert label == token + 1 and token % 1000 == position + 1
            assert position == 0 or ids_S[place - 1] == token - 1
            found.append(token)
    assert sorted(found) == sorted(token for ids, _ in samples for token in ids[:-1])
    places = sum(len(ids) - 1 for ids, _ in samples)
    assert -(-places // 16) == 113  # the fewest rows that could be
    assert split.num_sequences(16) == (118 if packing else 200)


def test_what_is_longer_than_a_row_is_refused_dropped_or_cut() -> None:
    samples = [sample(10, 9, 1), sample(20, 10, 1), sample(40, 12, 11), sample(60, 3, 3)]
    with pytest.raises(ConfigError, match=r"data\.seq_length must hold every sample to train on, got 8 with 2 longer"):
        packed(samples)
    dropped = packed(samples, too_long="drop")
    assert dropped.num_documents == 1 and dropped.num_tokens == 9
    cut = packed(samples, too_long="truncate")  # the third has nothing left to learn
    assert cut.num_documents == 2
    assert cut.sequences(np.array([1]), 8).labels_BS.tolist() == [list(range(21, 29))]


def test_nothing_to_learn_and_wrong_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="there must be a sample to train on with a token to learn, got none"):
        packed([sample(10, 3, 3)])
    # The first token has nothing before it that could predict it.
    with pytest.raises(ConfigError, match="got none"):
        packed([([5], [True])])
    split = packed([sample(10, 4, 2)])
    with pytest.raises(ValueError, match="rows were packed for seq_length 8, got 16"):
        split.sequences(np.array([0]), 16)
    with pytest.raises(ValueError, match=r"indices must be in \[0, 1\), got 1 to 1"):
        split.sequences(np.array([1]), 8)


def test_the_fingerprint_tells_data_apart() -> None:
    one = packed([sample(10, 4, 2), sample(20, 6, 3)])
    assert one.fingerprint == packed([sample(10, 4, 2), sample(20, 6, 3)]).fingerprint
    others = [
        packed([sample(10, 4, 1), sample(20, 6, 3)]),
        packed([sample(11, 4, 2), sample(20, 6, 3)]),
        packed([sample(10, 4, 2), sample(20, 6, 3)], packing=False),
        packed([sample(10, 4, 2), sample(20, 6, 3)], seq_length=9),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 5
