"""What `zerofit plan` predicts against what trials of `zerofit compare` measure, at 32 configurations and more.

    python benchmarks/plan_accuracy.py measure            # on the simulated accelerator: 96 launches, an hour
    python benchmarks/plan_accuracy.py table              # the half that the memory model may be corrected with
    python benchmarks/plan_accuracy.py table --half set-aside
    python benchmarks/plan_accuracy.py measure --half shared       # then table: model parallelism, fsdp2
    python benchmarks/plan_accuracy.py measure --half recomputed   # then table: each way of recomputing
    python benchmarks/plan_accuracy.py measure --half offloaded    # then table: layers' inputs on the host
    python benchmarks/plan_accuracy.py measure --half experts      # then table: mixtures of experts

`measure` keeps each result in outputs/plan-accuracy/measured and repeats none. A launch is a trial of
`zerofit compare` (zerofit/training/measurement.py) at one of three micro-batches, with rows of the greatest length.
The simulated device (zerofit/tools/simulate) is host memory whose allocator is exact, in blocks of 512 bytes; it has
no context, no fragmentation and no cuBLAS workspace, so max_memory_allocated is compared with the prediction without
that workspace.

The largest micro-batch: with a limit halfway between the measured peaks of two neighbouring micro-batches the smaller
one is the largest that fits (tests/device shows that a run needs what its peak says); `table` looks for the largest
one whose prediction is within the same limit.

SET_ASIDE is drawn by a seed, before anything was measured.
"""

import argparse
import json
import random
import statistics
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from provenance import provenance

from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.trial import peak_bytes, run_trial
from zerofit.tools.runs import LaunchedRun
from zerofit.tools.tool_recipe import read_with_recipe

ROOT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30
PATIENCE_S = 1200
NO_DROPOUT = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
TEXT = ["--train_file", "{stdlib}/*.py", "--train_tokenizer_vocab_size", "4096"]
LABELLED = ["--dataset_name", "stdlib-docstrings", "--train_tokenizer_vocab_size", "4096"]
PAIRS = (
    "--dataset_name stdlib-functions --train_tokenizer_vocab_size 2048 --max_target_length 16 "
    "--max_train_samples 400 --predict_with_generate false"
).split()
LORA = ("--lora",)
AGAIN = ("--gradient_checkpointing",)
SELECTIVE = (*AGAIN, "selective")
ON_HOST = ("--activation_offload",)
WHOLE = ("--packing", "concatenate")
ROWS = ("--packing", "none")


def _llama(layers: int, width: int, heads: int = 4, groups: int = 4) -> list[str]:
    inner = {128: 344, 256: 688, 384: 1024}[width]
    return [
        "llama-2-7b",
        f"num_hidden_layers={layers},hidden_size={width},intermediate_size={inner},"
        f"num_attention_heads={heads},num_key_value_heads={groups}",
    ]


def _encoder(name: str, layers: int, width: int, heads: int, more: str = "") -> list[str]:
    return [
        name,
        f"num_hidden_layers={layers},hidden_size={width},num_attention_heads={heads},"
        f"intermediate_size={4 * width}{more}",
    ]


def _pairs(name: str, encoder: int, decoder: int) -> list[str]:
    sizes = f"d_model=256,encoder_layers={encoder},decoder_layers={decoder}"
    return [name, sizes + "".join(f",{part}_attention_heads=4,{part}_ffn_dim=1024" for part in ("encoder", "decoder"))]


def _mixture(name: str, layers: int, width: int, groups: int, chosen: int, experts: str) -> list[str]:
    return [
        name,
        f"num_hidden_layers={layers},hidden_size={width},num_attention_heads=4,num_key_value_heads={groups},"
        f"num_experts_per_tok={chosen},max_position_embeddings=256,output_router_logits=true,"
        f"{experts}",
    ]


