"""Quantized products against a plain reference: quantize by the definition, multiply expert by expert in float64."""

# R routed rows   P rows with padding   D in features   F out features   E experts   B blocks

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.formats import MXFP8, NVFP4, Float8, Format, FP8Block
from moe_runtime.functional import check_weight, grouped_linear
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import quantize
from moe_runtime.precision import Recipe
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, with_nan_tail

RECIPES: dict[str, Recipe] = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "nvfp4": mr.recipes.NVFP4BlockScaling(),
    "nvfp4 plain": mr.recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "float8": mr.recipes.Float8CurrentScaling(),
    "float8 power of 2": mr.recipes.Float8CurrentScaling(use_power_2_scales=True),
    "fp8_block": mr.recipes.Float8BlockScaling(),
}
OVERRIDES = [None, "dequantized", "high_precision"]
# Against float64, of the same quantized operands: what is left is one rounding of each result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
TAIL = 3


# The definition -------------------------------------------------------------------------------------------------------


def floor_power(value: Tensor) -> Tensor:
    """The largest power of two that is not above `value`."""
    return torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - 1)


def per_block(x_MN: Tensor, rows: int, cols: int) -> Tensor:
    """The amax of its block, for each element."""
    blocks = x_MN.unflatten(0, (-1, rows)).unflatten(2, (-1, cols))
    return blocks.abs().amax((1, 3), keepdim=True).expand_as(blocks).reshape(x_MN.shape)


def fp8(x_MN: Tensor, element: str) -> Tensor:
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    return x_MN.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float()


def fp8_scaled(x_MN: Tensor, amax_MN: Tensor, fmt: Float8 | FP8Block) -> Tensor:
    largest = 448.0 if fmt.element == "e4m3" else 57344.0
    factor_MN = torch.where(amax_MN > 0, torch.full_like(amax_MN, largest) / amax_MN, 1.0)
    if fmt.power_of_two:
        factor_MN = floor_power(factor_MN)
    return fp8(x_MN * factor_MN, fmt.element) * (1 / factor_MN)


def mxfp8(x_MN: Tensor) -> Tensor:
    needed_MN = per_block(x_MN, 1, 32) / 448
    power_MN = floor_power(needed_MN)
    power_MN = torch.where(power_MN < needed_MN, power_MN * 2, power_MN).clamp(min=2.0**-127)
    return fp8(x_MN / power_MN, "e4m3") * power_MN


def e2m1(x_MN: Tensor) -> Tensor:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = x_MN.abs().clamp(max=6).contiguous()
    low = torch.searchsorted(grid, size, right=True) - 1
    high = (low + 1).clamp(max=7)
    below, above = size - grid[low], grid[high] - size
    up = (below > above) | ((below == above) & (low % 2 == 1))
    return torch.where(up, grid[high], grid[low]) * x_MN.sign()


def nvfp4(x_MN: Tensor, fmt: NVFP4) -> Tensor:
    amax = x_MN.abs().max() if x_MN.numel() else torch.zeros(())
    encode = torch.full_like(amax, 448.0 * 6) / amax if amax > 0 else torch.ones(())
    scale_MN = fp8(per_block(x_MN, *fmt.block) * (encode * (torch.ones(()) / 6)), "e4m3")
    step_MN = scale_MN * (1 / encode)
    return torch.where(step_MN > 0, e2m1(x_MN * (1 / step_MN)) * step_MN, 0.0)


