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
from zerofit.health.flight import FLIGHT_FOLDER, RECORD_PREFIX
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
from zerofit.recipe.files import counted, is_there, wait_until
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
from zerofit.training.run_configuration import RunConfiguration, decide_compilation

if TYPE_CHECKING:
    from zerofit.training.run import Run

COMPILING_PATIENCE = 4.0  # times watchdog_minutes, for the first update, which compiles
LONG_PATIENCE = 12.0  # times watchdog_minutes, for reading, placing or writing a whole model
HEAD_WEIGHTS = re.compile(
    r"(^|\.)(classifier|score|pooler|pre_classifier|classification_head|sequence_summary|logits_proj|qa_outputs)\b"
)


def build_model(auto_class: Any, config: PretrainedConfig, run: "Run", ignored_weights: Sequence[str] = ()) -> Any:
    """Build the model with its pretrained weights, or random ones of the recipe's seed, equal under all strategies.
    Raises UserError: weights are missing.

    Args:
        ignored_weights: names of weights that are newly initialized even if the checkpoint has them.
    """
    recipe = run.recipe
    strategy = run.strategy
    continued = run.config.adapter
    if run.stored is not None:
        ignored_weights = [*ignored_weights, *run.stored.full_weights]
    elif continued is not None:
        check_resized(continued, config)
        ignored_weights = [*ignored_weights, *continued.full_weights]
    # This is set before loading, which may run out of memory.
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


def notes_on_weights(model: Any, ignored: Sequence[str], origin: str | None) -> list[str]:
    """Notes for the log on weights that are not in the checkpoint, and so are random (new heads and `ignored` ones are
    left out), and on weights of the checkpoint that the model does not use."""
    missing = [name for name in getattr(model, "initialized_weights", ()) if name not in ignored]
    missing = [name for name in missing if not HEAD_WEIGHTS.search(name)]
    unused = [name for name in getattr(model, "unused_weights", ()) if name.removeprefix("ignored.") not in ignored]
    notes = []
    for weights, verb, effect in ((missing, "lacks", "now random"), (unused, "has", "which this model does not use")):
        if weights:
            listed = ", ".join(weights[:3]) + (", ..." if len(weights) > 3 else "")
            notes.append(
                f"model_name_or_path = {origin!r} {verb} {counted(len(weights), 'weight')}, {effect}: {listed}"
            )
    return notes


def add_lora(model: Any, run: "Run") -> None:
    """Add the recipe's LoRA adapter and freeze the other weights, or load the adapter that is trained on or evaluated.
    Without an adapter do nothing. Raises UserError: modules that the adapter needs are not in the
    model."""
    if run.stored is not None:
        run.stored.inject(model, run.strategy)
    elif run.config.adapter is not None:
        run.adapter = continue_adapter(run.config.adapter, model, run.recipe, run.strategy)
    else:
        run.adapter = add_adapter(model, run.recipe, run.task, run.strategy)


def open_process_group(run: "Run") -> tuple[Accelerator, list[str]]:
    """Start the process group. Returns the Accelerator, and notes for the log. Raises UserError: machines differ in
    their options or data."""
    if not (run.is_main and sys.stderr.isatty()):
        disable_progress_bar()
    # transformers warns where it sees no attention_mask: full rows need none, and others bring one.
    loading_log = logging.getLogger("transformers.modeling_utils")
    loading_log.addFilter(lambda line: "attention_mask" not in line.getMessage())
    if run.recipe.trains:  # `notes_on_weights` logs what matters of it
        loading_log.addFilter(lambda line: "LOAD REPORT" not in line.getMessage() or "MISMATCH" in line.getMessage())
    watchdog = run.watchdog
    watchdog.phase("rendezvous", patience=math.inf)
    rendezvous_notes = run.ranks.wait()
    # This is for torch's compiler, not imported yet: the processes of this machine share its cores.
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, max(1, cores))))
    watchdog.phase("process group", patience=2.0)
    os.environ.setdefault(
        "TORCH_FR_DUMP_TEMP_FILE", str((run.folder.path / FLIGHT_FOLDER / RECORD_PREFIX).absolute())
    )  # NCCL
    silence = timedelta(minutes=run.recipe.watchdog_minutes)
    timeout = max(processes.COLLECTIVE_TIMEOUT, 2 * LONG_PATIENCE * silence)  # the watchdog must report first
    run.starting.enter_context(group_timeout(timeout))
    # The name keeps the store alive until the process group has it. An earlier run may have left a group.
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
    watchdog.phase("load", patience=LONG_PATIENCE)
    check_machines(run.config)
    compiled_before = run.config.compiled_before
    run.compilation, compiling = decide_compilation(
        run.recipe, run.strategy, run.model_configuration, run.num_updates, compiled_before, device=accelerator.device
    )
    watchdog.first_patience = COMPILING_PATIENCE if run.recipe.compiles else 1.0
    return accelerator, [*rendezvous_notes, *notes, *compiling]


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
        pinned = pins_memory(device)  # then copies are asynchronous
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
    """Resume the run in the folder, if there is one, and open the record and the checkpoints."""
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
    """Make the checkpoint manager, and restore the checkpoint to resume; the record continues from its update."""
    config = run.config
    engine = run.engine
    recipe = run.recipe
    data = data_fingerprint(run.data.train, getattr(recipe, "length_grouping", "none"))
    check_same({"training data": data}, "Give all machines the same data and the same packages")
    identity = {
        **config.resume.identity,
        "num_processes": engine.layout.world_size,
        "data_parallel": engine.layout.data_size,
        "options_given_for": config.options_given_for,
        "strategy": run.strategy.name,
        "torch_compile": recipe.torch_compile,
    }
    run.checkpoints = CheckpointManager(run, identity, data)
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
            (run.folder.path / FLIGHT_FOLDER).mkdir(exist_ok=True)  # NCCL's watchdog writes there, and makes no folder
    if recipe.save_strategy != "no":  # each rank writes its part of a checkpoint into this folder
        file = run.folder.path / "recipe.yaml"
        text = engine.from_main(file.read_text() if engine.is_main else None)
        is_seen = wait_until(lambda: is_there(file) and file.read_text() == text)
        view = f"view of output_dir = {str(run.folder.path)!r}"
        check_same({view: "the run" if is_seen else "no such run"}, f"{SHARED_FOLDER_REMEDY}, or --save_strategy no")
    run.checkpoints.restore_best_checkpoint()
