"""Prepares a run: its model and its record."""

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import distributed
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from zerofit.checkpoint.exporter import ModelExporter
from zerofit.checkpoint.manager import CheckpointManager, data_fingerprint
from zerofit.compat.torch import group_timeout
from zerofit.data.sources import files_and_sizes
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.flight import FOLDER, PREFIX
from zerofit.health.shutdown import listen
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.launch.rendezvous import store_of_one_process
from zerofit.model import load
from zerofit.model.adapter_folder import check_resized
from zerofit.model.compilation import (
    blocks_of,
    check_float8_device,
    compile_model,
    convert_to_float8,
    fuse_norms,
    round_embeddings,
)
from zerofit.model.lora import add_adapter, continue_adapter
from zerofit.model.parameters import flops_per_pair_token, flops_per_token
from zerofit.model.recomputation import enable_recomputation, offload_inputs
from zerofit.recipe.files import appears, counted, is_there
from zerofit.record.environment import describe_environment
from zerofit.record.recorder import MemoryMeter, RunRecorder, ThroughputMeter, peak_flops, start_trackers
from zerofit.record.terminal import Bar
from zerofit.strategy import processes
from zerofit.strategy.builds import lock_files
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.host_memory import resident_bytes, usable_cores
from zerofit.strategy.strategy import SHARED_FOLDER_REMEDY, check_same
from zerofit.training.evaluation import make_best_tracker
from zerofit.training.measurement import Profiler
from zerofit.training.run_configuration import RunConfiguration, decide

if TYPE_CHECKING:
    from zerofit.training.run import Run

COMPILING = 4.0  # times watchdog_minutes: the first of each phase of an update
LONG = 12.0  # times watchdog_minutes: reading, placing or writing a whole model
HEAD = re.compile(
    r"(^|\.)(classifier|score|pooler|pre_classifier|classification_head|sequence_summary|logits_proj|qa_outputs)\b"
)


def build_model(auto_class: Any, config: PretrainedConfig, run: "Run", ignored_weights: Sequence[str] = ()) -> Any:
    """The model with its pretrained weights, or with random ones of the recipe's seed: the same under every strategy.
    Raises UserError: weights are nowhere.

    Args:
        ignored_weights: names of weights that are drawn anew whatever the checkpoint has.
    """
    recipe = run.recipe
    strategy = run.strategy
    continued = run.config.adapter
    if run.stored is not None:
        ignored_weights = [*ignored_weights, *run.stored.swapped_in]
    elif continued is not None:
        check_resized(continued, config)
        ignored_weights = [*ignored_weights, *continued.full_weights]
    # Known before, since loading may take all memory.
    run.parameters = load.size_of_model(auto_class, config, strategy, recipe.trust_remote_code)
    model = load.load_model(
        auto_class, config, recipe, strategy, ignored_weights=ignored_weights, num_parameters=run.parameters
    )
    if run.stored is None:
        run.notes += notes_on_weights(model, ignored_weights, recipe.model_name_or_path)
    fuse_norms(model)
    if not recipe.residual_in_fp32:
        round_embeddings(model)
    return model


def notes_on_weights(model: Any, ignored: Sequence[str], name: str | None) -> list[str]:
    """Notes for the log on weights that are not in the checkpoint, and so are random (new heads and `ignored` ones are
    left out), and on weights of the checkpoint that the model does not use."""
    missing = [each for each in getattr(model, "initialized_weights", ()) if each not in ignored]
    missing = [each for each in missing if not HEAD.search(each)]
    unused = [each for each in getattr(model, "unused_weights", ()) if each.removeprefix("ignored.") not in ignored]
    notes = []
    for found, verb, what in ((missing, "lacks", "now random"), (unused, "has", "which this model does not use")):
        if found:
            named = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            notes.append(f"model_name_or_path = {name!r} {verb} {counted(len(found), 'weight')}, {what}: {named}")
    return notes