def fake(x_MN: Tensor, fmt: Format, direction: str = "rowwise", seed: int | None = None) -> Tensor:
    """What `x` is after quantizing, in its own dtype and orientation."""
    x32_MN = x_MN.float()
    if isinstance(fmt, NVFP4) and (fmt.stochastic_rounding or (fmt.random_hadamard and direction == "columnwise")):
        # Rotation and random bits have independent tests of their own.
        pair = quantize(
            x_MN.contiguous(), fmt, rowwise=direction == "rowwise", columnwise=direction != "rowwise", seed=seed
        )
        (q,) = [q for q in pair if q is not None]
        return dequantize(q, x_MN.dtype)
    stored_MN = x32_MN if direction == "rowwise" else x32_MN.mT
    if isinstance(fmt, MXFP8):
        result = mxfp8(stored_MN)
    elif isinstance(fmt, FP8Block):
        result = fp8_scaled(stored_MN, per_block(stored_MN, *fmt.block), fmt)
    elif isinstance(fmt, Float8):
        amax = stored_MN.abs().max() if stored_MN.numel() else torch.zeros(())
        result = fp8_scaled(stored_MN, amax.expand_as(stored_MN), fmt)
    else:
        assert isinstance(fmt, NVFP4)
        result = nvfp4(stored_MN, fmt)
    return (result if direction == "rowwise" else result.mT).to(x_MN.dtype)


