"""The candidates of loop_speed.py: a bare loop, zerofit and the Trainer, which train the same workload.

Each gets a new `Stopwatch`, takes a lap after every update, and records the loss of every update.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerofit.data.collate import CausalCollator
from zerofit.data.order import SampleOrder
from zerofit.data.pack import Documents, PackedBlocks
from zerofit.health.watchdog import Watchdog
from zerofit.model.configuration import load_configuration
from zerofit.model.load import build_model
from zerofit.model.loss import install_loss, model_loss
from zerofit.model.parameters import flops_per_token
from zerofit.model.preflight import check_loss, install_chosen_loss
from zerofit.recipe import ClmRecipe
from zerofit.record.jsonl import JsonlFile
from zerofit.record.meters import make_meter
from zerofit.record.timeline import Timeline
from zerofit.strategy.devices import pins_memory
from zerofit.training.fit import fit
from zerofit.training.prepare import prepare, start
from zerofit.training.session import Session
from zerofit.training.task import Task


@dataclass(frozen=True)
class Options:
    """Sizes of the model, of the batches and of the measurement."""

    rounds: int = 15
    updates: int = 6  # timed ones
    warmup: int = 2  # updates before them
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    vocab_size: int = 4096
    block_size: int = 256  # tokens a sample, and the model's positions
    micro_batch: int = 8  # samples
    accumulation: int = 1  # micro-batches an update
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    seed: int = 42
    threads: int = 0  # of torch; 0: one for each core

    @property
    def num_updates(self) -> int:
        return self.warmup + self.updates

    @property
    def num_samples(self) -> int:
        return self.num_updates * self.accumulation * self.micro_batch

    @property
    def tokens_per_update(self) -> int:
        return self.accumulation * self.micro_batch * self.block_size


@dataclass
class Stopwatch:
    """The moment at which each update was done, and its loss."""

    options: Options
    device: torch.device
    moments: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def lap(self) -> None:
        at_an_end = len(self.moments) + 1 in (self.options.warmup, self.options.num_updates)
        if at_an_end and self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.moments.append(time.perf_counter())

    def figures(self) -> dict[str, Any]:
        """tokens/s over the timed updates, the median and the fastest update, and the loss of the last."""
        assert len(self.moments) == len(self.losses) == self.options.num_updates, "an update was missed"
        timed = self.moments[self.options.warmup - 1 :]
        seconds = [after - before for before, after in itertools.pairwise(timed)]
        return {
            "tokens_per_s": self.options.updates * self.options.tokens_per_update / (timed[-1] - timed[0]),
            "median_update_s": statistics.median(seconds),
            "fastest_update_s": min(seconds),
            "last_loss": self.losses[-1],
        }


class Workload:
    """What all candidates train: the recipe, the model's configuration and the batches."""

    def __init__(self, options: Options, device: torch.device, folder: Path):
        self.options, self.device, self.folder = options, device, folder
        self.config = load_configuration(self.recipe("full"))
        generator = torch.Generator().manual_seed(options.seed)
        shape = (options.num_samples, options.block_size)
        tokens = torch.randint(0, options.vocab_size, shape, generator=generator)
        self.samples = PackedBlocks(_documents(tokens), options.block_size, boundaries=False, filler=0)
        order = SampleOrder(options.num_samples, options.seed).places(0, options.num_samples)
        self.rows = tokens[order]  # (samples, block size), as zerofit will see them
        self.batches = self.rows.reshape(options.num_updates, options.accumulation, options.micro_batch, -1)
        if pins_memory(device):
            self.batches = self.batches.pin_memory()

    def recipe(self, loss: str) -> ClmRecipe:
        o = self.options
        return ClmRecipe(
            config_name="gpt2",
            config_overrides=f"n_layer={o.num_layers},n_embd={o.hidden_size},n_head={o.num_heads},"
            f"n_positions={o.block_size},vocab_size={o.vocab_size},bos_token_id=0,eos_token_id=0,"
            "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
            packing="concatenate",
            block_size=o.block_size,
            per_device_train_batch_size=o.micro_batch,
            gradient_accumulation_steps=o.accumulation,
            max_train_steps=o.num_updates,
            learning_rate=o.learning_rate,
            max_grad_norm=o.max_grad_norm,
            seed=o.seed,
            loss=loss,
            output_dir=tempfile.mkdtemp(dir=self.folder),  # each run holds a lock on its own
            overwrite_output_dir=True,
        )

    def model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.options.seed)
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).to(self.device)
        # transformers 5.23 finds no loss type for GPT-2, and its Trainer would then divide by T in place of T - 1.
        model.loss_type = "ForCausalLM"
        return model