def add_lora(model: Any, run: "Run") -> None:
    """Add the recipe's LoRA adapter and freeze the rest; or load the adapter that training continues, or the one that
    is evaluated. Without an adapter do nothing. Raises UserError: modules that the adapter needs are not in the
    model."""
    if run.stored is not None:
        run.stored.inject(model, run.strategy)
    elif run.config.adapter is not None:
        run.adapter = continue_adapter(run.config.adapter, model, run.recipe, run.strategy)
    else:
        run.adapter = add_adapter(model, run.recipe, run.task, run.strategy)


def open_process_group(run: "Run") -> tuple[Accelerator, list[str]]:
    """The Accelerator, its process group running, and notes for the log. Raises UserError: machines have other options
    or other data."""
    if not (run.is_main and sys.stderr.isatty()):
        disable_progress_bar()
    # transformers warns where it sees no attention_mask: full rows need none, and others bring one.
    of_loading = logging.getLogger("transformers.modeling_utils")
    of_loading.addFilter(lambda line: "attention_mask" not in line.getMessage())
    if run.recipe.trains:  # `notes_on_weights` tells what matters of it
        of_loading.addFilter(lambda line: "LOAD REPORT" not in line.getMessage() or "MISMATCH" in line.getMessage())
    watchdog = run.watchdog
    watchdog.phase("rendezvous", patience=math.inf)
    met = run.ranks.wait()
    # torch's compiler, which is not imported yet: the processes of this machine compile with its cores together.
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, max(1, cores))))
    watchdog.phase("process group", patience=2.0)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run.folder.path / FOLDER / PREFIX).absolute()))  # NCCL
    silence = timedelta(minutes=run.recipe.watchdog_minutes)
    timeout = max(processes.COLLECTIVE_TIMEOUT, 2 * LONG * silence)  # the watchdog is to speak first
    run.starting.enter_context(group_timeout(timeout))
    # Referenced until the process group has it. An earlier run in this process may have left a group.
    store = None if distributed.is_initialized() else store_of_one_process()  # noqa: F841
    accelerator, notes = processes.make_accelerator(
        run.strategy,
        timeout,
        log_with=list(run.config.trackers) or None,
        project_dir=str(run.folder.path),
    )
    if run.strategy.deepspeed is not None:
        remedy = "a build is at work, or was killed. If nothing is being compiled, delete that file"
        run.log_lines(*(f"warning: {lock} is there: {remedy}" for lock in lock_files()))
    if distributed.is_initialized():
        size = distributed.get_world_size()
        backend = distributed.get_backend()
        watchdog.record_collectives(run.folder.path, size, backend, run.ranks.machines)
    check_float8_device(run.recipe)
    run.program_bytes = resident_bytes()
    watchdog.phase("load", patience=LONG)
    check_machines(run.config)
    before = run.config.compiled_before
    run.compilation, compiling = decide(
        run.recipe, run.strategy, run.model_configuration, run.num_updates, before, device=accelerator.device
    )
    watchdog.first_patience = COMPILING if run.recipe.compiles else 1.0
    return accelerator, [*met, *notes, *compiling]


def check_machines(config: RunConfiguration) -> None:
    """Check that all ranks train the same run on the same files. Raises UserError: one does not; it names the
    machine."""
    options = {f"option {name}": value for name, value in config.resume.identity.items()}
    files = {f"{name} (files and their bytes)": sizes for name, sizes in files_and_sizes(config.recipe).items()}
    resumed = {f"run to resume in output_dir = {str(config.folder.path)!r}": config.resume.sources}
    check_same(options, "Start all machines with the same recipe and options")
    check_same(files, "Copy the data to all machines, or put it where all of them see it")
    check_same(resumed, SHARED_FOLDER_REMEDY)


def prepare_activations(model: Any, recipe: Any, device: torch.device, falls_back: bool = False) -> list[str]:
    """Checkpoint, offload and compile as the recipe says, on this device. Returns notes for the log.

    Args:
        falls_back: torch_compile was "auto": a model that cannot be compiled runs eagerly, with a note.
    """
    notes = []
    if recipe.gradient_checkpointing:
        enable_recomputation(model, recipe.gradient_checkpointing, compiled=bool(recipe.compiles))
    if recipe.activation_offload and device.type == "cpu":
        notes.append("activation_offload has no effect: the device's memory is the host's")
    elif recipe.activation_offload:
        pinned = pins_memory(device)  # then the device copies by itself
        offload_inputs(model, functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned))
    if recipe.float8 and recipe.trains:
        notes.append(convert_to_float8(model, blocks_of(model)))
    if recipe.compiles and falls_back and not blocks_of(model):
        recipe.torch_compile = False
        notes.append(f"layers are not compiled: the code of a {model.config.model_type} names no blocks")
    elif recipe.compiles:
        compile_model(model, str(recipe.compiles), falls_back=falls_back)
    return notes


