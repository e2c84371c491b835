"""GroupedTensor: one tensor of shape (E, rows, cols) that packs the weights of E local experts.

In high precision it is an ordinary strided tensor with a class of its own: real storage, so that `.data =`, foreach
optimizers, DDP, FSDP2 and buffer remapping act on it as on any tensor. Nothing is cached: members are views made from
the current storage at each call, so they follow whatever replaced it.

Computing with it gives plain tensors. Only what makes "the same parameter" again (detach, clone, to, deepcopy, pickle)
keeps the class.
"""

# E local experts   F output rows of a member   D input columns of a member

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime.tensor.fsdp import gathered, record_bytes
from moe_runtime.tensor.quantized_tensor import QuantizedTensor
from moe_runtime.tensor.quantizer import Quantizer
from moe_runtime.tensor.storage import InitValues


class GroupedTensor(Tensor):
    """The stacked weights of E experts, shape (E, rows, cols), in high precision.

    Made by `pack`. `members()[e]` is expert e's (rows, cols) matrix, a view.
    """

    # Set to True on a parameter whose weight gradient is computed after `backward()`: reducers that know the protocol
    # then install no post-backward hook of their own. It must be a real attribute, or assignment would be lost.
    skip_backward_post_hook: bool = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def pack(
        cls, source: Tensor | Sequence[Tensor], quantizer: Quantizer | None = None, *, keep_init: bool = False
    ) -> "GroupedTensor":
        """Stack E matrices of one shape, or take a dense (E, rows, cols) tensor; quantized if there is a quantizer.

        quantizer  copied: the tensor owns its own. None: members stay as they are, high-precision or quantized
        keep_init  keep the values from which it is quantized, as `get_high_precision_init_val` gives them
        In high precision a sequence is copied into new contiguous storage; a dense tensor is aliased, and must be
        contiguous. Quantized members keep their bytes and, stacked, their initial values: all have them, or none.
        Raises ValueError for no members, unequal members, or a tensor that is not three-dimensional; RuntimeError for
        members of which some have initial values.
        """
        if isinstance(source, GroupedTensor) and isinstance(source, QuantizedTensor) and quantizer is None:
            return source.detach()
        members = None if isinstance(source, Tensor) else list(source)
        if members and all(isinstance(member, QuantizedTensor) for member in members) and quantizer is None:
            return _stack_quantized(members)  # pyright: ignore[reportArgumentType]
        if quantizer is None:
            return cls._pack_dense(source)
        dense_EFD = cls._pack_dense(source).plain()
        return QuantizedGroupedTensor.quantized(dense_EFD, quantizer, keep_init=keep_init)

    @classmethod
    def _pack_dense(cls, source: Tensor | Sequence[Tensor]) -> "GroupedTensor":
        dense_EFD = source if isinstance(source, Tensor) else _stack(source)
        if dense_EFD.dim() != 3:
            raise ValueError(f"a packed tensor has shape (experts, rows, cols), got {tuple(dense_EFD.shape)}")
        if not dense_EFD.is_contiguous():
            raise ValueError(f"a packed tensor must be contiguous, got strides {dense_EFD.stride()}")
        if not dense_EFD.dtype.is_floating_point:
            raise TypeError(f"a packed tensor has a floating-point dtype, got {dense_EFD.dtype}")
        return torch.Tensor._make_subclass(GroupedTensor, dense_EFD.detach())

    def members(self) -> tuple[Tensor, ...]:
        """E views of shape (rows, cols), derived from the current storage."""
        return self.plain().unbind(0)

    def plain(self) -> Tensor:
        """The same storage as an ordinary detached tensor."""
        return self.as_subclass(Tensor).detach()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as an ordinary (E, rows, cols) tensor: the storage itself unless `dtype` differs."""
        return self.plain() if dtype is None else self.plain().to(dtype)

    @property
    def quantizer(self) -> Quantizer | None:
        """None: a high-precision tensor has no quantizer."""
        return None

    @property
    def rowwise(self) -> bool:
        """Whether fprop can read it."""
        return True

    @property
    def columnwise(self) -> bool:
        """Whether dgrad can read it: a transposed view costs nothing."""
        return True

    def get_high_precision_init_val(self) -> Tensor | None:
        """None: the values themselves are in high precision."""
        return None

    def clear_high_precision_init_val(self) -> None:
        """Nothing to free."""

    @property
    def stored_bytes(self) -> int:
        """Bytes held for the values."""
        return self.numel() * self.element_size()

    def _same_class(self, value: Tensor) -> "GroupedTensor":
        new = torch.Tensor._make_subclass(GroupedTensor, value, value.requires_grad)
        # A parameter's alias is not a parameter.
        _set_attributes(new, {name: held for name, held in self.__dict__.items() if name != "_is_param"})
        return new

    def detach(self) -> "GroupedTensor":
        """An alias without history, of the same class: what `nn.Parameter` and `state_dict` ask for."""
        return self._same_class(self.plain())

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """A copy: of this class when no graph is recorded, else an ordinary tensor with history."""
        copied = self.as_subclass(Tensor).clone(memory_format=memory_format)
        return copied if copied.requires_grad else self._same_class(copied)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`: of this class when no graph is recorded, else an ordinary tensor with history."""
        moved = self.as_subclass(Tensor).to(*args, **kwargs)
        return moved if moved.grad_fn is not None else self._same_class(moved)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # From an ordinary tensor: torch's own way goes through `as_subclass`, which gives a parameter a history.
        return _rebuild, (self.plain(), self.requires_grad, dict(self.__dict__))

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError("only leaf tensors can be deep-copied; detach this GroupedTensor first")
        new = self._same_class(self.plain().clone())
        new.requires_grad_(self.requires_grad)
        _set_attributes(new, copy.deepcopy(dict(self.__dict__), memo))
        if self.grad is not None:
            new.grad = self.grad.clone()
        memo[id(self)] = new
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GroupedTensor({tuple(self.shape)}, {self.dtype}, {self.device}, requires_grad={self.requires_grad})"


