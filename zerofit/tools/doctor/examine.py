"""One examination: the launch as accelerate would make it, the run as it would be resolved, the machine beneath."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from zerofit.estimate.planned_rows import TASKS as AUTO_CLASSES
from zerofit.estimate.planned_strategy import plan_strategy
from zerofit.estimate.read_model import read_planned_model
from zerofit.launch.schedulers import read_machines
from zerofit.model.adapter_folder import on_its_base
from zerofit.model.configuration import known_architectures
from zerofit.model.tokenizer import TokenizerOptions, check_vocabulary, load_tokenizer
from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import NothingToDo, UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.paths import check_paths, is_missing_folder, output_folder
from zerofit.recipe.schedule import make_schedule
from zerofit.recipe.tasks import TASKS
from zerofit.strategy.builds import check_compiled_code
from zerofit.strategy.gpus import check_devices, num_devices
from zerofit.strategy.launch import default_config
from zerofit.strategy.named import find_strategies
from zerofit.strategy.read import read_strategy
from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.check import Needs, check_machine, inspect_installation
from zerofit.tools.doctor.doctor_report import ERROR, NOTE, WARNING, DoctorReport, Finding, Value, error, note, warning
from zerofit.tools.doctor.launcher import ExaminedLaunch, look_at_launch, look_at_torchrun, shown_command
from zerofit.tools.rank_environment import environment_of_a_rank
from zerofit.training.configuration import check_model, resolve

MODELS = ("model_name_or_path", "config_name", "model_type")
TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads variables
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Examination:
    """Fills in a report.

    Args:
        task: None: there is no recipe.
        shell: the environment in which the launch would be typed.
        is_sound: the recipe has no problem by itself.
    """

    def __init__(self, options: Any, task: str | None, report: DoctorReport, shell: dict[str, str], is_sound: bool):
        self.options, self.task, self.report, self.shell, self.is_sound = options, task, report, shell, is_sound
        self.recipe = recipe_of(options, TASKS[task] if task else TrainingRecipe)
        self.launch: ExaminedLaunch | None = None
        self.strategy: Strategy | None = None
        self.looked_at_model, self.planned = False, None  # the model without weights
        self.needs = Needs(processes=max(1, num_devices()), examined=False)

    def of_launch(self, program: list[str]) -> None:
        """Look at the launch, and resolve recipe and strategy in the environment that it would make."""
        report = self.report
        try:
            self.launch = launch = self._read_launch()
        except UserError as refusal:
            report.add(ERROR, refusal.problems)
            report.bad_input = True
            return
        report.findings += launch.findings
        report.command = shown_command(launch, program)
        report.values += launch_values(launch)
        offline = {"HF_HUB_OFFLINE": "1"}
        with environment_of_a_rank(launch.world_size, launch.local_world_size, launch.environment | offline):
            self._resolve(launch)
        if self.strategy is not None:
            report.values += strategy_values(self.strategy)
            report.findings += _sharded_too_late(self.strategy, launch)
            report.add(NOTE, self.strategy.notes)
        if self.task:
            folder = output_folder(self.task, self.recipe)
            report.values += recipe_values(self.recipe, self.strategy, folder)
        self.needs = self._needs(launch)

    def machines(self) -> list[Finding]:
        """What `zerofit launch` reads of the scheduler's variables."""
        try:
            machines = read_machines(self.shell)
        except UserError as refusal:
            return [warning(f"zerofit launch: {problem}") for problem in refusal.problems]
        if machines.count == 1:
            return []
        where = f"machine {machines.rank} of {machines.count}, the first at {machines.address}"
        return [note(f"zerofit launch: {where}, read from {machines.source}")]

    def _read_launch(self) -> ExaminedLaunch:
        """Raises UserError: there is no such strategy, or its YAML cannot be read."""
        options, devices, shell = self.options, num_devices(), self.shell
        chosen = {
            name: (value, f"--{name}")
            for name in ("num_processes", "num_machines")
            if (value := getattr(options, name))
        }
        default = max(1, devices) * (options.num_machines or 1), "one for each device" if devices else "default"
        if self.recipe.deepspeed_config and not options.strategy:
            return look_at_torchrun({"num_processes": default, "num_machines": (1, "default"), **chosen}, shell)
        name = options.strategy
        if name is None and (file := default_config()):
            self.report.findings.append(note(f"{file}: accelerate launch reads it. Use --strategy NAME for another"))
            return look_at_launch(Path(file), chosen, devices, shell)
        if name is None:
            chosen = {"num_processes": default, **chosen}
            name = "ddp" if chosen["num_processes"][0] > 1 else "single"
        return look_at_launch(find_strategies([name])[name], chosen, devices, shell)

    def _resolve(self, launch: ExaminedLaunch) -> None:
        """The strategy, and with a sound recipe the whole run."""
        report = self.report
        if self.task:
            with self._collected():
                check_paths(self.recipe, output_folder(self.task, self.recipe))
            with self._collected():
                check_compiled_code()
        if not launch.refused:
            with self._collected():
                self._resolve_strategy(launch)
        downloads = _to_download(self.recipe, launch.environment) if self.task else []
        if self.task and self.recipe.trains and not downloads and any(getattr(self.recipe, name) for name in MODELS):
            with self._collected():
                self._look_at_model()
        if self.task and self.is_sound:
            report.findings += [*_schedule_problems(self.recipe), *downloads]
            flags = getattr(self.options, "without_effect", [])
            report.add(WARNING, [f"{flag} has no effect on a launch that does not train" for flag in flags])

    @contextlib.contextmanager
    def _collected(self) -> Iterator[None]:
        """Report the problems of an error that ends this block, and continue behind it."""
        try:
            yield
        except UserError as refusal:
            self.report.add(ERROR, refusal.problems)
        except ImportError as missing:
            self.report.findings.append(error(f"a package cannot be imported: {missing}. Run make setup"))

    def _resolve_strategy(self, launch: ExaminedLaunch) -> None:
        """Raises UserError: recipe, pair and earlier run contradict each other."""
        try:
            if self.task and self.is_sound and self.recipe.trains:
                config = resolve(self.task, self.recipe, launch.config_file)
                self.recipe, self.strategy = config.recipe, config.strategy
                self.report.add(NOTE, config.notes)
            else:
                recipe = self.recipe.draft()
                self.strategy, self.recipe = read_strategy(recipe, launch.config_file), recipe
                self.strategy.check_precision()
        except NothingToDo as message:
            self.report.add(NOTE, [str(message)])
            self.recipe = self.recipe.draft()
            self.strategy = read_strategy(self.recipe, launch.config_file)

    def _look_at_model(self) -> None:
        """Raises UserError: the model, its layout, its lengths or its tokenizer are not what the recipe needs."""
        self.looked_at_model, auto_class = True, getattr(transformers, AUTO_CLASSES[self.task])
        recipe, config = on_its_base(self.recipe, self.task, auto_class)
        with self._collected():
            check_model(self.task, recipe, self.strategy, auto_class)
        with self._collected():
            self.planned = read_planned_model(self.recipe, self.task, num_devices() > 0)
        if not recipe.train_tokenizer_vocab_size and (recipe.tokenizer_name or recipe.model_name_or_path):
            check_vocabulary(config, load_tokenizer(TokenizerOptions.of(recipe), config), recipe)

    def _needs(self, launch: ExaminedLaunch) -> Needs:
        """What the launch asks of this machine."""
        strategy = self.strategy
        needs = Needs(
            processes=launch.local_world_size,
            num_machines=launch.num_machines,
            visible=launch.devices,
        )
        if strategy is None:
            return needs
        on_gpu = num_devices() > 0
        needs = dataclasses.replace(needs, precision=strategy.precision)
        if not (self.task and self.is_sound and self.recipe.trains):
            return needs
        if self.looked_at_model and self.planned is None:
            return needs
        try:
            planned = self.planned or read_planned_model(self.recipe, self.task, on_gpu)
            states = plan_strategy(strategy.name, strategy, planned).states(planned, strategy.batches.accumulation > 1)
        except UserError as refusal:
            what = f"the model's size is not known here, so memory and disk are not checked: {refusal.problems[0]}"
            self.report.findings.append(note(what))
            return needs
        weights, host = planned.weights, states.offloaded + (0 if on_gpu else states.held)
        trained = f", {weights.trained / 1e6:,.1f} M of them are trained" if weights.frozen else ""
        self.report.machine.append(("model", f"{(weights.trained + weights.frozen) / 1e6:,.1f} M parameters{trained}"))
        saves = self.recipe.save_strategy != "no" or self.recipe.save_minutes
        return dataclasses.replace(
            needs,
            state_bytes=states.held if on_gpu else None,
            host_bytes=host * launch.local_world_size,
            checkpoint_bytes=planned.checkpoint_bytes if saves and not self.recipe.save_only_model else None,
        )

    def of_machine(self) -> None:
        """The machine, and whether it has what the launch asks for."""
        report, needs = self.report, self.needs
        if self.launch is None:
            with self._collected():
                check_devices()
        machine = inspect_installation(output_folder(self.task, self.recipe) if self.task else None)
        variables = self.launch.environment if self.launch else self.shell
        report.findings += check_machine(machine, needs, variables)
        report.machine += machine.lines()


