"""The record of a run that trains: its checkpoints, its meters, its trackers, and where it goes on from."""

from typing import TYPE_CHECKING

from torch import distributed

from zerofit.checkpoint.exporter import ModelExporter
from zerofit.checkpoint.manager import CheckpointManager
from zerofit.checkpoint.resume import data_fingerprint
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.flight import FOLDER
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.model.parameters import flops_per_pair_token, flops_per_token
from zerofit.record.environment import describe_environment
from zerofit.record.meters import MemoryMeter, ThroughputMeter, peak_flops
from zerofit.record.recorder import RunRecorder
from zerofit.record.terminal import Bar
from zerofit.record.trackers import start_trackers
from zerofit.strategy.machines import check_same
from zerofit.training.best_metric import make_best_tracker
from zerofit.training.profiling import Profiler
from zerofit.training.setup import check_output_folder

if TYPE_CHECKING:
    from zerofit.training.run import Run


def open_record(run: "Run") -> None:
    """Resume the run that is in the folder, if one is, and begin its record and its checkpoints."""
    recipe, engine, state, samples = run.recipe, run.engine, run.state, run.data.train
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
    run.shutdown.install()
    run.checkpoints.start()
    run.memory, run.clock = MemoryMeter(engine.device), RankClock.of(engine)
    run.detector = AnomalyDetector(recipe.spike_threshold, recipe.max_grad_norm > 0, run.strategy.precision == "fp16")
    if run.task == "seq2seq":
        flops = flops_per_pair_token(engine.whole, *samples.stats.pair_lengths)
    else:
        flops = flops_per_token(engine.whole, getattr(run.data, "row_length", samples.stats.mean_length))
    peak = peak_flops(engine.device, run.strategy.precision)
    run.throughput = ThroughputMeter(flops, peak and peak * engine.layout.world_size)
    run.recorder = RunRecorder(run, Bar(run.num_updates, recipe.logging_steps, engine.is_main))
    run.slow_ranks = SlowRanks(
        engine.layout,
        recipe.logging_steps,
        lambda rank: run.ranks.place_of(rank, engine.device.type),
        run.clock.measures,
    )
    run.profiler = Profiler(run) if recipe.profile and engine.is_main else None
    engine.phase = run.enter_part


def _resume(run: "Run") -> None:
    """Make the run's checkpoints, and continue from one; the record goes on from its update."""
    config, engine, recipe = run.config, run.engine, run.recipe
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
    check_output_folder(config, engine)
    run.checkpoints.restore_best_checkpoint()