def open_record(run: "Run") -> None:
    """Resume the run that is in the folder, if one is, and begin its record and its checkpoints."""
    recipe = run.recipe
    engine = run.engine
    state = run.state
    samples = run.data.train
    lengths = samples.lengths
    run.row_tokens = len(samples[0]["input_ids"]) if lengths is None else int(lengths.max())
    run.best = make_best_tracker(recipe, run.figures, bool(run.data.num_held_out), state.best)
    command = run.strategy.launch.command
    run.environment = describe_environment(command, engine.device) if run.is_main else {}
    run.environment |= {"torch_compile": run.compilation} if run.is_main and run.compilation else {}
    run.exporter = ModelExporter(run)
    _resume(run)
    notes = start_trackers(run)
    run.log_lines(*(f"note      {note}" for note in notes))
    listen(run.shutdown.receive)
    run.checkpoints.start()
    run.memory = MemoryMeter(engine.device)
    run.clock = RankClock(engine)
    run.detector = AnomalyDetector(recipe.spike_threshold, recipe.max_grad_norm > 0, run.strategy.precision == "fp16")
    if run.task == "seq2seq":
        flops = flops_per_pair_token(engine.whole, *samples.stats.pair_lengths)
    else:
        flops = flops_per_token(engine.whole, getattr(run.data, "row_length", samples.stats.mean_length))
    peak = peak_flops(engine.device, run.strategy.precision)
    run.throughput = ThroughputMeter(flops, peak and peak * engine.layout.world_size)
    run.recorder = RunRecorder(run, Bar(run.num_updates, recipe.logging_steps, engine.is_main))
    place_of = functools.partial(run.ranks.place_of, device=engine.device.type)
    run.slow_ranks = SlowRanks(engine.layout, recipe.logging_steps, place_of, run.clock.measures)
    run.profiler = Profiler(run) if recipe.profile and engine.is_main else None
    engine.phase = run.enter_part


def _resume(run: "Run") -> None:
    """Make the run's checkpoints, and continue from one; the record goes on from its update."""
    config = run.config
    engine = run.engine
    recipe = run.recipe
    data = data_fingerprint(run.data.train, getattr(recipe, "length_grouping", "none"))
    check_same({"training data": data}, "Give all machines the same data and the same packages")
    about = {
        **config.resume.identity,
        "num_processes": engine.layout.world_size,
        "data_parallel": engine.layout.data_size,
        "options_given_for": config.options_given_for,
        "strategy": run.strategy.name,
        "torch_compile": recipe.torch_compile,
    }
    run.checkpoints = CheckpointManager(run, about, data)
    run.checkpoints.resume(config.resume)
    if engine.is_main:
        run.checkpoints.drop_replaced()
        run.folder.start(
            recipe,
            run.strategy.batches.global_batch,
            {**engine.effective_strategy(), "options_given_for": config.options_given_for},
            run.environment,
            run.state.updates,
            resumed_from=run.checkpoints.resumed_from,
        )
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            (run.folder.path / FOLDER).mkdir(exist_ok=True)  # NCCL's watchdog writes there, and makes no folder
    if recipe.save_strategy != "no":  # each rank writes its part of a checkpoint into this folder
        file = run.folder.path / "recipe.yaml"
        text = engine.from_main(file.read_text() if engine.is_main else None)
        is_seen = appears(lambda: is_there(file) and file.read_text() == text)
        view = f"view of output_dir = {str(run.folder.path)!r}"
        check_same({view: "the run" if is_seen else "no such run"}, f"{SHARED_FOLDER_REMEDY}, or --save_strategy no")
    run.checkpoints.restore_best_checkpoint()
