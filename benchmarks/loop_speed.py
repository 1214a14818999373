"""What zerofit's loop costs beside a bare PyTorch loop, and what it gains or loses beside transformers' Trainer.

    python benchmarks/loop_speed.py                   # 15 rounds of 3 candidates: 8 updates each
    python benchmarks/loop_speed.py --rounds 5 --updates 30 --warmup 5

Each round trains the same small GPT-2 from the same weights on the same batches of random tokens (full blocks, fp32,
the plain mean loss) through every candidate, one after another in one process:

    bare       a loop written by hand: transformers' own loss, fused AdamW, clipping, linear decay
    zerofit    what train/clm.py does between its data and its export, with its record on disk
    Trainer    transformers.Trainer: logs each update to nobody, no progress bar, no evaluation, no saving

The order rotates from round to round and turns around in every other one. Tokens/s are those of the wall clock over
the updates after the warm-up, the device synchronised at both ends. Ratios are taken within a round. All candidates
must arrive at the same loss, or there is nothing to compare: then it stops.

On a machine that others share, the spread says how much they disturbed. The last column, the ratio of the two fastest
updates in all rounds, is disturbed least. OpenMP's threads sleep while they wait, as in zerofit/strategy/launch.py;
OMP_WAIT_POLICY=ACTIVE in front of the command measures everything with torch's default.
"""

import argparse
import contextlib
import gc
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it once, when torch is imported

import torch
from provenance import provenance

from zerofit.data.collate import CausalCollator
from zerofit.data.order import SampleOrder
from zerofit.data.pack import Documents, PackedBlocks, TextData
from zerofit.health.watchdog import Watchdog
from zerofit.launch.rendezvous import RankRendezvous
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import model_loss
from zerofit.model.parameters import count_parameters
from zerofit.recipe import ClmRecipe
from zerofit.recipe.errors import exit_within
from zerofit.recipe.options import make_schedule
from zerofit.recipe.paths import output_folder
from zerofit.record.environment import Timeline
from zerofit.record.metrics import JsonlFile
from zerofit.record.terminal import table
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.causal import choose_loss_and_attention
from zerofit.training.entry import Start
from zerofit.training.run import Run
from zerofit.training.setup import build_model

RATIOS = (("zerofit", "bare"), ("zerofit", "Trainer"))  # whose tokens/s, divided by whose
SAME_LOSS = 1e-3  # relative; far above rounding, far below any other training
SIZES = {  # the flags
    "rounds": 15,
    "updates": 6,  # timed ones
    "warmup": 2,  # updates before them
    "num_layers": 4,
    "hidden_size": 256,
    "vocab_size": 4096,
    "block_size": 256,  # tokens of a sample, and the model's positions
    "micro_batch": 8,  # samples
    "accumulation": 1,  # micro-batches of an update
}
HEADS, LEARNING_RATE, MAX_GRAD_NORM, SEED = 4, 1e-3, 1.0, 42


class Laps:
    """The moment at which each update was done, and its loss."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.moments: list[float] = []
        self.losses: list[float] = []

    def add(self) -> None:
        """Note that an update is done."""
        is_an_end = len(self.moments) + 1 in (self.options.warmup, self.options.warmup + self.options.updates)
        if is_an_end and self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.moments.append(time.perf_counter())

    def figures(self) -> dict[str, float]:
        """tokens/s over the timed updates, the fastest of these, and the loss of the last."""
        o = self.options
        assert len(self.moments) == len(self.losses) == o.warmup + o.updates, "an update was missed"
        timed = self.moments[o.warmup - 1 :]
        fastest = min(after - before for before, after in itertools.pairwise(timed))
        tokens = o.updates * o.accumulation * o.micro_batch * o.block_size
        return {"tokens/s": tokens / (timed[-1] - timed[0]), "fastest": fastest, "loss": self.losses[-1]}


class Workload:
    """What all candidates train: the recipe, the model's configuration and the batches.

    Attributes:
        trainer: further arguments of the Trainer.
    """

    trainer: dict[str, Any] = {}

    def __init__(self, options: argparse.Namespace, device: torch.device, folder: Path):
        from datasets import Dataset, Features, List, Value

        self.options, self.device, self.folder = options, device, folder
        self.num_updates = options.warmup + options.updates
        num_samples = self.num_updates * options.accumulation * options.micro_batch
        self.config = load_configuration(self.recipe())
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(0, options.vocab_size, (num_samples, options.block_size), generator=generator)
        features = Features({"input_ids": List(Value("int32"))})
        documents = Documents(Dataset.from_dict({"input_ids": tokens.tolist()}, features=features))
        self.samples = PackedBlocks(documents, options.block_size, boundaries=False, filler=0)
        self.rows = tokens[SampleOrder(num_samples, SEED).indices(0, num_samples)]  # as zerofit will see them

    def recipe(self) -> ClmRecipe:
        o = self.options
        return ClmRecipe(
            config_name="gpt2",
            config_overrides=f"n_layer={o.num_layers},n_embd={o.hidden_size},n_head={HEADS},"
            f"n_positions={o.block_size},vocab_size={o.vocab_size},bos_token_id=0,eos_token_id=0,"
            "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
            packing="concatenate",
            block_size=o.block_size,
            per_device_train_batch_size=o.micro_batch,
            gradient_accumulation_steps=o.accumulation,
            max_train_steps=self.num_updates,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            seed=SEED,
            loss="full",
            output_dir=tempfile.mkdtemp(dir=self.folder),  # each run holds a lock on its own
            overwrite_output_dir=True,
        )

    def model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).to(self.device)
        # transformers 5.23 finds no loss type for GPT-2, and its Trainer would then divide by T in place of T - 1.
        model.loss_type = "ForCausalLM"
        return model


def train_bare(work: Workload, laps: Laps) -> None:
    """The least that trains this model: what a person would write by hand."""
    o, model = work.options, work.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    batches = work.rows.to(work.device).reshape(work.num_updates, o.accumulation, o.micro_batch, -1)
    for update, micro_batches in enumerate(batches):
        total = torch.zeros((), device=work.device)
        for input_ids in micro_batches:
            loss = model(input_ids=input_ids, labels=input_ids).loss / o.accumulation
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - update / work.num_updates)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        laps.losses.append(total.item())
        norm.item()
        laps.add()


class TimedLines(JsonlFile):
    """A run's metrics.jsonl, with a lap taken after each line that is written."""

    def __init__(self, path: Path, laps: Laps):
        super().__init__(path)
        self.laps = laps

    def add(self, line: dict[str, Any]) -> None:
        super().add(line)
        self.laps.losses.append(line["loss"])
        self.laps.add()


