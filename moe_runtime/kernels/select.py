"""Which backend runs an op, and why the others do not: a table per op, tried in order.

Each op's folder holds its own table; kernels/tables.py lists them all. A backend refuses a problem with a reason, which
the caller sees: in the log (once) where a backend made for the device was passed over, in an error where it was asked
for by name. The native CPU backend is moe_runtime._C, which an install may lack; so may triton, the GPU's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.core.log import get_logger, warn_once

_HOW_TO_BUILD = "build it with g++ and: pip install --no-build-isolation -e . (or python setup.py build_ext --inplace)"


class Problem(NamedTuple):
    """What is asked: the tensors that decide who can run it, the one that names device and dtype first.

    layout  of a gated and a linear half, where the op has them
    """

    tensors: tuple[Tensor, ...]
    layout: str = "concatenated"


def never_refuses(problem: Problem) -> None:
    """The refusal of a backend that runs everything."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run an op."""

    name: str
    refuses: Callable[[Problem], str | None]  # None means "I can run this"
    run: Any  # what Table.choose returns: the function, or a module with the op's functions
    device: str | None = None  # the device type it was made for; None: any


class Selection(NamedTuple):
    """What a table would choose, for people to read."""

    op: str
    chosen: str
    refusals: list[str]  # "backend: reason" of each backend before the chosen one


@dataclass(frozen=True, slots=True)
class Table:
    """An op's backends, the fastest first; the last one runs everything."""

    op: str
    backends: tuple[Backend, ...]
    probe_dtype: torch.dtype = torch.bfloat16  # of the tensors that `describe` asks about

    def choose(self, problem: Problem, only: str | None = None) -> Any:
        """The `run` of the first backend that accepts `problem`; with `only`, of that backend or nothing.

        A name that is not in the table is a ValueError, no backend that accepts an UnsupportedError with every refusal.
        """
        if only is not None:
            return self._named(problem, only).run
        device = problem.tensors[0].device.type
        refusals: list[str] | None = None
        for backend in self.backends:
            if backend.device is not None and backend.device != device:
                continue
            if (reason := backend.refuses(problem)) is None:
                if refusals is not None and not torch.compiler.is_compiling():
                    warn_once(_LOGGER, f"{self.op} runs on backend {backend.name} ({'; '.join(refusals)})")
                return backend.run
            refusals = [*(refusals or ()), f"{backend.name}: {reason}"]
        raise UnsupportedError(f"no backend runs {self.op} here ({'; '.join(_refusals(self.backends, problem))})")

    def describe(self, device: torch.device) -> Selection:
        """The choice for small tensors of the probe dtype on `device`."""
        sample = torch.empty(16, 16, dtype=self.probe_dtype, device=device)
        problem = Problem((sample, sample))
        refusals: list[str] = []
        for backend in self.backends:
            if (reason := _refusal(backend, problem)) is None:
                return Selection(self.op, backend.name, refusals)
            refusals.append(f"{backend.name}: {reason}")
        return Selection(self.op, "none", refusals)

    def _named(self, problem: Problem, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                if (reason := _refusal(backend, problem)) is not None:
                    raise UnsupportedError(f"{self.op} cannot run on the backend asked for ({name}: {reason})")
                return backend
        names = ", ".join(backend.name for backend in self.backends)
        raise ValueError(f"backend must be one of {names} for {self.op}; got {name!r}")


def _refusal(backend: Backend, problem: Problem) -> str | None:
    device = problem.tensors[0].device.type
    if backend.device is not None and backend.device != device:
        return f"runs on {backend.device} tensors, got {device}"
    return backend.refuses(problem)


def _refusals(backends: tuple[Backend, ...], problem: Problem) -> list[str]:
    return [f"{backend.name}: {_refusal(backend, problem)}" for backend in backends]


class NativeStatus(NamedTuple):
    """Whether moe_runtime._C is loaded; `reason` says how to get it where it is not."""

    available: bool
    reason: str


def _load_native() -> NativeStatus:
    try:
        import_module("moe_runtime._C")
    except ModuleNotFoundError:
        return NativeStatus(False, f"moe_runtime._C is not built; {_HOW_TO_BUILD}")
    except ImportError as error:
        return NativeStatus(False, f"moe_runtime._C does not load ({error}); {_HOW_TO_BUILD}")
    return NativeStatus(True, "moe_runtime._C is loaded")


_LOGGER = get_logger(__name__)
_NATIVE = _load_native()


def native_status() -> NativeStatus:
    """Whether the native CPU kernels are loaded in this process, and if not, how to build them."""
    return _NATIVE


def native(run: Any, *dtypes: torch.dtype) -> Backend:
    """The backend of moe_runtime._C for problems whose first tensor has one of `dtypes`."""

    def refuses(problem: Problem) -> str | None:
        return _refuses_dtype(problem, dtypes) if _NATIVE.available else _NATIVE.reason

    return Backend("native", refuses, run, device="cpu")


def triton_missing() -> str | None:
    """Why the Triton kernels cannot be imported in this process, None where they can. Does not import triton."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA"
    return None


def triton(run: Any | None, *dtypes: torch.dtype) -> Backend:
    """The Triton backend for problems whose first tensor has one of `dtypes`; `run` is None where triton_missing()."""
    missing = triton_missing()

    def refuses(problem: Problem) -> str | None:
        if missing is not None:
            return missing
        index, current = problem.tensors[0].device.index, torch.cuda.current_device()
        if index != current:  # a launch goes to the current device, wherever its tensors are
            return f"runs on the current device cuda:{current}, got cuda:{index}"
        return _refuses_dtype(problem, dtypes)

    return Backend("triton", refuses, run, device="cuda")


def _refuses_dtype(problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if problem.tensors[0].dtype in dtypes:
        return None
    takes = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"takes {takes}, got {problem.tensors[0].dtype}"


def reference(run: Any) -> Backend:
    """The backend of ordinary torch ops: any device, any floating dtype."""
    return Backend("reference", never_refuses, run)
