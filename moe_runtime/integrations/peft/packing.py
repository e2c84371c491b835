"""How PEFT lays factors out: those of all experts in two matrices, or two matrices an expert and projection.

fused       lora_A (E * r, in), the expert slow; lora_B (out, r * E), the expert fast
per expert  lora_A (r, in) and lora_B (rows, r) of each projection; ones that are fused in memory have a part of the
            rows each
"""

# E experts   r rank   F out features   D in features

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.checkpoint.hf import Piece

__all__ = ["Factors", "from_fused", "from_pieces", "padded", "to_fused", "to_pieces"]


class Factors(NamedTuple):
    """Of a grouped layer: a (E, r, D), b (E, F, r)."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """r"""
        return self.a.shape[1]


def to_fused(factors: Factors) -> tuple[Tensor, Tensor]:
    """(lora_A, lora_B) as PEFT's ParamWrapper has them."""
    return factors.a.flatten(0, 1).contiguous(), factors.b.permute(1, 2, 0).flatten(1).contiguous()


def from_fused(lora_a: Tensor, lora_b: Tensor, num_experts: int) -> Factors:
    """Inverse of `to_fused`."""
    a_ErD = lora_a.reshape(num_experts, -1, lora_a.shape[1])
    b_EFr = lora_b.reshape(lora_b.shape[0], -1, num_experts).permute(2, 0, 1)
    return Factors(a_ErD.contiguous(), b_EFr.contiguous())


def to_pieces(factors: Factors, pieces: Sequence[Piece]) -> dict[str, tuple[Tensor, Tensor]]:
    """(lora_A, lora_B) of each piece, by its key; parts of one expert's rows have its A in common."""
    found = {}
    for piece in pieces:
        assert piece.expert is not None
        start, stop = piece.rows or (0, factors.b.shape[1])
        found[piece.key] = (factors.a[piece.expert].clone(), factors.b[piece.expert, start:stop].contiguous())
    return found


def from_pieces(given: Mapping[str, tuple[Tensor, Tensor]], pieces: Sequence[Piece], shape: tuple[int, ...]) -> Factors:
    """The factors (E, F, D) = `shape` of those pieces that are given; the update of others is 0.

    Parts whose A differ stand beside each other: their ranks add up, and b has a block for each.
    """
    num_experts, rows, _ = shape
    parts = sorted({piece.rows or (0, rows) for piece in pieces})
    by_place = {(p.expert, p.rows or (0, rows)): given[p.key] for p in pieces if p.key in given}
    like_a, like_b = next(iter(given.values()))
    rank = like_a.shape[0]
    experts = [[by_place.get((e, part)) for part in parts] for e in range(num_experts)]
    same = all(
        len({id(held[0]) for held in held_parts if held is not None}) <= 1 or _equal(held_parts)
        for held_parts in experts
    )
    blocks = 1 if same else len(parts)
    a_ErD = like_a.new_zeros(num_experts, blocks * rank, shape[2])
    b_EFr = like_b.new_zeros(num_experts, rows, blocks * rank)
    for e, held_parts in enumerate(experts):
        for index, ((start, stop), held) in enumerate(zip(parts, held_parts, strict=True)):
            if held is None:
                continue
            first = 0 if same else index * rank
            a_ErD[e, first : first + rank] = held[0]
            b_EFr[e, start:stop, first : first + rank] = held[1]
    return Factors(a_ErD, b_EFr)


def padded(factors: Factors, rank: int) -> Factors:
    """The same update with a larger rank."""
    more = rank - factors.rank
    return Factors(torch.nn.functional.pad(factors.a, (0, 0, 0, more)), torch.nn.functional.pad(factors.b, (0, more)))


def _equal(held_parts: Sequence[tuple[Tensor, Tensor] | None]) -> bool:
    factors = [held[0] for held in held_parts if held is not None]
    return all(torch.equal(factors[0], other) for other in factors[1:])
