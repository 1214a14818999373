"""What `zerofit plan` predicts against what trials of `zerofit compare` measure, at 32 configurations.

    python benchmarks/plan_accuracy.py measure            # on the simulated accelerator: 32 launches, 20 to 40 minutes
    python benchmarks/plan_accuracy.py measure --on cpu   # ten of them on the bare CPU
    python benchmarks/plan_accuracy.py table              # the half that the memory model may be corrected with
    python benchmarks/plan_accuracy.py table --half set-aside
    python benchmarks/plan_accuracy.py table --on cpu --half all
    python benchmarks/plan_accuracy.py measure --half shared   # then table: model parallelism, fsdp2
    python benchmarks/plan_accuracy.py measure --half recomputed   # then table: each way of recomputing
    python benchmarks/plan_accuracy.py measure --half offloaded    # then table: layers' inputs on the host
    python benchmarks/plan_accuracy.py measure --half generated    # then table: evaluated by generation
    python benchmarks/plan_accuracy.py measure --half experts      # then table: mixtures of experts
    python benchmarks/plan_accuracy.py measure --half muon         # then table: --optim muon
    python benchmarks/plan_accuracy.py measure --half tags         # then table: a class for each word
    python benchmarks/plan_accuracy.py measure --half tuned        # then table: of answers, teachers, ...

`measure` keeps each result in outputs/plan-accuracy/measured and repeats none. A launch is the trial that
`zerofit compare` launches (zerofit/tools/compare/trial.py), with rows of the greatest length, evaluation included; it
tries three micro-batches, and the allocator's peak starts anew at each. The simulated accelerator
(zerofit/tools/simulate) is host memory whose allocator is exact, in blocks of 512 bytes; it has no context, no
fragmentation and no cuBLAS workspace, so max_memory_allocated is compared with the prediction without that workspace.
On a CPU the peak is what the memory limit counts, beyond what the process took before the model. It is that of rank 0:
only of that one is it noted what it took before, and ranks differ there by 150 MiB.

The largest micro-batch: with a limit halfway between the measured peaks of two neighbouring micro-batches the smaller
one is the largest that fits (tests/device shows that a run needs what its peak says); `table` looks for the largest
one whose prediction is within the same limit.

SET_ASIDE is drawn by a seed, before anything was measured.
"""

import argparse
import ast
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from provenance import provenance

from zerofit.launch.runs import LaunchedRun, launched
from zerofit.record.jsonl import LineReader
from zerofit.record.terminal import table
from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.trial_files import ANSWERS, TrialRequest
from zerofit.tools.compare.trial_machine import TrialMachine, launch_environment
from zerofit.tools.tool_recipe import read_with_recipe

