"""Recognises errors that say that memory ran out, and reads the figures in their text.

The run ends with exit code 87 (EXIT_OUT_OF_MEMORY), so that whoever starts runs can tell it from other failures.
"""

import errno
import re
import traceback

from zerofit.strategy.host_memory import GIB

# What says that memory ran out. A pinned block that is refused is host memory, in the words of a device's. NCCL's
# words are those of its checks.h and alloc.h.
PINNED = r"pin[_ ]memory.{0,400}?(?:CUDA|HIP) error: out of memory"
OF_HOST = re.compile("|".join((
    PINNED, "Failed to CUDA host alloc", "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory",
    "not enough memory: you tried to allocate", r"std::bad_alloc", "bad allocation", "unable to mmap",
    "unable to allocate shared memory")), re.DOTALL)  # fmt: skip
NO_HANDLE = "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
OF_DEVICE = re.compile("|".join((
    "(?:CUDA|HIP|XPU) out of memory", "(?:CUDA|HIP) error: out of memory", "MPS backend out of memory",
    "(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED", NO_HANDLE, r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to CUDA [cm]alloc")))  # fmt: skip
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
ASKED = re.compile(rf"(?:[Tt]ried|Unable) to allocate {SIZE}")  # torch's allocators; numpy


def is_out_of_memory(error: BaseException) -> str | None:
    """`device` or `host` if an error, or what it came from, says that memory ran out there; else None."""
    for one in causes_of(error):
        if type(one).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return "host"
        frames = traceback.extract_tb(one.__traceback__)  # the line of the program knows of pinned memory
        text = f"{frames[-1].line if frames else ''}\n{one}"
        if isinstance(one, RuntimeError) and (where := memory_in(text)):
            return where
    return None


def memory_in(text: str) -> str | None:
    """`device` or `host`, if a text says that memory ran out there; else None."""
    if OF_HOST.search(text):
        return "host"
    return "device" if OF_DEVICE.search(text) else None


def causes_of(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def asked_for(error: BaseException) -> int:
    """The bytes that could not be had, by the error's message; 0 where it does not say."""
    match = ASKED.search("\n".join(str(one) for one in causes_of(error)))
    return round(float(match[1]) * UNITS[match[2]]) if match else 0
