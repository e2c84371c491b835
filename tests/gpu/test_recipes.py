"""Quantized experts on a GPU: the bits of training do not depend on evaluation, nor bytes on what the format says."""

# R routed rows   D model width   E experts

import pytest
import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.precision import Recipe
from moe_runtime.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES = [
    mr.recipes.MXFP8BlockScaling(),
    mr.recipes.NVFP4BlockScaling(),
    mr.recipes.Float8BlockScaling(),
    mr.recipes.Float8CurrentScaling(),
    mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    mr.recipes.NVFP4BlockScaling(disable_2d_quantization=True, backward_override="high_precision"),
]
SPLITS = [300, 0, 81, 131]


def _train(recipe: Recipe, *, evaluates: bool, device: str = "cuda") -> tuple[dict[str, Tensor], list[float]]:
    """Every stored tensor and the losses of 3 AdamW steps, in bf16 on fp32 masters."""
    torch.manual_seed(0)
    with mr.quantized_model_init(
        recipe=recipe,
        preserve_high_precision_init_val=True,
        omit_columnwise_primary_weight_storage=recipe.backward_override is not None,
    ):
        layer = mr.GroupedMLP(4, 256, 128, dtype=torch.bfloat16, device=device)
    optimizer = mr.optim.MasterWeights(torch.optim.AdamW, layer.parameters(), lr=1e-2)
    x_RD = torch.randn(520, 256, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    splits_E = torch.tensor(SPLITS, device=device)
    losses = []
    for _ in range(3):
        if evaluates:
            layer.eval()
            with torch.no_grad(), mr.autocast(recipe=recipe):
                layer(x_RD, splits_E)
            layer.train()
        with mr.autocast(recipe=recipe):
            loss = layer(x_RD, splits_E).float().square().sum() / 512
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    stored = {}
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, QuantizedTensor)
        stored |= {f"{name}.{part}": tensor for part, tensor in parameter.records.tensors().items()}
    return stored, losses


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.name}-{recipe.backward_override}")
def test_train_eval_train_is_train_train(recipe: Recipe) -> None:
    stored, losses = _train(recipe, evaluates=False)
    again, losses_again = _train(recipe, evaluates=True)
    assert losses == losses_again
    for name, tensor in stored.items():
        assert torch.equal(tensor, again[name]), name
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.name}-{recipe.backward_override}")
def test_quantized_bytes_are_the_cpus(recipe: Recipe) -> None:
    w_EFD = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    quantizer = mr.Quantizer(format=recipe.weight)
    here = mr.GroupedTensor.pack(w_EFD.cuda(), quantizer)
    there = mr.GroupedTensor.pack(w_EFD, quantizer)
    assert isinstance(here, QuantizedTensor) and isinstance(there, QuantizedTensor)
    for name, tensor in there.records.tensors().items():
        assert torch.equal(here.records.tensors()[name].cpu(), tensor), name
    assert torch.equal(here.dequantize().cpu(), there.dequantize())


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: recipe.name)
def test_stored_bytes_are_what_the_allocator_holds(recipe: Recipe) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with mr.quantized_model_init(recipe=recipe):
        layer = mr.GroupedLinear(16, 2048, 1024, dtype=torch.bfloat16, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert isinstance(layer.weight, QuantizedTensor)
    formula = recipe.weight.stored_bytes((16, 1024, 2048), columnwise=True)
    assert layer.weight.stored_bytes == formula
    assert held == pytest.approx(formula, rel=0.01)


def test_checkpointed_backward_sees_the_recipe_on_its_own_thread() -> None:
    recipe = mr.recipes.NVFP4BlockScaling()
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        layer = mr.GroupedMLP(4, 256, 128, dtype=torch.bfloat16, device="cuda")
        x_RD = torch.ones(520, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.manual_seed(3)
        with mr.autocast(recipe=recipe):
            if recomputes:
                y_RD = torch.utils.checkpoint.checkpoint(
                    layer, x_RD, SPLITS, use_reentrant=False, context_fn=mr.recompute_context_fn
                )
            else:
                y_RD = layer(x_RD, SPLITS)
        y_RD.sum().backward()
        gradients.append([p.grad for p in (x_RD, *layer.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