def train_zerofit(work: Workload, laps: Laps) -> None:
    """What train/clm.py does between its data and its export, with the batches given."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    recipe = work.recipe()
    run = Run.open(Start("clm", recipe, output_folder("clm", recipe), Timeline(), Watchdog(0, None), RankRendezvous()))
    run.folder.metrics = TimedLines(run.folder.metrics.path, laps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # an export has one
    data = TextData(train=work.samples, tokenizer=tokenizer, block_size=work.options.block_size)
    run.start(data)
    model = build_model(AutoModelForCausalLM, work.config, run)
    choose_loss_and_attention(model, run)
    optimizer = make_optimizer(model, run.recipe, run.device, run.strategy)
    engine = run.prepare(model, optimizer, make_schedule(run.recipe, run.num_updates))
    for update in run.updates(data, CausalCollator(pad_id=0)):
        losses = engine.forward_backward(update.micro_batches, model_loss, update.scale)
        run.log(update, engine.step(losses, run.bounds()))


def train_trainer(work: Workload, laps: Laps) -> None:
    """transformers.Trainer with equal settings."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Steps(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            laps.add()

    arguments = TrainingArguments(
        output_dir=str(work.folder / "trainer"),
        max_steps=work.num_updates,
        per_device_train_batch_size=work.options.micro_batch,
        gradient_accumulation_steps=work.options.accumulation,
        train_sampling_strategy="sequential",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="no",
        dataloader_num_workers=0,
        remove_unused_columns=False,
        use_cpu=work.device.type == "cpu",
        seed=SEED,
        log_level="error",
        **work.trainer,
    )
    dataset = [{"input_ids": row, "labels": row} for row in work.rows]
    trainer = Trainer(work.model(), arguments, default_data_collator, dataset, callbacks=[Steps()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    laps.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


CANDIDATES: dict[str, Callable[[Workload, Laps], None]] = {
    "bare": train_bare,
    "zerofit": train_zerofit,
    "Trainer": train_trainer,
}


def measure(name: str, work: Workload) -> dict[str, float]:
    """One candidate, from fresh weights, with all cores and nothing left behind by the one before."""
    torch.set_num_threads(os.cpu_count() or 1)
    forget_candidates()
    laps = Laps(work.options, work.device)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), exit_within():
        CANDIDATES[name](work, laps)
    return laps.figures()


def forget_candidates() -> None:
    """Free the models of candidates that ended, or failed, and what accelerate knows of them."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.unfreeze()  # a run of zerofit takes what there is, its model too, out of the search for garbage
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def measure_rounds(work: Workload) -> list[dict[str, dict[str, float]]]:
    """{candidate: figures} of each round.

    Raises:
        RuntimeError: the last losses of a round are not the same.
    """
    rounds, names = [], list(CANDIDATES)
    for number in range(work.options.rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        figures = {name: measure(name, work) for name in (order[::-1] if number % 2 else order)}
        losses = {name: each["loss"] for name, each in figures.items()}
        if not max(losses.values()) - min(losses.values()) <= SAME_LOSS * min(losses.values()):
            raise RuntimeError(f"the candidates did not train the same: their last losses are {losses}")
        print(f"round {number + 1}", {name: round(each["tokens/s"]) for name, each in figures.items()}, flush=True)
        rounds.append(figures)
    return rounds


def tables(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Two tables: tokens/s of each candidate, and ratios."""
    speeds = [("tokens/s over the rounds", "median", "min", "max", "fastest update, ms")]
    fastest = {}
    for name in CANDIDATES:
        each = [figures[name]["tokens/s"] for figures in rounds]
        fastest[name] = min(figures[name]["fastest"] for figures in rounds)
        spread = (f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each)))
        speeds.append((name, *spread, f"{1000 * fastest[name]:.2f}"))
    ratios = [("ratio of tokens/s in a round", "median", "min", "max", "fastest updates")]
    for mine, other in RATIOS:
        each = [figures[mine]["tokens/s"] / figures[other]["tokens/s"] for figures in rounds]
        values = (statistics.median(each), min(each), max(each), fastest[other] / fastest[mine])
        ratios.append((f"{mine} / {other}", *(f"{value:.3f}" for value in values)))
    return table(speeds) + "\n\n" + table(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[{default}]")
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 1:
        parser.error("--rounds and --warmup: at least 1")
    if torch.accelerator.device_count() > 1:
        raise SystemExit("the Trainer would split batches over the devices that are visible: CUDA_VISIBLE_DEVICES=0")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(options, device, Path(folder))
        print(f"GPT-2 with {count_parameters(work.model())[0]:,} parameters, fp32, on {device.type}", flush=True)
        rounds = measure_rounds(work)
    print(f"\n{tables(rounds)}\n\n{provenance('fp32', 'torch', 'transformers', 'accelerate')}")


if __name__ == "__main__":
    main()
