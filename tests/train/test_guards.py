"""Guards: what makes a step count as not finite, what is written about it, when a run stops, which loss is a spike."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from moe_runtime.core.errors import NumericsError
from moe_runtime.train.config import GuardsConfig
from moe_runtime.train.guards import SPIKE_MINIMUM, GradientFacts, Guards, gradient_facts, num_nonfinite
from moe_runtime.train.setup import Trainee


def guards(folder: Path, resumed_step: int | None = None, **options: Any) -> Guards:
    trainee = SimpleNamespace(model=nn.Linear(2, 2), layout=SimpleNamespace(rank=0, world=1))
    return Guards(
        GuardsConfig(**options),
        folder,
        cast(Trainee, trainee),
        sequences=lambda step: [[10 * step, 10 * step + 1]],
        skipped=0,
        resumed_step=resumed_step,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_bad_value_is_found(value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)
    assert num_nonfinite(model).item() == 0
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    assert num_nonfinite(model).item() == 0
    assert model[0].weight.grad is not None
    model[0].weight.grad[4, 2] = value
    assert num_nonfinite(model).item() == 1
    facts = gradient_facts(model)
    assert facts.nonfinite == ("0.weight",)


def test_norms_are_given_by_layer() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1, bias=False)])
    model.head = nn.Linear(1, 1, bias=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert gradient_facts(model).norms == pytest.approx({"layers.0": 3**0.5, "layers.1": 2**0.5, "head": 1.0})


def test_skipped_steps_are_counted_described_and_end_the_run(tmp_path: Path) -> None:
    guard = guards(tmp_path, max_skipped=2)
    facts = GradientFacts(norms={"layers.0": math.nan, "layers.1": 2.0}, nonfinite=("layers.0.weight",))
    guard.after_step(3, math.nan, math.inf, facts)
    guard.after_step(4, 1.0, 1.0, None)
    evidence = json.loads((tmp_path / "evidence" / "step-000003.json").read_text())
    assert evidence == {
        "step": 3,
        "skipped_so_far": 1,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "ranks": [
            {
                "rank": 0,
                "sequences": [[20, 21]],
                "nonfinite_gradients": ["layers.0.weight"],
                "gradient_norms": {"layers.0": "NaN", "layers.1": 2.0},
            }
        ],
    }
    with pytest.raises(NumericsError, match=r"2 steps had a loss .* guards.max_skipped = 2; the last is step 5"):
        guard.after_step(5, math.nan, math.nan, facts)


def test_a_spike_is_a_loss_far_above_the_recent_ones(tmp_path: Path) -> None:
    guard = guards(tmp_path, spike_sigmas=6.0)
    for step in range(1, SPIKE_MINIMUM + 1):
        guard.after_step(step, 5.0 + 0.1 * (step % 2), 1.0, None)
    guard.after_step(SPIKE_MINIMUM + 1, 5.3, 1.0, None)
    assert not (tmp_path / "spikes.jsonl").exists()
    guard.after_step(SPIKE_MINIMUM + 2, 6.0, 9.0, None)
    (row,) = map(json.loads, (tmp_path / "spikes.jsonl").read_text().splitlines())
    assert (row["step"], row["loss"], row["grad_norm"]) == (SPIKE_MINIMUM + 2, 6.0, 9.0)
    assert row["mean"] == pytest.approx(5.0647, abs=1e-4)
    guards(tmp_path, resumed_step=SPIKE_MINIMUM)
    assert (tmp_path / "spikes.jsonl").read_text() == ""


def test_no_spikes_are_logged_at_zero_sigmas(tmp_path: Path) -> None:
    guard = guards(tmp_path, spike_sigmas=0.0)
    for step in range(1, 30):
        guard.after_step(step, 100.0 if step == 29 else 1.0, 1.0, None)
    assert not (tmp_path / "spikes.jsonl").exists()