def pieces(x_RD: Tensor, splits: Sequence[int], multiple: int = 1) -> tuple[Tensor, list[slice]]:
    """Each expert's rows, padded with zero rows to a multiple; where each begins and ends."""
    parts, places, start = [], [], 0
    for part in x_RD.split(list(splits)):
        size = -(-len(part) // multiple) * multiple
        parts.append(torch.cat([part, part.new_zeros(size - len(part), part.shape[1])]))
        places.append(slice(start, start + size))
        start += size
    return torch.cat(parts), places


def reference(
    x_RD: Tensor, w_EFD: Tensor, dy_RF: Tensor, splits: Sequence[int], recipe: Recipe, stored: bool, seed: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw in float64."""
    w_row = torch.stack([fake(w_FD, recipe.weight) for w_FD in w_EFD])
    x_row = fake(x_RD, recipe.input)
    places = pieces(x_RD, splits)[1]
    w_back, dy_back = w_row, dy_RF
    if recipe.backward_override is None:
        w_back = torch.stack([fake(w_FD, recipe.weight, "columnwise") for w_FD in w_EFD])
        dy_back = fake(dy_RF, recipe.gradient, seed=seed)
    elif recipe.backward_override == "high_precision" and not stored:
        w_back = w_EFD
    y = torch.cat([x_row[p].double() @ w_row[e].double().T for e, p in enumerate(places)])
    dx = torch.cat([dy_back[p].double() @ w_back[e].double() for e, p in enumerate(places)])

    dy_wgrad, x_wgrad = dy_RF, x_row if recipe.backward_override == "dequantized" else x_RD
    if recipe.backward_override is None:
        block = recipe.gradient.block
        dy_PF, places = pieces(dy_RF, splits, 1 if block is None else block.cols)
        x_PD, _ = pieces(x_RD, splits, 1 if block is None else block.cols)
        dy_wgrad = fake(dy_PF, recipe.gradient, "columnwise", seed)
        x_wgrad = fake(x_PD, recipe.input, "columnwise")
    dw = torch.stack([dy_wgrad[p].double().T @ x_wgrad[p].double() for p in places])
    return y, dx, dw


def sizes(name: str) -> tuple[int, int]:
    return (128, 256) if name == "fp8_block" else (64, 96)


def draw(name: str, splits: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, dy, ends: with a block of zeros, and magnitudes that differ between experts."""
    width, out = sizes(name)
    generator = torch.Generator().manual_seed(sum(splits))
    w_EFD = torch.randn(len(splits), out, width, generator=generator)
    w_EFD *= torch.tensor([1.0, 0.01, 30.0, 2.0])[: len(splits), None, None]
    w_EFD[0, :, :32] = 0
    x_RD = torch.randn(sum(splits), width, generator=generator)
    dy_RF = torch.randn(sum(splits), out, generator=generator) * 1e-2
    ends_E = torch.tensor(splits).cumsum(0).to(torch.int32)
    return x_RD.to(dtype), w_EFD.to(dtype), dy_RF.to(dtype), ends_E


def run(
    x_RD: Tensor, w: Tensor, dy_RF: Tensor, ends_E: Tensor, recipe: Recipe, tail: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw of ours, with rows of NaN past the last expert's and NaN in fresh memory."""
    x_RD = with_nan_tail(x_RD, tail).requires_grad_()
    w = w.detach().requires_grad_()
    torch.manual_seed(11)
    with nan_filled_memory():
        y_RF = grouped_linear(x_RD, w, ends_E, recipe=recipe)
        y_RF.backward(with_nan_tail(dy_RF, tail))
    assert x_RD.grad is not None and w.grad is not None and type(w.grad) is Tensor and y_RF.dtype == x_RD.dtype
    return y_RF.detach(), x_RD.grad, w.grad


def seed_of(recipe: Recipe) -> int | None:
    """What `run` draws for stochastic rounding."""
    if not (isinstance(recipe.gradient, NVFP4) and recipe.gradient.stochastic_rounding):
        return None
    if recipe.backward_override is not None:
        return None
    torch.manual_seed(11)
    return int(torch.randint(2**62, ()).item())


def stored_weight(w_EFD: Tensor, recipe: Recipe, *, columnwise: bool = True) -> Tensor:
    return mr.GroupedTensor.pack(w_EFD, mr.Quantizer(format=recipe.weight, columnwise=columnwise))


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("stored", [False, True], ids=["dense", "stored"])
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_values_and_gradients(name: str, override: Any, stored: bool, dtype: torch.dtype, splits: tuple) -> None:
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, splits, dtype)
    weight = stored_weight(w_EFD, recipe) if stored else w_EFD
    y_RF, dx_RD, dw_EFD = run(x_RD, weight, dy_RF, ends_E, recipe, TAIL)
    y, dx, dw = reference(x_RD, w_EFD, dy_RF, splits, recipe, stored, seed_of(recipe))
    for tail in (y_RF[len(y) :], dx_RD[len(y) :]):
        assert len(tail) == TAIL and not tail.any()
    assert_close_per_expert(y_RF[: len(y)], y, TOLERANCE[dtype], ends=ends_E, name="y")
    assert_close_per_expert(dx_RD[: len(y)], dx, TOLERANCE[dtype], ends=ends_E, name="dx")
    assert_close_per_expert(dw_EFD, dw, TOLERANCE[dtype], name="dw")


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_differs_from_high_precision_where_it_should(name: str, override: Any) -> None:
    """A recipe that silently computes in high precision passes every tolerance of training."""
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 3), torch.float32)
    exact = run(x_RD, w_EFD, dy_RF, ends_E, mr.recipes.HighPrecision())
    ours = run(x_RD, w_EFD, dy_RF, ends_E, recipe)
    differs = [not torch.equal(a, b) for a, b in zip(ours, exact, strict=True)]
    assert differs == [True, override != "high_precision", override != "high_precision"]


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_stored_is_the_dense_weight_quantized_beforehand(name: str, override: Any) -> None:
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.bfloat16)
    ours, theirs = (run(x_RD, w, dy_RF, ends_E, recipe) for w in (stored_weight(w_EFD, recipe), w_EFD))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])
    assert torch.equal(ours[1], theirs[1]) == (override != "high_precision"), (
        "the originals of a stored weight are gone"
    )


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_override_never_reads_the_columnwise_bytes(name: str, override: Any) -> None:
    """Row-wise only and both directions give the same bits, whatever the columnwise bytes hold."""
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.bfloat16)
    weights = [stored_weight(w_EFD, recipe), stored_weight(w_EFD, recipe, columnwise=False)]
    weights.append(stored_weight(w_EFD, recipe))
    weights[2].record("columnwise").payload.fill_(0x7F)  # pyright: ignore[reportAttributeAccessIssue]
    ours = [run(x_RD, w, dy_RF, ends_E, recipe) for w in weights]
    assert same(ours[0], ours[1]) and same(ours[0], ours[2])


