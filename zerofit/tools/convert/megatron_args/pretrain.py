"""pretrain_gpt.py's flags as a recipe (model, data, length, schedule, evaluation, checkpoints) and a strategy.

Sources: megatron/arguments.py and megatron/training.py of Megatron-LM and Megatron-DeepSpeed, also for the defaults;
megatron/core/optimizer_param_scheduler.py, get_lr.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zerofit.recipe.files import parse_json, place, read_text, read_yaml
from zerofit.strategy.layout import PIPELINE_KEY, SEQUENCE_KEY, TENSOR_KEY, with_degrees
from zerofit.tools.convert.megatron_args.flags import DATA_PARALLEL, DEGREE, SHAPING, flag_status
from zerofit.tools.convert.megatron_args.shape import (
    MACHINES,
    OPTIONS,
    PROCESSES,
    SAME,
    SEARCH,
    Call,
    FlagLedger,
    FlagRow,
    MegatronArgsOptions,
    Shape,
    of_weights,
    positive_number,
    read_shape,
)

SPLITTING = {  # {flag: (the degree of the layout, its key in the pair's JSON)}
    "tensor_model_parallel_size": ("tensor", f"{TENSOR_KEY}.autotp_size"),
    "pipeline_model_parallel_size": ("pipeline", f"{PIPELINE_KEY}.stages"),
    "context_parallel_size": ("sequence", SEQUENCE_KEY),
    "ds_sequence_parallel_size": ("sequence", SEQUENCE_KEY),
}
DEGREES = (*SPLITTING, "expert_model_parallel_size", "moe_expert_parallel_size")
FALLBACK = 8  # processes, where the script does not say
OWNED = {  # keys of the JSON, and the flags that must agree
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
}
DEFAULTS = {"clip_grad": 1.0}  # Megatron's


@dataclass
class Layout:
    """Processes and strategy.

    Attributes:
        split: processes of one copy of the model in Megatron; tensor, pipeline, sequence: degrees carried over.
        stage, zero: of ZeRO (0: DDP); zero_optimization of the script's DeepSpeed JSON.
        rank, address, port: of this machine and of machine 0.
    """

    world: int
    machines: int
    split: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stage: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    rank: str = "0"
    address: str = "MACHINE_0"
    port: str = "29500"

    @property
    def replica_size(self) -> int:
        """Processes of one copy of the model."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def replicas(self) -> int:
        return self.world // self.replica_size

    @property
    def strategy(self) -> str:
        if self.pipeline > 1:
            return "3d" if self.tensor > 1 else "pp"
        if self.tensor > 1:
            return "tp" if self.stage == 1 else f"tp_zero{self.stage}"
        if self.sequence > 1:
            return "sp"
        return f"zero{self.stage}" if self.stage else "single" if self.world == 1 else "ddp"


def layout_of_call(flags: FlagLedger, call: Call, processes: int | None) -> Layout:
    """Processes and machines; one kind of parallelism, that of data."""
    machines = call.machines
    remedy = "Set --num_processes N, of all machines"
    world = processes or (call.processes or FALLBACK) * machines
    for what, names in (("processes", PROCESSES), ("machines", MACHINES)):
        said = call.of_launcher(names)
        if said is not None and not processes and positive_number(said) is None:
            flags.wrong("", f"the number of {what}: a number was expected, and the launcher has {said!r}. {remedy}")
    if not processes and call.processes is None:
        words = f"num_processes: {world}, a guess: the launcher does not say. {remedy}"
        flags.rows["=processes"] = FlagRow("(processes)", "carried over", words)
    named = {"rank": "node_rank", "address": "master_addr", "port": "master_port"}
    given: dict[str, Any] = {name: value for name, option in named.items() if (value := call.of_launcher((option,)))}
    layout = Layout(world, machines if world % machines == 0 else 1, **given)
    if not layout.port.isdigit():
        flags.wrong("", f"the port of machine 0: a number was expected, and the launcher has {layout.port}")
    return layout


