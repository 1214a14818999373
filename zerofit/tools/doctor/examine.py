"""Examine a machine and a launch for `zerofit doctor`."""

import contextlib
import dataclasses
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from zerofit.estimate.planned_model import read_planned_model
from zerofit.estimate.planned_rows import PLANNED_CLASSES
from zerofit.launch.machines import read_machines
from zerofit.model.adapter_folder import with_base_configuration
from zerofit.model.compilation import check_float8_device, missing_compiler
from zerofit.model.configuration import known_architectures
from zerofit.model.tokenizer import check_vocabulary, load_tokenizer
from zerofit.recipe.errors import NothingToDo, UserError, first_line
from zerofit.recipe.files import counted, display_path, is_shared, read_yaml, script
from zerofit.recipe.options import TrainingRecipe, make_schedule
from zerofit.recipe.paths import check_paths, is_missing_folder, output_folder
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.terminal import size
from zerofit.strategy.builds import check_compiled_code
from zerofit.strategy.gpus import (
    ALSO_VISIBLE,
    NO_DEVICE,
    VISIBLE,
    check_devices,
    cudnn,
    gpus_of_the_machine,
    num_devices,
)
from zerofit.strategy.launch import default_config, find_strategies
from zerofit.strategy.read import read_strategy
from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.report import ERROR, NOTE, WARNING, DoctorOptions, DoctorReport
from zerofit.tools.machine import VARIABLES_OF_A_RANK, Machine, environment_of_a_rank, inspect_machine
from zerofit.training.run_configuration import check_model, choose_compilation, resolve

SHM_FOLDER = Path("/dev/shm")
MIN_SHM_BYTES = 512 * 2**20  # ds_report's limit
MIN_FREE_DISK_BYTES = 2**30
MIN_FREE_MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class Installation(Machine):
    """A machine, and the folder that a run writes to. Sizes are in bytes.

    Attributes:
        present: {maker: number of GPUs that the operating system has}, whether or not torch sees them.
        shm: size of /dev/shm; None: there is none.
        output: the run's folder; None: no run is examined.
        disk_free: free bytes of the disk with that folder.
        disk_shared: other machines may see that disk.
    """

    shm: int | None = None
    present: dict[str, int] = dataclasses.field(default_factory=dict)
    output: str | None = None
    disk_free: int = 0
    disk_shared: bool = False

    @classmethod
    def here(cls, output: Path | None) -> "Installation":
        """Return a description of this machine. `output`: the run's folder."""
        shm = shutil.disk_usage(SHM_FOLDER).total if SHM_FOLDER.is_dir() else None
        installation = cls(**vars(inspect_machine()), shm=shm, present=gpus_of_the_machine())
        if not output:
            return installation
        path = output.expanduser().absolute()
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        shared = is_shared(existing)
        return replace(installation, output=str(path), disk_free=free, disk_shared=shared)

    def facts(self) -> list[tuple[str, str]]:
        """Return (title, text) of each fact for the report."""
        devices = [f"{device.name}, {size(device.free)} free of {size(device.total)}" for device in self.devices]
        shm = f"; /dev/shm {size(self.shm)}" if self.shm is not None else ""
        facts = [
            ("devices", "; ".join(devices) or f"no accelerator, {counted(self.cores, 'core')}"),
            ("torch", ", ".join(filter(None, [torch.__version__, cudnn() if self.devices else None]))),
            ("memory", f"{size(self.memory_free)} free of {size(self.memory)}{shm}"),
        ]
        if self.output:
            shared = ", shared" if self.disk_shared else ""
            facts.append(("output", f"{self.output}: {size(self.disk_free)} free{shared}"))
        return facts


