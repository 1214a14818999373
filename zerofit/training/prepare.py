"""From a resolved configuration to a model that an engine holds: length, process group, weights, adapter, sharding."""

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import distributed
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from zerofit.data.sources import files_and_sizes
from zerofit.data.token_updates import TokenUpdates
from zerofit.health.flight import FOLDER, PREFIX
from zerofit.launch.ranks import RANKS
from zerofit.launch.rendezvous import store_of_one_process
from zerofit.model.adapter_folder import check_resized
from zerofit.model.adapter_loading import continue_adapter
from zerofit.model.compilation import blocks_of, compile_model
from zerofit.model.load import build_model, size_of_model
from zerofit.model.lora import Adapter, add_adapter
from zerofit.model.parameters import count_parameters
from zerofit.model.recomputation import enable_recomputation, offload_inputs
from zerofit.model.stages import whole_model
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import appears, is_there
from zerofit.recipe.model_options import ModelOptions
from zerofit.recipe.schedule import Schedule, make_schedule
from zerofit.record.meters import without_mfu
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine
from zerofit.strategy.gpus import describe_device
from zerofit.strategy.host_memory import resident_bytes
from zerofit.strategy.machines import SHARED_FOLDER_REMEDY, check_same
from zerofit.strategy.muon import Muon
from zerofit.strategy.prepare import prepare_engine
from zerofit.strategy.processes import COLLECTIVE_TIMEOUT, start_processes
from zerofit.training.configuration import RunConfiguration
from zerofit.training.session import LONG, Session
from zerofit.training.stream import RunLength, run_length
from zerofit.training.summary import about_the_model

# docs/measurements/gpu.md
FASTER_COMPILED = (
    "layers are not compiled. --torch_compile took a quarter of an update's time and memory off on an H100"
)

STYLE = re.compile(r"\x1b\[[0-9;]*m")
HEAD = re.compile(r"(^|\.)(classifier|score|pooler|pre_classifier|classification_head|sequence_summary|qa_outputs)\b")


@dataclass(frozen=True)
class Started:
    """A launch whose processes run.

    Args:
        length: None where nothing is trained, and `schedule` with it.
    """

    session: Session
    accelerator: Accelerator
    length: RunLength | None
    schedule: Schedule | None

    def load(
        self, auto_class: Any, config: PretrainedConfig, ignored_weights: Sequence[str] = ()
    ) -> tuple[Any, Adapter | None]:
        """The model, and its LoRA adapter where it has one (the rest is frozen). See build_model for the arguments.

        Raises:
            UserError: modules that the adapter needs are not in the model; weights are nowhere.
        """
        session, recipe, stored = self.session, self.session.recipe, self.session.stored
        continued = session.config.adapter
        if stored is not None:
            ignored_weights = [*ignored_weights, *stored.swapped_in]
        elif continued is not None:
            check_resized(continued, config)
            ignored_weights = [*ignored_weights, *continued.full_weights]
        # Known before, since loading may take all memory.
        session.facts.parameters = size_of_model(auto_class, config, session.strategy, recipe.trust_remote_code)
        session.advise()
        model = build_model(
            auto_class, config, recipe, session.strategy, recipe.seed, ignored_weights, session.facts.parameters
        )
        if stored is not None:
            stored.inject(model, session.strategy)
            return model, None
        if continued is not None:
            return model, continue_adapter(continued, model, recipe, session.strategy)
        return model, add_adapter(model, recipe, session.task, session.strategy)


def start(session: Session, num_samples: int, by_tokens: TokenUpdates | None = None) -> Started:
    """Fix the length of the run and its schedule, and start the processes.

    Args:
        num_samples: of the training data.
        by_tokens: which of them each update has, with tokens_per_batch.

    Raises:
        UserError: there are fewer samples than one global batch takes; machines differ.
    """
    length, schedule = None, None
    if session.recipe.trains:
        length = _length(session, num_samples, by_tokens)
        schedule, warnings = make_schedule(session.recipe, length.num_updates)
        session.say(*(f"warning: {warning}" for warning in warnings))
    accelerator, notes = _start_processes(session)
    session = session.with_strategy(session.strategy, notes)
    if session.measurement is not None:
        session.measurement.limit_memory(accelerator)
    return Started(session, accelerator, length, schedule)


