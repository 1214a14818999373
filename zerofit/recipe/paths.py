"""Check the files and folders that a recipe names, quickly and before anything heavy is imported."""

import glob
import os
import re
import stat
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import read_record

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from zerofit.recipe.options import TrainingRecipe
    from zerofit.recipe.tasks import TaskRecipe

FILE_OPTIONS = ("train_file", "validation_file", "validation_mismatched_file", "predict_file")
FOLDER_OPTIONS = ("model_name_or_path", "config_name", "tokenizer_name", "dataset_name")  # or names on the hub
ENVIRONMENT_FILE = "environment.json"  # in a run's folder
ROOT_USER = 0  # the user whose folders all trust
STORE_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
MIN_FREE_BYTES = 1 << 16  # the smallest record of a run
LFS_POINTER = "is a pointer of git lfs to a file that was not fetched: git lfs pull"


def check_paths(recipe: "TrainingRecipe", output: Path, output_option: str = "output_dir") -> None:
    """Check that all files and folders of the recipe exist and that the run folder can be written. Each rank checks:
    machines may differ. Raises UserError: with all problems."""
    problems = []
    for option in FILE_OPTIONS:
        is_streamed = option == "train_file" and getattr(recipe, "streaming", None)
        names = getattr(recipe, option, None) or []
        try:
            find_files(option, [name for name in names if not (is_streamed and is_address(name))])
        except UserError as error:
            problems += error.problems
    for option in FOLDER_OPTIONS:
        name = getattr(recipe, option, None)
        if name and is_missing_folder(name):
            problems.append(f"{option} = {name!r}: there is no such folder")
        elif name and (why := why_no_model(name)):
            problems.append(f"{option} = {name!r}: {why}")
        elif name and (folder := meta_folder(name)):
            problems.append(
                f"{option} = {name!r} has weights in Meta's format. Convert them first: zerofit convert meta-to-hf "
                f"--input {folder} --output {folder.name}-hf"
            )
    for option in ("vocab_file", "merge_file"):
        name = getattr(recipe, option, None)
        if name and not Path(name).expanduser().is_file():
            problems.append(f"{option} = {name!r}: there is no such file")
    for _, prefix in getattr(recipe, "blend", []):
        missing = corpus_problem(str(Path(prefix).expanduser()))
        problems += [f"data_path = {prefix!r}: {missing}"] if missing else []
    checkpoints = output / "checkpoints"  # may be a mount, or belong to somebody else
    places = [(output_option, output), ("cache_dir", recipe.cache_dir)]
    places += [(output_option, checkpoints)] if checkpoints.exists() else []
    for option, place in places:
        why = why_not_writable(Path(place).expanduser()) if place else None
        problems += [f"{option} = {str(place)!r} {why}. Choose another folder"] if why else []
    if problems:
        raise UserError(problems)


def find_files(option: str, patterns: list[str]) -> list[Path]:
    """Return the files that paths and globs name, in a fixed order. `{stdlib}` is the folder of Python's standard
    library. Raises UserError: something is missing, a folder, or empty."""
    problems = []
    files_with_content = []
    for pattern in filter(lambda word: not is_weight(word), patterns):
        if is_address(pattern):
            problems.append(
                f"{option} = {pattern!r}: copy it to this machine first; --streaming alone reads addresses"
            )
            continue
        pattern = os.path.expanduser(pattern.replace("{stdlib}", sysconfig.get_path("stdlib")))
        is_glob = glob.has_magic(pattern) and not os.path.exists(pattern)  # a file may be called a[1].txt
        matches = sorted(glob.glob(pattern, recursive=True)) if is_glob else [pattern]
        files = [Path(match) for match in matches if not os.path.isdir(match) or not is_glob]
        if not files:
            problems.append(f"{option} = {pattern!r}: no file matches")
        for path in files:
            if not path.exists():
                problems.append(f"{option} = {str(path)!r}: there is no such file")
            elif path.is_dir():
                is_dataset = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
                remedy = f"read it with --dataset_name {path}" if is_dataset else f"name its files, e.g. {path}/*.txt"
                problems.append(f"{option} = {str(path)!r} is a folder; {remedy}")
            elif is_pointer(path):
                problems.append(f"{option} = {str(path)!r} {LFS_POINTER}")
            elif path.stat().st_size == 0 and not is_glob:
                problems.append(f"{option} = {str(path)!r}: the file is empty")
        files_with_content += [path for path in files if path.is_file() and path.stat().st_size > 0]
    if patterns and not problems and not files_with_content:
        problems.append(f"{option} = {patterns}: all files that match are empty")
    if problems:
        raise UserError(problems)
    # Each once; a link keeps its name, as the hub's cache has links to files without an ending.
    return sorted({path.resolve(): Path(os.path.abspath(path)) for path in files_with_content}.values())


def is_pointer(path: Path) -> bool:
    """Return whether a file is the pointer that `git clone` leaves of a large file where git lfs is not installed."""
    return path.is_file() and path.stat().st_size < 500 and path.read_bytes().startswith(b"version https://git-lfs")


def is_address(name: str) -> bool:
    """Return whether a name is an address, as s3://bucket/name, and not a path."""
    return "://" in name


