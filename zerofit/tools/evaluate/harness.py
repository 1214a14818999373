"""The harness at work: its own engine on a model that is loaded as `zerofit generate` loads it."""

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
from zerofit.tools.generate.respond import find_model, load

RESULTS = "results.json"


class SharedModel(HFLM):
    """A model that each rank has whole; the harness shares the requests out among the ranks of its `accelerator`."""

    rank = property(lambda self: self.accelerator.process_index)
    world_size = property(lambda self: self.accelerator.num_processes)


def evaluate(options: Any, folder: Path) -> int:
    """Evaluate, show the table, and write results.json and samples.jsonl. Raises UserError: a task is unknown, or a
    file has none.

    Args:
        options: EvaluateOptions, whose module imports this one as it starts.
        folder: of the model, where it is one; a run's own figures are shown beside the tasks'.
    """
    check_folder_of(options.results, RESULTS, "evaluation on tasks")
    base, adapter, tokenizer = find_model(options)
    files = {name: Path(name).resolve() for name in options.tasks if Path(name).suffix in (".yaml", ".yml")}
    known = TaskManager(include_path=[str(place) for place in sorted({file.parent for file in files.values()})])
    of_files = {str(entry.yaml_path): name for name, entry in known.task_index.items() if entry.yaml_path}
    asked = [of_files.get(str(files.get(name)), name) for name in options.tasks]
    missing = [name for name in asked if not known.match_tasks([name])]
    if missing:
        raise UserError(f"tasks = {' '.join(missing)}: no such task is known. `lm-eval ls tasks` lists them")
    accelerator = Accelerator()
    if accelerator.device.index is not None:
        torch.accelerator.set_device_index(accelerator.device.index)
    kind = HFLM if accelerator.num_processes == 1 else SharedModel
    model = kind(load(base, adapter, options).eval(), tokenizer=tokenizer, batch_size=options.batch_size)
    model.accelerator = accelerator
    found = simple_evaluate(
        model,
        tasks=known.match_tasks(asked),
        task_manager=known,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
    )
    if found is None:  # of every rank but the first
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    samples = found.pop("samples", {})
    items = ({"task": task, **line} for task, lines in samples.items() for line in lines)
    with atomic_file(options.results / "samples.jsonl") as file:
        file.writelines(json.dumps(item, default=str, ensure_ascii=False) + "\n" for item in items)
    with atomic_file(options.results / RESULTS) as file:
        json.dump({"options": options.to_dict(), **found}, file, indent=2, default=str, ensure_ascii=False)
    log_lines(table(rows(found, folder), screen_width()), f"results   {options.results}")
    return 0


def rows(found: dict[str, Any], folder: Path) -> list[tuple[str, ...]]:
    """The table: the figures of the run's last evaluation, where the model is a run's, and those of each task."""
    lines: list[tuple[str, ...]] = [("task", "figure", "value", "+-", "questions")]
    metrics = RunFolder(folder.parent).metrics.read() if folder.name == "model" else []
    own: dict[str, Any] = next((line for line in reversed(metrics) if "eval_loss" in line), {})
    for name, value in own.items():
        if name.startswith("eval_") and "seconds" not in name and isinstance(value, float):
            lines.append(("held out, by the run", name, f"{value:.4g}", "", ""))
    for task, figures in found["results"].items():
        for name, value in figures.items():
            figure, _, kind = name.partition(",")
            if isinstance(value, float) and not figure.endswith("_stderr"):
                error = figures.get(f"{figure}_stderr,{kind}")
                shown = f"{error:.2g}" if isinstance(error, float) else ""
                count = found.get("n-samples", {}).get(task, {}).get("effective", "")
                lines.append((task, figure, f"{value:.4g}", shown, str(count)))
    return lines