ROOT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30
PATIENCE_S = 1200
NO_DROPOUT = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
TEXT = ["--train_file", "{stdlib}/*.py", "--train_tokenizer_vocab_size", "4096"]
LABELLED = ["--dataset_name", "stdlib-docstrings", "--train_tokenizer_vocab_size", "4096"]
NUM_TAGS = 900
PAIRS = (
    "--dataset_name stdlib-functions --train_tokenizer_vocab_size 2048 --max_target_length 16 "
    "--max_train_samples 400 --predict_with_generate false"
).split()
LORA, AGAIN = ("--lora",), ("--gradient_checkpointing",)
SELECTIVE = (*AGAIN, "selective")
ON_HOST = ("--activation_offload",)
GENERATES = tuple(
    (
        "--predict_with_generate true --num_beams 4 --per_device_eval_batch_size 64 --val_max_target_length "
        "48 --val_min_target_length 48"
    ).split()
)
DPO, SIMPO, ORPO = (("--preference_loss", name) for name in ("dpo", "simpo", "orpo"))
SMOOTHED, WITH_Z, MEAN = ("--label_smoothing", "0.1"), ("--z_loss", "1e-4"), ("--ema_decay", "0.999")
FORWARD, REVERSE = (("--distill_divergence", name) for name in ("forward", "reverse"))
WHOLE, ROWS = ("--packing", "concatenate"), ("--packing", "none")


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
MADE = ROOT / "outputs" / "plan-accuracy" / "data"  # by make_data
DATA = {
    "clm": TEXT,
    "cls": LABELLED,
    "seq2seq": PAIRS,
    "answers": [
        *("--train_file", str(MADE / "answers.jsonl"), "--train_tokenizer_vocab_size", "2048"),
        *("--allow_data_loss", "--max_train_samples", "400"),
    ],
    "tags": [
        *("--train_file", str(MADE / "tags.conll"), "--validation_split_percentage", "10"),
        *("--train_tokenizer_vocab_size", "4096"),
    ],
    "teacher": [
        *("--train_file", str(MADE / "*.py"), "--tokenizer_name", str(MADE / "teacher" / "model")),
        *("--teacher", str(MADE / "teacher" / "model")),
    ],
}
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
    data: str = ""  # of DATA; by default the task's

    @property
    def name(self) -> str:
        more = [word.removeprefix("--") for word in (*self.more, *filter(None, [self.data]))]
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
        return [
            "--task",
            task,
            *DATA[self.data or task],
            "--model_type" if shape in TYPES else "--config_name",
            shape,
            "--config_overrides",
            overrides,
            lengths[task],
            str(self.length),
            "--precision",
            self.precision,
            "--gradient_accumulation_steps",
            str(self.accumulation),
            *"--per_device_eval_batch_size 4 --max_train_steps 100".split(),
            *self.more,
        ]


def _make(
    model: str,
    strategy: str,
    precision: str,
    length: int,
    accumulation: int,
    sizes: tuple[int, int],
    *more: tuple[str, ...],
    data: str = "",
) -> Configuration:
    return Configuration(model, strategy, precision, length, accumulation, sizes, sum(more, ()), data)


