"""Calls a kernel's own launcher with a stub below it: grid, parameters and TMA descriptors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blasst.kernels.verify.errors import ToolError, VerifyError
from blasst.kernels.verify.launch import Launch, Region
from blasst.kernels.verify.parse import Module

STUB = Path(__file__).with_name("stub.c")
CUDA = 2  # DLPack's device type
MAX_PARAMETERS, MAX_BYTES = 64, 1024
DLPACK = {
    torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8), torch.float16: (2, 16),
    torch.float32: (2, 32), torch.bfloat16: (4, 16),
}  # fmt: skip
# Type tags of the launcher's arguments.
NONE, INT, BOOL, FLOAT, TENSOR, ARRAY = 0, 1, 2, 3, 7, 71
HEADER = 24  # bytes of an object of the runtime


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Any(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64))


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", _Dim3), ("block", _Dim3), ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


@dataclass
class Launcher:
    """A linked launcher. function: the name under which the object file was exported."""

    library: Path
    function: str
    module: Module
    kept: list[Any] = field(default_factory=list)

    def capture(
        self,
        arguments: Sequence[Any],
        roles: Callable[[int], str],
        regions: Sequence[Region] = (),
    ) -> Launch:
        """arguments: torch CPU tensors (taken for CUDA ones), numbers, None, and sequences of
        tensors or None."""
        library = ctypes.CDLL(str(self.library))
        sizes = [p.size for p in self.module.parameters]
        if len(sizes) > MAX_PARAMETERS or max(sizes) > MAX_BYTES:
            raise VerifyError(f"{len(sizes)} parameters of up to {max(sizes)} bytes are too many")
        library.blasst_begin(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        packed = (_Any * len(arguments))()
        for slot, argument in zip(packed, arguments, strict=True):
            self._pack(slot, argument)
        call = getattr(library, f"__tvm_ffi_{self.function}")
        call.restype = ctypes.c_int
        if call(None, packed, len(arguments), ctypes.byref(_Any())) != 0:
            raise VerifyError(f"the launcher refused its arguments: {_raised()}")
        launches = ctypes.c_int.in_dll(library, "blasst_launches").value
        if launches != 1:
            raise VerifyError(f"the launcher started {launches} kernels, not one")
        taken = _Launch.in_dll(library, "blasst_launch")
        blob = bytes(
            (ctypes.c_ubyte * (MAX_PARAMETERS * MAX_BYTES)).in_dll(library, "blasst_parameters")
        )
        return Launch(
            grid=(taken.grid.x, taken.grid.y, taken.grid.z),
            threads=taken.block.x * taken.block.y * taken.block.z,
            shared_bytes=taken.shared_bytes,
            parameters=[blob[i * MAX_BYTES : i * MAX_BYTES + n] for i, n in enumerate(sizes)],
            roles=roles,
            regions=tuple(regions),
        )

    def _pack(self, slot: _Any, argument: Any) -> None:
        if argument is None:
            slot.tag = NONE
        elif isinstance(argument, bool):
            slot.tag, slot.value = BOOL, int(argument)
        elif isinstance(argument, int):
            slot.tag, slot.value = INT, argument & (1 << 64) - 1
        elif isinstance(argument, float):
            slot.tag = FLOAT
            slot.value = ctypes.c_uint64.from_buffer_copy(ctypes.c_double(argument)).value
        elif isinstance(argument, torch.Tensor):
            slot.tag, slot.value = TENSOR, ctypes.addressof(self._tensor(argument))
        elif isinstance(argument, Sequence):
            import tvm_ffi

            array = tvm_ffi.convert([_in_array(value) for value in argument])
            self.kept.append(array)
            slot.tag, slot.value = ARRAY, array.__chandle__()
        else:
            raise VerifyError(f"cannot pass {type(argument).__name__} to a launcher")

    def _tensor(self, tensor: torch.Tensor) -> _Tensor:
        code, bits = DLPACK[tensor.dtype]
        shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
        packed = _Tensor(
            data=tensor.data_ptr(), device_type=CUDA, device=0, rank=tensor.dim(), code=code,
            bits=bits, lanes=1, shape=shape, strides=strides, byte_offset=0,
        )  # fmt: skip
        self.kept += [tensor, shape, strides, packed]
        return packed


def _in_array(value: Any) -> Any:
    """A tensor as an object of the runtime, on a device."""
    if not isinstance(value, torch.Tensor):
        return value
    import tvm_ffi

    held = tvm_ffi.from_dlpack(value)
    at = held.__chandle__() + HEADER + _Tensor.device_type.offset
    ctypes.c_int32.from_address(at).value = CUDA
    return held


def link(object_file: Path, function: str, module: Module) -> Launcher:
    """Links an exported object file with the stub, once; needs a C compiler.

    The library appears whole or not at all: other processes may load it meanwhile.
    """
    library = object_file.with_suffix(".so")
    if not library.exists() or library.stat().st_mtime < object_file.stat().st_mtime:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            _link(object_file, made)
            made.replace(library)
    return Launcher(library, function, module)


def _link(object_file: Path, library: Path) -> None:
    import tvm_ffi

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ToolError("no C compiler (cc) was found; install gcc or clang")
    runtime = Path(tvm_ffi.__file__).parent / "lib"
    done = subprocess.run(
        [
            compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(object_file), str(STUB),
            f"-L{runtime}", "-ltvm_ffi", f"-Wl,-rpath,{runtime}", "-Wl,-z,noexecstack",
            "-Wl,-Bsymbolic",
        ],  # the real runtime's functions must not take the stub's place
        capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise ToolError(f"{compiler} failed: {done.stderr.strip()[-500:]}")


def _raised() -> str:
    """Text of the error that the launcher raised through its runtime."""
    import tvm_ffi

    runtime = ctypes.CDLL(str(Path(tvm_ffi.__file__).parent / "lib" / "libtvm_ffi.so"))
    handle = ctypes.c_void_p()
    runtime.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return "no message"

    def text(at: int) -> str:
        pointer, length = (ctypes.c_uint64.from_address(at + i).value for i in (0, 8))
        return ctypes.string_at(pointer, length).decode(errors="replace")

    start = handle.value + HEADER  # (pointer, length) of kind and message
    return f"{text(start)}: {text(start + 16)}"