@pytest.mark.parametrize("name", RECIPES)
def test_a_stored_weight_without_a_recipe_is_its_values(name: str) -> None:
    """LoRA on a frozen base: x and dy in high precision, the weight dequantized in all products."""
    recipe = RECIPES[name]
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.bfloat16)
    weight = stored_weight(w_EFD, recipe, columnwise=False)
    plain = mr.recipes.HighPrecision()
    ours = run(x_RD, weight, dy_RF, ends_E, plain)
    assert same(ours, run(x_RD, weight.dequantize(), dy_RF, ends_E, plain))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("wanted", ["x", "w", "both", "neither"])
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("stored", [False, True], ids=["dense", "stored"])
def test_only_what_is_asked_for_is_computed(stored: bool, override: Any, wanted: str) -> None:
    recipe = replace(RECIPES["mxfp8"], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw("mxfp8", (5, 0, 7, 1), torch.float32)
    weight = stored_weight(w_EFD, recipe) if stored else w_EFD
    expected = run(x_RD, weight, dy_RF, ends_E, recipe)
    x_RD = x_RD.clone().requires_grad_(wanted in ("x", "both"))
    weight = weight.detach().requires_grad_(wanted in ("w", "both"))
    y_RF = grouped_linear(x_RD, weight, ends_E, recipe=recipe)
    assert torch.equal(y_RF, expected[0]) and y_RF.requires_grad == (wanted != "neither")
    if wanted != "neither":
        y_RF.backward(dy_RF)
    assert x_RD.grad is None if wanted in ("w", "neither") else torch.equal(x_RD.grad, expected[1])  # pyright: ignore
    assert weight.grad is None if wanted in ("x", "neither") else torch.equal(weight.grad, expected[2])  # pyright: ignore


@pytest.mark.parametrize("stored", [False, True], ids=["dense", "stored"])
@pytest.mark.parametrize("name", RECIPES)
def test_no_rows_at_all(name: str, stored: bool) -> None:
    """A rank that got no token keeps its graph, and its gradients are zeros of full shape."""
    width, out = sizes(name)
    recipe, (_, w_EFD, _, _) = RECIPES[name], draw(name, (1, 1), torch.bfloat16)
    x_RD = torch.zeros(0, width, dtype=torch.bfloat16, requires_grad=True)
    weight = (stored_weight(w_EFD, recipe) if stored else w_EFD).detach().requires_grad_()
    with nan_filled_memory():
        y_RF = grouped_linear(x_RD, weight, torch.zeros(2, dtype=torch.int32), recipe=recipe)
        assert y_RF.shape == (0, out) and y_RF.requires_grad
        y_RF.sum().backward()
    assert x_RD.grad is not None and x_RD.grad.shape == (0, width)
    assert weight.grad is not None and weight.grad.shape == w_EFD.shape and not weight.grad.any()


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_of_nan_stays_with_its_expert(name: str) -> None:
    """One bad token must not reach the rows of others; where a tensor shares a scale, amax skips it."""
    recipe = RECIPES[name]
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (4, 5), torch.float32)
    clean = run(x_RD, w_EFD, dy_RF, ends_E, recipe)
    x_RD[1, 3] = float("nan")
    y_RF, dx_RD, dw_EFD = run(x_RD, w_EFD, dy_RF, ends_E, recipe)
    assert y_RF[1].isnan().all() and y_RF[[0, 2, 3]].isfinite().all()
    assert torch.equal(y_RF[4:], clean[0][4:]) or isinstance(recipe.input, Float8 | NVFP4)
    assert y_RF[4:].isfinite().all() and torch.equal(dx_RD, clean[1])
    assert dw_EFD[1].isfinite().all() and dw_EFD[0].isnan().any()


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_large_rows_past_the_end_do_not_enter_a_scale(name: str, override: Any) -> None:
    """What nobody owns is finite, too, where memory is reused: it must not be anybody's amax."""
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.float32)
    expected = run(x_RD, w_EFD, dy_RF, ends_E, recipe, tail=3)
    tails = [torch.cat([rows, torch.full((3, rows.shape[1]), 1e30)]) for rows in (x_RD, dy_RF)]
    assert same(run(tails[0], w_EFD, tails[1], ends_E, recipe), expected)