CONFIGURATIONS = [
    _make("GPT-2, 4 of 256", "single", "fp32", 128, 1, (2, 8), WHOLE),
    _make("GPT-2, 4 of 256", "ddp", "fp32", 64, 2, (2, 12)),
    _make("GPT-2, 3 of 512", "ddp", "bf16", 64, 2, (2, 9)),
    _make("GPT-2, 3 of 512", "zero1", "bf16", 64, 2, (2, 10)),
    _make("GPT-2, 3 of 512", "zero2", "fp32", 64, 1, (2, 8), WHOLE),
    _make("GPT-2, 4 of 256", "zero3", "fp32", 128, 1, (2, 7), WHOLE),
    _make("GPT-2, 3 of 512", "zero2_offload", "bf16", 96, 2, (2, 7)),
    _make("GPT-2, 4 of 256", "zero3_offload", "bf16", 64, 1, (2, 11)),
    _make("GPT-2 with dropout, 4 of 256", "ddp", "fp32", 64, 1, (2, 9), WHOLE),
    _make("Llama, 4 of 256", "single", "bf16", 128, 2, (2, 10), AGAIN),
    _make("Llama, 4 of 256", "ddp", "bf16", 128, 1, (2, 8), LORA),
    _make("Llama, 4 of 256", "zero3", "bf16", 128, 1, (2, 8), LORA),
    _make("Llama, 3 of 384, grouped", "zero2", "bf16", 64, 2, (2, 14), AGAIN),
    _make("Llama, 3 of 384, grouped", "zero3", "bf16", 96, 2, (2, 8), WHOLE),
    _make("GPT-NeoX, 3 of 320", "zero1", "fp32", 96, 1, (2, 8), LORA, ROWS),
    _make("GPT-NeoX, 3 of 320", "zero3_offload_optimizer", "fp32", 64, 2, (2, 16), AGAIN),
    _make("Llama classifier, 4 of 256", "zero3_offload", "bf16", 64, 1, (2, 10)),
    _make("BERT, 4 of 256", "single", "fp32", 64, 2, (2, 10)),
    _make("BERT, 4 of 256", "ddp", "bf16", 64, 2, (2, 12)),
    _make("BERT, 4 of 256", "zero2_offload", "fp32", 96, 1, (2, 8), LORA),
    _make("DeBERTa, 3 of 192", "ddp", "fp32", 64, 1, (2, 9)),
    _make("DeBERTa, 3 of 192", "zero2", "bf16", 64, 1, (2, 12)),
    _make("RoBERTa, 3 of 384", "zero1", "bf16", 128, 1, (2, 12), AGAIN),
    _make("RoBERTa, 3 of 384", "zero3", "fp32", 64, 1, (2, 8)),
    _make("BlenderBot, 2 + 3 of 256", "single", "bf16", 64, 1, (2, 12)),
    _make("BlenderBot, 2 + 3 of 256", "ddp", "fp32", 96, 1, (2, 10), AGAIN),
    _make("BlenderBot, 2 + 3 of 256", "ddp", "bf16", 64, 2, (2, 11), LORA),
    _make("BlenderBot, 2 + 3 of 256", "zero2", "bf16", 64, 2, (2, 13)),
    _make("T5, 3 + 3 of 256", "zero1", "fp32", 64, 2, (2, 9)),
    _make("T5, 3 + 3 of 256", "zero3", "fp32", 96, 1, (2, 7), LORA),
    _make("BART, 2 + 2 of 256", "zero2_offload", "bf16", 64, 1, (2, 12)),
    _make("BART, 2 + 2 of 256", "zero3_offload", "fp32", 64, 2, (2, 10)),
]
_draw = random.Random(19)
SET_ASIDE = set(_draw.sample(range(len(CONFIGURATIONS)), len(CONFIGURATIONS) // 2))
ON_CPU = set(_draw.sample(range(len(CONFIGURATIONS)), 10))
SHARED = [  # two ranks share each layer, split each row, are stages, or gather blocks (fsdp2)
    _make("GPT-2, 3 of 512", "tp", "fp32", 64, 1, (2, 8), WHOLE),
    _make("Llama, 3 of 384, grouped", "sp", "bf16", 128, 1, (2, 8)),
    _make("Llama, 3 of 384, grouped", "tp", "bf16", 96, 2, (2, 8)),
    _make("Llama, 4 of 256", "tp_zero3", "fp32", 128, 1, (2, 7), WHOLE),
    _make("GPT-2, 4 of 256", "sp", "fp32", 128, 2, (2, 9), WHOLE),
    _make("Llama, 4 of 256", "tp_zero2", "bf16", 128, 2, (2, 10), AGAIN),
    _make("GPT-2, 3 of 512", "sp", "bf16", 96, 1, (2, 10), AGAIN),
    _make("GPT-2, 4 of 256", "pp", "fp32", 128, 2, (2, 8), WHOLE),
    _make("Llama, 4 of 256", "pp", "bf16", 128, 4, (2, 8), WHOLE),
    _make("Llama, 4 of 256", "3d", "bf16", 128, 4, (2, 8), WHOLE),
    _make("GPT-2, 4 of 256", "3d", "fp32", 128, 2, (2, 8), WHOLE, AGAIN),
    _make("GPT-2, 3 of 512", "fsdp2", "fp32", 64, 1, (2, 8), WHOLE),
    _make("Llama, 4 of 256", "fsdp2", "bf16", 128, 2, (2, 10), AGAIN),
    _make("Llama, 3 of 384, grouped", "fsdp2", "bf16", 96, 1, (2, 9)),
    _make("BERT, 4 of 256", "fsdp2", "fp32", 96, 2, (4, 16)),
    _make("GPT-NeoX, 3 of 320", "fsdp2", "bf16", 128, 1, (2, 9), LORA),
]
RECOMPUTED = [  # the same with each way of recomputing, and others
    *(_make("Llama, 8 of 256", "ddp", "fp32", 64, 1, (2, 8), WHOLE, *way) for way in ((), (AGAIN,), (SELECTIVE,))),
    _make("GPT-2 with dropout, 4 of 256", "zero2", "fp32", 64, 1, (2, 8), WHOLE, SELECTIVE),
    _make("GPT-2, 4 of 256", "zero3", "fp32", 64, 2, (2, 8), WHOLE, SELECTIVE),
    _make("Llama, 4 of 256", "fsdp2", "bf16", 64, 1, (2, 8), WHOLE, SELECTIVE),
    _make("GPT-2, 4 of 256", "tp", "fp32", 64, 1, (2, 8), WHOLE, SELECTIVE),
    _make("DeBERTa, 3 of 192", "ddp", "fp32", 64, 1, (2, 8), SELECTIVE),
    _make("T5, 3 + 3 of 256", "zero1", "fp32", 64, 1, (2, 8), SELECTIVE),
]
OFFLOADED = [  # the inputs of recomputed layers wait on the host; the same without
    *(_make("Llama, 24 of 128", "ddp", "fp32", 256, 1, (2, 8), WHOLE, AGAIN, *more) for more in ((), (ON_HOST,))),
    *(
        _make("Llama, 8 of 256", strategy, precision, 256, accumulation, (2, 8), WHOLE, AGAIN, ON_HOST)
        for strategy, precision, accumulation in (
            ("ddp", "fp32", 1),
            ("zero2", "fp32", 2),
            ("zero3", "fp32", 1),
            ("fsdp2", "fp32", 1),
            ("sp", "fp32", 1),
        )
    ),
    _make("BlenderBot, 2 + 3 of 256", "ddp", "fp32", 96, 1, (2, 10), AGAIN, ON_HOST),
    _make("DeBERTa, 3 of 192", "zero2", "fp32", 64, 1, (2, 12), AGAIN, ON_HOST),
]
GENERATED = [  # evaluated by generation, in batches that need more than the small micro-batch
    _make("BlenderBot, 2 + 3 of 256", "single", "bf16", 64, 1, (2, 96), GENERATES),
    _make("BlenderBot, 2 + 3 of 256", "ddp", "fp32", 96, 1, (2, 64), GENERATES),
    _make("BlenderBot, 2 + 3 of 256", "zero2", "bf16", 64, 2, (2, 96), GENERATES),
    _make("T5, 3 + 3 of 256", "zero3", "fp32", 64, 1, (2, 64), GENERATES),
    _make("BART, 2 + 2 of 256", "fsdp2", "bf16", 64, 1, (2, 96), GENERATES),
]
EXPERTS = [  # mixtures of experts, which are divided among ranks, or are as other weights
    _make("Mixtral, 4 of 256", "ep", "fp32", 128, 1, (2, 8), WHOLE),
    _make("Mixtral, 4 of 256", "ep", "bf16", 96, 2, (2, 10)),
    _make("OLMoE, 3 of 192", "ep", "fp32", 64, 2, (2, 9), WHOLE, AGAIN),
    _make("Qwen 3 MoE, 4 of 192", "ep", "bf16", 128, 1, (2, 8), WHOLE),
    _make("Mixtral, 4 of 256", "fsdp2", "fp32", 128, 1, (2, 8), WHOLE),
    _make("Mixtral, 4 of 256", "zero3", "bf16", 128, 1, (2, 8), WHOLE),
    _make("OLMoE, 3 of 192", "ddp", "fp32", 64, 2, (2, 9), WHOLE),
    _make("OLMoE, 3 of 192", "zero3", "fp32", 64, 2, (2, 9), WHOLE),
    _make("Qwen 3 MoE, 4 of 192", "zero3", "bf16", 96, 1, (2, 10), WHOLE, AGAIN),
    _make("Mixtral, 4 of 256", "ep", "bf16", 128, 1, (2, 10), WHOLE, AGAIN),
]
ON_DISK = [  # the optimizer's state on a disk: needs libaio's headers
    _make("GPT-2, 4 of 256", "zero3_offload_nvme", "bf16", 64, 1, (2, 11)),
    _make("Llama, 8 of 256", "zero3_offload_nvme", "fp32", 128, 2, (2, 8), WHOLE),
    _make("BERT, 4 of 256", "zero3_offload_nvme", "bf16", 96, 1, (2, 12)),
]
MUON = [  # short rows, so that the optimizer's step needs most at a micro-batch of 2
    *(
        _make(model, strategy, precision, 64, 1, (2, 8), WHOLE, ("--optim", "muon"))
        for model, strategy, precision in (
            ("GPT-2, 3 of 512", "single", "fp32"),
            ("GPT-2, 3 of 512", "single", "bf16"),
            ("GPT-2, 3 of 512", "ddp", "fp32"),
            ("GPT-2, 3 of 512", "zero1", "bf16"),
            ("GPT-2, 3 of 512", "zero2", "fp32"),
            ("GPT-2, 3 of 512", "zero3", "fp32"),
            ("Llama, 3 of 384, grouped", "zero3", "bf16"),
            ("GPT-2, 3 of 512", "fsdp2", "fp32"),
            ("Llama, 3 of 384, grouped", "fsdp2", "bf16"),
            ("Mixtral, 4 of 256", "zero3", "fp32"),
        )
    ),
]
WITH_TAGS = [  # so many tags that their logits matter
    _make("BERT, 4 of 256", "single", "fp32", 64, 1, (2, 12), data="tags"),
    _make("BERT, 4 of 256", "ddp", "bf16", 64, 2, (2, 12), data="tags"),
    _make("BERT, 4 of 256", "fsdp2", "fp32", 96, 1, (2, 10), data="tags"),
    _make("DeBERTa, 3 of 192", "zero2", "bf16", 64, 1, (2, 12), data="tags"),
    _make("DeBERTa, 3 of 192", "zero3", "fp32", 64, 1, (2, 9), data="tags"),
    _make("BERT, 4 of 256", "zero2_offload", "fp32", 96, 1, (2, 8), LORA, data="tags"),
]
SMALL = "Llama, 4 of 256"
TUNED = [  # losses of other kinds, a teacher, a mean of the weights, learning rates by layer, rows that go round
    _make(SMALL, "single", "fp32", 64, 1, (2, 8), DPO, data="answers"),
    _make(SMALL, "ddp", "bf16", 64, 2, (2, 8), DPO, data="answers"),
    _make(SMALL, "zero2", "fp32", 64, 1, (2, 8), DPO, data="answers"),
    _make(SMALL, "zero3", "bf16", 64, 1, (2, 8), DPO, data="answers"),
    _make(SMALL, "fsdp2", "fp32", 64, 1, (2, 8), DPO, data="answers"),
    _make(SMALL, "zero2", "bf16", 64, 1, (2, 8), DPO, LORA, data="answers"),
    _make("GPT-2, 4 of 256", "zero2", "bf16", 64, 1, (2, 8), SIMPO, data="answers"),
    _make("GPT-2, 4 of 256", "ddp", "fp32", 64, 1, (2, 8), ORPO, data="answers"),
    _make(SMALL, "single", "fp32", 64, 1, (2, 8), REVERSE, data="teacher"),
    _make(SMALL, "zero2", "bf16", 64, 1, (2, 8), FORWARD, data="teacher"),
    _make(SMALL, "single", "fp32", 64, 1, (2, 8), WHOLE, MEAN),
    _make(SMALL, "zero2", "bf16", 64, 1, (2, 8), WHOLE, MEAN),
    _make(SMALL, "zero3", "fp32", 64, 1, (2, 8), WHOLE, MEAN),
    _make(SMALL, "fsdp2", "bf16", 64, 1, (2, 8), WHOLE, MEAN),
    _make(SMALL, "single", "fp32", 64, 1, (2, 8), WHOLE, SMOOTHED, WITH_Z),
    _make(SMALL, "zero2", "bf16", 64, 1, (2, 8), WHOLE, SMOOTHED),
    _make(SMALL, "fsdp2", "fp32", 64, 1, (2, 8), WHOLE, WITH_Z),
    _make("BERT, 4 of 256", "single", "fp32", 64, 1, (2, 10), ("--layer_decay", "0.8")),
    _make("BERT, 4 of 256", "zero3", "bf16", 64, 1, (2, 10), ("--layer_decay", "0.8")),
    _make("Llama, 3 of 384, one head of keys", "sp", "fp32", 128, 1, (2, 8), WHOLE),
    _make("Llama, 3 of 384, one head of keys", "sp", "bf16", 128, 1, (2, 8), WHOLE, AGAIN),
]
OTHERS = {
    "tags": WITH_TAGS,
    "tuned": TUNED,
    "muon": MUON,
    "disk": ON_DISK,
    "generated": GENERATED,
    "shared": SHARED,
    "recomputed": RECOMPUTED,
    "offloaded": OFFLOADED,
    "experts": EXPERTS,
}


def chosen(half: str, on: str) -> list[Configuration]:
    """The configurations of that half that are measured there."""
    if half in OTHERS:
        return OTHERS[half]
    return [
        one
        for place, one in enumerate(CONFIGURATIONS)
        if half in ("all", "set-aside" if place in SET_ASIDE else "first") and (on != "cpu" or place in ON_CPU)
    ]


# ----------------------------------------------------------------------------------------------------------- measuring


def make_data() -> None:
    """In MADE, once: pairs of answers; sentences of twenty random words with the tags; a small teacher."""
    if (MADE / "teacher" / "model").is_dir():  # made last
        return
    MADE.mkdir(parents=True, exist_ok=True)
    functions = [
        (ast.unparse(each.args), ast.unparse(each.body))
        for file in sorted(Path(ast.__file__).parent.glob("[a-d]*.py"))
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.FunctionDef)
    ]
    with (MADE / "answers.jsonl").open("w") as lines:
        for (arguments, body), (_, other) in itertools.pairwise(functions):
            if arguments and body != other:
                lines.write(json.dumps({"prompt": arguments, "chosen": body, "rejected": other}) + "\n")
    draw = random.Random(1)
    words = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(20 * NUM_TAGS))
    tagged = (f"{word} T{number % NUM_TAGS}" + "\n" * (number % 20 == 0) for number, word in enumerate(words))
    (MADE / "tags.conll").write_text("\n".join(tagged) + "\n")
    for name in ("ast", "argparse", "calendar", "dataclasses"):
        shutil.copy(Path(ast.__file__).with_name(f"{name}.py"), MADE)
    text, (shape, overrides) = ["--train_file", str(MADE / "*.py")], MODELS[SMALL][1]
    model = ["--train_tokenizer_vocab_size", "4096", "--config_name", shape, "--config_overrides", overrides]
    taught = ["--output_dir", str(MADE / "teacher"), "--block_size", "64", "--max_train_steps", "1"]
    script = str(ROOT / "train" / "clm.py")
    subprocess.run([sys.executable, script, *text, *model, *taught], check=True, cwd=ROOT)


