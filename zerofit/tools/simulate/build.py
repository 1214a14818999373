"""Build the C++ extension of the simulated device, once for each version of torch and of the sources.

    eval "$(python -m zerofit.tools.simulate.build)"     # build, and use the simulated device in this shell

A build takes about half a minute. It is kept in torch's folder for extensions (TORCH_EXTENSIONS_DIR), like
DeepSpeed's."""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

from zerofit.strategy.builds import check_compiled_code

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
DEVICE = HERE / "device"
EXTENSION_NAME = "simgpu_c"


def missing() -> str | None:
    """Return what this machine lacks to build the extension; None: nothing."""
    if _compiler() is None:
        return "there is no C++ compiler (looked for $CXX, c++, g++ and clang++)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"Python's headers are not installed ({header})"


def build_device() -> Path:
    """Return the extension's file; build it if it does not exist. Several processes may call this at the same time.
    Raises RuntimeError, with the compiler's message: it does not compile."""
    check_compiled_code()
    library = target()
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if the building process is killed
        if not library.is_file():
            unfinished = library.with_suffix(".unfinished")
            done = subprocess.run(_command(unfinished), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{shlex.join(done.args)}\n{done.stderr[-6000:]}")
            unfinished.rename(library)
    return library


def target() -> Path:
    """Return the path of the built extension. Its name has a hash of everything that it is built from, except the
    place of the sources."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    sources = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))
    command = shlex.join(_command(Path(EXTENSION_NAME))).replace(str(SOURCES), "")
    about = f"{torch.__version__} {sysconfig.get_config_var('EXT_SUFFIX')} {command}"
    return (
        Path(root)
        / EXTENSION_NAME
        / f"{EXTENSION_NAME}-{hashlib.sha256(about.encode() + sources).hexdigest()[:16]}.so"
    )


def environment(library: Path) -> dict[str, str]:
    """Return the environment variables with which Python uses the simulated device."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(DEVICE)]
    return {"SIMGPU_LIBRARY": str(library), "PYTHONPATH": os.pathsep.join([str(DEVICE), *others])}


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next(filter(None, map(shutil.which, names)), None)


def _command(library: Path) -> list[str]:
    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()
    return [
        _compiler() or "c++",
        *"-std=c++20 -O1 -DNDEBUG -fPIC -shared".split(),
        f"-DTORCH_EXTENSION_NAME={EXTENSION_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in headers),
        str(SOURCES / "simgpu.cpp"),
        "-o",
        str(library),
        *(f"-L{path}" for path in libraries),
        *"-lc10 -ltorch -ltorch_cpu -ltorch_python".split(),
    ]


if __name__ == "__main__":
    if missing():
        sys.exit(f"simulated device: {missing()}")
    for name, value in environment(build_device()).items():
        print(f"export {name}={shlex.quote(value)}")
