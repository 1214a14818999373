"""A seeded search over combinations that no table lists: data, model, options, strategies, a kill and a resume.

Each seed draws a run. One process trains it undisturbed; then it is trained under drawn strategies and numbers of
processes, killed or ended by a signal on the way, and resumed under the next one. Both must have the same samples,
losses, gradient norms, learning rates, held-out figures and final weights. What the program refuses, it refuses with
code 2 and before the first update.

    pytest -m long tests/launch/test_random_combinations.py                  # seeds 0 to 99, about half an hour
    pytest -m long tests/launch/test_random_combinations.py --seeds 117      # one of them: a failure prints commands
    pytest -m long tests/launch/test_random_combinations.py --seeds 100-299
"""

import json
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import test_agreement as data
import torch
from helpers import (
    ROOT,
    launch_command,
    launched,
    metrics,
    small_model,
    small_sizes,
    tiny_deberta,
    updates,
    write_records,
)
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from zerofit.recipe.tasks import CAUSAL_TASKS

pytestmark = pytest.mark.long

TOLERANCE = {False: 1e-5, True: 5e-2}  # relative, of losses, gradient norms and held-out figures; True: in bf16
WITH_RELU = ("opt", "t5")  # whose kink turns a sum's rounding into a step: with gelu in its place 3.8e-5 become 7e-8
KINKS = 1e-4
ON_THE_HOST = 5e-5  # DeepSpeed's Adam on the host keeps 1 - beta^t in fp32, which has few digits in the first updates
# Small differences of large figures, which are compared relative to more than their value: sums of log-probabilities,
# and a correlation, which is a ratio of the small differences of predictions that are nearly alike.
# A gradient of 0.002, of answers that are equally likely, has parts that nearly cancel.
SUMS = {"eval_reward_margin": 1.0, "eval_pearson": 10.0, "grad_norm": 0.01}
# No output depends on the bias of attention's keys: its gradient is rounding, which Adam divides by itself.
KEYS = re.compile(r"\b(k_proj|key|key_proj)\.bias$")
ATTEMPTS = 6  # draws until one is not refused
COUNTS = ("update", "consumed_samples", "targets", "tokens", "skipped")