def recipe_of(options: Any, cls: type[Recipe]) -> Recipe:
    """The recipe alone: what the doctor's options set is no part of a run."""
    fields = [field.name for field in dataclasses.fields(cls)]
    recipe = cls(**{name: getattr(options, name) for name in fields if hasattr(options, name)})
    sources = {name: options.source(name) for name in (*fields, "config")}
    recipe.strategy = sources["strategy"] = None
    recipe.remember_sources({name: source for name, source in sources.items() if source})
    recipe.remember_left_out(options.left_out)
    return recipe


def _sharded_too_late(strategy: Strategy, launch: ExaminedLaunch) -> list[Finding]:
    section = launch.content.get("deepspeed_config") or {}
    if not strategy.launch.json_path or strategy.stage != 3 or section.get("zero3_init_flag") is not False:
        return []
    what = f"{launch.config_file}: zero3_init_flag = false: each process loads the whole model before sharding"
    return [warning(f"{what}. Write zero3_init_flag: true")]


def _schedule_problems(recipe: Any) -> list[Finding]:
    """What the schedule says of a run whose length is known."""
    if not recipe.max_train_steps:
        return []
    try:
        return [warning(text) for text in make_schedule(recipe, recipe.max_train_steps)[1] if "no effect" not in text]
    except UserError as refusal:
        return [error(problem) for problem in refusal.problems]


