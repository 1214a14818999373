"""The run's folder: what a run was, and what came of it. Only the main process writes."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from train.recipe.base import Recipe
from train.recipe.errors import UserError
from train.record.jsonl import JsonlFile

PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "megatron-core",
    "evaluate",
    "scikit-learn",
    "sacrebleu",
    "numpy",
    "liger-kernel",
)
# Environment variables, or beginnings of their names, by which network, memory and threads are set.
SETTINGS = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_",
    "FI_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_",
    "MKL_NUM_THREADS", "KMP_", "MALLOC_", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
# Options that older records have not, and what they would say.
OLDER = {"optim": "adamw"}
# Options that do not change what is computed: a run that differs only in these is the same run.
# Of strategy.yaml, the data-parallel processes with which the options make the global batch: the first that is there.
GIVEN_FOR = ("options_given_for", "data_parallel", "num_processes")
NOT_THE_RUN = {
    "strategy", "deepspeed_config", "output_dir", "overwrite_output_dir", "logging_steps", "with_tracking",
    "report_to", "report_name", "run_name", "preprocessing_num_workers", "dataloader_num_workers", "cache_dir",
    "data_cache_path", "overwrite_cache", "sample_tokens", "sample_prompt", "per_device_train_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "global_batch_size", "gradient_checkpointing",
    "activation_offload", "torch_compile", "loss", "metric_for_best_model", "save_best", "load_best_model_at_end",
    "n_val_batch_generations", "save_strategy", "save_steps", "save_total_limit", "resume", "max_hours",
    "record_samples", "save_minutes", "save_keep_every", "save_only_model", "save_async", "on_save_failure",
    "on_fault", "spike_threshold", "watchdog_minutes", "rendezvous_minutes",
}  # fmt: skip


class RunFolder:
    """outputs/<run>/ with recipe.yaml, strategy.yaml, environment.json, metrics.jsonl, loss.png, checkpoints/ and
    model/; samples.jsonl where it was asked for, faults.jsonl where there was one."""

    def __init__(self, path: str | Path, option: str = "output_dir"):
        self.path, self.option = Path(path), option  # what messages call it
        self.metrics = JsonlFile(self.path / "metrics.jsonl")
        self.samples = JsonlFile(self.path / "samples.jsonl")
        self.faults = JsonlFile(self.path / "faults.jsonl")
        self._lock = None

    @property
    def model(self) -> Path:
        return self.path / "model"

    def recorded(self) -> dict[str, Any] | None:
        """The options of the run that is in the folder, and of its strategy the numbers of processes; None where no
        update was made."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir = {str(self.path)!r} is a file. Choose a folder")
        recipe, strategy = self.path / "recipe.yaml", self.path / "strategy.yaml"
        if not recipe.is_file() or not self._has_updates():
            return None
        options = yaml.safe_load(recipe.read_text()) or {}
        laid_out = (yaml.safe_load(strategy.read_text()) or {}) if strategy.is_file() else {}
        return {**OLDER, **options, **{name: laid_out[name] for name in GIVEN_FOR if name in laid_out}}

    def refuse_a_different_run(self, differing: list[str]) -> None:
        """Raises UserError: the folder holds another run than this one."""
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise UserError(
            f"output_dir = {str(self.path)!r} holds a different run: {'; '.join(differing[:5])}{more}. "
            "Choose another --output_dir, or replace that run with --overwrite_output_dir"
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run that is in the folder has come to its end."""
        return self.model.is_dir() and self.environment().get("finished") is True

    def environment(self) -> dict[str, Any]:
        """environment.json; empty where there is none."""
        try:
            found = json.loads((self.path / "environment.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def lock(self) -> None:
        """Keep other launches out of the folder, as long as this process lives.

        Raises:
            UserError: one is at work there, or the folder cannot be written.
        """
        if self._lock is not None or not self.path.is_dir():
            return
        try:
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"{self.option} = {str(self.path)!r} cannot be written: {error.strerror}") from None
        with contextlib.suppress(ImportError, OSError):  # not every system and file system has such locks
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{self.option} = {str(self.path)!r}: another run is at work there ({file.read().strip()}). Wait "
                    "for its end, or end it"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} of {platform.node()}\n")
            file.flush()
        self._lock = file

    def _has_updates(self) -> bool:
        return any(line["update"] > 0 for line in self.metrics.read())

    def start(
        self,
        recipe: Recipe,
        global_batch: int,
        strategy: dict[str, Any],
        environment: dict[str, Any],
        updates: int = 0,
        resumed_from: Path | None = None,
    ) -> None:
        """Write what the run is, and begin its record anew, or continue it after `updates` updates.

        Args:
            resumed_from: the folder of the run that is resumed: this one, or another whose record is copied.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            self._clear(resumed_from)
            self._write_all(recipe, global_batch, strategy, environment, updates)
        except OSError as error:
            raise UserError(f"output_dir = {str(self.path)!r} cannot be written: {error.strerror}") from None

    def start_answers(self, options: dict[str, Any], strategy: dict[str, Any], environment: dict[str, Any]) -> None:
        """Begin the record of a launch that trains nothing; what an earlier one has left is replaced.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            for left in (self.metrics.path, *self.path.glob("predictions*.jsonl"), *self.path.glob("*.tsv")):
                left.unlink(missing_ok=True)
            self._describe(options, strategy, environment)
        except OSError as error:
            raise UserError(f"output_dir = {str(self.path)!r} cannot be written: {error.strerror}") from None

    def _describe(self, options: dict, strategy: dict, environment: dict) -> None:
        self._write("recipe.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        self._write("strategy.yaml", yaml.safe_dump(json.loads(json.dumps(strategy)), sort_keys=False))
        earlier = self.environment()  # another rank may have failed meanwhile (train/record/exit_code.py)
        failure = {name: earlier[name] for name in ("exit_code", "exit_reason") if name in earlier}
        self.write_environment({**environment, **failure})

    def _clear(self, resumed_from: Path | None) -> None:
        shutil.rmtree(self.model, ignore_errors=True)
        (self.path / "loss.png").unlink(missing_ok=True)
        if resumed_from is not None and resumed_from.resolve() == self.path.resolve():
            return
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)  # what the run that stood here has left
        for left in (self.metrics.path, self.samples.path, self.faults.path, *self.path.glob("predictions*.jsonl")):
            left.unlink(missing_ok=True)
        for lines in (self.metrics, self.samples) if resumed_from is not None else ():
            if (resumed_from / lines.path.name).is_file():
                shutil.copyfile(resumed_from / lines.path.name, lines.path)

    def _write_all(self, recipe, global_batch: int, strategy: dict, environment: dict, updates: int) -> None:
        self._describe({**recipe.to_dict(), **identity(recipe, global_batch)}, strategy, environment)
        self.metrics.start(updates)
        if recipe.record_samples:
            self.samples.start(updates)

    def write_environment(self, environment: dict[str, Any]) -> None:
        self._write("environment.json", json.dumps(environment, indent=2) + "\n")

    def write_predictions(self, rows: Iterable[dict[str, Any]], suffix: str = "") -> None:
        """predictions.jsonl of the latest evaluation, one held-out example a line, in the order of the data."""
        partial = self.path / f"predictions{suffix}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        partial.replace(partial.with_suffix(".jsonl"))

    def predictions(self) -> list[dict[str, Any]]:
        """What write_predictions wrote last."""
        with (self.path / "predictions.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)


def check_folder_of(output: Path, file: str, what: str) -> None:
    """Raises UserError if a tool's folder holds anything but an earlier `what`, which is told by its `file`."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output = {str(output)!r} is a file. Name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / file).is_file():
        raise UserError(f"output = {str(output)!r} holds something else than an earlier {what}. Name another folder")


def differences(recipe: Recipe, global_batch: int, recorded: dict[str, Any]) -> list[str]:
    """The options in which this run differs from a recorded one, each with both values."""
    return differing_options(identity(recipe, global_batch), recorded)


def differing_options(now: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """The same of the options that make a run (`identity`)."""
    names = [name for name in now if name in recorded and recorded[name] != now[name]]
    return [f"{name} was {recorded[name]!r}, now {now[name]!r}" for name in names]


def identity(recipe: Recipe, global_batch: int) -> dict[str, Any]:
    """The options that make a run the run that it is."""
    options = {name: value for name, value in recipe.to_dict().items() if name not in NOT_THE_RUN}
    return {**options, "global_batch_size": global_batch}


def describe_environment(command: list[str], device) -> dict[str, Any]:
    """Versions, commit, hardware and command of this run."""
    import psutil
    import torch

    from train.strategy.devices import device_names

    root = Path(__file__).resolve().parents[2]
    hardware: dict[str, Any] = {
        "cpu": cpu_model(), "cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }  # fmt: skip
    if device.type != "cpu":
        versions = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": getattr(torch.version, "xpu", None)}
        hardware["gpus"] = device_names(device)
        hardware |= {name: version for name, version in versions.items() if version}
    return {
        "command": command or sys.argv,
        "arguments": sys.argv,
        "zerofit_commit": _git(root, "rev-parse", "HEAD"),
        "zerofit_changed": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "hardware": hardware,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    """The processor of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
