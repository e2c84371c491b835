"""Bytes that one rank needs to train adapters on a frozen base: weights, adapters, gradients, optimizer, activations.

Weights, adapters, gradients and the optimizer's state are exact: they are the tensors that will be made. Activations
are what autograd keeps of a microbatch between forward and backward, term by term below; what kernels use in passing,
allocators round up and libraries take for themselves is not counted.
"""

# T tokens of a microbatch on this rank   R = T K routed rows   D model width   F expert width   K top-k
# H query heads   G key heads   W width of a head

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from moe_runtime.formats import Format
from moe_runtime.precision import Recipe

FLOAT32, INT32, INT64 = 4, 4, 8

Sharing = Literal["experts", "dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter in its global shape. `format` None: plain values of `value_bytes`; else row-wise, and columnwise."""

    name: str
    shape: tuple[int, ...]
    value_bytes: int
    is_expert: bool = False
    trains: bool = False
    format: Format | None = None
    columnwise: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How ranks share the parameters: `expert` ranks share the experts, `shard` ranks everything (1: each has all)."""

    shard: int = 1
    expert: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Tensors that it keeps of each trained parameter: `states` of fp32 or the parameter's own bytes, and a master.

    masters  fp32 copies of parameters of fewer bytes
    steps    a four-byte step count a parameter, as AdamW has
    """

    states: int
    masters: bool = False
    steps: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One decoder block: attention over heads, a router, SwiGLU experts.

    head_norms  queries and keys are normalized head by head, as Qwen3's are
    adapted     its adapted products, out of "q", "k", "v", "o", "gate_up" and "down"
    rank        of their adapters
    dropout     on the adapters' inputs
    """

    hidden: int
    heads: int
    key_heads: int
    head_width: int
    expert_width: int
    num_experts: int
    top_k: int
    head_norms: bool = False
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    dropout: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A microbatch of one rank, `sequences` rows of `seq_length` tokens.

    packed     a row holds several samples, so attention reads a mask of (seq_length, seq_length) a row
    recompute  blocks keep their input only, and one at a time is computed again
    """

    sequences: int
    seq_length: int
    value_bytes: int
    vocab: int
    packed: bool = True
    recompute: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row of the plan, and how it was computed."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The lines, and their sum: what a process should grow by."""

    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def of(self, name: str) -> int:
        """Bytes of one line; KeyError where there is none."""
        return {line.name: line.num_bytes for line in self.lines}[name]


def expert_format(recipe: Recipe, *, stored_quantized: bool) -> Format | None:
    """What the experts' weights are stored in; None: plain values."""
    return recipe.weight if recipe.quantizes and stored_quantized else None


def weight_bytes(weight: Weight) -> int:
    """Of the whole parameter, over all ranks."""
    if weight.format is None:
        return prod(weight.shape) * weight.value_bytes
    return weight.format.stored_bytes(weight.shape, rowwise=True, columnwise=weight.columnwise)


def plan_memory(
    weights: Sequence[Weight],
    *,
    placement: Placement,
    optimizer: Optimizer,
    layers: Sequence[Layer],
    batch: Batch,
) -> MemoryPlan:
    """The plan of one rank. Parts are rounded up, as the largest rank has them."""
    base = [weight for weight in weights if not weight.trains]
    adapters = [weight for weight in weights if weight.trains]
    experts = [weight for weight in base if weight.is_expert]
    rest = [weight for weight in base if not weight.is_expert]
    blocks = [layer_bytes(layer, batch) for layer in layers]
    kept = sum(blocks)
    if batch.recompute:
        kept = sum(batch.tokens * layer.hidden * batch.value_bytes for layer in layers) + max(blocks, default=0)
    lines = [
        Line(name="base experts", num_bytes=_held(experts, placement), formula=_stored(experts)),
        Line(name="base, the rest", num_bytes=_held(rest, placement), formula=_stored(rest)),
        Line(name="adapters", num_bytes=_held(adapters, placement), formula=_stored(adapters)),
        Line(name="gradients", num_bytes=_held(adapters, placement), formula="as the adapters"),
        Line(
            name="optimizer",
            num_bytes=sum(_optimizer_bytes(weight, optimizer, placement) for weight in adapters),
            formula=f"{optimizer.states} x fp32{' + an fp32 master' if optimizer.masters else ''}",
        ),
        Line(
            name="activations",
            num_bytes=kept,
            formula=f"{len(layers)} blocks, {batch.tokens:,} tokens{', recomputed' if batch.recompute else ''}",
        ),
        Line(
            name="logits and loss",
            num_bytes=loss_bytes(batch),
            formula=f"{batch.tokens:,} tokens x {batch.vocab:,} ids",
        ),
    ]
    if placement.shard > 1:
        gathered = max((weight_bytes(w) for w in experts), default=0) * 2
        lines.append(
            Line(
                name="gathered block",
                num_bytes=-(-gathered // placement.expert),
                formula="the experts of one block, whole, while it runs",
            )
        )
    return MemoryPlan(lines=tuple(lines))


def layer_bytes(layer: Layer, batch: Batch) -> int:
    """What autograd keeps of one block whose base is frozen, by the terms of `layer_terms`."""
    return sum(layer_terms(layer, batch).values())


def layer_terms(layer: Layer, batch: Batch) -> dict[str, int]:
    """Bytes that one block keeps for backward, by what they are; exact for Qwen3-MoE in one process.

    A frozen product keeps nothing of its input. An adapted one keeps it, once for all that read it, and its A x.
    """
    T, b, K = batch.tokens, batch.value_bytes, layer.top_k
    H, G, W, D, F = layer.heads, layer.key_heads, layer.head_width, layer.hidden, layer.expert_width
    R, adapted = T * K, layer.adapted
    of_tokens, of_rows = adapted & {"q", "k", "v", "o"}, adapted & {"gate_up", "down"}
    of_experts = R * b * (D * ("gate_up" in adapted) + F * ("down" in adapted))
    return {
        "norms": 2 * T * (D + 1) * FLOAT32,
        "norms of heads": T * (H + G) * (W + 1) * FLOAT32 if layer.head_norms else 0,
        "input of q, k, v": T * D * b if adapted & {"q", "k", "v"} else 0,
        # Keys and values are repeated for each query head.
        "attention": 4 * T * H * W * b + T * H * FLOAT32 + 2 * T * W * b,
        "attention mask": T * batch.seq_length * b if batch.packed else 0,
        "router": T * (layer.num_experts + 1) * FLOAT32 + R * (FLOAT32 + INT64),
        "places of rows": 2 * R * INT32 + layer.num_experts * INT32 + R * b,
        "rows into adapted products": of_experts,
        # The numbers that they were multiplied by.
        "dropout": of_experts * layer.dropout,
        "gate_up's output": R * 2 * F * b,
        "adapters' inner products": layer.rank * b * (T * len(of_tokens) + R * len(of_rows)),
    }


def loss_bytes(batch: Batch) -> int:
    """Logits in fp32, their log-softmax, and one gradient at a time; the logits again where values are not fp32."""
    copies = 3 * FLOAT32 + (batch.value_bytes if batch.value_bytes != FLOAT32 else 0)
    return batch.tokens * batch.vocab * copies


def _held(weights: Sequence[Weight], placement: Placement) -> int:
    """Bytes that one rank holds."""
    return sum(-(-weight_bytes(weight) // _degree(weight, placement)) for weight in weights)


def _degree(weight: Weight, placement: Placement) -> int:
    # Experts are cut by the expert degree first, then over the ranks that hold the same ones: shard in all.
    return max(placement.shard, placement.expert if weight.is_expert else 1)


def _optimizer_bytes(weight: Weight, optimizer: Optimizer, placement: Placement) -> int:
    values = -(-prod(weight.shape) // _degree(weight, placement))
    has_master = optimizer.masters and weight.value_bytes != FLOAT32
    state = FLOAT32 if has_master else weight.value_bytes
    return values * (optimizer.states * state + FLOAT32 * has_master) + FLOAT32 * optimizer.steps


def _stored(weights: Sequence[Weight]) -> str:
    values = sum(prod(weight.shape) for weight in weights)
    if not values:
        return "none"
    each = sum(weight_bytes(weight) for weight in weights) / values
    names = sorted({"plain" if weight.format is None else weight.format.name for weight in weights})
    return f"{values:,} values, {each:.4f} bytes each ({', '.join(names)})"