# Of each form of data: the flags. Names in braces are those of the fixture `folders`.
TEXT = "--train_file {material}/text/train.txt --block_size 64"
CHATS = "--block_size 160 --chat_template instruction --train_file"
FORMS = {
    "clm": {
        "packed": f"{TEXT} --packing documents",
        "joined": f"{TEXT} --packing concatenate",
        "unpacked": f"{TEXT} --packing none",
        "instructions": f"{CHATS} {{material}}/instruct/english.json --packing none",
        "packed instructions": f"{CHATS} {{material}}/instruct/english.json",
        "chats": f"{CHATS} {{chats}}",
        "mixture": f"{CHATS} 3 {{material}}/text/train.txt 1 {{material}}/instruct/english.json",
        "streamed": f"{CHATS} {{chats}} --validation_file {{chats}} --streaming 2KiB --max_train_steps 8",
        "preferences": f"{CHATS} {{pairs}} --preference_loss {{loss}}",
        "teacher": f"{TEXT} --teacher {{teacher}} --distill_divergence {{divergence}}",
    },
    "cls": {
        "classes": "--train_file {classes} --max_length 48",
        "glue": "--train_file {material}/glue/MRPC/train.tsv --task_name mrpc --max_length 48 "
        "--validation_file {material}/glue/MRPC/dev.tsv",
        "numbers": "--train_file {numbers} --max_length 48",
        "tags": "--train_file {tags} --max_length 48",
        "choices": "--train_file {choices} --max_length 32 --learning_rate 1e-4",
        "mixed": "--train_file 3 {classes} 1 {kinds} --max_length 48",
    },
    "seq2seq": {
        "dialogue": "--train_file {material}/dialogue/keyed.json --max_source_length 40 --max_target_length 24",
        "pairs": "--train_file {questions} --max_source_length 32 --max_target_length 48",
        "mixed": "--train_file 3 {material}/dialogue/keyed.json 1 {questions} --max_source_length 32 "
        "--max_target_length 48",
    },
}
FAMILIES = {
    "clm": ("llama", "llama", "gpt2", "gpt_neox", "mistral", "qwen3", "olmo2", "gemma2", "opt", "mixtral"),
    "cls": ("bert", "roberta", "electra", "deberta-v2", "modernbert", "llama"),
    "seq2seq": ("t5", "bart", "blenderbot", "mt5"),
}
# How often (of 1), for which tasks and forms ("all": any; without those after a minus), and one of these is drawn.
OPTIONS = (
    (0.5, "all", ("--lr_scheduler_type cosine --min_lr_ratio 0.1", "--lr_scheduler_type wsd --wsd_decay_ratio 0.5",
                  "--lr_scheduler_type constant", "--lr_scheduler_type constant_with_warmup",
                  "--lr_scheduler_type linear --lr_decay_steps 6")),
    (0.5, "all", ("--num_warmup_steps 3", "--warmup_ratio 0.4")),
    (0.3, "all", ("--optim muon", "--optim adafactor", "--optim adamw --adam_beta2 0.95 --weight_decay 0.3")),
    (0.5, "all", ("--max_grad_norm 0", "--max_grad_norm 0.05")),
    (0.2, "all", ("--ema_decay 0.6",)),
    (0.3, "all", ("--gradient_checkpointing full", "--gradient_checkpointing selective")),
    (0.2, "all", ("--lora", "--lora --use_dora", "--lora --lora_bias all --use_rslora")),
    (0.3, "unpacked instructions dialogue pairs", ("--tokens_per_batch 640",)),
    (0.2, "all -streamed", ("--global_batch_warmup 4@4", "--global_batch_warmup 6@3")),
    (0.4, "packed joined teacher", ("--block_size_warmup 16@4",)),
    (0.3, "clm seq2seq -teacher -preferences", ("--loss chunked", "--loss full")),
    (0.3, "clm seq2seq classes glue tags -teacher -preferences", ("--label_smoothing 0.1",)),
    (0.2, "clm seq2seq -teacher -preferences", ("--z_loss 0.01",)),
    (0.3, "classes tags", ("--class_weights balanced", "--focal_gamma 2")),
    (0.15, "cls", ("--layer_decay 0.7",)),
    (0.3, "cls seq2seq", ("--length_grouping update", "--length_grouping none", "--pad_to_max_length")),
    (0.5, "all", ("--eval_steps 2", "--eval_steps 3", "--eval_on_start false")),
    (0.3, "all", ("--eval_steps 1 --early_stopping_patience 1",
                  "--eval_steps 1 --early_stopping_patience 2",
                  "--metric_for_best_model loss --eval_steps 2", "--load_best_model_at_end true --eval_steps 2")),
    (0.9, "all", ("--save_strategy steps --save_steps 1", "--save_strategy steps --save_steps 2",
                  "--save_strategy steps --save_steps 3 --save_total_limit 1", "--save_strategy epoch")),
    (0.3, "all", ("--save_async true", "--save_async false")),
    (0.1, "all", ("--precision bf16",)),
    (0.1, "all", ("--dataloader_num_workers 1",)),
)  # fmt: skip
DATA_PARALLEL = {  # numbers of processes
    "single": (1,), "ddp": (1, 2, 2, 3, 4), "zero1": (1, 2, 2, 3, 4), "zero2": (1, 2, 2, 3, 4), "zero2_plain": (2, 3),
    "zero3": (1, 2, 2, 3, 4), "zero3_hpz": (2, 4), "zero2_offload": (1, 2, 2, 3), "zero3_offload": (2, 3),
    "zero3_offload_optimizer": (2, 3), "zero3_offload_nvme": (2,), "fsdp2": (1, 2, 2, 3, 4), "hsdp": (4,),
    "ep": (2, 4),
}  # fmt: skip
SPLIT = {"sp": (2, 2, 4), "tp": (2, 2, 4), "tp_zero2": (2, 4), "tp_zero3": (2, 4), "pp": (2, 2, 3, 4), "3d": (4,)}


