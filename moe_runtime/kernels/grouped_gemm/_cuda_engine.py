"""Builds and launches hopper.cu: NVRTC at first use, tensor maps for the copy engine, one launch for each product.

Both libraries are the ones that torch brings or the driver's own, reached through their C interface; no compiler need
be installed. A variant is compiled once in a process.
"""

# R routed rows   E experts

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

TILE_M, TILE_N, TILE_K = 128, 256, 64
# Row tiles side by side, so that both operands stay in L2. From an H200: many for rows of one weight.
GROUP, GROUP_OF_EXPERT = 32, 8
_STAGES = 4
_SHARED_BYTES = _STAGES * (TILE_M + TILE_N) * TILE_K * 2 + 1024
_THREADS = 384
_ACCUMULATORS = 128  # of a thread: 64 rows of 256 columns over a warpgroup

_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS_OUTSIDE = 9, 0, 3, 3, 0  # of the driver's tensor maps
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_ALIGNMENT = 64
_MAX_INT, _RAGGED_ROWS = 0x7FFF0000, 2**30
RAGGED_SPAN_BYTES = 2**35  # 2^30 of these are 2^65: they vanish from an address


class Mode:
    """What a kernel makes of the product; see hopper.cu."""

    STORE, ACT, DACT, WGRAD = 0, 1, 2, 3


class Gather:
    """The operand whose rows come by index; see hopper.cu."""

    NONE, A, B = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One compilation of hopper.cu."""

    mode: int
    b_mn: bool
    gather: int = 0
    out_f32: bool = False
    accumulate: bool = False

    def options(self) -> list[str]:
        """As the compiler takes them."""
        return [
            f"-DMODE={self.mode}",
            f"-DB_MN={int(self.b_mn)}",
            f"-DGATHER={self.gather}",
            f"-DOUT_F32={int(self.out_f32)}",
            f"-DACCUMULATE={int(self.accumulate)}",
            f"-DSTAGES={_STAGES}",
        ]


class TensorMap(ctypes.Structure):
    """What the copy engine knows of a tensor; the driver fills it."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Args(ctypes.Structure):
    """The kernel's arguments, field for field as in hopper.cu."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("rows_of", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("act", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("dgate", ctypes.c_void_p),
        ("num_m", ctypes.c_int),
        ("num_c", ctypes.c_int),
        ("num_tiles", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("group", ctypes.c_int),
        ("height", ctypes.c_int),
    )


def address(values: Tensor | None) -> int | None:
    """Where a tensor starts, for a field of Args."""
    return None if values is None else values.data_ptr()


def tensor_map(values: Tensor, shape: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Contiguous `values` seen in `shape`, read in blocks of `box`; zeros outside."""
    strides = [values.element_size()]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return _encode(values, list(reversed(shape)), strides[1:], list(reversed(box)))


def ragged_map(values_RC: Tensor, box: Sequence[int]) -> TensorMap:
    """Rows of one expert at a time: coordinates past its end give zeros, wherever it lies.

    An expert of n rows that end at row z is read at (2^30 - n + row, z, 2^30): the row's coordinate leaves the first
    dim's bounds exactly at n, and the offsets that this adds cancel in 64 bits.
    """
    row_bytes = values_RC.shape[1] * values_RC.element_size()
    shape = [values_RC.shape[1], _RAGGED_ROWS, _MAX_INT, _MAX_INT]
    strides = [row_bytes, row_bytes, RAGGED_SPAN_BYTES - row_bytes]
    return _encode(values_RC, shape, strides, [*reversed(box), 1, 1])


def launch(
    variant: Variant, map_a: TensorMap | None, map_b: TensorMap | None, args: Args, map_h: TensorMap | None = None
) -> None:
    """Run a variant on the current stream, as many blocks as the device holds at once."""
    device = torch.cuda.current_device()
    kernel = _kernel(variant, device)
    blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, args.num_tiles)
    values = (map_a or TensorMap(), map_b or TensorMap(), map_h or TensorMap(), args)
    parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = torch.cuda.current_stream().cuda_stream
    shape = (blocks, 1, 1, _THREADS, 1, 1, _SHARED_BYTES)
    _check(_driver().cuLaunchKernel(kernel, *shape, ctypes.c_void_p(stream), parameters, None), "launch")


def _encode(values: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorMap:
    """Dims from the innermost on; `strides` in bytes, of all but it."""
    rank = len(shape)
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _MAP_ALIGNMENT)
    found = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT)
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(found),
            _BFLOAT16,
            rank,
            ctypes.c_void_p(values.data_ptr()),
            (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _NO_INTERLEAVE,
            _SWIZZLE_128B,
            _L2_256B,
            _ZEROS_OUTSIDE,
        ),
        f"describe a tensor of shape {shape}",
    )
    return found


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver cannot {what}: error {status}")


@functools.cache
def _kernel(variant: Variant, device: int) -> ctypes.c_void_p:
    """The function, loaded into the context of `device`, which torch has made current."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _cubin(variant)), "load the kernel")
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"grouped_gemm"), "find the kernel")
    _check(driver.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED, _SHARED_BYTES), "give the kernel its memory")
    return kernel


@functools.cache
def _cubin(variant: Variant) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source().encode(), b"hopper.cu", 0, None, None):
        raise RuntimeError("NVRTC cannot take hopper.cu")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", *(option.encode() for option in variant.options())]
    if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
        raise RuntimeError(f"NVRTC cannot compile hopper.cu for {variant}:\n{_log(nvrtc, program)}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def source() -> str:
    """What NVRTC compiles."""
    folder = files("moe_runtime.kernels.grouped_gemm")
    text = "".join(folder.joinpath(name).read_text() for name in ("hopper_ptx.cuh", "hopper.cu"))
    return text.replace("//@WGMMA@", _wgmma())


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library of torch's CUDA version: by name, or where its wheel puts it."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    places = [name, *sorted(map(str, Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")))]
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise RuntimeError(f"NVRTC is not there: tried {', '.join(places)}")


@functools.cache
def missing(device: int) -> str | None:
    """Why hopper.cu cannot be built or run on a CUDA device, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"made for compute capability 9.0, got {capability[0]}.{capability[1]}"
    try:
        _nvrtc()
    except RuntimeError as error:
        return str(error)
    return None


def _wgmma() -> str:
    """The one instruction that multiplies: it names each of its 128 accumulators."""
    names = ", ".join(f"%{i}" for i in range(_ACCUMULATORS))
    values = ", ".join(f'"+f"(acc[{i}])' for i in range(_ACCUMULATORS))
    a, b, a_mn, b_mn = (f"%{_ACCUMULATORS + i}" for i in range(4))
    return (
        "__device__ __forceinline__ void wgmma(float (&acc)[128], u64 a, u64 b) {\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{names}}}, '
        f'{a}, {b}, 1, 1, 1, {a_mn}, {b_mn};"\n: {values}\n'
        ': "l"(a), "l"(b), "n"(MODE == 3), "n"(B_MN));\n}\n'
    )
