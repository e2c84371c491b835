"""A record accepts only tensors that belong together."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, Quantized
from moe_runtime.formats.format import Direction

FORMATS: list[Format] = [MXFP8(), MXFP8(element="e5m2"), FP8Block(), FP8Block(two_dimensional=True), Float8(), NVFP4()]


def record(fmt: Format, shape: tuple[int, ...] = (2, 128, 256), direction: Direction = "rowwise") -> Quantized:
    return Quantized(
        payload=torch.zeros(fmt.payload_shape(shape, direction), dtype=fmt.payload_dtype),
        scale=torch.ones(fmt.scale_shape(shape, direction), dtype=fmt.scale_dtype),
        tensor_scale=torch.ones(shape[:-2]) if fmt.has_tensor_scale else None,
        format=fmt,
        direction=direction,
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
@pytest.mark.parametrize("shape", [(2, 128, 256), (128, 256), (0, 128, 128), (2, 0, 256)], ids=str)
def test_shape_and_bytes(fmt: Format, shape: tuple[int, ...]) -> None:
    for direction in ("rowwise", "columnwise"):
        q = record(fmt, shape, direction)
        assert q.shape == shape
        rowwise = direction == "rowwise"
        assert q.stored_bytes == fmt.stored_bytes(shape, rowwise=rowwise, columnwise=not rowwise)


@pytest.mark.parametrize("fmt", [*FORMATS, MXFP4()], ids=repr)
def test_a_payload_without_its_scale_is_refused(fmt: Format) -> None:
    q = record(fmt)
    with pytest.raises(ValueError, match=rf"{fmt.name} needs a scale of shape .*, got None"):
        replace(q, scale=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=rf"scale of {fmt.name} must be torch.* of shape"):
        replace(q, scale=q.scale[:1])
    with pytest.raises(ValueError, match=r"payload of .* must be torch\.uint8 .* got torch\.int8"):
        replace(q, payload=q.payload.to(torch.int8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"direction": "diagonal"}, 'direction must be "rowwise" or "columnwise", got \'diagonal\''),
        ({"format": NVFP4()}, "scale of nvfp4 must be"),
        ({"tensor_scale": torch.ones(2)}, r"mxfp8 has no tensor_scale, got one of shape \(2,\)"),
        ({"payload": torch.zeros(2, 128, 255, dtype=torch.uint8)}, "needs cols to be a multiple of 32, got cols=255"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    q = record(MXFP8(), (2, 128, 256))
    with pytest.raises(ValueError, match=message):
        replace(q, **changes)


def test_nvfp4_needs_its_tensor_scale() -> None:
    with pytest.raises(ValueError, match=r"nvfp4 needs a tensor_scale of shape \(2,\), got None"):
        replace(record(NVFP4()), tensor_scale=None)


def test_copies_and_pickles() -> None:
    q = record(NVFP4(random_hadamard=True), direction="columnwise")
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert (other.format, other.direction, other.shape) == (q.format, q.direction, q.shape)
        assert torch.equal(other.payload, q.payload) and torch.equal(other.scale, q.scale)
        other.scale.fill_(2)
    assert int(q.scale.max()) == 1