@pytest.mark.parametrize("name", RECIPES)
def test_strides_do_not_matter(name: str) -> None:
    recipe = RECIPES[name]
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.bfloat16)
    expected = run(x_RD, w_EFD, dy_RF, ends_E, recipe)
    assert same(run(x_RD.T.contiguous().T, w_EFD.mT.contiguous().mT, dy_RF.T.contiguous().T, ends_E, recipe), expected)
    x_RD = x_RD.requires_grad_()
    torch.manual_seed(11)
    grouped_linear(x_RD, w_EFD, ends_E, recipe=recipe).sum().backward()  # a gradient of stride 0
    assert x_RD.grad is not None and x_RD.grad.isfinite().all()


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_kept_graph_gives_the_same_bits_again(name: str, override: Any) -> None:
    recipe = replace(RECIPES[name], backward_override=override)
    x_RD, w_EFD, dy_RF, ends_E = draw(name, (5, 0, 7, 1), torch.float32)
    weight = stored_weight(w_EFD, recipe).requires_grad_()
    x_RD.requires_grad_()
    y_RF = grouped_linear(x_RD, weight, ends_E, recipe=recipe)
    first = torch.autograd.grad(y_RF, (x_RD, weight), dy_RF, retain_graph=True)
    torch.manual_seed(99)
    assert same(torch.autograd.grad(y_RF, (x_RD, weight), dy_RF), first)


def test_stochastic_rounding_draws_once_a_forward_and_only_where_a_backward_follows() -> None:
    recipe = RECIPES["nvfp4"]
    x_RD, w_EFD, dy_RF, ends_E = draw("nvfp4", (5, 7), torch.float32)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        grouped_linear(x_RD.requires_grad_(), w_EFD, ends_E, recipe=recipe)
    for quiet in (replace(recipe, backward_override="dequantized"), RECIPES["nvfp4 plain"]):
        grouped_linear(x_RD, w_EFD, ends_E, recipe=quiet)
    grouped_linear(x_RD.detach(), w_EFD, ends_E, recipe=recipe)
    assert torch.equal(torch.get_rng_state(), state), "evaluation must not move the state of training"
    gradients = []
    for _ in range(2):
        y_RF = grouped_linear(x_RD, w_EFD, ends_E, recipe=recipe)
        gradients += torch.autograd.grad(y_RF, x_RD, dy_RF)
    assert not torch.equal(torch.get_rng_state(), state) and not torch.equal(*gradients)


def test_an_e5m2_gradient_is_read_as_e5m2() -> None:
    """Read as E4M3, 256 would be 24 and 57344 would be 352: the loss stays, gradients shrink."""
    recipe = RECIPES["float8"]
    assert isinstance(recipe.gradient, Float8) and recipe.gradient.element == "e5m2"
    w_EFD = torch.eye(32)[None]
    x_RD = torch.zeros(1, 32, requires_grad=True)
    dy_RF = torch.zeros(1, 32)
    dy_RF[0, :4] = torch.tensor([57344.0, 256.0, 1.0, 2.0**-14])
    grouped_linear(x_RD, w_EFD, torch.tensor([1], dtype=torch.int32), recipe=recipe).backward(dy_RF)
    assert x_RD.grad is not None and x_RD.grad[0, :4].tolist() == [57344.0, 256.0, 1.0, 2.0**-14]


# Bytes ----------------------------------------------------------------------------------------------------------------


