"""The bytes of a checkpoint equal the formula of the documentation, for tensors of hostile sizes."""

from pathlib import Path

import pytest
import torch
from torch import nn

import moe_runtime as mr
from moe_runtime import checkpoint
from moe_runtime.bench.checkpoint import formula_bytes, record_bytes


def tensor_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bytes_equal_the_formula(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Module()
    shapes = [(1,), (3, 5), (64,), (16, 16), (2, 3, 4, 5), (1000, 33), (), (7, 1)]
    for index, shape in enumerate(shapes):
        model.register_buffer(f"a_name_{'longer_' * index}", torch.zeros(shape, dtype=dtype))
    parameter = nn.Parameter(torch.zeros(65, 3))
    model.weight = parameter
    model.experts = mr.GroupedMLP(num_experts=3, hidden_size=8, intermediate_size=16, dtype=torch.float32)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    folder = checkpoint.save(tmp_path, 1, model, optimizer, {})
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    sizes += [65 * 3 * 4] * 3 + [4] + [len(torch.get_rng_state())]
    sizes += [parameter.numel() * 4 for parameter in model.experts.parameters()]
    assert tensor_bytes(folder) == sum(map(record_bytes, sizes)) == formula_bytes(folder)


def test_an_empty_part_is_headers_only() -> None:
    assert [record_bytes(size) for size in (0, 1, 63, 64)] == [1513, 1577, 1577, 1641]