def read_layout(flags: FlagLedger, call: Call, processes: int | None) -> Layout:
    """Processes, degrees and ZeRO stage. Degrees that are not carried over become ZeRO-3."""
    layout = layout_of_call(flags, call, processes)
    refused: dict[str, str] = {}
    for name in filter(flags.has, DEGREES):
        degree = flags.number(name, default=1)
        kind, _ = SPLITTING.get(name, ("", ""))
        size = layout.replica_size * degree
        layout.split *= degree if kind else 1
        if degree == 1:
            flags.satisfied(name, "1: it splits nothing")
        elif not kind:
            refused[name] = "not supported: "
        elif kind == "sequence" and layout.replica_size > 1:
            refused[name] = "rows are not split together with another kind of parallelism: "
        elif layout.world % size:
            refused[name] = f"num_processes = {layout.world} is not a multiple of {size}: "
        else:
            setattr(layout, kind, degree)
    _read_zero(flags, layout)
    _stage(flags, layout, bool(refused.keys() & SPLITTING.keys()))
    for name in filter(flags.has, DEGREES):
        if name in refused:
            flags.none(name, f"{refused[name]}{DEGREE if layout.stage == 3 else DATA_PARALLEL}")
        elif name not in flags.rows:
            flags.carried(name, f"the pair: {layout.strategy}, {SPLITTING[name][1]}: {flags.text(name)}")
    if layout.tensor == 1:
        flags.none("sequence_parallel", "it splits activations among tensor-parallel processes, and there are none")
    return layout


def _stage(flags: FlagLedger, layout: Layout, in_place_of_others: bool) -> None:
    block = layout.zero.get("stage")
    stage = flags.number("zero_stage", default=None)
    if None not in (block, stage) and block != stage:
        flags.wrong("zero_stage", f"the DeepSpeed JSON says stage {block}: keep one of the two")
    stage = block if block is not None else stage
    stage = int(flags.has("use_distributed_optimizer")) if stage is None else stage
    if stage not in (0, 1, 2, 3):
        flags.wrong("zero_stage", "0, 1, 2 or 3 was expected")
        return
    min_stage = 3 if in_place_of_others else 1 if layout.replica_size > 1 else stage
    layout.stage = max(min_stage, stage) if layout.sequence == 1 else 2 if stage == 2 else 3
    if layout.pipeline > 1:
        layout.stage = 1
    instead = " instead of other kinds of parallelism" if in_place_of_others else ""
    for name in ("zero_stage", "deepspeed", "use_distributed_optimizer"):
        flags.carried(name, f"the pair: {layout.strategy}{instead}")


def _read_zero(flags: FlagLedger, layout: Layout) -> None:
    """Read zero_optimization of the DeepSpeed JSON that the command line names. Its other keys are the recipe's."""
    name = flags.text("deepspeed_config")
    if name is None:
        return
    if not Path(name).is_file():
        flags.none("deepspeed_config", "there is no such file here: nothing of it is carried over")
        return
    try:
        config = parse_json(read_text(Path(name)))
    except json.JSONDecodeError as error:
        flags.wrong("deepspeed_config", f"{name} is not valid JSON: {error}")
        return
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization", {}), dict):
        flags.wrong("deepspeed_config", f"{name} and its zero_optimization must be JSON objects")
        return
    layout.zero = config.pop("zero_optimization", {})
    flags.carried("deepspeed_config", "deepspeed.json: its zero_optimization")
    for key, value in config.items():
        flag = OWNED.get(key)
        if flag and value not in ("auto", flags.number(flag, float, DEFAULTS.get(flag, value))):
            flags.wrong(flag, f"the DeepSpeed JSON says {key} = {value}: make them agree")
        if key in ("bf16", "fp16") and isinstance(value, dict) and value.get("enabled") is True and not flags.has(key):
            flags.wrong("", f"the DeepSpeed JSON has {key} on, and there is no --{key}: make them agree")
        flags.rows[f"json.{key}"] = FlagRow(f'  "{key}"', "no counterpart", "the flags and the pair decide it")


