"""Files that users hand over, and the folders of the program's scripts, strategies and recipes, and of prepared data.

The program's are next to the package in a clone, and in it if it is installed. YAML and JSON that are nested too
deeply, or grow as they are read, are refused.
"""

import bz2
import functools
import gzip
import hashlib
import json
import lzma
import os
import re
import secrets
import shutil
import time
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from zerofit.recipe.errors import UserError, first_line, nearest

TOO_DEEP = "nested too deeply"
MAX_NESTING = 50  # lists and maps in each other
MAX_ALIAS_LENGTH = 1000  # characters of a value that is repeated


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits: it would follow aliases of aliases, and nesting until Python's stack is full.
    A key that stands twice in a map is refused."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        mark = event.start_mark
        repeated = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        is_short = isinstance(repeated, yaml.ScalarNode) and len(repeated.value) <= MAX_ALIAS_LENGTH
        if isinstance(event, yaml.AliasEvent) and not is_short:
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor} repeats more than a short value: write it out", mark
            )
        if self.depth == MAX_NESTING:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the map of a node, in which each key may stand once: PyYAML would take the last."""
        names = [str(key.value) for key, _ in node.value]
        if duplicates := [key for place, (key, _) in enumerate(node.value) if str(key.value) in names[:place]]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{duplicates[0].value} is set twice: keep one", duplicates[0].start_mark
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None of an empty one. Raises UserError if it cannot be read."""
    try:
        return yaml.load(read_text(path), BoundedLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:400]}") from None


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON as json.loads does, with its options. Raises json.JSONDecodeError also where Python's stack is too
    small for the nesting."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise json.JSONDecodeError(TOO_DEEP, "", 0) from None


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its keys and values (`object_pairs_hook`). Raises json.JSONDecodeError: a key is there
    twice."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise json.JSONDecodeError(f"{max(names, key=names.count)} is there twice, keep one of the two", "", 0)
    return unique


def has_lone_surrogate(value: Any) -> bool:
    """Return whether a text in a JSON value has half of a surrogate pair, which cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_object(text: bytes, is_yaml: bool = False) -> dict[str, Any] | None:
    """Parse a text of JSON or YAML that is an object; None if it is another value, or damaged."""
    try:
        value = yaml.load(text, BoundedLoader) if is_yaml else parse_json(text)
    except (ValueError, yaml.YAMLError):
        return None
    return value if isinstance(value, dict) else None


def read_record(path: Path) -> dict[str, Any]:
    """Return the object in a .json or .yaml file of a record; empty if the file is missing, cannot be read, or holds
    something else: a kill, a full disk or an editor may have damaged it."""
    try:
        return parse_object(path.read_bytes(), is_yaml=path.suffix == ".yaml") or {}
    except OSError:
        return {}


def parse_bytes(text: str) -> int:
    """Convert a size to bytes: 24GiB -> 25769803776. Powers of 1024 are KiB, MiB, GiB, TiB, powers of 1000 kB, MB, GB,
    TB; the B may be missing, and then G is GiB. Raises ValueError: it is not a positive size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)\s*", text)
    if not match or (match[3] and not match[2]):
        raise ValueError(text)
    base = 1000 if match[4] and not match[3] else 1024
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise ValueError(text)
    return size


