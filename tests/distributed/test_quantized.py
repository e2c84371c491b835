"""Experts stored quantized, sharded and replicated: they train as in one process, and any layout loads any other's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_cases import (
    RECIPES,
    first_masters,
    gathered,
    load,
    offloaded,
    one_expert_a_rank,
    refused_separate,
    refused_shard,
    save,
    train,
)

from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

PLANS = [
    (2, "fsdp2", 1, 1),
    (2, "fsdp2", 2, 1),
    (2, "ddp", 1, 1),
    (2, "ddp", 2, 1),
    (4, "fsdp2", 2, 1),
    (4, "fsdp2", 1, 2),
]
QUANTIZED = [name for name in RECIPES if name != "bf16"]


def _run(ranks: Ranks, world: int, function: Callable, *arguments: object) -> list:
    return [function(*arguments)] if world == 1 else ranks(world).run(function, *arguments)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))
@pytest.mark.parametrize(
    # A quantized wgrad has blocks of 32 rows, and which rows share one depends on how ranks divide them. Weights that
    # differ by summation order alone may round to neighboring codes.
    ("recipe", "loss_bound", "norm_bound"),
    [("mxfp8", 1e-4, 1e-3), ("mxfp8 dequantized", 1e-5, 1e-3)],
    ids=["mxfp8", "dequantized"],
)
def test_trains_as_in_one_process(recipe: str, loss_bound: float, norm_bound: float, plan: tuple, ranks: Ranks) -> None:
    world, data, expert, replicate = plan
    losses, norms = train(recipe, "none", 1, 1, False)
    for discrete in (False, True) if data == "ddp" else (False,):
        results = ranks(world).run(train, recipe, data, expert, replicate, discrete)
        assert all(result == results[0] for result in results)
        torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(losses), rtol=loss_bound, atol=0)
        torch.testing.assert_close(torch.tensor(results[0][1]), torch.tensor(norms), rtol=norm_bound, atol=0)


def test_mixed_precision_gathers_bytes_and_computes_in_bf16(ranks: Ranks) -> None:
    exact, _ = train("mxfp8 dequantized", "none", 1, 1, False)
    for expert in (1, 2):
        results = ranks(2).run(train, "mxfp8 dequantized", "fsdp2", expert, 1, False, True)
        torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(exact), rtol=2e-3, atol=0)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_shards_kept_on_the_cpu_give_the_same_gradients(recipe: str, ranks: Ranks) -> None:
    assert ranks(2).run(offloaded, recipe) == [True, True]


LAYOUTS = [(2, "fsdp2", 1), (1, "none", 1), (2, "fsdp2", 2), (4, "fsdp2", 2), (2, "ddp", 2)]
SEPARATE = [(2, "ddp", 2), (1, "none", 1), (2, "ddp", 1)]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("loaded", LAYOUTS[1:], ids=lambda layout: "-".join(map(str, layout)))
def test_saved_at_two_ranks_loaded_at_any_other(recipe: str, loaded: tuple, ranks: Ranks, tmp_path: Path) -> None:
    _check_reload(ranks, tmp_path, recipe, LAYOUTS[0], loaded, discrete=False)


@pytest.mark.parametrize("loaded", SEPARATE[1:], ids=str)
def test_separate_quantized_experts_reload_at_any_other(loaded: tuple, ranks: Ranks, tmp_path: Path) -> None:
    _check_reload(ranks, tmp_path, "nvfp4", SEPARATE[0], loaded, discrete=True)


def _check_reload(ranks: Ranks, folder: Path, recipe: str, saved: tuple, loaded: tuple, *, discrete: bool) -> None:
    before = _union(_run(ranks, saved[0], save, str(folder), recipe, *saved[1:], discrete))
    after = _union(_run(ranks, loaded[0], load, str(folder), recipe, *loaded[1:], discrete))
    assert any(name.endswith(".rowwise.scale") for name in before) and any(name.endswith(".master") for name in before)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("plan", [(1, "none", 1), (2, "fsdp2", 2), (4, "fsdp2", 2), (2, "ddp", 2)], ids=str)
def test_masters_start_at_the_values_before_quantization(plan: tuple, ranks: Ranks) -> None:
    world, *layout = plan
    exact = first_masters("bf16", "none", 1)
    for name, master in _union(_run(ranks, world, first_masters, "mxfp8", *layout)).items():
        if name.endswith(".master"):
            assert torch.equal(master, exact[name.removesuffix(".master")]), name


def test_one_expert_a_rank_is_sharded_inside_and_trains_in_bf16(ranks: Ranks) -> None:
    expected = torch.tensor(one_expert_a_rank(False))
    for losses in ranks(4).run(one_expert_a_rank, True):
        # bf16 products of other batch sizes round apart.
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-3, atol=0)


def test_experts_that_a_shard_would_split_are_refused_with_a_plan_that_fits(ranks: Ranks) -> None:
    sentences = ranks(4).run(refused_shard, 6, 4)
    for sentence in sentences:
        assert "shard=4" in sentence and "6 experts" in sentence and "shard=2, replicate=2" in sentence


def test_separate_quantized_experts_are_refused_under_fsdp2(ranks: Ranks) -> None:
    for sentence in ranks(2).run(refused_separate):
        assert "single_grouped_weight=True" in sentence and "data='fsdp2'" in sentence


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_gathers_the_stored_bytes_and_keeps_no_dequantized_copy(frozen: bool, ranks: Ranks) -> None:
    for num_bytes, alive in ranks(2).run(gathered, "mxfp8 dequantized", frozen):
        assert num_bytes == pytest.approx(1 + 1 / 32)
        assert not alive


def _union(parts: list[dict]) -> dict:
    return {name: value for part in parts for name, value in part.items()}