def open_address(option: str, address: str) -> tuple["AbstractFileSystem", str]:
    """Return (the file system of an address, the path in it), without a request to the store. It takes any file system
    of fsspec that keeps files: s3 (the package s3fs), gcs (gcsfs), az (adlfs), file, ... Raises UserError: the
    protocol is unknown, a package is missing, or the path is relative."""
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    protocol, _, place = address.partition("://")
    try:
        system = get_filesystem_class(protocol)
        is_local = issubclass(system, LocalFileSystem)
        files, path = url_to_fs(address, **({"auto_mkdir": True} if is_local else {}))
    except ImportError as error:
        remedy = f"pip install {STORE_PACKAGES[protocol]}" if protocol in STORE_PACKAGES else first_line(error)
        raise UserError(f"{option} = {address!r}: a package is missing for {protocol}://. {remedy}") from None
    except ValueError as error:
        raise UserError(f"{option} = {address!r}: {first_line(error)}. Use s3://, gcs://, az:// or file://") from None
    if is_local and not place.startswith(("/", "~")):
        raise UserError(f"{option} = {address!r}: expected an absolute path, as file:///{place}")
    return files, path.rstrip("/")


def is_weight(word: str) -> bool:
    """Return whether a word of train_file is the weight of the files after it, and not a file."""
    return bool(re.fullmatch(r"(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", word)) and not os.path.exists(word)


def is_missing_folder(name: str) -> bool:
    """Return whether a name can only be that of a folder, and the folder does not exist."""
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return looks_like_a_path and not Path(name).expanduser().exists()


def meta_folder(name: str) -> Path | None:
    """Return the folder of Meta's consolidated.*.pth that a name means; None if it has transformers' files too."""
    path = Path(name).expanduser()
    folder = path.parent if path.suffix == ".pth" else path
    if (folder / "config.json").is_file() or not any(folder.glob("consolidated.*.pth")):
        return None
    return folder


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, with its model or adapter in model/."""
    files = ("config.json", "adapter_config.json")
    return any((folder / "model" / name).is_file() for name in files) and not (folder / "config.json").exists()


def corpus_problem(prefix: str) -> str | None:
    """Return a sentence if a file of a corpus in Megatron's format is missing; None if both exist."""
    missing = [f"{prefix}{ending}" for ending in (".idx", ".bin") if not Path(f"{prefix}{ending}").is_file()]
    if not missing:
        return None
    folder, name = os.path.split(prefix)
    similar = sorted(Path(folder or ".").glob(f"{glob.escape(name)}_*_document.idx"))
    close = f"Did you mean {' or '.join(str(path)[:-4] for path in similar[:3])}?" if similar else ""
    return f"there is no {' and no '.join(missing)}. {close or 'Name what stands before .bin and .idx'}"


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder cannot be created or written, as part of a sentence; None if it can. Creates nothing."""
    folder = folder.absolute()
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        return "is a file" if place == folder else f"cannot be made: {place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(MIN_FREE_BYTES))  # a full disk still makes empty files
            file.flush()
            os.fsync(file.fileno())
            return None
    except OSError as error:
        return f"cannot be written: {error.strerror} ({place})"


def untrusted_folder_reason(folder: Path) -> str | None:
    """Return why other users can change an existing folder, as part of a sentence; None: they cannot, or it is
    absent."""
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in (os.getuid(), ROOT_USER):
        return "belongs to somebody else"
    writers = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getgid() else 0)
    return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})" if status.st_mode & writers else None


def name_of_recipe(file: str | None, otherwise: str) -> str:
    """Return the name of a run or report: that of the recipe's file; for a run's own recipe.yaml that of the run;
    without a file `otherwise`."""
    if file is None:
        return otherwise
    path = Path(file)
    is_of_run = any((path.parent / name).is_file() for name in ("strategy.yaml", ENVIRONMENT_FILE))
    return path.resolve().parent.name if path.name == "recipe.yaml" and is_of_run else path.stem


def why_no_model(name: str) -> str | None:
    """Return why the run in this folder has no model; None: it has one, or the folder is not that of a run."""
    folder = Path(name).expanduser()
    if not (folder / ENVIRONMENT_FILE).is_file() or is_run(folder) or (folder / "config.json").is_file():
        return None
    record = read_record(folder / ENVIRONMENT_FILE)
    code = record.get("exit_code")
    reason = record.get("exit_reason")
    if code is None:
        return "this run has no model yet: it has not ended"
    problem = f"this run has no model: it ended with code {code}"
    return f"{problem} ({str(reason).removeprefix('error: ')})" if reason else problem


def output_folder(task: str, recipe: "TrainingRecipe") -> Path:
    """Return the run folder: output_dir, else outputs/ and the name of the recipe's file, else of the task."""
    return Path(recipe.output_dir or Path("outputs") / name_of_recipe(recipe.source("config"), task))


def answers_folder(task: str, recipe: "TaskRecipe") -> str:
    """Return the folder of a launch without training: it is named after the model, the recipe's file or the task, and
    after evaluate or predict."""
    model = Path(recipe.model_name_or_path or "")
    of_model = model.resolve().parent.name if model.name == "model" else model.name
    name = recipe.output_dir or Path("outputs") / name_of_recipe(recipe.source("config"), of_model or task)
    return f"{name}-{'predict' if recipe.predict_file else 'evaluate'}"
