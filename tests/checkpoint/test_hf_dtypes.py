"""Folders whose tensors differ in dtype."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from moe_runtime.checkpoint.hf import Names, Piece, Reader


def test_an_expert_in_fp32_beside_one_in_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    """Read together they are fp32; in the dtype of the first, 1 + 2^-20 would be 1."""
    experts = (torch.ones(1, 2, dtype=torch.bfloat16), torch.full((1, 2), 1 + 2.0**-20))
    save_file({f"w.{e}": value for e, value in enumerate(experts)}, tmp_path / "model.safetensors")
    pieces = tuple(Piece(key=f"w.{e}", expert=e, rows=(0, 1)) for e in range(2))
    names = Names(shapes={"w": (2, 1, 2)}, pieces={"per_expert": {"w": pieces}, "fused": {"w": (Piece(key="w"),)}})
    with Reader(tmp_path, names) as reader:
        assert reader.dtype("w") == torch.float32
        assert reader.read("w", ((0, 2), (0, 1), (0, 2))).tolist() == [[[1.0, 1.0]], [[1 + 2.0**-20] * 2]]