def pair_of(layout: Layout, folder: Path) -> dict[str, str]:
    """{file name: text} of the pair: an accelerate YAML, and under ZeRO a DeepSpeed JSON."""
    files = {}
    settings = read_yaml(place(f"accelerate_configs/{layout.strategy}.yaml"))
    settings |= {"num_machines": layout.machines, "num_processes": layout.world}
    if layout.machines > 1:
        settings |= {"main_process_ip": layout.address, "main_process_port": int(layout.port)}
    if layout.stage:
        settings["deepspeed_config"]["deepspeed_config_file"] = str(folder / "deepspeed.json")
        settings["deepspeed_config"]["zero3_init_flag"] &= layout.stage == 3
        config = json.loads(place(f"ds_configs/{layout.strategy}.json").read_text())
        config = with_degrees(config, layout.tensor, layout.pipeline, layout.sequence)
        config["zero_optimization"] |= {**layout.zero, "stage": layout.stage}
        files["deepspeed.json"] = json.dumps(config, indent=2) + "\n"
    return {"accelerate.yaml": yaml.safe_dump(settings, sort_keys=False), **files}


GPT2_VOCABULARY = 50257
LLAMA_VOCABULARY = 32000
SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
STYLES = ("linear", "cosine", "constant", "wsd")
SELECTIVE = "linear layers' products and attention are kept, and all else is recomputed"
RECOMPUTATION = (
    "recompute_granularity recompute_activations checkpoint_activations deepspeed_activation_checkpointing "
    "activations_checkpoint_method"
).split()
CHOSEN = (*DEGREES, "data_parallel_size", "sequence_parallel", "use_distributed_optimizer", "zero_stage")
KNOWN = ("pretrain_gpt.py", "pretrain_llama.py", SEARCH)
PLAIN: dict[str, tuple[str, type, Any]] = {  # {flag: (its option, type, Megatron's default where ours differs)}
    "seq_length": ("block_size", int, None),
    "reset_position_ids": ("reset_position_ids", bool, None),
    "reset_attention_mask": ("reset_attention_mask", bool, None),
    "eod_mask_loss": ("eod_mask_loss", bool, None),
    "data_cache_path": ("cache_dir", str, None),
    "num_workers": ("dataloader_num_workers", int, None),
    "seed": ("seed", int, 1234),
    "weight_decay": ("weight_decay", float, 0.01),
    "adam_beta1": ("adam_beta1", float, None),
    "adam_beta2": ("adam_beta2", float, None),
    "adam_eps": ("adam_epsilon", float, None),
    "clip_grad": ("max_grad_norm", float, None),
    "save": ("output_dir", str, None),
    "save_interval": ("save_steps", int, None),
    "log_interval": ("logging_steps", int, 100),
}


@dataclass
class ConvertedScript(FlagLedger):
    """A recipe, with the flags that it is made of.

    Attributes:
        recipe: {option: value} in the order in which it is written.
        batch: samples of an update.
        vocabulary: tokens before padding, where that is known without the tokenizer's files.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: Layout(1, 1))
    shape: Shape | None = None
    batch: int = 1
    vocabulary: int | None = None
    notes: list[str] = field(default_factory=list)

    def carry(self, flag: str, option: str, value: Any, note: str = "", *, default: Any = None) -> None:
        """Set an option of the recipe; `default` is Megatron's of the flag, for a row where it is not given."""
        self.recipe[option] = value
        words = f"{option}: {value}{note}"
        if default is not None and not self.has(flag):
            self.default(f"--{flag.replace('_', '-')} {default}", words)
        self.carried(flag, words)


def in_updates(done: ConvertedScript, what: str, option: str) -> int | None:
    """The smallest of --WHAT-iters, --WHAT-samples and --WHAT-tokens, as updates."""
    batch = done.batch
    units = {"iters": 1, "samples": batch, "tokens": batch * done.recipe.get("block_size", 1)}
    lengths = {}
    for unit, size in units.items():
        name = f"{what}_{unit}"
        if done.has(name):
            number = done.number(name, default=0)
            round_down = name == "train_samples"  # Megatron drops an incomplete global batch
            lengths[name] = number // size if round_down else -(-number // size)
            done.carried(name, f"{option}: {lengths[name]}")
    smallest = min(lengths.values(), default=None)
    for name, updates in lengths.items():
        if updates != smallest:
            done.satisfied(name, f"{updates} updates: the run ends before, after {smallest}")
    return smallest