def _to_download(recipe: Any, variables: Mapping[str, str]) -> list[Finding]:
    """Weights and tokenizers that the recipe names and that are not here."""
    findings = []
    files = {"model_name_or_path": "config.json", "config_name": "config.json"}
    for option, file in {**files, "tokenizer_name": "tokenizer_config.json"}.items():
        name = getattr(recipe, option)
        if not name or Path(name).expanduser().exists() or is_missing_folder(name):
            continue
        if option == "config_name" and name.lower() in known_architectures():
            continue
        with contextlib.suppress(HFValidationError):
            if isinstance(try_to_load_from_cache(name, file), str):
                continue
        what = f"{option} = {name!r} is not on this machine"
        if offline := next((each for each in OFFLINE if variables.get(each, "").upper() in TRUE), None):
            findings.append(error(f"{what}, and {offline} forbids the download. Type unset {offline}"))
        else:
            findings.append(note(f"{what}: the run downloads it. To have it before: hf download {name}"))
    return findings


# Options that are shown whoever has set them; of the others those that somebody has set.
COMMON = tuple(
    (
        "model_name_or_path config_name per_device_train_batch_size gradient_accumulation_steps "
        "global_batch_size learning_rate lr_scheduler_type weight_decay max_grad_norm gradient_checkpointing "
        "output_dir"
    ).split()
)
DEFAULT = "default"


def launch_values(launch: ExaminedLaunch) -> list[Value]:
    """Of the launcher: processes and machines."""
    sizes = {"num_processes": launch.world_size, "num_machines": launch.num_machines}
    return [Value(name, value, launch.sources[name]) for name, value in sizes.items()]


def recipe_values(recipe: Any, strategy: Strategy | None, folder: Path) -> list[Value]:
    """The options of the recipe that are common or set, with the values that hold."""
    batches, values = strategy.batches if strategy else None, {}
    for field in dataclasses.fields(recipe):
        name = field.name
        if name == "precision" and strategy:
            continue  # of the strategy, with all who state it
        value, source = getattr(recipe, name), recipe.source(name)
        is_set = bool(source)
        source = "this machine" if source == "" else (source or DEFAULT)
        if name == "gradient_accumulation_steps" and batches and value is None:
            value = batches.accumulation
            source = "from global_batch_size" if recipe.global_batch_size else DEFAULT
        if name == "global_batch_size" and batches and value is None:
            value = batches.global_batch
            source = f"{batches.micro_batch} x {batches.accumulation} x {batches.replicas} (see above)"
        if name == "output_dir" and value is None:
            value = str(folder)
        if is_set or (name in COMMON and value is not None and recipe.trains):
            values[name] = Value(name, value, source)
    first = [values.pop(name) for name in COMMON if name in values]
    return [*first, *values.values()]


def strategy_values(strategy: Strategy) -> list[Value]:
    """The strategy, its precision and its layout."""
    stated = strategy.stated[0].source if strategy.stated else DEFAULT
    values = [
        Value("strategy", strategy.name, strategy.source),
        Value("precision", strategy.precision, stated),
    ]
    if strategy.deepspeed is not None and strategy.layout.replica_size > 1:
        degrees = {
            "data": strategy.layout.data_size,
            "tensor": strategy.layout.tensor,
            "pipeline": strategy.layout.pipeline,
            "sequence": strategy.layout.sequence,
        }
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        values.append(Value("layout", shown, strategy.source))
    return values
