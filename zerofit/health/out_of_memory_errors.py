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
PATTERNS = {  # torch's CUDA allocator, its CPU allocator, numpy
    "asked": (rf"[Tt]ried to allocate {SIZE}", rf"Unable to allocate {SIZE}"),
    "total": (rf"total capacity of {SIZE}",),
    "free": (rf"of which {SIZE} is free",),
}


def is_out_of_memory(error: BaseException) -> str | None:
    """`device` or `host` if an error, or what it came from, says that memory ran out there; else None."""
    for one in causes_of(error):
        if type(one).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return "host"
        if isinstance(one, RuntimeError) and (where := memory_in(_with_its_line(one))):
            return where
    return None


def memory_in(text: str) -> str | None:
    """`device` or `host`, if a text says that memory ran out there; else None."""
    if OF_HOST.search(text):
        return "host"
    return "device" if OF_DEVICE.search(text) else None


def _with_its_line(error: BaseException) -> str:
    """The error's text, after the line of the program that it came from: that line knows of pinned memory."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line if frames else ''}\n{error}"


def causes_of(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def figures_of(error: BaseException) -> dict[str, int]:
    """The figures in an error's message, in bytes: asked, total, free; only what is there."""
    text = "\n".join(str(one) for one in causes_of(error))
    figures = {}
    for name, patterns in PATTERNS.items():
        match = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
        if match:
            figures[name] = round(float(match[1]) * UNITS[match[2]])
    return figures
