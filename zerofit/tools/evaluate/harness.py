"""Run lm-evaluation-harness on a model that is loaded as `zerofit generate` loads it."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import log_lines, screen_width, table
from zerofit.tools.generate.respond import find_model, load_generator

RESULTS_FILE = "results.json"


class SharedModel(HFLM):
    """A model that is replicated on each rank; the harness distributes requests over the ranks of its
    `accelerator`."""

    rank = property(lambda self: self.accelerator.process_index)
    world_size = property(lambda self: self.accelerator.num_processes)


def evaluate(options: Any, folder: Path) -> int:
    """Evaluate, print the table, and write results.json and samples.jsonl. Raises UserError: a task is unknown, or a
    file defines no task.

    Args:
        options: EvaluateOptions (not imported here: its module imports this one).
        folder: the model's folder; for a run's model the table also has the held-out figures of the run.
    """
    check_folder_of(options.results, RESULTS_FILE, "evaluation on tasks")
    base, adapter, tokenizer = find_model(options)
    files = {name: Path(name).resolve() for name in options.tasks if Path(name).suffix in (".yaml", ".yml")}
    folders = sorted({file.parent for file in files.values()})
    manager = TaskManager(include_path=[str(task_folder) for task_folder in folders])
    task_of_file = {str(entry.yaml_path): name for name, entry in manager.task_index.items() if entry.yaml_path}
    task_names = [task_of_file.get(str(files.get(name)), name) for name in options.tasks]
    missing = [name for name in task_names if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"tasks = {' '.join(missing)}: no such task is known. `lm-eval ls tasks` lists them")
    accelerator = Accelerator()
    if accelerator.device.index is not None:
        torch.accelerator.set_device_index(accelerator.device.index)
    kind = HFLM if accelerator.num_processes == 1 else SharedModel
    loaded = load_generator(base, adapter, options).eval()
    model = kind(loaded, tokenizer=tokenizer, batch_size=options.batch_size)
    model.accelerator = accelerator
    results = simple_evaluate(
        model,
        tasks=manager.match_tasks(task_names),
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
    )
    if results is None:  # on every rank but the first
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    samples = results.pop("samples", {})
    items = ({"task": task, **line} for task, lines in samples.items() for line in lines)
    with atomic_file(options.results / "samples.jsonl") as file:
        file.writelines(json.dumps(item, default=str, ensure_ascii=False) + "\n" for item in items)
    with atomic_file(options.results / RESULTS_FILE) as file:
        json.dump({"options": options.to_dict(), **results}, file, indent=2, default=str, ensure_ascii=False)
    log_lines(table(make_results_table(results, folder), screen_width()), f"results   {options.results}")
    return 0


def make_results_table(results: dict[str, Any], folder: Path) -> list[tuple[str, ...]]:
    """Return the column names and a row per task and figure; for a run's model, those of its last evaluation come
    first."""
    rows: list[tuple[str, ...]] = [("task", "figure", "value", "+-", "questions")]
    metrics = RunFolder(folder.parent).metrics.read() if folder.name == "model" else []
    evaluation: dict[str, Any] = next((line for line in reversed(metrics) if "eval_loss" in line), {})
    for name, value in evaluation.items():
        if name.startswith("eval_") and "seconds" not in name and isinstance(value, float):
            rows.append(("held out, by the run", name, f"{value:.4g}", "", ""))
    for task, figures in results["results"].items():
        for name, value in figures.items():
            figure, _, kind = name.partition(",")
            if isinstance(value, float) and not figure.endswith("_stderr"):
                error = figures.get(f"{figure}_stderr,{kind}")
                shown = f"{error:.2g}" if isinstance(error, float) else ""
                count = results.get("n-samples", {}).get(task, {}).get("effective", "")
                rows.append((task, figure, f"{value:.4g}", shown, str(count)))
    return rows