def _length(session: Session, num_samples: int, by_tokens: TokenUpdates | None) -> RunLength:
    sizes = session.strategy.batches
    if session.measurement is not None:
        num_samples = session.measurement.samples(num_samples, sizes.global_batch)
    if num_samples < sizes.global_batch:
        raise UserError(
            f"the training data gives {num_samples} samples, fewer than one global batch of {sizes.global_batch} "
            f"= {sizes.micro_batch} x {sizes.accumulation} x {sizes.replicas} (per_device_train_batch_size x "
            "accumulation x processes). Make the batch smaller, or train on more data (or, of text, on a shorter "
            "block_size)"
        )
    length = run_length(session.recipe, num_samples, sizes, by_tokens)
    last = session.recipe.profiled_updates[-1:]
    if last and last[0] > length.num_updates:
        raise UserError(
            f"profile = {session.recipe.profile}: the run has {length.num_updates} updates. Choose an M within them"
        )
    return length


def is_of_a_new_head(report: str) -> bool:
    """Whether transformers reports on loaded weights, and nothing is missing but a head, which is to be trained."""
    rows = [[cell.strip() for cell in STYLE.sub("", line).split("|")] for line in report.splitlines() if "|" in line]
    missing = [name for name, state, *_ in rows if state == "MISSING"]
    spoilt = any(state in ("MISMATCH", "CONVERSION") for _, state, *_ in rows)
    return bool(missing) and not spoilt and all(map(HEAD.search, missing))


def _start_processes(session: Session) -> tuple[Accelerator, list[str]]:
    """The Accelerator, its process group running, and notes for the log."""
    if not (session.is_main and sys.stderr.isatty()):
        disable_progress_bar()
    # Rows are packed full or come with their mask; transformers cannot know, and asks for one at every run.
    of_loading = logging.getLogger("transformers.modeling_utils")
    of_loading.addFilter(lambda line: "attention_mask" not in line.getMessage())
    if session.task == "cls" and session.recipe.trains:
        of_loading.addFilter(lambda line: not is_of_a_new_head(line.getMessage()))
    watchdog = session.watchdog
    watchdog.phase("rendezvous", patience=math.inf)
    met = RANKS.wait()
    watchdog.phase("process group", patience=2.0)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((session.folder.path / FOLDER / PREFIX).absolute()))  # NCCL
    silence = timedelta(minutes=session.recipe.watchdog_minutes)
    store = store_of_one_process()  # noqa: F841 - it serves until the process group has taken it over
    accelerator, notes = start_processes(
        session.strategy,
        max(COLLECTIVE_TIMEOUT, 2 * LONG * silence),  # the watchdog is to speak first
        log_with=list(session.config.trackers) or None,
        project_dir=str(session.folder.path),
    )
    if distributed.is_initialized():
        size, backend = distributed.get_world_size(), distributed.get_backend()
        watchdog.record_collectives(session.folder.path, size, backend, RANKS.machines)
    session.facts.program_bytes = resident_bytes()
    watchdog.phase("load", patience=LONG)
    check_machines(session.config)
    session.timeline.mark("process group")
    return accelerator, [*met, *notes]


@dataclass(frozen=True)
class Prepared:
    """A model that an engine holds, ready to be trained or evaluated.

    Args:
        length: None where nothing is trained, and `schedule` with it.
        parameters: of the whole model.
        trainable: those of them that are trained.
        notes: for the log.
    """

    session: Session
    engine: Engine
    adapter: Adapter | None
    length: RunLength | None
    schedule: Schedule | None
    parameters: int
    trainable: int
    notes: tuple[str, ...]

    def announce(self, *lines: str) -> None:
        """Say what is about to happen: the model, the strategy, and what the task has to say."""
        session, strategy = self.session, self.session.strategy
        stored, recipe, length, schedule = session.stored, session.recipe, self.length, self.schedule
        run, model = [], []
        if stored is not None:
            model, layout = stored.describe(self.parameters), strategy.describe_layout
        else:
            assert length is not None, "it trains"
            assert schedule is not None, "it trains"
            model, layout = about_the_model(recipe, self.parameters, self.trainable, self.adapter), strategy.describe
            if isinstance(self.engine.torch_optimizer, Muon):
                model += [f"optimizer {self.engine.torch_optimizer.describe()}"]
            warmup = f", {schedule.num_warmup} warm-up" if schedule.num_warmup else ""
            rate = f"learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}"
            run = [f"run       {length.describe}; {rate}"]
        session.say(
            *model,
            f"strategy  {layout}",
            f"device    {describe_device(self.engine.device)}",
            *lines,
            *run,
            f"folder    {session.folder.path}",
            *(f"note      {note.removeprefix('note: ')}" for note in [*strategy.notes, *self.notes]),
        )