def kept_bytes(y_RF: Tensor) -> Iterator[int]:
    seen = set()
    for saved in y_RF.grad_fn.saved_tensors:  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        for tensor in saved.records.tensors().values() if hasattr(saved, "records") else [saved]:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (None, 128 * (128 + 128 // 32)),  # x columnwise: 40 rows, and room for the padding 2 experts may need, 2 * 31
        ("dequantized", 40 * (128 + 128 // 32)),  # x row-wise as fprop read it
        ("high_precision", 40 * 128 * 2),  # x itself
    ],
)
def test_bytes_kept_for_backward(override: Any, expected: int) -> None:
    recipe = replace(RECIPES["mxfp8"], backward_override=override)
    x_RD = torch.randn(40, 128).bfloat16().requires_grad_()
    weight = stored_weight(torch.randn(2, 64, 128).bfloat16(), recipe).requires_grad_()
    y_RF = grouped_linear(x_RD, weight, torch.tensor([20, 40], dtype=torch.int32), recipe=recipe)
    ends, weights = 2 * 4, weight.stored_bytes  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(kept_bytes(y_RF)) == ends + weights + expected


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_missing_direction_is_refused_before_anything_is_multiplied() -> None:
    recipe = RECIPES["mxfp8"]
    weight = stored_weight(torch.randn(2, 64, 64), recipe, columnwise=False)
    with pytest.raises(
        ValueError, match=r"^here: the weight is stored row-wise only .*quantized backward of MXFP8.*omit"
    ):
        check_weight(weight, recipe, "here")
    with torch.no_grad():
        check_weight(weight, recipe, "here")
    check_weight(weight, replace(recipe, backward_override="dequantized"), "here")
    check_weight(weight, mr.recipes.HighPrecision(), "here")
    x_RD = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(ValueError, match="the columnwise bytes of this weight are needed and not stored"):
        grouped_linear(x_RD, weight, torch.tensor([2, 4], dtype=torch.int32), recipe=recipe)


def test_a_weight_of_another_format_is_refused() -> None:
    weight = stored_weight(torch.randn(2, 64, 64), RECIPES["mxfp8"])
    for other in ("nvfp4", "float8"):
        with pytest.raises(ValueError, match=r"^here: the weight is stored as MXFP8.*multiplies by"):
            check_weight(weight, RECIPES[other], "here")
    e5m2 = mr.GroupedTensor.pack(torch.randn(2, 64, 64), mr.Quantizer(format=MXFP8(element="e5m2")))
    with pytest.raises(ValueError, match=r"stored as MXFP8\(element='e5m2'\)"):
        check_weight(e5m2, RECIPES["mxfp8"], "here")


def test_bytes_dropped_between_forward_and_backward_are_missed() -> None:
    recipe = RECIPES["float8"]
    weight = stored_weight(torch.randn(2, 64, 64), recipe).requires_grad_()
    x_RD = torch.randn(4, 64, requires_grad=True)
    y_RF = grouped_linear(x_RD, weight, torch.tensor([2, 4], dtype=torch.int32), recipe=recipe)
    weight.set_usage(columnwise=False)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="columnwise bytes of a weight were dropped between its forward"):
        y_RF.sum().backward()


def test_dtypes_that_differ() -> None:
    weight = stored_weight(torch.randn(2, 64, 64), RECIPES["mxfp8"])
    with pytest.raises(TypeError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        grouped_linear(
            torch.zeros(2, 64, dtype=torch.bfloat16),
            weight,
            torch.tensor([1, 2], dtype=torch.int32),
            recipe=RECIPES["mxfp8"],
        )


@pytest.mark.parametrize(("width", "out"), [(48, 64), (64, 48)])
def test_sizes_that_are_not_whole_blocks(width: int, out: int) -> None:
    x_RD = torch.randn(4, width, requires_grad=True)
    w_EFD = torch.randn(2, out, width, requires_grad=True)
    with pytest.raises(ValueError, match=r"needs (cols|rows) to be a multiple of 32, got (cols|rows)=48"):
        grouped_linear(x_RD, w_EFD, torch.tensor([2, 4], dtype=torch.int32), recipe=RECIPES["mxfp8"])