@dataclass(frozen=True)
class Run:
    """What is trained."""

    task: str
    about: str
    flags: tuple[str, ...]
    global_batch: int


@dataclass(frozen=True)
class Leg:
    """A launch of the run: under this strategy, and how it ends."""

    strategy: str
    processes: int
    micro_batch: int
    end: str | None = None  # SIGNAL PHASE UPDATE, as disturbed.py takes it; None: it is left alone

    def __str__(self) -> str:
        return f"{self.strategy} x{self.processes}" + (f", {self.end}" if self.end else "")


def draw_run(random: Random, folders: dict[str, Path]) -> Run:
    task = random.choice(("clm", "clm", "cls", "seq2seq"))
    form, family = random.choice(list(FORMS[task])), random.choice(FAMILIES[task])
    names = {
        **folders,
        "loss": random.choice(("dpo", "ipo", "hinge", "simpo", "orpo")),
        "divergence": random.choice(("forward", "reverse")),
    }
    options = [
        random.choice(choices)
        for odds, where, choices in OPTIONS
        if random.random() < odds and fits(where, {"all", task, form})
    ]
    model, tokenizer = f"--model_name_or_path {{{task}-{family}}}", f"--tokenizer_name {{{task}-{family}}}"
    if random.random() < 0.25 and "--lora" not in " ".join(options):  # from scratch: each strategy makes the weights
        sizes = ",".join(f"{name}={value}" for name, value in small_sizes(family).items())
        model = f"--model_type {family} --config_overrides {sizes} {tokenizer}"
    length = random.choice(("--max_train_steps 8", "--max_train_steps 8", "--num_train_epochs 2"))
    rows = f"--max_train_samples {random.choice((37, 48, 75))}" if form != "streamed" else ""
    common = (
        "--learning_rate 1e-3 --weight_decay 0.1 --adam_epsilon 1e-6 --record_samples --precision fp32 "
        f"--per_device_eval_batch_size 3 --max_eval_samples {random.choice((5, 9))}"
    )
    words = " ".join((model, length, rows, common, FORMS[task][form], *options))
    flags = {part.split()[0]: part.split()[1:] for part in f" {words}".split(" --")[1:]}  # the last of each name
    if task == "seq2seq":
        flags |= {"predict_with_generate": [random.choice(("true", "false"))], "num_beams": ["1"]}
    given = tuple(word.format(**names) for name, values in flags.items() for word in (f"--{name}", *values))
    script = {"preferences": "dpo", "teacher": "distill"}.get(form, task)
    return Run(script, f"{form}, {family}", given, random.choice((12, 12, 12, 8)))


def fits(where: str, names: set[str]) -> bool:
    listed = where.split()
    return bool(names.intersection(listed)) and not names.intersection(word[1:] for word in listed if word[0] == "-")


def draw_leg(random: Random, run: Run, left: int) -> Leg:
    """A launch that `left` further ones follow."""
    among = SPLIT if random.random() < (0.35 if run.task in CAUSAL_TASKS else 0.03) else DATA_PARALLEL
    strategy = random.choice(list(among))
    phase = random.choice(("data", "forward", "update", "save", "evaluate"))
    update = max(2, random.randrange(5, 10) - 2 * left)
    end = f"{random.choice(('SIGKILL', 'SIGKILL', 'SIGTERM'))} {phase} {update}" if left else None
    processes = random.choice(among[strategy])
    return Leg(strategy, processes, random.choice((1, 1, 2)) if processes < 4 else 1, end)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first, _, last = metafunc.config.getoption("--seeds").partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