MODELS = {  # layers and their width: task, shape, and what is changed of it
    "GPT-2, 4 of 256": ("clm", ["gpt2", f"n_layer=4,n_head=4,n_embd=256,n_positions=256,{NO_DROPOUT}"]),
    "GPT-2, 3 of 512": ("clm", ["gpt2", f"n_layer=3,n_head=8,n_embd=512,n_positions=256,{NO_DROPOUT}"]),
    "GPT-2 with dropout, 4 of 256": ("clm", ["gpt2", "n_layer=4,n_head=4,n_embd=256,n_positions=256"]),
    "Llama, 4 of 256": ("clm", _llama(4, 256)),
    "Llama, 8 of 256": ("clm", _llama(8, 256)),
    "Llama, 24 of 128": ("clm", _llama(24, 128)),
    "Llama, 3 of 384, grouped": ("clm", _llama(3, 384, 6, 2)),
    "Llama, 3 of 384, one head of keys": ("clm", _llama(3, 384, 6, 1)),
    "GPT-NeoX, 3 of 320": ("clm", _encoder("open-calm-1b", 3, 320, 5)),
    "Llama classifier, 4 of 256": ("cls", _llama(4, 256)),
    "BERT, 4 of 256": ("cls", _encoder("bert", 4, 256, 4)),
    "RoBERTa, 3 of 384": (
        "cls",
        _encoder("roberta", 3, 384, 6, ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"),
    ),
    "DeBERTa, 3 of 192": ("cls", _encoder("deberta-v2-xlarge", 3, 192, 4)),
    "BlenderBot, 2 + 3 of 256": ("seq2seq", _pairs("blenderbot-400M-distill", 2, 3)),
    "T5, 3 + 3 of 256": (
        "seq2seq",
        ["t5-large", "d_model=256,d_kv=64,d_ff=1024,num_layers=3,num_decoder_layers=3,num_heads=4"],
    ),
    "BART, 2 + 2 of 256": ("seq2seq", _pairs("bart", 2, 2)),
    "Mixtral, 4 of 256": ("clm", _mixture("mixtral", 4, 256, 2, 2, "num_local_experts=8,intermediate_size=512")),
    "OLMoE, 3 of 192": ("clm", _mixture("olmoe", 3, 192, 4, 4, "num_experts=16,intermediate_size=192")),
    "Qwen 3 MoE, 4 of 192": (
        "clm",
        _mixture("qwen3_moe", 4, 192, 2, 3, "num_experts=8,intermediate_size=512,moe_intermediate_size=256"),
    ),
}
DATA = {"clm": TEXT, "cls": LABELLED, "seq2seq": PAIRS}
TYPES = ("bert", "roberta", "bart", "mixtral", "olmoe", "qwen3_moe")  # of transformers, without a name in this tree


@dataclass(frozen=True)
class Configuration:
    """A line of the table.

    Args:
        length: tokens of a row; of pairs, of a source.
        sizes: micro-batches: a small one, and the one that a limit is put above.
    """

    model: str
    strategy: str
    precision: str
    length: int
    accumulation: int
    sizes: tuple[int, int]
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        more = [word.removeprefix("--") for word in self.more]
        return " ".join([self.model, self.strategy, self.precision, str(self.length), str(self.accumulation), *more])

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-").replace(",", "")

    @property
    def task(self) -> str:
        return MODELS[self.model][0]

    @property
    def tried(self) -> list[int]:
        return [*self.sizes, self.sizes[-1] + 1]

    @property
    def processes(self) -> int:
        return {"single": 1, "3d": 4}.get(self.strategy, 2)

    @property
    def recipe(self) -> list[str]:
        task, (shape, overrides) = MODELS[self.model]
        lengths = {"clm": "--block_size", "cls": "--max_length", "seq2seq": "--max_source_length"}
        kind = "--model_type" if shape in TYPES else "--config_name"
        words = (
            f"--task {task} {kind} {shape} --config_overrides {overrides} {lengths[task]} {self.length} "
            f"--precision {self.precision} --gradient_accumulation_steps {self.accumulation} "
            "--per_device_eval_batch_size 4 --max_train_steps 100"
        )
        return [*words.split(), *DATA[task], *self.more]


CONFIGURATIONS = [
    Configuration("GPT-2, 4 of 256", "single", "fp32", 128, 1, (2, 8), WHOLE),
    Configuration("GPT-2, 4 of 256", "ddp", "fp32", 64, 2, (2, 12)),
    Configuration("GPT-2, 3 of 512", "ddp", "bf16", 64, 2, (2, 9)),
    Configuration("GPT-2, 3 of 512", "zero1", "bf16", 64, 2, (2, 10)),
    Configuration("GPT-2, 3 of 512", "zero2", "fp32", 64, 1, (2, 8), WHOLE),
    Configuration("GPT-2, 4 of 256", "zero3", "fp32", 128, 1, (2, 7), WHOLE),
    Configuration("GPT-2, 3 of 512", "zero2_offload", "bf16", 96, 2, (2, 7)),
    Configuration("GPT-2, 4 of 256", "zero3_offload", "bf16", 64, 1, (2, 11)),
    Configuration("GPT-2 with dropout, 4 of 256", "ddp", "fp32", 64, 1, (2, 9), WHOLE),
    Configuration("Llama, 4 of 256", "single", "bf16", 128, 2, (2, 10), AGAIN),
    Configuration("Llama, 4 of 256", "ddp", "bf16", 128, 1, (2, 8), LORA),
    Configuration("Llama, 4 of 256", "zero3", "bf16", 128, 1, (2, 8), LORA),
    Configuration("Llama, 3 of 384, grouped", "zero2", "bf16", 64, 2, (2, 14), AGAIN),
    Configuration("Llama, 3 of 384, grouped", "zero3", "bf16", 96, 2, (2, 8), WHOLE),
    Configuration("GPT-NeoX, 3 of 320", "zero1", "fp32", 96, 1, (2, 8), LORA + ROWS),
    Configuration("GPT-NeoX, 3 of 320", "zero3_offload_optimizer", "fp32", 64, 2, (2, 16), AGAIN),
    Configuration("Llama classifier, 4 of 256", "zero3_offload", "bf16", 64, 1, (2, 10)),
    Configuration("BERT, 4 of 256", "single", "fp32", 64, 2, (2, 10)),
    Configuration("BERT, 4 of 256", "ddp", "bf16", 64, 2, (2, 12)),
    Configuration("BERT, 4 of 256", "zero2_offload", "fp32", 96, 1, (2, 8), LORA),
    Configuration("DeBERTa, 3 of 192", "ddp", "fp32", 64, 1, (2, 9)),
    Configuration("DeBERTa, 3 of 192", "zero2", "bf16", 64, 1, (2, 12)),
    Configuration("RoBERTa, 3 of 384", "zero1", "bf16", 128, 1, (2, 12), AGAIN),
    Configuration("RoBERTa, 3 of 384", "zero3", "fp32", 64, 1, (2, 8)),
    Configuration("BlenderBot, 2 + 3 of 256", "single", "bf16", 64, 1, (2, 12)),
    Configuration("BlenderBot, 2 + 3 of 256", "ddp", "fp32", 96, 1, (2, 10), AGAIN),
    Configuration("BlenderBot, 2 + 3 of 256", "ddp", "bf16", 64, 2, (2, 11), LORA),
    Configuration("BlenderBot, 2 + 3 of 256", "zero2", "bf16", 64, 2, (2, 13)),
    Configuration("T5, 3 + 3 of 256", "zero1", "fp32", 64, 2, (2, 9)),
    Configuration("T5, 3 + 3 of 256", "zero3", "fp32", 96, 1, (2, 7), LORA),
    Configuration("BART, 2 + 2 of 256", "zero2_offload", "bf16", 64, 1, (2, 12)),
    Configuration("BART, 2 + 2 of 256", "zero3_offload", "fp32", 64, 2, (2, 10)),
]
SET_ASIDE = set(random.Random(19).sample(range(len(CONFIGURATIONS)), len(CONFIGURATIONS) // 2))
SHARED = [  # two ranks share each layer, split each row, are stages, or gather blocks (fsdp2)
    Configuration("GPT-2, 3 of 512", "tp", "fp32", 64, 1, (2, 8), WHOLE),
    Configuration("Llama, 3 of 384, grouped", "sp", "bf16", 128, 1, (2, 8)),
    Configuration("Llama, 3 of 384, grouped", "tp", "bf16", 96, 2, (2, 8)),
    Configuration("Llama, 4 of 256", "tp_zero3", "fp32", 128, 1, (2, 7), WHOLE),
    Configuration("GPT-2, 4 of 256", "sp", "fp32", 128, 2, (2, 9), WHOLE),
    Configuration("Llama, 4 of 256", "tp_zero2", "bf16", 128, 2, (2, 10), AGAIN),
    Configuration("GPT-2, 3 of 512", "sp", "bf16", 96, 1, (2, 10), AGAIN),
    Configuration("GPT-2, 4 of 256", "pp", "fp32", 128, 2, (2, 8), WHOLE),
    Configuration("Llama, 4 of 256", "pp", "bf16", 128, 4, (2, 8), WHOLE),
    Configuration("Llama, 4 of 256", "3d", "bf16", 128, 4, (2, 8), WHOLE),
    Configuration("GPT-2, 4 of 256", "3d", "fp32", 128, 2, (2, 8), WHOLE + AGAIN),
    Configuration("GPT-2, 3 of 512", "fsdp2", "fp32", 64, 1, (2, 8), WHOLE),
    Configuration("Llama, 4 of 256", "fsdp2", "bf16", 128, 2, (2, 10), AGAIN),
    Configuration("Llama, 3 of 384, grouped", "fsdp2", "bf16", 96, 1, (2, 9)),
    Configuration("BERT, 4 of 256", "fsdp2", "fp32", 96, 2, (4, 16)),
    Configuration("GPT-NeoX, 3 of 320", "fsdp2", "bf16", 128, 1, (2, 9), LORA),
]
RECOMPUTED = [  # the same with each way of recomputing, and others
    *(Configuration("Llama, 8 of 256", "ddp", "fp32", 64, 1, (2, 8), WHOLE + way) for way in ((), AGAIN, SELECTIVE)),
    Configuration("GPT-2 with dropout, 4 of 256", "zero2", "fp32", 64, 1, (2, 8), WHOLE + SELECTIVE),
    Configuration("GPT-2, 4 of 256", "zero3", "fp32", 64, 2, (2, 8), WHOLE + SELECTIVE),
    Configuration("Llama, 4 of 256", "fsdp2", "bf16", 64, 1, (2, 8), WHOLE + SELECTIVE),
    Configuration("GPT-2, 4 of 256", "tp", "fp32", 64, 1, (2, 8), WHOLE + SELECTIVE),
    Configuration("DeBERTa, 3 of 192", "ddp", "fp32", 64, 1, (2, 8), SELECTIVE),
    Configuration("T5, 3 + 3 of 256", "zero1", "fp32", 64, 1, (2, 8), SELECTIVE),
]
OFFLOADED = [  # the inputs of recomputed layers wait on the host; the same without
    Configuration("Llama, 24 of 128", "ddp", "fp32", 256, 1, (2, 8), WHOLE + AGAIN),
    Configuration("Llama, 24 of 128", "ddp", "fp32", 256, 1, (2, 8), WHOLE + AGAIN + ON_HOST),
    *(
        Configuration("Llama, 8 of 256", strategy, precision, 256, accumulation, (2, 8), WHOLE + AGAIN + ON_HOST)
        for strategy, precision, accumulation in (
            ("ddp", "fp32", 1),
            ("zero2", "fp32", 2),
            ("zero3", "fp32", 1),
            ("fsdp2", "fp32", 1),
            ("sp", "fp32", 1),
        )
    ),
    Configuration("BlenderBot, 2 + 3 of 256", "ddp", "fp32", 96, 1, (2, 10), AGAIN + ON_HOST),
    Configuration("DeBERTa, 3 of 192", "zero2", "fp32", 64, 1, (2, 12), AGAIN + ON_HOST),
]
EXPERTS = [  # mixtures of experts, which are divided among ranks, or are as other weights
    Configuration("Mixtral, 4 of 256", "ep", "fp32", 128, 1, (2, 8), WHOLE),
    Configuration("Mixtral, 4 of 256", "ep", "bf16", 96, 2, (2, 10)),
    Configuration("OLMoE, 3 of 192", "ep", "fp32", 64, 2, (2, 9), WHOLE + AGAIN),
    Configuration("Qwen 3 MoE, 4 of 192", "ep", "bf16", 128, 1, (2, 8), WHOLE),
    Configuration("Mixtral, 4 of 256", "fsdp2", "fp32", 128, 1, (2, 8), WHOLE),
    Configuration("Mixtral, 4 of 256", "zero3", "bf16", 128, 1, (2, 8), WHOLE),
    Configuration("OLMoE, 3 of 192", "ddp", "fp32", 64, 2, (2, 9), WHOLE),
    Configuration("OLMoE, 3 of 192", "zero3", "fp32", 64, 2, (2, 9), WHOLE),
    Configuration("Qwen 3 MoE, 4 of 192", "zero3", "bf16", 96, 1, (2, 10), WHOLE + AGAIN),
    Configuration("Mixtral, 4 of 256", "ep", "bf16", 128, 1, (2, 10), WHOLE + AGAIN),
]
OTHERS = {"shared": SHARED, "recomputed": RECOMPUTED, "offloaded": OFFLOADED, "experts": EXPERTS}


def chosen(half: str) -> list[Configuration]:
    """The configurations of that half."""
    if half in OTHERS:
        return OTHERS[half]
    halves = ("set-aside" if place in SET_ASIDE else "first" for place in range(len(CONFIGURATIONS)))
    return [one for one, its_half in zip(CONFIGURATIONS, halves) if half in ("all", its_half)]


# ----------------------------------------------------------------------------------------------------------- measuring


def measured(configuration: Configuration, output: Path) -> Path:
    """The file of a configuration's measurements: {micro-batch: peak bytes}."""
    return output / "measured" / "device" / f"{configuration.file_name}.json"


def measure(configuration: Configuration, output: Path) -> dict[str, int]:
    """{micro-batch: peak bytes} of the process that needs most, by one launch each.

    Raises:
        RuntimeError: a launch failed.
    """
    from zerofit.tools.simulate import build as simgpu_build

    folder = output / "trials" / configuration.file_name
    folder.mkdir(parents=True, exist_ok=True)
    recipe, processes = folder / "recipe.yaml", configuration.processes
    flags = [*configuration.recipe, "--cache_dir", str(output / "cache"), "--strategies", configuration.strategy]
    options, cls = read_with_recipe(CompareOptions, [*flags, "--num_processes", str(processes)], "measure")
    recipe.write_text(yaml.safe_dump(make_recipe(options, cls)[0]))
    sizes = ",".join([str(16 * GIB)] * processes)
    environment = {
        **simgpu_build.environment(simgpu_build.build_device()),
        "SIMGPU_MEMORY": sizes,
        "OMP_NUM_THREADS": "1",
    }
    peaks = {}
    for size in configuration.tried:
        pair = ROOT / "accelerate_configs" / f"{configuration.strategy}.yaml"
        flags = ("--per_device_train_batch_size", str(size))
        trial = LaunchedRun(configuration.task, pair, recipe, folder / str(size) / "run", flags)
        request = {"steps": 1, "memory_limit": None}
        result = run_trial(trial, processes, uuid.uuid4().hex, request, environment, patience_s=PATIENCE_S)
        if result["outcome"] != "fits":
            raise RuntimeError(f"{configuration.name}: see {folder / str(size)}")
        peaks[str(size)] = peak_bytes(result, "allocated")
    return peaks


# ---------------------------------------------------------------------------------------------------------- predicting


class Predictor:
    """What `zerofit plan` predicts for a configuration."""

    def __init__(self, configuration: Configuration):
        from zerofit.estimate.planned_model import read_planned_model
        from zerofit.tools.plan.plan_options import PlanOptions, resolve_layout
        from zerofit.tools.plan.planner import MemoryBudget, Planner

        flags = ["--strategies", configuration.strategy, "--gpu_memory", "16GiB"]
        options, _ = read_with_recipe(PlanOptions, [*configuration.recipe, *flags], "predict")
        model = replace(read_planned_model(options, configuration.task, True), cpu_kernels=True)
        budget = MemoryBudget(16 * GIB, None, configuration.processes, configuration.processes)
        self.planner = Planner(options, model, budget)
        self.resolved = resolve_layout(configuration.strategy, options, model, budget.num_gpus, budget.gpus_per_node)

    def peak(self, micro_batch: int):
        """The Peak, without the workspace and the unused blocks that the simulated accelerator does not have."""
        from zerofit.estimate.allocations import UnusedBytes
        from zerofit.estimate.peak import CUBLAS_WORKSPACE_BYTES, WORKSPACE
        from zerofit.tools.plan import planner

        planner.unused_bytes = lambda *blocks: UnusedBytes(0, 0)
        peak = self.planner.predict(self.resolved, micro_batch).peak
        components = peak.components | {WORKSPACE: peak.components[WORKSPACE] - CUBLAS_WORKSPACE_BYTES}
        return replace(peak, components=components, allocated=peak.allocated - CUBLAS_WORKSPACE_BYTES)

    def largest(self, limit: float, start: int) -> int:
        """The largest micro-batch that is predicted to be within the limit."""
        size = start
        while self.peak(size + 1).allocated <= limit:
            size += 1
        while size and self.peak(size).allocated > limit:
            size -= 1
        return size


def compare(configuration: Configuration, peaks: dict[str, int]) -> tuple[str, list[float], int]:
    """(a row of docs/measurements/plan.md, the errors, by how much the largest micro-batch is missed)."""
    predictor, cells, errors = Predictor(configuration), [], []
    small, size, larger = configuration.tried
    for tried in (small, size):
        predicted, peak = predictor.peak(tried).allocated, peaks[str(tried)]
        errors.append(predicted / peak - 1)
        cells.append(f"{tried}: {predicted / MIB:.1f} / {peak / MIB:.1f}, {100 * errors[-1]:+.1f} %")
    found = predictor.largest((peaks[str(size)] + peaks[str(larger)]) / 2, size)
    more = ", ".join(word.removeprefix("--").replace("_", " ") for word in configuration.more if word != "--packing")
    about = (configuration.model, configuration.strategy, configuration.precision)
    sizes = f"{configuration.length} x {configuration.accumulation}"
    return f"| {' | '.join((*about, sizes, more, *cells, f'{found} of {size}'))} |", errors, abs(found - size)


def summarise(results: list[tuple[str, list[float], int]]) -> str:
    errors = [abs(error) for _, several, _ in results for error in several]
    steps = [missed for *_, missed in results]
    return (
        f"{len(results)} configurations, {len(errors)} peaks: median error {100 * statistics.median(errors):.2f} %, "
        f"worst {100 * max(errors):.1f} %; the largest micro-batch exact in {steps.count(0)}, within one step in "
        f"{sum(step <= 1 for step in steps)} of {len(steps)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--half", choices=("first", "set-aside", "all", *OTHERS))
    parser.add_argument("--only", default="", help="words that a configuration's name must have")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "plan-accuracy")
    options = parser.parse_args()
    half = options.half or ("all" if options.what == "measure" else "first")
    configurations = [each for each in chosen(half) if all(word in each.name for word in options.only.split())]
    for number, configuration in enumerate(configurations if options.what == "measure" else (), 1):
        file = measured(configuration, options.output)
        if file.is_file():
            continue
        print(f"{number} of {len(configurations)}: {configuration.name}", flush=True)
        try:
            found = measure(configuration, options.output)
        except RuntimeError as error:
            print(f"  failed: {error}", flush=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found) + "\n")
    if options.what == "table":
        files = {each: measured(each, options.output) for each in configurations}
        results = [compare(each, json.loads(file.read_text())) for each, file in files.items() if file.is_file()]
        source = provenance("measured by `measure`", "torch", "accelerate", "deepspeed", "transformers")
        print(*(row for row, *_ in results), "", summarise(results), "", source, sep="\n")


if __name__ == "__main__":
    main()
