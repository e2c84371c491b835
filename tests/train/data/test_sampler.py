"""The sampler's promises: once an epoch, the same rows at every data-parallel size, resume from the step alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.sampler import Sampler

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**64 - 1)


@given(num_sequences=sizes, batch=sizes, seed=seeds, epochs=st.integers(1, 3))
def test_every_sequence_exactly_once_an_epoch(num_sequences, batch, seed, epochs):
    sampler = Sampler(num_sequences=num_sequences, global_batch_size=batch, seed=seed)
    num_steps = -(-epochs * num_sequences // batch)
    stream = np.concatenate([sampler.indices(step) for step in range(num_steps)])
    assert stream.dtype == np.int64
    for epoch in range(epochs):
        rows = stream[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(rows.tolist()) == list(range(num_sequences))


@given(num_sequences=sizes, rows=st.integers(1, 3), microbatches=st.integers(1, 4), seed=seeds, step=st.integers(0, 50))
def test_microbatches_hold_the_same_rows_at_every_data_parallel_size(num_sequences, rows, microbatches, seed, step):
    batch = rows * microbatches * 12
    sampler = Sampler(num_sequences=num_sequences, global_batch_size=batch, seed=seed)
    expected = sampler.indices(step).reshape(microbatches, -1)
    for dp_size in (1, 2, 3, 4, 12):
        sampler.check(microbatches, dp_size)
        for index in range(microbatches):
            parts = [
                sampler.microbatch(step, index, num_microbatches=microbatches, dp_rank=rank, dp_size=dp_size)
                for rank in range(dp_size)
            ]
            assert {len(part) for part in parts} == {batch // microbatches // dp_size}
            assert np.concatenate(parts).tolist() == expected[index].tolist()


@given(seed=seeds, step=st.integers(0, 10**12))
def test_a_step_depends_on_nothing_but_seed_and_step(seed, step):
    first = Sampler(num_sequences=10**9, global_batch_size=6, seed=seed).indices(step)
    other = Sampler(num_sequences=10**9, global_batch_size=6, seed=seed)
    other.indices(step + 1)
    second = other.indices(step)
    assert first.tolist() == second.tolist()
    assert np.all((first >= 0) & (first < 10**9))


def test_order_is_pinned():
    # Another order would change what a resumed run reads: it must never change.
    assert Sampler(num_sequences=10, global_batch_size=10, seed=0).indices(0).tolist() == [8, 5, 0, 6, 2, 7, 1, 4, 9, 3]
    assert Sampler(num_sequences=10, global_batch_size=10, seed=0).indices(1).tolist() == [8, 2, 9, 1, 5, 3, 7, 6, 4, 0]


def test_seeds_and_epochs_give_unrelated_orders():
    num_sequences = 4096
    orders = [
        Sampler(num_sequences=num_sequences, global_batch_size=num_sequences, seed=seed).indices(epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    orders.append(np.arange(num_sequences))
    correlation = np.corrcoef(np.stack(orders)) - np.eye(len(orders))
    assert np.abs(correlation).max() < 5 / np.sqrt(num_sequences)


def test_all_orders_of_a_tiny_set_are_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for step in range(2400):
        order = tuple(Sampler(num_sequences=4, global_batch_size=4, seed=3).indices(step).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_squared = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi_squared < 49.7  # 0.1 % of the distribution with 23 degrees of freedom lies above


def test_batch_larger_than_the_data_wraps_epochs():
    rows = Sampler(num_sequences=3, global_batch_size=8, seed=5).indices(0).tolist()
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2] and len(set(rows[6:])) == 2
    assert Sampler(num_sequences=1, global_batch_size=4, seed=5).indices(9).tolist() == [0, 0, 0, 0]


def test_changing_a_returned_array_changes_no_later_one():
    sampler = Sampler(num_sequences=50, global_batch_size=4, seed=1)
    before = sampler.indices(3).tolist()
    sampler.indices(3)[:] = -1
    sampler.microbatch(3, 0, num_microbatches=1, dp_rank=0, dp_size=1)[:] = -1
    assert sampler.indices(3).tolist() == before


@pytest.mark.parametrize(("microbatches", "dp_size"), [(5, 1), (1, 5), (4, 4), (0, 1), (1, 0)])
def test_check_names_the_numbers(microbatches, dp_size):
    sampler = Sampler(num_sequences=100, global_batch_size=8, seed=0)
    with pytest.raises(ConfigError, match=rf"= {microbatches} x {dp_size}, got 8 sequences"):
        sampler.check(microbatches, dp_size)


@pytest.mark.parametrize(("index", "rank"), [(-1, 0), (2, 0), (0, -1), (0, 2)])
def test_index_or_rank_out_of_range(index, rank):
    sampler = Sampler(num_sequences=100, global_batch_size=8, seed=0)
    with pytest.raises(ValueError, match=rf"index must be in \[0, 2\) .* got {index} and {rank}"):
        sampler.microbatch(0, index, num_microbatches=2, dp_rank=rank, dp_size=2)


def test_bad_sizes_and_steps():
    with pytest.raises(ConfigError, match="num_sequences must be at least 1, got 0"):
        Sampler(num_sequences=0, global_batch_size=8, seed=0)
    with pytest.raises(ConfigError, match="global_batch_size must be at least 1, got 0"):
        Sampler(num_sequences=8, global_batch_size=0, seed=0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        Sampler(num_sequences=8, global_batch_size=8, seed=0).indices(-1)