def check_machine(
    machine: Installation,
    variables: Mapping[str, str],
    processes: int,
    num_machines: int = 1,
    precision: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (level, message) on what is wrong with a machine for a run on it.

    Args:
        variables: the environment of a process.
        processes: the processes on this machine.
    """
    num_devices_here = len(machine.devices)
    counted_processes = counted(processes, "process")
    for maker, count in machine.present.items():
        hiding = [name for name in (VISIBLE[maker], *ALSO_VISIBLE[maker]) if variables.get(name) in NO_DEVICE]
        if hiding and not num_devices_here:
            what = f"{hiding[0]} = {variables[hiding[0]]!r} hides the machine's {counted(count, f'{maker} GPU')}"
            yield WARNING, f"{what}: a run is on the CPU. Type unset {hiding[0]}"
    if not num_devices_here and processes > machine.cores:
        what = f"{counted_processes} oversubscribe {counted(machine.cores, 'core')}"
        yield WARNING, f"{what}. Use --num_processes {machine.cores * num_machines} or less"
    if num_devices_here and processes != num_devices_here:
        level, only = (ERROR, "") if processes > num_devices_here else (NOTE, " for all of them")
        what = f"{counted_processes} on this machine, which has {counted(num_devices_here, 'device')}"
        yield level, f"{what}. Use --num_processes {num_devices_here * num_machines}{only}"
    for name in sorted({device.name for device in machine.devices if device.has_bf16 is False}):
        if precision == "bf16":
            yield WARNING, f"precision = bf16: torch emulates it, slowly, on a {name}. Use --precision fp16"
    if precision == "bf16" and (times := machine.bf16_slowdown):
        yield WARNING, f"precision = bf16 takes {times:.0f} times as long as fp32 on this CPU. Use --precision fp32"
    for number, device in enumerate(machine.devices):
        if device.free < MIN_FREE_MEMORY_FRACTION * device.total:
            used = f"{size(device.total - device.free)} of {size(device.total)}"
            yield WARNING, f"device {number} ({device.name}): {used} are in use. See nvidia-smi or rocm-smi"
    if machine.shm is not None and machine.shm < MIN_SHM_BYTES and (num_devices_here or processes > 1):
        what = f"/dev/shm has {size(machine.shm)}: processes that exchange data through it may die with a bus error"
        yield WARNING, f"{what}. Start the container with --shm-size=1g or more"
    if machine.output and machine.disk_free < MIN_FREE_DISK_BYTES:
        yield WARNING, f"{machine.output}: only {size(machine.disk_free)} free. Name another folder with --output_dir"
    if machine.output and num_machines > 1 and not machine.disk_shared:
        what = f"{machine.output} seems to be on a disk of this machine, one of {num_machines}"
        yield WARNING, f"{what}. Name a folder on a file system that all machines share with --output_dir"


BY_DEFAULT = "default"
MODEL_OPTIONS = ("model_name_or_path", "config_name", "model_type")
TRUE_VALUES = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads variables
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def examine(
    report: DoctorReport, options: DoctorOptions, task: str | None, recipe: TrainingRecipe, shell: dict[str, str]
) -> None:
    """Fill in a report on this machine, and on the run if a task or a strategy is named."""
    with report.collected(WARNING, "zerofit launch: "):
        machines = read_machines(shell)
        if machines.count > 1:  # a scheduler's variables say so
            where = f"machine {machines.rank} of {machines.count}, the first at {machines.address}"
            report.add(NOTE, f"zerofit launch: {where}, read from {machines.source}")
    processes = max(1, num_devices())
    num_machines = 1
    precision = None
    if task or recipe.strategy:
        report.examined = "this recipe" if task else "this strategy"
        try:
            processes, num_machines, precision = _examine_run(report, options, task, recipe, shell)
        except UserError as refusal:
            report.add(ERROR, *refusal.problems)
            report.bad_input = True
    else:
        with report.collected():
            check_devices()
    machine = Installation.here(output_folder(task, recipe) if task else None)
    report.findings += check_machine(machine, shell, processes, num_machines, precision)
    report.facts += machine.facts()


def _examine_run(
    report: DoctorReport, options: DoctorOptions, task: str | None, recipe: TrainingRecipe, shell: dict[str, str]
) -> tuple[int, int, str | None]:
    """Examine the launch, then recipe and strategy. Returns (processes of this machine, machines, the precision or
    None). Raises UserError: there is no such strategy, or its YAML cannot be read."""
    is_sound = not report.bad_input
    processes, machines = _examine_launch(report, options, task, recipe)
    local_processes = processes // machines or 1
    for name, value in sorted(shell.items()):  # variables of an earlier launch
        if name.startswith("ACCELERATE_") or (name in VARIABLES_OF_A_RANK and processes == 1):
            what = f"{name} = {value!r} is set in this shell, reaches the run and overrides the YAML"
            report.add(WARNING, f"{what}. Type unset {name}")
    if task:
        with report.collected():
            check_paths(recipe, output_folder(task, recipe))
        with report.collected():
            check_compiled_code()
    strategy = None
    with report.collected(), environment_of_a_rank(processes, local_processes, shell | {"HF_HUB_OFFLINE": "1"}):
        recipe, strategy = _resolve(report, task if is_sound else None, recipe)
    if strategy is not None:
        stated = strategy.stated[0].source if strategy.stated else BY_DEFAULT
        report.values += [("strategy", strategy.name, strategy.source), ("precision", strategy.precision, stated)]
        report.add(NOTE, *strategy.notes)
        if task:
            with report.collected():
                check_float8_device(recipe)
    requirements = local_processes, machines, strategy.precision if strategy else None
    if task is None:
        return requirements
    report.values += recipe_rows(recipe, strategy)
    level, downloads = _to_download(recipe, shell)
    if recipe.trains and not downloads and any(getattr(recipe, name) for name in MODEL_OPTIONS):
        with report.collected():
            _examine_model(report, task, recipe, strategy)
    if not is_sound:
        return requirements
    report.add(level, *downloads)
    flags = getattr(options, "without_effect", [])
    report.add(WARNING, *(f"{flag} has no effect on a launch that does not train" for flag in flags))
    with report.collected():
        schedule = make_schedule(recipe, recipe.max_train_steps or 0)
        if schedule and schedule.warning:
            report.add(WARNING, schedule.warning)
    return requirements


def _examine_launch(
    report: DoctorReport, options: DoctorOptions, task: str | None, recipe: TrainingRecipe
) -> tuple[int, int]:
    """Add the launch and its command to the report. Returns (processes, machines). Raises UserError as
    `_examine_run`."""
    devices = num_devices()
    file = None
    strategy = recipe.strategy
    content: dict[str, Any] = {}
    counts: dict[str, int] = {}
    if not strategy:
        strategy = default_config()
        if strategy:
            report.add(NOTE, f"{strategy}: accelerate launch reads it. Use --strategy NAME for another")
        several = (options.num_processes or devices * (options.num_machines or 1)) > 1
        strategy = strategy or ("ddp" if several else "single")
        recipe.adopt("strategy", strategy, "--strategy")
    if not strategy.endswith(".json"):
        file = str(find_strategies([strategy])[strategy])
        content = read_yaml(Path(file)) or {}
        try:
            load_config_from_file(file)
        except Exception as refusal:  # the launch would end with it
            what = f"accelerate launch refuses {file}: {first_line(refusal).rstrip('.')}"
            report.add(ERROR, f"{what}. Name one of accelerate_configs/ with --strategy")
    for name, default in (("num_machines", 1), ("num_processes", max(1, devices))):
        given = getattr(options, name)
        of_file = content.get(name)
        stated = of_file if isinstance(of_file, int) and of_file > 0 else None
        counts[name] = given or stated or default * counts.get("num_machines", 1)
        report.values.append((name, counts[name], f"--{name}" if given else file if file and stated else BY_DEFAULT))
    machines = counts["num_machines"]
    processes = counts["num_processes"]
    if processes % machines:
        what = f"num_processes = {processes} on {machines} machines: each has the same number"
        report.add(ERROR, f"{what}. Use --num_processes {machines * max(1, processes // machines)}")
    address = content.get("main_process_ip") or "MACHINE_0"
    several = machines > 1
    words: list[object] = ["accelerate", "launch", "--config_file", file, "--num_processes", processes]
    words += ["--num_machines", machines, "--machine_rank", 0, "--main_process_ip", address] if several else []
    if file is None:
        words = ["torchrun", "--nproc_per_node", processes // machines, *(["--nnodes", machines] if several else [])]
    program = ["train/TASK.py", "--config", "RECIPE"]
    if task:
        program = [display_path(script(task)), *recipe.flags_given(without=("strategy",) if file else ())]
    report.command = shlex.join(map(str, [*words, *program]))
    return processes, machines


def _resolve(report: DoctorReport, task: str | None, recipe: TrainingRecipe) -> tuple[TrainingRecipe, Strategy | None]:
    """Return (recipe, strategy) as the first process of a run resolves them; without a task, or without training, only
    the strategy is resolved. The strategy is None where there is nothing to do."""
    if task and isinstance(recipe, TaskRecipe) and recipe.trains:
        try:
            config = resolve(task, recipe)
        except NothingToDo as message:
            report.add(NOTE, str(message))
            return recipe, None
        report.add(NOTE, *config.notes)
        return config.recipe, config.strategy
    recipe = recipe.draft()
    strategy = read_strategy(recipe)
    strategy.check_precision()
    return recipe, strategy


def _examine_model(report: DoctorReport, task: str, recipe: TrainingRecipe, strategy: Strategy | None) -> None:
    """Check model, layout, lengths, adapter and tokenizer, without reading weights."""
    auto_class = getattr(transformers, PLANNED_CLASSES[task])
    on_base, config = with_base_configuration(recipe, task, auto_class)
    with report.collected():
        check_model(task, on_base, strategy, auto_class)
    if strategy is not None and recipe.torch_compile == "auto" and num_devices() and torch.cuda.is_available():
        compilation = choose_compilation(recipe, strategy, config, recipe.max_train_steps, missing_compiler())
        report.values.append(("torch_compile", f"auto: {str(compilation.value).lower()}", compilation.why))
    with report.collected():
        read_planned_model(recipe, task, num_devices() > 0)
    if not on_base.train_tokenizer_vocab_size and (on_base.tokenizer_name or on_base.model_name_or_path):
        check_vocabulary(config, load_tokenizer(on_base, config), on_base)


def _to_download(recipe: TrainingRecipe, shell: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return (level, messages on the models and tokenizers of the recipe that are not on this machine)."""
    messages = []
    offline = next((name for name in OFFLINE_VARIABLES if shell.get(name, "").upper() in TRUE_VALUES), None)
    for option in ("model_name_or_path", "config_name", "tokenizer_name"):
        name = getattr(recipe, option)
        is_here = not name or Path(name).expanduser().exists() or is_missing_folder(name)
        if is_here or (option == "config_name" and name.lower() in known_architectures()):
            continue
        with contextlib.suppress(HFValidationError):
            file = "tokenizer_config.json" if option == "tokenizer_name" else "config.json"
            if isinstance(try_to_load_from_cache(name, file), str):
                continue
        remedy = f"the run downloads it. To have it before: hf download {name}"
        if offline:
            remedy = f"{offline} forbids the download. Type unset {offline}"
        messages.append(f"{option} = {name!r} is not on this machine: {remedy}")
    return ERROR if offline else NOTE, messages


def recipe_rows(recipe: TrainingRecipe, strategy: Strategy | None) -> list[tuple[str, Any, str]]:
    """Return (option, effective value, source) of the options that are not at their defaults, and of the batch."""
    values = {}
    for field in dataclasses.fields(recipe):
        source = recipe.source(field.name)
        if source is not None and field.name not in ("precision", "strategy"):  # they are rows of the launch
            values[field.name] = (field.name, getattr(recipe, field.name), source or "this machine")
    if strategy and recipe.trains:
        batches = strategy.batches
        accumulation = "gradient_accumulation_steps"
        name = "global_batch_size"
        formula = f"{batches.micro_batch} x {batches.accumulation} x {batches.replicas} replicas"
        source = "from global_batch_size" if recipe.global_batch_size else BY_DEFAULT
        values.setdefault(accumulation, (accumulation, batches.accumulation, source))
        values.setdefault(name, (name, batches.global_batch, formula))
    return list(values.values())
