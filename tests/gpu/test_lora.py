"""Adapters on a GPU: bytes of a base loaded from a folder, and what the missing direction saves, to its formula."""

from pathlib import Path

import pytest
import torch

from moe_runtime.bench import lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, EXPERTS, WIDTH, INNER = 2, 128, 2048, 768


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, lora.Measured]:
    """Two layers of the 30B shape."""
    folder: Path = lora.write_base(tmp_path_factory.mktemp("base") / "qwen3", "qwen3_30b", LAYERS)
    return {
        arm: lora.measure(
            arm,
            folder,
            shape="qwen3_30b",
            tokens=8192,
            sequence=4096,
            rank=16,
            steps=3,
            device=torch.device("cuda"),
        )
        for arm in ("bf16", "mxfp8", "nvfp4", "default")
    }


def test_expert_storage(found: dict[str, lora.Measured]) -> None:
    lora.check_losses(list(found.values()))
    for arm, expected in (("bf16", 2.0), ("mxfp8", 1.03), ("nvfp4", 0.56)):
        assert found[arm].expert_bytes_per_parameter == pytest.approx(expected, rel=0.01)


def test_loading_holds_at_most_two_modules_beside_the_model(found: dict[str, lora.Measured]) -> None:
    module = EXPERTS * 3 * WIDTH * INNER * 2
    for measured in found.values():
        assert measured.peak_load_bytes is not None
        assert measured.peak_load_bytes <= measured.stored_bytes + 2 * module


def test_the_missing_direction_saves_its_bytes(found: dict[str, lora.Measured]) -> None:
    direction = LAYERS * EXPERTS * 3 * WIDTH * INNER * 33 / 32
    both, one = found["default"].peak_step_bytes, found["mxfp8"].peak_step_bytes
    assert both is not None and one is not None
    assert both - one == pytest.approx(direction, rel=0.01)
