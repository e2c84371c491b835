"""The one vocabulary for Hugging Face names: which tensors on disk make up a model's tensor, in either name style.

    per_expert   what `save_pretrained` writes by default and transformers 4 reads: one tensor an expert and projection,
                 where the architecture has them so
    fused        the names of transformers 5 in memory: one tensor a layer for all experts

A `Names` is plain data about one model. Whoever builds a model attaches it (integrations/transformers makes it from
transformers' own conversion tables); reading and writing look it up.
"""

# E experts over the whole group   F output features   D input features

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["STYLES", "Names", "Piece", "Style", "attach_names", "names_of"]

Style = Literal["per_expert", "fused"]
STYLES: tuple[Style, ...] = ("per_expert", "fused")
_ATTRIBUTE = "huggingface_names"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A tensor on disk and the part of a model's tensor that it holds.

    expert  it holds this expert's matrix (or bias); None: all of the tensor's first dimension
    rows    output features [start, stop) of the model's tensor; None: all
    transposed  its last two dimensions are swapped on disk
    """

    key: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def box(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """[start, stop) in each dimension of the model's tensor."""
        box = [(0, size) for size in shape]
        if self.expert is not None:
            box[0] = (self.expert, self.expert + 1)
        if self.rows is not None:
            box[1] = self.rows
        return tuple(box)

    def disk_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What the tensor on disk must have, for a model's tensor of `shape`."""
        sizes = [stop - start for start, stop in self.box(shape)]
        if self.transposed:
            sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
        return tuple(sizes if self.expert is None else sizes[1:])


@dataclass(frozen=True, kw_only=True)
class Names:
    """The map between a model's tensors and Hugging Face keys.

    shapes    global shape of each tensor; experts stand as one tensor (E, F, D), or (E, F) for a bias
    pieces    of each tensor in each style
    tied      other names of a tensor, which a folder may hold as well, or instead
    own       tensors that the Hugging Face class does not have: a selection bias that balancing added
    fp32      tensors that stay in float32 whatever dtype is asked for
    ignored   regular expressions of keys that the class says it does not need
    prefix    of its base model, which a folder's keys may have in front
    fp8_block rows and columns that share a scale in a float8 folder
    dtype     of what a folder holds quantized, when it is written as values
    config    config.json, as text
    fill_rest makes and fills whatever no folder holds: `fill_rest(model, device, held names)`
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[Style, Mapping[str, tuple[Piece, ...]]]
    tied: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    fp8_block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    config: str = "{}"
    fill_rest: Callable[[nn.Module, Any, frozenset[str]], None] | None = None


def attach_names(model: nn.Module, names: Names | Callable[[], Names]) -> None:
    """Remember on the model how Hugging Face calls its tensors; a function is called when somebody first asks."""
    setattr(model, _ATTRIBUTE, names)


def names_of(model: nn.Module) -> Names:
    """The map attached to the model, or to what it wraps. ValueError where there is none."""
    inner = getattr(model, "module", None)
    holder = inner if isinstance(inner, nn.Module) and not hasattr(model, _ATTRIBUTE) else model
    names = getattr(holder, _ATTRIBUTE, None)
    if names is None:
        raise ValueError(
            f"{type(model).__name__} does not know its Hugging Face names: expected a model of "
            "moe_runtime.integrations.transformers.build, or attach_names(model, names) before"
        )
    if not isinstance(names, Names):
        names = names()
        attach_names(holder, names)
    return names
