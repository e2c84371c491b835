"""The arms of the frozen benchmark, on the CPU at a small size: all right, and a wrong one is not timed."""

import pytest
import torch

from moe_runtime.bench import frozen, layer
from moe_runtime.bench.moe import Shape

SHAPE = Shape(width=64, expert_width=32, experts=6, top_k=2, tokens=37)


@pytest.fixture(scope="module")
def arms() -> dict[str, frozen.Arm]:
    inputs = layer.inputs_of(SHAPE, torch.device("cpu"))
    return {"eager": frozen.composite_arm(inputs, layer.ARMS["eager"]), **frozen.our_arms(inputs)}


@pytest.mark.parametrize("name", ["eager", "bf16", "mxfp8", "nvfp4"])
def test_every_arm_computes_the_layer(name: str, arms: dict[str, frozen.Arm]) -> None:
    assert 0 < frozen.check(arms[name]) <= layer.TOLERANCE


def test_stored_bytes_are_those_of_row_wise_storage(arms: dict[str, frozen.Arm]) -> None:
    count = 6 * 3 * 64 * 32
    assert arms["bf16"].stored_bytes == 2 * count
    assert arms["mxfp8"].stored_bytes == count * 33 // 32
    assert arms["nvfp4"].stored_bytes == count * 9 // 16 + 4 * 6 * 2  # a tensor scale for each expert of two weights


def test_a_wrong_arm_is_not_timed(arms: dict[str, frozen.Arm]) -> None:
    y_TD, dx_TD, dgates_TK = arms["bf16"].run()
    wrong = arms["bf16"]._replace(run=lambda: (y_TD, dx_TD * 1.1, dgates_TK))
    with pytest.raises(SystemExit, match="dx is off by"):
        frozen.check(wrong)
