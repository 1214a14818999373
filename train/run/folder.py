"""The run's folder: what a run was, and what came of it. Only the main process writes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from train.recipe.errors import UserError
from train.recipe.options import Recipe
from train.run.lines import Lines

PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "evaluate",
    "scikit-learn",
    "sacrebleu",
    "numpy",
    "liger-kernel",
)
# Options that do not change what is computed: a run that differs only in these is the same run.
NOT_THE_RUN = {
    "output_dir", "overwrite_output_dir", "logging_steps", "with_tracking", "report_to", "report_name", "run_name",
    "preprocessing_num_workers", "dataloader_num_workers", "cache_dir", "overwrite_cache", "sample_tokens",
    "sample_prompt", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "global_batch_size", "gradient_checkpointing", "torch_compile", "loss", "metric_for_best_model", "save_best",
    "load_best_model_at_end", "n_val_batch_generations", "save_strategy", "save_steps", "save_total_limit",
    "resume", "max_hours", "record_samples",
}  # fmt: skip


class RunFolder:
    """outputs/<run>/ with recipe.yaml, strategy.yaml, environment.json, metrics.jsonl, loss.png, checkpoints/ and
    model/."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = Lines(self.path / "metrics.jsonl")
        self.samples = Lines(self.path / "samples.jsonl")

    @property
    def model(self) -> Path:
        return self.path / "model"

    def refuse_a_different_run(self, recipe: Recipe, global_batch: int) -> bool:
        """Whether the folder holds this very run already.

        Raises:
            UserError: it holds a different one, and nobody allowed to replace that.
        """
        recorded = self.path / "recipe.yaml"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir = {str(self.path)!r} is a file. Choose a folder")
        if not recorded.is_file() or recipe.overwrite_output_dir or not self._has_updates():
            return False
        before = yaml.safe_load(recorded.read_text()) or {}
        now = _comparable(recipe, global_batch)
        differing = [name for name in now if name in before and before[name] != now[name]]
        if differing:
            shown = "; ".join(f"{name} was {before[name]!r}, now {now[name]!r}" for name in differing[:5])
            more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise UserError(
                f"output_dir = {str(self.path)!r} holds a different run: {shown}{more}. "
                "Choose another --output_dir, or replace that run with --overwrite_output_dir"
            )
        return True

    def _has_updates(self) -> bool:
        return any(line["update"] > 0 for line in self.metrics.read())

    def start(
        self,
        recipe: Recipe,
        global_batch: int,
        strategy: dict[str, Any],
        environment: dict[str, Any],
        updates: int = 0,
    ) -> None:
        """Write what the run is, and begin its metrics anew, or go on after so many updates."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir = {str(self.path)!r} cannot be made: {error.strerror}") from None
        shutil.rmtree(self.model, ignore_errors=True)
        (self.path / "loss.png").unlink(missing_ok=True)
        if not updates:  # what the run that stood here has left
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            for left in (self.samples.path, *self.path.glob("predictions*.jsonl")):
                left.unlink(missing_ok=True)
        options = {**recipe.to_dict(), **_comparable(recipe, global_batch)}
        self._write("recipe.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        self._write("strategy.yaml", yaml.safe_dump(json.loads(json.dumps(strategy)), sort_keys=False))
        self.write_environment(environment)
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
        (self.path / name).write_text(text, encoding="utf-8")


def _comparable(recipe: Recipe, global_batch: int) -> dict[str, Any]:
    options = {name: value for name, value in recipe.to_dict().items() if name not in NOT_THE_RUN}
    return {**options, "global_batch_size": global_batch}


def describe_environment(command: list[str], device) -> dict[str, Any]:
    """Versions, commit, hardware and command of this run."""
    import platform

    import psutil
    import torch

    root = Path(__file__).resolve().parents[2]
    hardware: dict[str, Any] = {
        "cpu": _cpu_name(), "cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }  # fmt: skip
    if device.type == "cuda":
        hardware["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        hardware["cuda"] = torch.version.cuda
    return {
        "command": command or sys.argv,
        "arguments": sys.argv,
        "zerofit_commit": _git(root, "rev-parse", "HEAD"),
        "zerofit_changed": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "hardware": hardware,
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor()