def prepare(started: Started, model: Any, adapter: Adapter | None) -> Prepared:
    """Shard and place the model under the strategy."""
    session, recipe = started.session, started.session.recipe
    disable_progress_bar()  # of "Writing model shards"; weights are loaded by now
    session.watchdog.phase("prepare", patience=LONG)
    notes = [*session.config.notes, *(session.stored.notes if session.stored else ())]
    if not recipe.model_name_or_path:
        notes += filter(None, [session.strategy.sharded_init_reason(session.facts.parameters)])
    if dropped := getattr(model, "dropped_settings", None):
        named = ", ".join(f"{name} = {value!r}" for name, value in dropped.items())
        notes.append(f"generation settings that transformers refuses to save are dropped: {named}")
    device = started.accelerator.device
    notes += prepare_activations(model, recipe, device, recipe.trains and session.strategy.can_compile)
    if recipe.trains:
        notes += filter(None, [without_mfu(device, session.strategy.precision, recipe.peak_tflops)])
    parameters, trainable = count_parameters(whole_model(model))
    engine = prepare_engine(session.strategy, started.accelerator, model, recipe, started.schedule)
    engine.alive = session.watchdog.alive
    session.facts.engine, session.facts.parameters = engine, parameters
    set_seed(recipe.seed, device_specific=True)  # dropout: the same in every run, another on every rank
    session.timeline.mark("preparing the model")
    return Prepared(session, engine, adapter, started.length, started.schedule, parameters, trainable, tuple(notes))


def check_machines(config: RunConfiguration) -> None:
    """Check that all ranks train the same run on the same files.

    Raises:
        UserError: one does not; it names the machine.
    """
    options = {f"option {name}": value for name, value in config.resume.identity.items()}
    files = {f"{name} (files and their bytes)": sizes for name, sizes in files_and_sizes(config.recipe).items()}
    resumed = {f"run to resume in output_dir = {str(config.folder.path)!r}": config.resume.sources}
    check_same(options, "Start all machines with the same recipe and options")
    check_same(files, "Copy the data to all machines, or put it where all of them see it")
    check_same(resumed, SHARED_FOLDER_REMEDY)


def check_output_folder(config: RunConfiguration, engine: Engine) -> None:
    """Check that all ranks see the folder into which each of them writes its part of a checkpoint."""
    if config.recipe.save_strategy == "no":
        return
    file = config.folder.path / "recipe.yaml"
    text = engine.from_main(file.read_text() if engine.is_main else None)
    is_seen = appears(lambda: is_there(file) and file.read_text() == text)
    view = f"view of output_dir = {str(config.folder.path)!r}"
    check_same({view: "the run" if is_seen else "no such run"}, f"{SHARED_FOLDER_REMEDY}, or --save_strategy no")


def prepare_activations(
    model: torch.nn.Module, recipe: ModelOptions, device: torch.device, can_compile: bool
) -> list[str]:
    """Checkpoint, offload and compile as the recipe says, on this device. Returns notes for the log.

    Args:
        can_compile: whether the strategy goes together with torch.compile.
    """
    notes = []
    if recipe.gradient_checkpointing:
        enable_recomputation(model, recipe.gradient_checkpointing, compiled=bool(recipe.torch_compile))
    if recipe.activation_offload and device.type == "cpu":
        notes.append("activation_offload has no effect: the device's memory is the host's")
    elif recipe.activation_offload:
        pinned = pins_memory(device)  # then the device copies by itself
        offload_inputs(model, functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned))
    if recipe.torch_compile:
        compile_model(model, str(recipe.torch_compile))
    elif can_compile and device.type == "cuda" and blocks_of(model):
        notes.append(FASTER_COMPILED)
    return notes