@pytest.fixture(scope="module")
def folders(llama, material, tmp_path_factory) -> dict[str, Path]:
    """What the flags name: data, and a small model of each family with a tokenizer, none of them with dropout."""
    folder = tmp_path_factory.mktemp("inputs")
    records = json.loads((material / "instruct" / "english.json").read_text())[:150]
    turns = [
        [
            {"role": "user", "content": record["input"] or record["instruction"]},
            {"role": "assistant", "content": record["output"]},
        ]
        for record in records
    ]
    chats = [{"messages": first + second} for first, second in zip(turns[::2], turns[1::2])]
    numbers = [{"text": record["output"], "label": len(record["output"]) / 100} for record in records]
    tiny_deberta(folder / "deberta", num_labels=2)
    made = {
        "material": material, "chats": write_records(folder / "chats.jsonl", chats),
        "numbers": write_records(folder / "numbers.jsonl", numbers), "choices": data.questions(folder),
        "classes": data.rare_words(folder, material), "kinds": data.answers_that_are_short(folder, material),
        "tags": data.names(folder, material), "pairs": data.pairs_of_answers(folder, material),
        "questions": data.answered(folder, material), "teacher": data.another_model(folder / "teacher", llama),
        "clm-llama": llama, "cls-deberta-v2": data.without_a_head(folder / "body", folder / "deberta"),
    }  # fmt: skip
    vocabularies = {"clm": llama, "cls": folder / "deberta", "seq2seq": material / "tokenizers" / "blenderbot"}
    classes = {"clm": AutoModelForCausalLM, "cls": AutoModel, "seq2seq": AutoModelForSeq2SeqLM}
    for task, family in ((task, family) for task, families in FAMILIES.items() for family in families):
        if f"{task}-{family}" not in made:
            made[f"{task}-{family}"] = model = folder / f"{task}-{family}"
            small_model(model, family, classes[task], vocabularies[task])
            config = json.loads((model / "config.json").read_text())
            # Without it the head of a Llama for words has dropout.
            (model / "config.json").write_text(json.dumps({**config, "classifier_dropout": 0.0}))
    return made


