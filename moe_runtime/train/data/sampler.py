"""Which sequences a step reads: a pure function of (seed, step), so the sampler's saved position is the step itself.

Every epoch is a permutation of all sequences, computed element by element with a keyed swap-or-not shuffle: no state,
no array of the data set's size, integer arithmetic only, hence the same order on every machine and library version.
"""

# B rows of a global batch   N rows asked for   E epochs they touch   R rounds of the shuffle

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from moe_runtime.core.errors import ConfigError

NUM_ROUNDS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Row r of step s is element s B + r of the endless sequence permutation(epoch 0), permutation(epoch 1), ...

    So every sequence comes exactly once an epoch, a batch may straddle epochs, and a batch larger than the data set
    wraps it. A run that resumes at step s asks for step s: nothing else is saved.
    """

    num_sequences: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        for field in ("num_sequences", "global_batch_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, got {getattr(self, field)}")

    def check(self, num_microbatches: int, dp_size: int) -> None:
        """ConfigError unless the global batch divides evenly over microbatches and data-parallel ranks."""
        if num_microbatches < 1 or dp_size < 1 or self.global_batch_size % (num_microbatches * dp_size) != 0:
            raise ConfigError(
                f"the global batch must be a multiple of microbatches x data-parallel ranks = "
                f"{num_microbatches} x {dp_size}, got {self.global_batch_size} sequences"
            )

    def indices(self, step: int) -> np.ndarray:
        """[global_batch_size] int64: the sequences of `step` (0, 1, ...)."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        return _step_indices(self, step).copy()

    def microbatch(self, step: int, index: int, *, num_microbatches: int, dp_rank: int, dp_size: int) -> np.ndarray:
        """int64 rows of one rank: slice `index` of `indices(step)` in num_microbatches, of it slice dp_rank in dp_size.

        Over all ranks microbatch `index` holds the same rows whatever dp_size is. ValueError for an index or rank out
        of range; `check` says beforehand whether the sizes divide.
        """
        if not 0 <= index < num_microbatches or not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"index must be in [0, {num_microbatches}) and dp_rank in [0, {dp_size}), got {index} and {dp_rank}"
            )
        self.check(num_microbatches, dp_size)
        num_rows = self.global_batch_size // (num_microbatches * dp_size)
        start = (index * dp_size + dp_rank) * num_rows
        return self.indices(step)[start : start + num_rows]


@functools.lru_cache(maxsize=4)  # the microbatches of a step share it
def _step_indices(sampler: Sampler, step: int) -> np.ndarray:
    position_N = step * sampler.global_batch_size + np.arange(sampler.global_batch_size, dtype=np.int64)
    epoch_N, offset_N = np.divmod(position_N, sampler.num_sequences)
    epochs_E, which_N = np.unique(epoch_N, return_inverse=True)
    mirror_RE, key_RE = np.stack([_round_keys(sampler.seed, epoch) for epoch in epochs_E.tolist()], axis=-1)
    n = np.uint64(sampler.num_sequences)
    x_N = offset_N.astype(np.uint64)
    for mirror_E, key_E in zip(mirror_RE % n, key_RE, strict=True):
        x_N = _swap_or_not(x_N, mirror_E[which_N], key_E[which_N], n)
    return x_N.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """[2, R] uint64: each round's mirror point and hash key."""
    digest = hashlib.shake_256(f"moe_runtime sampler {seed} {epoch}".encode()).digest(2 * NUM_ROUNDS * 8)
    return np.frombuffer(digest, dtype="<u8").reshape(2, NUM_ROUNDS)


def _swap_or_not(x_N: np.ndarray, mirror_N: np.ndarray, key_N: np.ndarray, n: np.uint64) -> np.ndarray:
    """One round: pair x with (mirror - x) mod n, and swap the pair or not by a hash bit of its larger member.

    Both members see the same bit, so a round is a bijection of [0, n), and so is a chain of them.
    """
    sum_N = mirror_N + (n - x_N)
    partner_N = np.where(sum_N >= n, sum_N - n, sum_N)
    return np.where(_hash_bit(np.maximum(x_N, partner_N) + key_N), partner_N, x_N)


def _hash_bit(z_N: np.ndarray) -> np.ndarray:
    """[N] bool: the top bit of a multiply-xorshift mix of 64 bits (constants of splitmix64)."""
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_N >> np.uint64(63) != 0
