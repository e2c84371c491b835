"""Checkpoints of a model whose base stays out of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moe_runtime import checkpoint
from moe_runtime.core.errors import CheckpointError


class Adapted(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.norm, self.adapter = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters())
        self.adapter(self.norm(self.base(torch.randn(3, 4)))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_what_is_frozen_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    model, other = Adapted(0), Adapted(1)
    before = other.base.weight.clone()
    for one in (model, other):
        checkpoint.leave_out_frozen(one)
    path = checkpoint.save(tmp_path, 1, model, model.optimizer, {})
    held = {name for name in checkpoint.verify(path) if name.startswith("model.")}
    assert held == {"model.adapter.weight", "model.adapter.bias"}
    checkpoint.load(path, other, other.optimizer)
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert torch.equal(other.base.weight, before) and not torch.equal(before, model.base.weight)


def test_a_whole_models_checkpoint_is_another_thing(tmp_path: Path) -> None:
    model = Adapted(0)
    path = checkpoint.save(tmp_path, 1, model, model.optimizer, {})
    assert {"model.base.weight", "model.norm.running_mean"} <= set(checkpoint.verify(path))
    checkpoint.leave_out_frozen(model)
    with pytest.raises(CheckpointError, match=r"belongs to another model: model\.base\.bias should have shape none"):
        checkpoint.load(path, model, model.optimizer)