def _documents(tokens: torch.Tensor) -> Documents:
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32"))})
    return Documents(Dataset.from_dict({"input_ids": tokens.tolist()}, features=features))


def train_bare(work: Workload, watch: Stopwatch, loss: str) -> None:
    """The least that trains this model: what a person would write by hand."""
    o, model = work.options, work.model()
    if loss == "chunked":
        install_loss(model, "chunked")
    share = 1 / o.accumulation if loss == "full" else 1 / (o.accumulation * o.micro_batch * (o.block_size - 1))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.learning_rate, weight_decay=0.0, fused=True)
    for update, micro_batches in enumerate(work.batches):
        total = torch.zeros((), device=work.device)
        for rows in micro_batches:
            input_ids = rows.to(work.device, non_blocking=True)
            output = model(input_ids=input_ids, labels=input_ids)
            value = (output.loss if loss == "full" else output) * share
            value.backward()
            total += value.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = o.learning_rate * (1 - update / o.num_updates)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.losses.append(total.item())
        norm.item()
        watch.lap()


class TimedLines(JsonlFile):
    """A run's metrics.jsonl, with a lap taken after each line that is written."""

    def __init__(self, path: Path, watch: Stopwatch):
        super().__init__(path)
        self.watch = watch

    def add(self, line: dict[str, Any]) -> None:
        super().add(line)
        self.watch.losses.append(line["loss"])
        self.watch.lap()


def train_zerofit(work: Workload, watch: Stopwatch, loss: str) -> None:
    """What train/clm.py does between its data and its export, with the batches given."""
    from transformers import AutoModelForCausalLM

    recipe = work.recipe(loss)
    session = Session.open("clm", recipe, Timeline(), Watchdog(0, None))
    session.folder.metrics = TimedLines(session.folder.metrics.path, watch)
    started = start(session, len(work.samples))
    model = build_model(AutoModelForCausalLM, work.config, recipe, session.strategy, recipe.seed)
    install_chosen_loss(model, recipe)
    prepared = prepare(started, model, adapter=None)
    engine = prepared.engine
    check_loss(engine, recipe)
    task = Task(session.recipe, work.samples, CausalCollator(pad_id=0), model_loss, evaluate=None)
    fit(
        prepared,
        task,
        make_meter(engine, flops_per_token(model, work.options.block_size), recipe.peak_tflops),
        tokenizer=None,
    )
    assert len(session.folder.metrics.read()) == work.options.num_updates
    assert engine.module.loss_kind == loss, "zerofit has chosen another loss"


def train_trainer(work: Workload, watch: Stopwatch) -> None:
    """transformers.Trainer with equal settings."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Laps(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            watch.lap()

    o = work.options
    arguments = TrainingArguments(
        output_dir=str(work.folder / "trainer"),
        max_steps=o.num_updates,
        per_device_train_batch_size=o.micro_batch,
        gradient_accumulation_steps=o.accumulation,
        train_sampling_strategy="sequential",
        learning_rate=o.learning_rate,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=o.max_grad_norm,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="no",
        dataloader_num_workers=0,
        remove_unused_columns=False,
        use_cpu=work.device.type == "cpu",
        seed=o.seed,
        log_level="error",
    )
    dataset = [{"input_ids": row, "labels": row} for row in work.rows]
    trainer = Trainer(work.model(), arguments, default_data_collator, dataset, callbacks=[Laps()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    watch.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


CANDIDATES: dict[str, Callable[[Workload, Stopwatch], None]] = {
    "bare full": lambda work, watch: train_bare(work, watch, "full"),
    "zerofit full": lambda work, watch: train_zerofit(work, watch, "full"),
    "bare chunked": lambda work, watch: train_bare(work, watch, "chunked"),
    "zerofit chunked": lambda work, watch: train_zerofit(work, watch, "chunked"),
    "Trainer": train_trainer,
}
