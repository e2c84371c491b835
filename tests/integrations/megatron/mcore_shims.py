"""Megatron on the CPU: replacements of torch's CUDA entry points. Importing this patches the process, so only the
processes of a RankPool do, before they import megatron. Nothing of megatron is changed but two names of 0.16.1.
"""

import logging
import queue
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """CPU work is synchronous: every wait is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> "Event":
        return Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def _on_cpu(function: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _install() -> None:
    current = Stream()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_, **__: current
    torch.cuda.default_stream = lambda *_, **__: current
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.stream = lambda stream=None: stream if isinstance(stream, Stream) else current
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
    torch.Tensor.record_stream = lambda *_, **__: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0
    torch.cuda.nvtx.range = lambda *_, **__: nullcontext()
    for name in ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron's optimizers take parameters by the text of their type.
    real = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        named_cpu = isinstance(result, str) and ".cuda." not in result
        return result.replace("torch.", "torch.cuda.", 1) if named_cpu else result

    torch.Tensor.type = type_


_install()
warnings.filterwarnings("ignore")
logging.getLogger("megatron.core").setLevel(logging.ERROR)

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.tensor_parallel import random as mcore_random  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads the name without Transformer Engine, too
    moe_utils.te_general_gemm = None
mcore_random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
# Split sizes become lists of integers only where they come from a GPU.
_move = token_dispatcher.maybe_move_tensor_to_cpu
token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
    t.numpy() if as_numpy and torch.is_tensor(t) and not t.is_cuda else _move(t, as_numpy, record_stream)
)

# Checkpoint files are written by processes; a pool's ranks may have none, so threads do it.
_threads = SimpleNamespace(Process=threading.Thread, Queue=queue.Queue, JoinableQueue=queue.Queue)
_results: queue.Queue[Any] = queue.Queue()
filesystem_async.mp = SimpleNamespace(get_context=lambda *_: _threads, Queue=queue.Queue)
filesystem_async._get_write_results_queue = lambda: _results

# With torch's own Adam, 0.16.1 gives all parameters one step tensor, which each of them would advance, and then looks
# for it among the tensors that it has loaded.
_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states_and_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    held = self._get_main_param_and_optimizer_states(model_param)
    self.optimizer.state[held["param"]]["step"] = held["step"].clone()
    _set_states(self, model_param, {"step": held["step"], **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_and_step
