"""Addresses (s3://bucket/name) where a path is expected: inputs are downloaded once, and read as local files.

Any file system of fsspec works that lasts: s3 (the package s3fs), gcs (gcsfs), az (adlfs), file, ...
"""

import glob
from hashlib import sha256
from pathlib import Path, PurePosixPath

from filelock import FileLock
from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import Problems, UserError, first_line
from zerofit.recipe.files import cache_root, put_in_place, temporary_path
from zerofit.recipe.paths import FILE_OPTIONS, is_address

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def open_address(option: str, address: str) -> tuple[AbstractFileSystem, str]:
    """The file system of an address, and the path in it. Nothing is asked of the store. Raises UserError: nothing is
    known of such addresses, or a package is missing; it is a relative path."""
    protocol, _, place = address.partition("://")
    try:
        system = get_filesystem_class(protocol)
        is_local = issubclass(system, LocalFileSystem)
        files, path = url_to_fs(address, **({"auto_mkdir": True} if is_local else {}))
    except ImportError as error:
        remedy = f"pip install {PACKAGES[protocol]}" if protocol in PACKAGES else first_line(error)
        raise UserError(f"{option} = {address!r}: a package is missing for {protocol}://. {remedy}") from None
    except ValueError as error:
        raise UserError(f"{option} = {address!r}: {first_line(error)}. Use s3://, gcs://, az:// or file://") from None
    if is_local and not place.startswith(("/", "~")):
        raise UserError(f"{option} = {address!r}: expected an absolute path, as file:///{place}")
    return files, path.rstrip("/")


def fetch_inputs(recipe: Recipe) -> None:
    """Download what the recipe names by addresses to the cache of prepared data, and let it name the copies. What is
    streamed is not downloaded.

    `recipe.to_dict()` keeps the addresses. What is there already, with the same size and etag, is not read again.
    Raises UserError: with all problems; something is not there, or cannot be read.
    """
    problems, root = Problems(), cache_root(getattr(recipe, "cache_dir", None)) / "addresses"
    for option in (*FILE_OPTIONS, "data_path", "model_name_or_path"):
        if option == "train_file" and getattr(recipe, "streaming", None):
            continue
        given = getattr(recipe, option, None) or []
        words = [given] if isinstance(given, str) else given
        if any(map(is_address, words)):
            with problems.collected():
                copies = [_copies(option, word, root) if is_address(word) else [word] for word in words]
                local = [str(path) for paths in copies for path in paths]
                recipe.stand_in(option, local[0] if isinstance(given, str) else local)
    problems.raise_found()


def _copies(option: str, address: str, root: Path) -> list[Path]:
    """The local files (a corpus: its prefix; a model: its folder) of an address."""
    files, path = open_address(option, address)
    try:
        files.invalidate_cache()
        if option == "model_name_or_path":
            of_run = (f"{path}/model/{name}" for name in ("config.json", "adapter_config.json"))
            path = f"{path}/model" if any(map(files.exists, of_run)) else path
            names = files.find(path)
        else:
            names = files.glob(f"{glob.escape(path)}.*" if option == "data_path" else path)
        found = {name: (files.size(name), files.ukey(name)) for name in sorted(names) if not files.isdir(name)}
        if not found:
            raise UserError(f"{option} = {address!r}: there is no such file")
        key = sha256(repr((address, found)).encode()).hexdigest()[:16]
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{key}.lock"):  # one process of this machine at a time
            if not (root / key).exists():
                _download(files, {name: size for name, (size, _) in found.items()}, root / key)
    except UserError:
        raise
    except Exception as error:  # each store has its own
        raise UserError(f"{option} = {address!r} cannot be read: {first_line(error)}") from None
    if option in ("data_path", "model_name_or_path"):
        return [root / key / _inside(path)]
    return [root / key / _inside(name) for name in found]


def _inside(name: str) -> PurePosixPath:
    """The path of a file in the cache, without the root of the store: its whole path, as names may repeat."""
    return PurePosixPath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))


def _download(files: AbstractFileSystem, sizes: dict[str, int], folder: Path) -> None:
    partial = temporary_path(folder)
    for name, size in sizes.items():
        copy = partial / _inside(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(name, str(copy))
        if copy.stat().st_size != size:
            raise OSError(f"{name} has {size:,} bytes, and {copy.stat().st_size:,} have arrived")
    put_in_place(partial, folder)