class Trial:
    """What a seed draws and launches, in a folder; what came of it, and the commands that repeat it."""

    def __init__(self, seed: int, folders: dict[str, Path], folder: Path, cache: str):
        self.random, self.folders, self.folder, self.cache = Random(seed), folders, folder, cache
        self.run: Run | None = None
        self.commands: list[str] = []
        self.saved = False  # whether the last leg has said so
        self.legs: list[str] = []

    def attempt(self) -> None:
        """Train the reference and the legs, and compare them."""
        for number in range(ATTEMPTS):  # until one is not refused
            self.run = draw_run(self.random, self.folders)
            if not self.is_refused(f"alone{number}", Leg("single", 1, 2)):
                break
        else:
            return
        reference, output = self.folder / f"alone{number}", self.folder / "run"
        for left in range(self.random.choice((0, 1, 1, 1, 1, 2)), -1, -1):
            for _ in range(ATTEMPTS):
                leg = draw_leg(self.random, self.run, left)
                if not self.is_refused("run", leg):
                    break
            else:
                return
            if (output / "model").is_dir():
                break
        compare(self.run, output, reference, any("offload" in leg for leg in self.legs))

    def is_refused(self, name: str, leg: Leg) -> bool:
        """Whether a launch is refused; else it has ended as the leg says."""
        output = self.folder / name
        before = num_updates(output)
        code, shown, said = self.launch(output, leg)
        resumed = "\nresumed " in shown
        if code == 2:
            assert re.search("^error: ", said, re.MULTILINE), said  # transformers may warn before
            assert "Traceback" not in said, said
            assert num_updates(output) == before, f"refused after updates: {said}"
            if name == "run" and self.legs:  # it is the layout that is refused, and not to resume
                fresh = self.folder / f"fresh{len(self.commands)}"
                assert self.launch(fresh, replace(leg, end=None))[0] == 2, f"only the resume is refused:\n{said}"
            return True
        signal_name = leg.end.split()[0] if leg.end else None
        codes = {None: (0,), "SIGKILL": (0, 1, -9), "SIGTERM": (0, 85)}[signal_name]
        assert code in codes, f"{leg}: exit code {code}\n{shown[-1500:]}\n{said[-5000:]}"
        assert resumed or not self.saved, f"{leg} has begun again"
        self.saved = code == 85
        self.legs += [str(leg)] if name == "run" else []
        return False

    def launch(self, output: Path, leg: Leg) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        batch = ("--global_batch_size", self.run.global_batch)
        if "--tokens_per_batch" in self.run.flags:
            batch = ()
        elif output.name.startswith("alone"):
            batch = ("--gradient_accumulation_steps", self.run.global_batch // leg.micro_batch)
        # The reference of preferences is kept with the data, and made by each run.
        cache = self.folder / f"{output.name}-cache" if "--preference_loss" in self.run.flags else self.cache
        flags = (*self.run.flags, "--per_device_train_batch_size", leg.micro_batch, *batch, "--cache_dir", cache)
        through = (ROOT / "tests" / "launch" / "disturbed.py", "0", leg.end) if leg.end else ()
        how = {"strategy": leg.strategy, "processes": leg.processes, "task": self.run.task}
        command = shlex.join(launch_command(output, *map(str, flags), **how))
        self.commands.append(f"{command}{f'  # until {leg.end}' if leg.end else ''}")
        done = launched(output, *flags, through=through, **how)
        return done.returncode, done.stdout, done.stderr


def num_updates(output: Path) -> int:
    return len(updates(metrics(output))) if (output / "metrics.jsonl").is_file() else 0


def compare(run: Run, ours: Path, reference: Path, on_the_host: bool) -> None:
    """That two runs differ by no more than rounding."""
    lines, expected, half = metrics(ours), metrics(reference), "bf16" in run.flags
    has_relu = run.about.split(", ")[1] in WITH_RELU
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected):
        assert {name: line.get(name) for name in COUNTS} == {name: other.get(name) for name in COUNTS}
        figures = {name for name in other if name in ("loss", "grad_norm", "learning_rate") or name[:5] == "eval_"}
        assert figures == {name for name in line if name in figures or name[:5] == "eval_"}
        if half:  # counts of a few held-out examples turn with the last bit of bf16
            figures = {name for name in figures if name[:5] != "eval_" or name[5:] in ("loss", "perplexity")}
        for name in figures:
            least = SUMS.get(name, 1e-3 if name[:5] == "eval_" else 1e-12)
            if half:  # where predictions are nearly right, their errors have few digits
                least = max(least, *(0.1 * abs(one[name]) for one in expected if name in one))
            difference = abs(line[name] - other[name]) / max(abs(other[name]), least)
            limit = max(TOLERANCE[half], ON_THE_HOST if on_the_host else 0.0)
            limit = max(limit, KINKS if has_relu else 0.0)
            limit = 1e-9 if name == "learning_rate" else limit
            assert difference <= limit, f"{name} of update {other['update']}: {line[name]}, not {other[name]}"
    assert (ours / "samples.jsonl").read_text() == (reference / "samples.jsonl").read_text(), "other samples"
    files = {file.relative_to(reference) for file in (reference / "model").rglob("*.safetensors")}
    assert files == {file.relative_to(ours) for file in (ours / "model").rglob("*.safetensors")} != set()
    for file in () if half else files:
        theirs, mine = load_file(reference / file), load_file(ours / file)
        assert theirs.keys() == mine.keys()
        for name in theirs:
            if KEYS.search(name):
                continue
            steps = 1e-3 if has_relu else 2e-5  # Adam's step of a weight behind a kink may be another one in whole
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=steps, msg=name)


def test_a_disturbed_run_is_the_undisturbed_one(seed, folders, cache, tmp_path):
    trial = Trial(seed, folders, tmp_path, cache)
    try:
        trial.attempt()
    except AssertionError as error:
        said = (f"seed {seed}: {error}", f"{trial.run.about}: {'; '.join(trial.legs)}", *trial.commands)
        raise AssertionError("\n".join(said)) from None
    finally:
        shutil.rmtree(tmp_path)


def test_every_strategy_can_be_drawn():
    assert {*DATA_PARALLEL, *SPLIT} == {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