def convert_pretraining(call: Call, options: MegatronArgsOptions) -> ConvertedScript:
    """The recipe of a call of pretrain_gpt.py, with the result for each flag."""
    done = ConvertedScript.of(call)
    searched = call.program == SEARCH
    done.layout = (_job if searched else read_layout)(done, call, options.num_processes)
    if call.program not in KNOWN:
        done.wrong("", f"{call.program} is not read: give its line after --, with pretrain_gpt.py in its place")
    done.shape = read_shape(done, call.program)
    for name, (option, kind, default) in PLAIN.items():
        value: str | float | None = done.has(name) or None
        if kind is not bool:
            value = done.text(name) if kind is str else done.number(name, kind, default)
        if value is not None:
            done.carry(name, option, value, default=default)
    if options.model_name_or_path:
        done.recipe["model_name_or_path"] = options.model_name_or_path
        of_weights(done, done.shape, options.model_name_or_path)
    elif done.shape:
        done.recipe["config_name"] = done.shape.family
        done.recipe["config_overrides"] = done.shape.overrides()
        name = "make_vocab_size_divisible_by"
        tensor = done.number("tensor_model_parallel_size", default=1)
        why = f" (times the {tensor} tensor-parallel processes, as in Megatron)" if tensor > 1 else ""
        done.carry(name, name, done.number(name, default=128) * tensor, why, default=128)
    _tokenizer(done, options)
    _data(done)
    (_searched_batches if searched else _batches)(done)
    updates = done.recipe["max_train_steps"] = in_updates(done, "train", "max_train_steps")
    if not (updates or done.problems):
        done.wrong("", "the length of the run is unknown: --train-iters, --train-samples or --train-tokens")
    if minutes := done.number("exit_duration_in_mins"):
        done.carry("exit_duration_in_mins", "max_hours", round(minutes / 60, 4))
    batches = max(1, done.number("eval_iters", default=100))  # an evaluation cannot be left out
    done.carry("eval_interval", "eval_steps", done.number("eval_interval", default=1000), default=1000)
    note = f", {batches} global batches of {done.batch}; the same samples each time, Megatron uses different ones"
    done.carry("eval_iters", "max_eval_samples", batches * done.batch, note, default=100)
    _optimizer(done)
    _precision_and_memory(done)
    _checkpoints_and_trackers(done, options)
    for name in done.flags:
        is_read = name in {*done.rows, *OPTIONS, *SAME}
        if not is_read and flag_status(name)[0] == "unknown" and SHAPING.search(name):
            done.wrong(name, "not a known flag, and by its name it changes the model. Remove it if it does not")
    return done


def _tokenizer(done: ConvertedScript, options: MegatronArgsOptions) -> None:
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file")
    kind = done.text("tokenizer_type") or ("GPT2BPETokenizer" if done.has("vocab_file") else "")
    file = done.text("tokenizer_model")
    folder = options.tokenizer_name or done.text("tokenizer_name_or_path") or file
    if kind in SENTENCEPIECE and not options.tokenizer_name:
        done.vocabulary = LLAMA_VOCABULARY
        folder = (os.path.dirname(file) or ".") if file else None
        if file and Path(file).name != "tokenizer.model":
            done.wrong("tokenizer_model", "put it into a folder as tokenizer.model, and say --tokenizer_name FOLDER")
    if kind == "GPT2BPETokenizer" and not options.tokenizer_name:
        done.vocabulary = GPT2_VOCABULARY
        for name in ("vocab_file", "merge_file"):
            done.carry(name, name, done.text(name))
        if not all(map(done.text, ("vocab_file", "merge_file"))):
            done.wrong("", "GPT2BPETokenizer reads --vocab-file and --merge-file: name both")
        done.satisfied("tokenizer_type", "vocab_file and merge_file are of that kind")
    elif folder:
        done.recipe["tokenizer_name"] = folder
        for name in names:
            done.carried(name, f"tokenizer_name: {folder}")
    else:
        done.wrong("tokenizer_type", "the tokenizer is not named: say --tokenizer_name FOLDER")


