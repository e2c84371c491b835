"""Shapes, bytes and refusals of every format."""

from dataclasses import FrozenInstanceError
from math import prod
from typing import Any

import pytest
import torch

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Block, Float8, Format, FP8Block, HighPrecision
from moe_runtime.formats.format import Direction

# format, payload and scale shape of (8, 256, 512) by direction, bytes of (rowwise), (columnwise), (both)
EXPERTS, ROWS, COLS = SHAPE = (8, 256, 512)
N = prod(SHAPE)
CASES: list[tuple[Format, Any, Any, tuple[float, float, float]]] = [
    (HighPrecision(), (SHAPE, SHAPE), ((0,), (0,)), (2 * N, 2 * N, 2 * N)),
    (HighPrecision(dtype=torch.float32), (SHAPE, SHAPE), ((0,), (0,)), (4 * N, 4 * N, 4 * N)),
    (Float8(), (SHAPE, (8, 512, 256)), ((8,), (8,)), (N + 32, N + 32, 2 * N + 32)),
    (FP8Block(), (SHAPE, (8, 512, 256)), ((8, 256, 4), (8, 512, 2)), (1.03125 * N, 1.03125 * N, 2.0625 * N)),
    (
        FP8Block(two_dimensional=True),
        (SHAPE, (8, 512, 256)),
        ((8, 2, 4), (8, 4, 2)),
        (N + 4 * N / 16384, N + 4 * N / 16384, 2 * N + 8 * N / 16384),
    ),
    (MXFP8(), (SHAPE, (8, 512, 256)), ((8, 256, 16), (8, 512, 8)), (1.03125 * N, 1.03125 * N, 2.0625 * N)),
    (MXFP8(element="e5m2"), (SHAPE, (8, 512, 256)), ((8, 256, 16), (8, 512, 8)), (1.03125 * N,) * 2 + (2.0625 * N,)),
    (
        NVFP4(),
        ((8, 256, 256), (8, 512, 128)),
        ((8, 256, 32), (8, 512, 16)),
        (0.5625 * N + 32, 0.5625 * N + 32, 1.125 * N + 64),
    ),
    (
        NVFP4(two_dimensional=True),
        ((8, 256, 256), (8, 512, 128)),
        ((8, 16, 32), (8, 32, 16)),
        (N / 2 + N / 256 + 32, N / 2 + N / 256 + 32, N + N / 128 + 64),
    ),
]
QUANTIZED = [case[0] for case in CASES[2:]]


@pytest.mark.parametrize(("fmt", "payloads", "scales", "sizes"), CASES, ids=lambda v: repr(v)[:60])
def test_shapes_and_bytes(fmt: Format, payloads: Any, scales: Any, sizes: tuple[float, float, float]) -> None:
    directions: tuple[Direction, Direction] = ("rowwise", "columnwise")
    assert tuple(fmt.payload_shape(SHAPE, d) for d in directions) == payloads
    assert tuple(fmt.scale_shape(SHAPE, d) for d in directions) == scales
    assert [fmt.logical_shape(fmt.payload_shape(SHAPE, d), d) for d in directions] == [SHAPE, SHAPE]
    assert fmt.stored_bytes(SHAPE) == sizes[0]
    assert fmt.stored_bytes(SHAPE, rowwise=False, columnwise=True) == sizes[1]
    assert fmt.stored_bytes(SHAPE, columnwise=True) == sizes[2]
    assert fmt.stored_bytes(SHAPE, rowwise=False) == 0
    fmt.check_shape(SHAPE, columnwise=True)


def test_mxfp4_is_row_wise_only() -> None:
    fmt = MXFP4()
    assert fmt.payload_shape(SHAPE) == (8, 256, 256) and fmt.scale_shape(SHAPE) == (8, 256, 16)
    assert fmt.stored_bytes(SHAPE) == 0.53125 * N
    with pytest.raises(ValueError, match="mxfp4 is stored row-wise only, got columnwise=True"):
        fmt.check_shape(SHAPE, columnwise=True)


def test_the_published_bytes() -> None:
    shape = (8, 64, 32)  # F10
    assert MXFP8().stored_bytes(shape) == 16896 and HighPrecision().stored_bytes(shape) == 32768


@pytest.mark.parametrize("fmt", QUANTIZED, ids=repr)
def test_one_matrix_is_a_stack_of_one(fmt: Format) -> None:
    assert fmt.payload_shape(SHAPE[1:]) == fmt.payload_shape((1, *SHAPE[1:]))[1:]
    assert fmt.scale_shape(SHAPE[1:]) == fmt.scale_shape((1, *SHAPE[1:]))[1:]
    assert fmt.stored_bytes(SHAPE[1:], columnwise=True) == fmt.stored_bytes((1, *SHAPE[1:]), columnwise=True)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=repr)
def test_partial_blocks_are_refused_by_name(fmt: Format) -> None:
    if fmt.block is None:
        fmt.check_shape((2, 7, 5), columnwise=True)
        return
    along = fmt.block.cols
    bad = along + along // 2
    message = rf"{fmt.name} stored rowwise needs cols to be a multiple of {along}, got cols={bad} in shape"
    with pytest.raises(ValueError, match=message):
        fmt.check_shape((2, 128, bad))
    with pytest.raises(ValueError, match=rf"stored columnwise needs rows to be a multiple of {along}, got rows={bad}"):
        fmt.check_shape((2, bad, 128), rowwise=False, columnwise=True)
    if fmt.block.rows == 1:
        fmt.check_shape((2, 7, 128))
        fmt.check_shape((2, 128, 7), rowwise=False, columnwise=True)
    else:
        with pytest.raises(ValueError, match=rf"rowwise needs rows .* got rows={bad} in shape \(2, {bad}, 128\)"):
            fmt.check_shape((2, bad, 128))


@pytest.mark.parametrize("fmt", [*QUANTIZED, MXFP4(), HighPrecision()], ids=repr)
def test_other_refusals(fmt: Format) -> None:
    with pytest.raises(ValueError, match=r"stores \(rows, cols\) or \(E, rows, cols\), got \(128,\)"):
        fmt.check_shape((128,))
    with pytest.raises(ValueError, match=r"got \(1, 1, 128, 128\)"):
        fmt.check_shape((1, 1, 128, 128))
    with pytest.raises(ValueError, match="needs rowwise or columnwise storage, got neither"):
        fmt.check_shape((128, 128), rowwise=False)
    fmt.check_shape((0, 128, 128))
    fmt.check_shape((2, 0, 0))


def test_formats_are_values() -> None:
    assert MXFP8() == MXFP8(element="e4m3") != MXFP8(element="e5m2")
    assert len({MXFP8(), MXFP8(), FP8Block(), NVFP4(), NVFP4(two_dimensional=True)}) == 4
    with pytest.raises(FrozenInstanceError):
        MXFP8().element = "e5m2"  # pyright: ignore[reportAttributeAccessIssue]
    assert FP8Block(two_dimensional=True).block == Block(128, 128)


@pytest.mark.parametrize("cls", [Float8, FP8Block, MXFP8])
def test_an_unknown_element_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match='element must be "e4m3" or "e5m2", got \'e2m1\''):
        cls(element="e2m1")


def test_options_that_exclude_each_other() -> None:
    for option in ("random_hadamard", "stochastic_rounding"):
        with pytest.raises(ValueError, match=f"{option}=True"):
            NVFP4(two_dimensional=True, **{option: True})
    with pytest.raises(ValueError, match=r"dtype must be .*, got torch\.int8"):
        HighPrecision(dtype=torch.int8)