def counted(number: int | str, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2,000 files`, `3 processes`. A number that is a text stands as it
    is."""
    digits = number if isinstance(number, str) else f"{number:,}"
    ending = "" if digits == "1" else "es" if noun.endswith("s") else "ies" if noun.endswith("y") else "s"
    return f"{digits} {noun[:-1] if ending == 'ies' else noun}{ending}"


PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
CONFIG_DIR = Path("accelerate_configs")
RECIPE_DIR = Path("recipes")


@functools.cache
def digest_of_code(folder: Path = PACKAGE_FOLDER, without: tuple[str, ...] = ()) -> str:
    """Return a hash of the Python files in a folder of the program, uncommitted changes included. `without`:
    beginnings of paths in the folder that are omitted."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        if not name.startswith(without):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def place(name: str | Path) -> Path:
    """Return the path of a folder or file of the program, from its path in a clone."""
    inside = PACKAGE_FOLDER / name
    return inside if inside.exists() else PACKAGE_FOLDER.parent / name


def script(task: str) -> Path:
    """Return the script of a task, such as clm."""
    return place("train") / f"{task}.py"


def configs() -> Path:
    """Return the folder of the strategies' YAML files: that of the current folder, or the program's own."""
    return CONFIG_DIR if CONFIG_DIR.is_dir() else place(CONFIG_DIR)


def nearest_recipe(name: str) -> str | None:
    """Return the recipe whose name is most similar to that of a missing file; None if none is."""
    recipes = {file.stem: file for folder in (place(RECIPE_DIR), RECIPE_DIR) for file in folder.glob("*/*.yaml")}
    close = nearest(Path(name).stem, recipes)
    return str(recipes[close]) if close else None


def recipe_file(name: str) -> str:
    """Return the file of a recipe: `name` itself, or a file of the current folder or of the program that has this name
    without its folder and extension; else `name`."""
    files = (file for folder in (RECIPE_DIR, place(RECIPE_DIR)) for file in sorted(folder.glob(f"*/{name}.yaml")))
    return name if Path(name).is_file() else str(next(files, name))


def cache_root(cache_dir: str | None) -> Path:
    """Return the folder of prepared data: the recipe's cache_dir, else a folder in the cache of the datasets
    library."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    # the cache of the datasets library, without importing it, which takes a second (datasets/config.py)
    hub = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE", f"{hub}/datasets")).expanduser() / "zerofit"


def display_path(path: Path) -> str:
    """Return a path for a command that is shown: relative to the current folder if it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# File systems that other machines may see as well (psutil's fstype begins with one of these).
SHARED_FS = ("nfs", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "fuse", "9p", "afs", "glusterfs", "wekafs")
# NFS may cache that a file is absent for 60 s (nfs(5): acdirmax); with a margin.
SECONDS_TO_APPEAR = 90.0
TEMPORARY_NAME = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.partial")

# The encodings that a byte-order mark stands for; that of UTF-32 begins like that of UTF-16.
BYTE_ORDER_MARKS = {
    BOM_UTF32_LE: "utf-32",
    BOM_UTF32_BE: "utf-32",
    BOM_UTF16_LE: "utf-16",
    BOM_UTF16_BE: "utf-16",
    BOM_UTF8: "utf-8",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # endings of files that are unpacked as they are read
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)  # reading a packed file raises them


def decompress(file: IO[bytes], name: Path) -> IO[bytes]:
    """Return an open file, decompressed as the extension of its name says."""
    ending = name.suffix.lower()
    if ending == ".zst":
        import pyarrow  # which has zstd; Python has it from 3.14 on

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    readers: dict[str, Any] = {
        ".gz": lambda file: gzip.GzipFile(fileobj=file),
        ".bz2": bz2.BZ2File,
        ".xz": lzma.LZMAFile,
    }
    return readers[ending](file) if ending in readers else file


def format_suffix(path: Path) -> str:
    """Return the file extension that says the format: .csv for a.csv and for A.CSV.gz."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read bytes; .gz, .bz2, .xz and .zst files are unpacked. Raises UserError: such a file is
    damaged."""
    try:
        with path.open("rb") as raw, decompress(raw, path) as file:
            yield file
    except READ_ERRORS as error:
        if path.suffix.lower() not in COMPRESSED:
            raise
        raise UserError(f"{path} cannot be read: {first_line(error)}. Is it cut off?") from None


def marked_encoding(start: bytes) -> str | None:
    """Return the encoding that the byte-order mark at the start of a file stands for; None without one."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)


def read_text(path: Path) -> str:
    """Return the text of a file: UTF-8, or UTF-16 or UTF-32 with a byte-order mark, which is removed. Raises OSError:
    it cannot be read. Raises UnicodeDecodeError: it is in another encoding."""
    data = path.read_bytes()
    text = data.decode(marked_encoding(data) or "utf-8").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_shared(folder: Path) -> bool:
    """Return whether other machines may see this folder."""
    import psutil

    folder = folder.resolve()
    disks = [disk for disk in psutil.disk_partitions(all=True) if folder.is_relative_to(disk.mountpoint)]
    file_system = max(disks, key=lambda disk: len(disk.mountpoint)).fstype if disks else ""
    return file_system.startswith(SHARED_FS)


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists, also on a network file system.

    A network file system may cache for a while that a name is absent; listing the folder asks the server again.
    """
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def wait_until(look: Callable[[], bool], seconds: float = SECONDS_TO_APPEAR) -> bool:
    """Wait until `look` returns true, such as for a file of another machine that appears late. Returns False after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def is_disk_error(error: Exception) -> bool:
    """Return whether writing failed for lack of room or permission, and not through a bug. For libraries in Rust
    (safetensors, tokenizers) only the message tells it."""
    text = str(error).lower()
    words = ("no space left", "os error", "i/o error", "permission denied", "disk quota", "read-only file system")
    return isinstance(error, OSError) or any(word in text for word in words)


def strip_folders(value: Any) -> Any:
    """Return an option's value to publish: absolute paths, alone or in a list, are reduced to their last name."""
    if isinstance(value, (list, tuple)):
        return [strip_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def temporary_path(path: Path) -> Path:
    """Return an unpredictable name next to `path`."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that replaces `path` at the end of the block: complete and on the disk, or not at all.

    No symbolic link is followed: neither one in the place of `path`, nor one in the place of the temporary file.
    """
    temporary = temporary_path(path)
    handle = open_without_links(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def open_without_links(path: Path | str, flags: int) -> int:
    """Open a file, and return its descriptor. Raises OSError if `path` is a symbolic link. Suits `open(...,
    opener=...)`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a symbolic link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a finished folder. If another machine was first, keep its folder, which has the same content."""
    try:
        partial.rename(folder)
    except OSError:
        if not is_there(folder):
            raise
        shutil.rmtree(partial, ignore_errors=True)