def _data(done: ConvertedScript) -> None:
    paths = done.flags.get("data_path")
    if paths:
        done.carry("data_path", "data_path", paths if len(paths) > 1 else paths[0])
        done.carry("split", "split", (done.text("split") or "969,30,1").replace(" ", ""))
    elif not done.problems:
        done.wrong("data_path", "there is no --data-path: training and evaluation come from one, by --split")
    if done.text("data_impl") not in (None, "mmap", "infer"):
        done.wrong("data_impl", "only mmap's .bin and .idx are read: prepare the corpus again with zerofit prepare")


def _batches(done: ConvertedScript) -> None:
    layout = done.layout
    micro = done.number("micro_batch_size", default=0)
    if not micro:
        done.wrong("micro_batch_size", "there is no --micro-batch-size")
        return
    total = done.number("global_batch_size", default=micro * max(1, layout.world // layout.split))
    if not done.has("global_batch_size"):
        done.default("--global-batch-size", f"global_batch_size: {total}, micro-batch * data-parallel processes")
    replicas = max(count for count in range(1, layout.replicas + 1) if total % count == 0)
    if replicas < layout.replicas:
        each = "processes" if layout.replica_size == 1 else f"replicas of {layout.replica_size} processes"
        done.notes.append(f"the global batch of {total} is divided by {replicas} {each}, not {layout.replicas}")
        layout.world = replicas * layout.replica_size
        layout.machines = layout.machines if layout.world % layout.machines == 0 else 1
    ours = max(size for size in range(1, micro + 1) if (total // replicas) % size == 0)
    note = f", accumulation {total // replicas // ours}"
    done.carry("micro_batch_size", "per_device_train_batch_size", ours, note)
    done.carry("global_batch_size", "global_batch_size", total)
    done.batch = total
    done.recipe["per_device_eval_batch_size"] = ours


def _optimizer(done: ConvertedScript) -> None:
    peak = done.number("lr", float)
    if not peak:
        done.wrong("lr", "there is no --lr")
        return
    done.carry("lr", "learning_rate", peak)
    if done.has("min_lr"):
        done.carry("min_lr", "min_lr_ratio", done.number("min_lr", float, 0.0) / peak, f", of {peak:g}")
    if done.text("optimizer") not in (None, "adam"):
        done.wrong("optimizer", "AdamW is the only optimizer here")
    if done.text("weight_decay_incr_style") not in (None, "constant"):
        done.wrong("weight_decay_incr_style", "weight decay is constant here")
    shape = (done.text("lr_decay_style") or "linear").lower()
    if shape not in STYLES:
        done.wrong("lr_decay_style", f"there are {', '.join(STYLES)}")
        return
    decay = in_updates(done, "lr_decay", "lr_decay_steps")
    warmup = in_updates(done, "lr_warmup", "num_warmup_steps") or 0
    length = decay or done.recipe["max_train_steps"] or 1
    if done.has("lr_warmup_fraction"):
        warmup = math.ceil(round(done.number("lr_warmup_fraction", float, 0.0) * length, 6))
        done.carried("lr_warmup_fraction", f"num_warmup_steps: {warmup}")
    if shape == "constant" and warmup:
        shape = "constant_with_warmup"
    done.carry("lr_decay_style", "lr_scheduler_type", shape, default="linear")
    if warmup:
        done.recipe["num_warmup_steps"] = warmup
    if shape.startswith("constant"):
        done.recipe.pop("min_lr_ratio", None)
        for name in ("min_lr", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"):
            done.satisfied(name, "a constant rate does not decay")
    elif decay:
        done.recipe["lr_decay_steps"] = decay
    if shape == "wsd":
        updates = in_updates(done, "lr_wsd_decay", "wsd_decay_ratio, updates")
        if not updates or done.text("lr_wsd_decay_style") != "linear":
            done.wrong("lr_decay_style", "give --lr-wsd-decay-iters, and say --lr-wsd-decay-style linear")
            return
        done.satisfied("lr_wsd_decay_style", "wsd ends in a straight line")
        done.recipe["wsd_decay_ratio"] = updates / length


def _precision_and_memory(done: ConvertedScript) -> None:
    both = [name for name in ("fp16", "bf16") if done.has(name)]
    if len(both) == 2:
        done.wrong("fp16", "--bf16 is there as well: keep one of the two")
    done.recipe["precision"] = both[0] if both else "fp32"
    for name in both:
        done.carried(name, f"precision: {name}")
    if not both:
        done.default("neither --bf16 nor --fp16", "precision: fp32")
    # Recomputation: Megatron's --recompute-activations sets the granularity; its older flags mean full layers.
    value: str | bool = True
    note = ""
    if done.has("recompute_activations") or done.text("recompute_granularity") == "selective":
        value = "selective"
        note = f" ({SELECTIVE})"
    for name in filter(done.has, RECOMPUTATION):
        done.carry(name, "gradient_checkpointing", value, note)
    if done.text("recompute_method") == "block":
        done.none("recompute_method", "all layers are recomputed")
    if done.has("checkpoint_in_cpu"):
        if "gradient_checkpointing" in done.recipe:
            done.carry("checkpoint_in_cpu", "activation_offload", True)
        else:
            done.satisfied("checkpoint_in_cpu", "no layer is recomputed")


def _checkpoints_and_trackers(done: ConvertedScript, options: MegatronArgsOptions) -> None:
    load = done.text("load")
    model = options.model_name_or_path
    if load and model:
        done.satisfied("load", f"model_name_or_path: {model}, from the option")
    elif load and load == done.text("save") and not done.has("finetune"):
        done.satisfied("load", "the same command resumes from the newest checkpoint of output_dir (resume: auto)")
    elif load:
        done.wrong("load", "Megatron's checkpoints are not read: set --model_name_or_path to a folder")
    elif done.has("finetune") and not model:
        done.wrong("finetune", "weights to begin with are not named: say --model_name_or_path FOLDER")
    trackers = {"wandb_project": "wandb", "tensorboard_dir": "tensorboard"}
    if found := [tracker for flag, tracker in trackers.items() if done.has(flag)]:
        done.recipe |= {"with_tracking": True, "report_to": found[0] if len(found) == 1 else "all"}
    done.carried("tensorboard_dir", "report_to: tensorboard; its files lie in the run's folder")
    if "wandb" in found:
        done.carry("wandb_project", "report_name", done.text("wandb_project"))


def _job(flags: FlagLedger, call: Call, processes: int | None) -> Layout:
    """Processes and machines; --world-size and --local-world-size name those of a job that is not started yet."""
    total = flags.number("world_size")
    layout = layout_of_call(flags, call, processes or total)
    flags.carried("world_size", f"zerofit plan --num_gpus {total}")
    local = flags.number("local_world_size")
    flags.carried("local_world_size", f"zerofit plan --gpus_per_node {local}")
    if local and layout.world % local == 0:
        layout.machines = layout.world // local
    for name in CHOSEN:
        flags.none(name, "zerofit plan tries degrees and stages, and chooses")
    if (flags.text("task_type") or "GPT").endswith("GPT"):
        flags.satisfied("task_type", "the models of its flags are converted")
    else:
        flags.wrong("task_type", "only llmacc.megatron.GPT is converted")
    return layout


def _searched_batches(done: ConvertedScript) -> None:
    """The global batch, or the largest one that is allowed."""
    name = done.first("global_batch_size", "max_global_batch_size")
    done.batch = done.number(name, default=1)
    if not done.has(name):
        done.wrong("", "there is neither --max-global-batch-size nor --global-batch-size")
    elif name == "global_batch_size":
        done.carry(name, name, done.batch)
    else:
        done.carried(name, f"zerofit plan --max_global_batch_size {done.batch}")
        done.notes.append(f"lengths in samples or tokens are counted in updates of {done.batch} samples")
    done.none("micro_batch_size", "zerofit plan chooses it")
