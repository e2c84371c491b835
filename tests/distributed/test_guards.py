"""Guards over ranks: what one rank alone meets, all of them act on, and replicas that differ are found and named."""

from collections.abc import Callable

import pytest
from guard_cases import bad_step, changed_bit, votes_are_heard

from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("data", "expert", "schedule", "fault"),
    [
        ("ddp", 1, "inline", "nan"),
        ("ddp", 2, "deferred", "inf"),
        ("ddp", 2, "inline", "late"),
        ("fsdp2", 2, "inline", "nan"),
        ("fsdp2", 1, "late", "late"),
    ],
)
def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(
    data: str, expert: int, schedule: str, fault: str, ranks: Ranks
) -> None:
    results = ranks(2).run(bad_step, data, expert, schedule, fault)
    for rank, (skipped, unchanged, equal, nonfinite) in enumerate(results):
        assert skipped == [False, True, False], rank
        assert unchanged and equal, rank
        assert bool(nonfinite) == (fault != "late" or rank == 1), rank


def test_what_one_rank_asks_for_all_ranks_hear_in_the_same_step(ranks: Ranks) -> None:
    assert ranks(2).run(votes_are_heard) == [[(False, False), (True, False), (False, True)]] * 2


@pytest.mark.parametrize(
    ("world", "data", "expert", "replicate", "ending", "rank", "others"),
    [
        (2, "ddp", 1, 1, "layers.1.self_attn.q_proj.weight", 1, "0"),
        (2, "ddp", 2, 1, "layers.0.mlp.gate.weight", 1, "0"),
        (2, "fsdp2", 1, 2, "lm_head.weight", 1, "0"),
        (4, "ddp", 2, 1, "layers.1.mlp.experts.experts.down.weight", 3, "1"),
        (4, "fsdp2", 2, 2, "layers.1.mlp.experts.experts.gate_up.weight", 2, "0"),
        (4, "ddp", 1, 1, "layers.0.mlp.gate.weight", 2, "0, 1, 3"),
    ],
)
def test_a_changed_bit_of_a_replica_is_named_by_tensor_and_rank(
    world: int, data: str, expert: int, replicate: int, ending: str, rank: int, others: str, ranks: Ranks
) -> None:
    for before, after in ranks(world).run(changed_bit, data, expert, replicate, ending, rank):
        assert before is None
        # Of two that differ nobody can say which is wrong: the later one is named first.
        assert after is not None and after.endswith(
            f"{ending} on rank {rank} differs from the same tensor on rank {others}"
        ), after