class Measurements:
    """A file for each measured configuration: {micro-batch: peak bytes}."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, on: str, configuration: Configuration, peaks: dict[str, int]) -> None:
        file = self._file(on, configuration)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(peaks) + "\n")

    def of(self, on: str, configuration: Configuration) -> dict[int, int]:
        file = self._file(on, configuration)
        return {int(size): peak for size, peak in json.loads(file.read_text()).items()} if file.is_file() else {}

    def _file(self, on: str, configuration: Configuration) -> Path:
        return self.folder / on / f"{configuration.file_name}.json"


def measure(configuration: Configuration, on: str, output: Path) -> dict[str, int]:
    """{micro-batch: peak bytes} of the process that needs most, by one launch.

    Raises:
        RuntimeError: the launch failed.
    """
    folder = output / "trials" / on / configuration.file_name
    shutil.rmtree(folder, ignore_errors=True)
    request = TrialRequest(
        sizes=configuration.tried,
        first=configuration.tried[0],
        only_first=False,
        steps=1,
        must_try=configuration.tried,
    )
    file, recipe = request.write(folder), folder / "recipe.yaml"
    flags = [*configuration.recipe, "--cache_dir", str(output / "cache"), "--strategies", configuration.strategy]
    options, cls = read_with_recipe(
        CompareOptions, [*flags, "--num_processes", str(configuration.processes)], "measure"
    )
    recipe.write_text(yaml.safe_dump(make_recipe(options, cls).values))
    trial = LaunchedRun(
        configuration.task,
        ROOT / "accelerate_configs" / f"{configuration.strategy}.yaml",
        recipe,
        folder / "run",
        ("--per_device_train_batch_size", str(request.first)),
        ("-m", "zerofit.tools.compare.trial", configuration.task, str(file)),
    )
    command, log = trial.command(configuration.processes), folder / "log.txt"
    with launched(command, trial.output, log, environment=_environment(on, configuration.processes)) as launch:
        launch.wait(PATIENCE_S)
    return peaks_in(folder, configuration, on)


def peaks_in(folder: Path, configuration: Configuration, on: str) -> dict[str, int]:
    """What a trial has answered.

    Raises:
        RuntimeError: it has not tried all sizes.
    """
    lines = LineReader(folder / ANSWERS).poll()
    fits = [line for line in lines if line["event"] == "fits"]
    if [line["size"] for line in fits] != configuration.tried:
        raise RuntimeError(f"{configuration.name}: see {folder}")
    (taken,) = (line["taken"] for line in lines if line["event"] == "started")
    counter, before, ranks = ("reserved", taken, slice(1)) if on == "cpu" else ("allocated", 0, slice(None))
    evaluated = [rank[counter] for rank in fits[0]["with_evaluation"][ranks]]
    return {
        str(line["size"]): max(*evaluated, *(rank[counter] for rank in line["ranks"][ranks])) - before for line in fits
    }


def _environment(on: str, processes: int) -> dict[str, str]:
    if on == "cpu":
        return launch_environment(TrialMachine(), processes) | {"OMP_NUM_THREADS": "1"}
    from zerofit.tools.simulate import build as simgpu_build

    sizes = ",".join([str(16 * GIB)] * processes)
    return {**simgpu_build.environment(simgpu_build.build()), "SIMGPU_MEMORY": sizes, "OMP_NUM_THREADS": "1"}


# ---------------------------------------------------------------------------------------------------------- predicting


class Predictor:
    """What `zerofit plan` predicts for a configuration."""

    def __init__(self, configuration: Configuration, on: str):
        from zerofit.estimate.read_model import read_planned_model
        from zerofit.tools.plan.layouts import resolve
        from zerofit.tools.plan.plan_options import PlanOptions
        from zerofit.tools.plan.planner import Planner
        from zerofit.tools.plan.prediction import Budget

        flags = ["--strategies", configuration.strategy, "--gpu_memory", "16GiB"]
        flags += ["--num_tags", str(NUM_TAGS)] if configuration.data == "tags" else []
        options, _ = read_with_recipe(PlanOptions, [*configuration.recipe, *flags], "predict")
        model = read_planned_model(options, configuration.task, on != "cpu")
        if on != "cpu":
            model = replace(model, cpu_kernels=True)
        budget = Budget(16 * GIB, None, configuration.processes, configuration.processes)
        self.on, self.planner = on, Planner(options, model, budget)
        self.resolved = resolve(configuration.strategy, options, model, budget.num_gpus, budget.gpus_per_node)

    def peak(self, micro_batch: int):
        """The Peak, without the workspace and the unused blocks that the simulated accelerator does not have."""
        from zerofit.estimate.caching_allocator import Unused
        from zerofit.estimate.memory_constants import CUBLAS_WORKSPACE_BYTES
        from zerofit.estimate.peak import WORKSPACE
        from zerofit.tools.plan import planner

        planner.unused_bytes = lambda *blocks: Unused(0, 0)
        peak = self.planner.predict(self.resolved, micro_batch).peak
        if self.on == "cpu":
            return peak
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


def compare(configuration: Configuration, on: str, peaks: dict[int, int]) -> dict:
    """Predictions beside measurements of one configuration."""
    predictor, (small, size, larger) = Predictor(configuration, on), configuration.tried
    predicted = {tried: predictor.peak(tried) for tried in (small, size)}
    limit = (peaks[size] + peaks[larger]) / 2
    return {
        "configuration": configuration.name,
        "measured": {tried: peaks[tried] for tried in predicted},
        "predicted": {tried: peak.allocated for tried, peak in predicted.items()},
        "phase": {tried: peak.phase for tried, peak in predicted.items()},
        "components": {tried: peak.components for tried, peak in predicted.items()},
        "error": {tried: peak.allocated / peaks[tried] - 1 for tried, peak in predicted.items()},
        "largest": size,
        "predicted_largest": predictor.largest(limit, size),
    }


def tabulate(results: list[dict], configurations: list[Configuration]) -> list[list[str]]:
    rows = [
        [
            *"model strategy precision tokens micro-batches".split(),
            "",
            "micro-batch",
            "predicted, MiB",
            "measured, MiB",
            "error",
            "phase",
            "largest",
        ]
    ]
    for result, one in zip(results, configurations, strict=True):
        more = ", ".join(word.removeprefix("--").replace("_", " ") for word in one.more if word != "--packing")
        about = [one.model, one.strategy, one.precision, str(one.length), str(one.accumulation), more]
        for size, measured in result["measured"].items():
            last = size == one.sizes[-1]
            found = f"{result['predicted_largest']} of {result['largest']}" if last else ""
            rows.append(
                [
                    *about,
                    str(size),
                    f"{result['predicted'][size] / MIB:.2f}",
                    f"{measured / MIB:.2f}",
                    f"{100 * result['error'][size]:+.1f} %",
                    result["phase"][size],
                    found,
                ]
            )
            about = [""] * len(about)
    return rows


def summarise(results: list[dict]) -> str:
    errors = [abs(error) for result in results for error in result["error"].values()]
    steps = [abs(result["predicted_largest"] - result["largest"]) for result in results]
    return (
        f"{len(results)} configurations, {len(errors)} peaks: median error {100 * statistics.median(errors):.2f} %, "
        f"worst {100 * max(errors):.1f} %; the largest micro-batch exact in {steps.count(0)}, within one step in "
        f"{sum(step <= 1 for step in steps)} of {len(steps)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--on", choices=("device", "cpu"), default="device")
    parser.add_argument("--half", choices=("first", "set-aside", "all", *OTHERS))
    parser.add_argument("--only", default="", help="words that a configuration's name must have")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "plan-accuracy")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    measurements = Measurements(options.output / "measured")
    half = options.half or ("all" if options.what == "measure" else "first")
    configurations = [
        each for each in chosen(half, options.on) if all(word in each.name for word in options.only.split())
    ]
    if options.what == "measure":
        if any(each.data for each in configurations):
            make_data()
        for number, configuration in enumerate(configurations, 1):
            if measurements.of(options.on, configuration):
                continue
            print(f"{number} of {len(configurations)}: {configuration.name}", flush=True)
            try:
                measurements.add(options.on, configuration, measure(configuration, options.on, options.output))
            except RuntimeError as error:
                print(f"  failed: {error}", flush=True)
        return
    configurations = [each for each in configurations if measurements.of(options.on, each)]
    results = [compare(each, options.on, measurements.of(options.on, each)) for each in configurations]
    (options.output / f"{options.on}-{half}.json").write_text(json.dumps(results, indent=2) + "\n")
    source = provenance("measured by `measure`", "torch", "accelerate", "deepspeed", "transformers")
    print(table(tabulate(results, configurations)), "", summarise(results), "", source, sep="\n")


if __name__ == "__main__":
    main()
