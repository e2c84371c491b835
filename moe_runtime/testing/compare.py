"""Compare tensors of experts by relative error: over all, per expert, and per expert and block of columns.

One number over a whole weight hides an expert that is wrong among many, and a tile that a kernel forgot. So the same
bound holds for each region by itself.
"""

# E experts   R rows   C columns   B blocks of columns

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK_COLUMNS = 16
_LISTED = 5


class _Region(NamedTuple):
    name: str
    error: float
    scale: float


def assert_close_per_expert(
    got: Tensor, expected: Tensor, tolerance: float, *, ends: Tensor | None = None, name: str = "tensor"
) -> float:
    """||got - expected|| / ||expected|| <= tolerance for the tensor, each expert, and each expert's 16-column blocks.

    got, expected  one shape, experts along dim 0; or, with `ends`, rows (R, ...) sorted by expert
    ends           int (E,) end row of each expert; rows past the last form one more group, named "tail"
    A region whose expected values are all 0 must be exactly 0. A value that is not finite must be the same in both,
    and then takes no part. Returns the largest ratio seen; raises AssertionError that lists the worst coordinates.
    """
    assert got.shape == expected.shape, f"{name}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if not expected.numel():
        return 0.0
    got64, expected64 = (value.detach().double().reshape(value.shape or (1,)) for value in (got, expected))
    finite = expected64.isfinite() & got64.isfinite()
    same = finite | (got64 == expected64) | (got64.isnan() & expected64.isnan())
    if not same.all():
        differing = torch.where(same, 0.0, float("inf"))
        raise AssertionError(f"{name}: not finite in one of the two only\n{_worst(got64, expected64, differing)}")
    error = torch.where(finite, got64 - expected64, 0.0)
    worst = max(_regions(error, torch.where(finite, expected64, 0.0), ends), key=_ratio)
    if _ratio(worst) <= tolerance:
        return _ratio(worst)
    raise AssertionError(
        f"{name}: relative error {_ratio(worst):.3g} in {worst.name}, at most {tolerance:.3g} expected "
        f"(||got - expected|| {worst.error:.3g}, ||expected|| {worst.scale:.3g})\n"
        f"{_worst(got64, expected64, error.abs())}"
    )


def _ratio(region: _Region) -> float:
    if region.scale:
        return region.error / region.scale
    return float("inf") if region.error else 0.0


def _regions(error: Tensor, expected: Tensor, ends: Tensor | None) -> list[_Region]:
    regions = [_Region("the whole", float(error.norm()), float(expected.norm()))]
    for expert, (start, stop) in _groups(len(error), ends).items():
        blocks = zip(_columns(error[start:stop]), _columns(expected[start:stop]), strict=True)
        regions.append(_Region(expert, float(error[start:stop].norm()), float(expected[start:stop].norm())))
        regions.extend(
            _Region(
                f"{expert}, columns {b * _BLOCK_COLUMNS}..{b * _BLOCK_COLUMNS + part.shape[1] - 1}",
                float(part.norm()),
                float(scale.norm()),
            )
            for b, (part, scale) in enumerate(blocks)
        )
    return regions


def _groups(num_rows: int, ends: Tensor | None) -> dict[str, tuple[int, int]]:
    """First and past-the-last row of each expert that has rows."""
    stops = list(range(1, num_rows + 1)) if ends is None else ends.tolist()
    pairs = {f"expert {e}": pair for e, pair in enumerate(zip([0, *stops], stops, strict=False))}
    pairs["tail"] = (stops[-1] if stops else 0, num_rows)
    return {name: (start, stop) for name, (start, stop) in pairs.items() if stop > start}


def _columns(values: Tensor) -> tuple[Tensor, ...]:
    """Blocks of 16 columns; a vector has one column."""
    rows_RC = values.reshape(-1, values.shape[-1]) if values.dim() > 1 else values[:, None]
    return rows_RC.split(_BLOCK_COLUMNS, dim=1)


def _worst(got: Tensor, expected: Tensor, error: Tensor) -> str:
    flat = error.reshape(-1)
    places = flat.topk(min(_LISTED, len(flat))).indices.tolist()
    lines = []
    for place in places:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), error.shape))
        lines.append(f"  at {index}: expected {float(expected[index]):.8g}, got {float(got[index]):.8g}")
    return "\n".join(lines)