class QuantizedGroupedTensor(QuantizedTensor, GroupedTensor):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The quantized storage of a GroupedTensor: a traceable wrapper around the tensors of its records."""

    def members(self) -> tuple[Tensor, ...]:
        """E quantized (rows, cols) tensors over the current storage."""
        return self.detach().unbind(0)

    def plain(self) -> Tensor:
        """The values as an ordinary tensor: a copy, as the storage holds bytes."""
        return self.dequantize()

    # FSDP2's extension points. On a shard mesh of one rank torch hands only the first input on, so there is one.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """One record of bytes an expert, (E_shard, bytes) uint8."""
        return (record_bytes(self.records),), self.records.map(lambda t: t[:0], init=False)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], template: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole parameter as views of the gathered records, which FSDP2 frees and fills again in place."""
        if out is not None:
            return None
        (record_EB,) = outputs
        return QuantizedGroupedTensor.wrap(gathered(record_EB, template), param_dtype), (record_EB,)


def _stack_quantized(members: Sequence[QuantizedTensor]) -> QuantizedGroupedTensor:
    first = members[0]
    for index, member in enumerate(members):
        described = [(tuple(m.shape), m.quantizer.format, m.dtype, list(m.records.tensors())) for m in (first, member)]
        if described[0] != described[1]:
            raise ValueError(
                f"members must agree in shape, format, dtype and directions: member 0 is {described[0]}, "
                f"member {index} is {described[1]}"
            )
    values = [member.get_high_precision_init_val() for member in members]
    kept = [value for value in values if value is not None]
    if kept and len(kept) != len(values):
        raise RuntimeError(
            f"inconsistent high-precision initial values: expected all {len(values)} members or none to keep them, "
            f"got {len(kept)}"
        )
    named = [member.records.tensors() for member in members]
    tensors = {name: torch.stack([tensors[name] for tensors in named]) for name in named[0]}
    init = InitValues(wanted=first.records.init.wanted, value=torch.stack(kept) if kept else None)
    return QuantizedGroupedTensor.wrap(first.records.with_tensors(tensors, init), first.dtype)


def _rebuild(plain: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> GroupedTensor:
    new = torch.Tensor._make_subclass(GroupedTensor, plain, requires_grad)
    _set_attributes(new, attributes)
    return new


def _set_attributes(tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _stack(members: Sequence[Tensor]) -> Tensor:
    if not members:
        raise ValueError("a packed tensor needs at least one member, got none")
    first = members[0]
    for index, member in enumerate(members):
        if member.dim() != 2:
            raise ValueError(f"a member has shape (rows, cols), member {index} has {tuple(member.shape)}")
        if (member.shape, member.dtype, member.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"members must agree in shape, dtype and device: member 0 is {tuple(first.shape)} {first.dtype} "
                f"{first.device}, member {index} is {tuple(member.shape)} {member.dtype} {member.device}"
            )
    return torch.stack([member.detach() for member in members])
