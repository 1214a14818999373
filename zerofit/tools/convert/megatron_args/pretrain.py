"""The conversion of pretrain_gpt.py's flags to a recipe and a strategy.

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
from zerofit.tools.convert.megatron_args.flags import MODEL_FLAG_PARTS, REPLICAS_NOTE, ZERO3_NOTE, flag_status
from zerofit.tools.convert.megatron_args.shape import (
    CONFIG_OPTIONS,
    FLAG_SYNONYMS,
    MACHINE_OPTIONS,
    PROCESS_OPTIONS,
    SEARCH_PROGRAM,
    FlagLedger,
    FlagRow,
    MegatronArgsOptions,
    MegatronCall,
    MegatronShape,
    compare_with_weights,
    positive_number,
    read_shape,
)

DEGREE_FLAGS = {  # {flag: (attribute of ConvertedLayout, its key in the pair's JSON)}
    "tensor_model_parallel_size": ("tensor", f"{TENSOR_KEY}.autotp_size"),
    "pipeline_model_parallel_size": ("pipeline", f"{PIPELINE_KEY}.stages"),
    "context_parallel_size": ("sequence", SEQUENCE_KEY),
    "ds_sequence_parallel_size": ("sequence", SEQUENCE_KEY),
}
ALL_DEGREES = (*DEGREE_FLAGS, "expert_model_parallel_size", "moe_expert_parallel_size")
DEFAULT_PROCESSES = 8  # of a machine, if the script does not say it
JSON_KEY_FLAGS = {  # {key of the DeepSpeed JSON: the flag that must agree with it}
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
}


@dataclass
class ConvertedLayout:
    """The processes and the strategy of the converted run.

    Attributes:
        world: number of processes on all machines. split: processes per copy of the model in Megatron.
        tensor, pipeline, sequence: degrees that are carried over.
        stage: of ZeRO (0: DDP). zero: zero_optimization of the script's DeepSpeed JSON.
        rank: of this machine. address, port: of machine 0.
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
        """The number of processes per copy of the model."""
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


def read_processes(flags: FlagLedger, call: MegatronCall, processes: int | None) -> ConvertedLayout:
    """Return the layout of the launcher's processes and machines, data-parallel only."""
    machines = call.machines
    remedy = "Set --num_processes N, of all machines"
    world = processes or (call.processes or DEFAULT_PROCESSES) * machines
    for noun, names in (("processes", PROCESS_OPTIONS), ("machines", MACHINE_OPTIONS)):
        number = call.launcher_option(names)
        if number is not None and not processes and positive_number(number) is None:
            flags.refuse("", f"the number of {noun}: a number was expected, and the launcher has {number!r}. {remedy}")
    if not processes and call.processes is None:
        words = f"num_processes: {world}, a guess: the launcher does not say. {remedy}"
        flags.rows["=processes"] = FlagRow("(processes)", "carried over", words)
    named = {"rank": "node_rank", "address": "master_addr", "port": "master_port"}
    given: dict[str, Any] = {name: value for name, flag in named.items() if (value := call.launcher_option((flag,)))}
    layout = ConvertedLayout(world, machines if world % machines == 0 else 1, **given)
    if not layout.port.isdigit():
        flags.refuse("", f"the port of machine 0: a number was expected, and the launcher has {layout.port}")
    return layout


def read_layout(flags: FlagLedger, call: MegatronCall, processes: int | None) -> ConvertedLayout:
    """Return the layout: processes, degrees and ZeRO stage. Degrees that are not carried over become ZeRO-3."""
    layout = read_processes(flags, call, processes)
    refused: dict[str, str] = {}
    for name in filter(flags.has, ALL_DEGREES):
        degree = flags.number(name, default=1)
        kind, _ = DEGREE_FLAGS.get(name, ("", ""))
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
    _choose_stage(flags, layout, bool(refused.keys() & DEGREE_FLAGS.keys()))
    for name in filter(flags.has, ALL_DEGREES):
        if name in refused:
            flags.unsupported(name, f"{refused[name]}{ZERO3_NOTE if layout.stage == 3 else REPLICAS_NOTE}")
        elif name not in flags.rows:
            flags.carried(name, f"the pair: {layout.strategy}, {DEGREE_FLAGS[name][1]}: {flags.text(name)}")
    if layout.tensor == 1:
        flags.unsupported("sequence_parallel", "it splits activations over tensor-parallel processes; there are none")
    return layout


def _choose_stage(flags: FlagLedger, layout: ConvertedLayout, replaces_degrees: bool) -> None:
    block = layout.zero.get("stage")
    stage = flags.number("zero_stage", default=None)
    if None not in (block, stage) and block != stage:
        flags.refuse("zero_stage", f"the DeepSpeed JSON says stage {block}: keep one of the two")
    stage = block if block is not None else stage
    stage = int(flags.has("use_distributed_optimizer")) if stage is None else stage
    if stage not in (0, 1, 2, 3):
        flags.refuse("zero_stage", "0, 1, 2 or 3 was expected")
        return
    min_stage = 3 if replaces_degrees else 1 if layout.replica_size > 1 else stage
    layout.stage = max(min_stage, stage) if layout.sequence == 1 else 2 if stage == 2 else 3
    if layout.pipeline > 1:
        layout.stage = 1
    instead = " instead of other kinds of parallelism" if replaces_degrees else ""
    for name in ("zero_stage", "deepspeed", "use_distributed_optimizer"):
        flags.carried(name, f"the pair: {layout.strategy}{instead}")


def _read_zero(flags: FlagLedger, layout: ConvertedLayout) -> None:
    """Read zero_optimization of the DeepSpeed JSON that the command line names. The flags decide its other keys."""
    name = flags.text("deepspeed_config")
    if name is None:
        return
    if not Path(name).is_file():
        flags.unsupported("deepspeed_config", "there is no such file here: nothing of it is carried over")
        return
    try:
        config = parse_json(read_text(Path(name)))
    except json.JSONDecodeError as error:
        flags.refuse("deepspeed_config", f"{name} is not valid JSON: {error}")
        return
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization", {}), dict):
        flags.refuse("deepspeed_config", f"{name} and its zero_optimization must be JSON objects")
        return
    layout.zero = config.pop("zero_optimization", {})
    flags.carried("deepspeed_config", "deepspeed.json: its zero_optimization")
    for key, value in config.items():
        flag = JSON_KEY_FLAGS.get(key)
        default = 1.0 if flag == "clip_grad" else value  # Megatron's
        if flag and value not in ("auto", flags.number(flag, float, default)):
            flags.refuse(flag, f"the DeepSpeed JSON says {key} = {value}: make them agree")
        if key in ("bf16", "fp16") and isinstance(value, dict) and value.get("enabled") is True and not flags.has(key):
            flags.refuse("", f"the DeepSpeed JSON has {key} on, and there is no --{key}: make them agree")
        flags.rows[f"json.{key}"] = FlagRow(f'  "{key}"', "no counterpart", "the flags and the pair decide it")


def make_pair(layout: ConvertedLayout, folder: Path) -> dict[str, str]:
    """Return {file name: text} of the pair: an accelerate YAML, and under ZeRO a DeepSpeed JSON."""
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
SENTENCEPIECE_TYPES = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
LR_DECAY_STYLES = ("linear", "cosine", "constant", "wsd")
SELECTIVE_NOTE = "linear layers' products and attention are kept, and all else is recomputed"
RECOMPUTATION_FLAGS = (
    "recompute_granularity recompute_activations checkpoint_activations deepspeed_activation_checkpointing "
    "activations_checkpoint_method"
).split()
SEARCHED_FLAGS = (*ALL_DEGREES, "data_parallel_size", "sequence_parallel", "use_distributed_optimizer", "zero_stage")
KNOWN_PROGRAMS = ("pretrain_gpt.py", "pretrain_llama.py", SEARCH_PROGRAM)
SIMPLE_FLAGS: dict[str, tuple[str, type, Any]] = {  # {flag: (option, type, Megatron's default if ours differs)}
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
    """The recipe of a Megatron script, and the ledger of the script's flags.

    Attributes:
        recipe: {option: value} in the order in which it is written.
        batch: samples of an update.
        vocabulary: number of tokens before padding, if it is known without the tokenizer's files.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    layout: ConvertedLayout = field(default_factory=lambda: ConvertedLayout(1, 1))
    shape: MegatronShape | None = None
    batch: int = 1
    vocabulary: int | None = None
    notes: list[str] = field(default_factory=list)

    def carry(self, flag: str, option: str, value: Any, note: str = "", *, default: Any = None) -> None:
        """Set an option of the recipe. `default` is Megatron's; it gets a row if the flag is not given."""
        self.recipe[option] = value
        words = f"{option}: {value}{note}"
        if default is not None and not self.has(flag):
            self.default(f"--{flag.replace('_', '-')} {default}", words)
        self.carried(flag, words)


def length_in_updates(script: ConvertedScript, prefix: str, option: str) -> int | None:
    """Return the smallest of --PREFIX-iters, --PREFIX-samples and --PREFIX-tokens, in updates; None without any."""
    batch = script.batch
    units = {"iters": 1, "samples": batch, "tokens": batch * script.recipe.get("block_size", 1)}
    lengths = {}
    for unit, size in units.items():
        name = f"{prefix}_{unit}"
        if script.has(name):
            number = script.number(name, default=0)
            round_down = name == "train_samples"  # Megatron drops an incomplete global batch
            lengths[name] = number // size if round_down else -(-number // size)
            script.carried(name, f"{option}: {lengths[name]}")
    smallest = min(lengths.values(), default=None)
    for name, updates in lengths.items():
        if updates != smallest:
            script.satisfied(name, f"{updates} updates: the run ends before, after {smallest}")
    return smallest


def convert_pretraining(call: MegatronCall, options: MegatronArgsOptions) -> ConvertedScript:
    """Convert a call of pretrain_gpt.py: return its recipe, with the status of each flag."""
    script = ConvertedScript.from_call(call)
    searched = call.program == SEARCH_PROGRAM
    script.layout = (_read_search_layout if searched else read_layout)(script, call, options.num_processes)
    if call.program not in KNOWN_PROGRAMS:
        script.refuse("", f"{call.program} is not read: give its line after --, with pretrain_gpt.py instead")
    script.shape = read_shape(script, call.program)
    for name, (option, kind, default) in SIMPLE_FLAGS.items():
        value: str | float | None = script.has(name) or None
        if kind is not bool:
            value = script.text(name) if kind is str else script.number(name, kind, default)
        if value is not None:
            script.carry(name, option, value, default=default)
    if options.model_name_or_path:
        script.recipe["model_name_or_path"] = options.model_name_or_path
        compare_with_weights(script, script.shape, options.model_name_or_path)
    elif script.shape:
        script.recipe["config_name"] = script.shape.family
        script.recipe["config_overrides"] = script.shape.overrides()
        name = "make_vocab_size_divisible_by"
        tensor = script.number("tensor_model_parallel_size", default=1)
        why = f" (times the {tensor} tensor-parallel processes, as in Megatron)" if tensor > 1 else ""
        script.carry(name, name, script.number(name, default=128) * tensor, why, default=128)
    _convert_tokenizer(script, options)
    _convert_data(script)
    (_convert_search_batches if searched else _convert_batches)(script)
    updates = script.recipe["max_train_steps"] = length_in_updates(script, "train", "max_train_steps")
    if not (updates or script.problems):
        script.refuse("", "the length of the run is unknown: --train-iters, --train-samples or --train-tokens")
    if minutes := script.number("exit_duration_in_mins"):
        script.carry("exit_duration_in_mins", "max_hours", round(minutes / 60, 4))
    batches = max(1, script.number("eval_iters", default=100))  # an evaluation cannot be left out
    script.carry("eval_interval", "eval_steps", script.number("eval_interval", default=1000), default=1000)
    note = f", {batches} global batches of {script.batch}; the same samples each time, Megatron uses different ones"
    script.carry("eval_iters", "max_eval_samples", batches * script.batch, note, default=100)
    _convert_optimizer(script)
    _convert_precision_and_memory(script)
    _convert_checkpoints_and_trackers(script, options)
    for name in script.flags:
        is_read = name in {*script.rows, *CONFIG_OPTIONS, *FLAG_SYNONYMS}
        if not is_read and flag_status(name)[0] == "unknown" and MODEL_FLAG_PARTS.search(name):
            script.refuse(name, "not a known flag, and by its name it changes the model. Remove it if it does not")
    return script


def _convert_tokenizer(script: ConvertedScript, options: MegatronArgsOptions) -> None:
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file")
    kind = script.text("tokenizer_type") or ("GPT2BPETokenizer" if script.has("vocab_file") else "")
    file = script.text("tokenizer_model")
    folder = options.tokenizer_name or script.text("tokenizer_name_or_path") or file
    if kind in SENTENCEPIECE_TYPES and not options.tokenizer_name:
        script.vocabulary = LLAMA_VOCABULARY
        folder = (os.path.dirname(file) or ".") if file else None
        if file and Path(file).name != "tokenizer.model":
            script.refuse("tokenizer_model", "copy it to FOLDER/tokenizer.model, and set --tokenizer_name FOLDER")
    if kind == "GPT2BPETokenizer" and not options.tokenizer_name:
        script.vocabulary = GPT2_VOCABULARY
        for name in ("vocab_file", "merge_file"):
            script.carry(name, name, script.text(name))
        if not all(map(script.text, ("vocab_file", "merge_file"))):
            script.refuse("", "GPT2BPETokenizer reads --vocab-file and --merge-file: name both")
        script.satisfied("tokenizer_type", "vocab_file and merge_file are of that kind")
    elif folder:
        script.recipe["tokenizer_name"] = folder
        for name in names:
            script.carried(name, f"tokenizer_name: {folder}")
    else:
        script.refuse("tokenizer_type", "the tokenizer is not named: say --tokenizer_name FOLDER")


def _convert_data(script: ConvertedScript) -> None:
    paths = script.flags.get("data_path")
    if paths:
        script.carry("data_path", "data_path", paths if len(paths) > 1 else paths[0])
        script.carry("split", "split", (script.text("split") or "969,30,1").replace(" ", ""))
    elif not script.problems:
        script.refuse("data_path", "there is no --data-path: training and evaluation come from one, by --split")
    if script.text("data_impl") not in (None, "mmap", "infer"):
        script.refuse("data_impl", "only mmap's .bin and .idx are read: prepare the corpus again with zerofit prepare")


def _convert_batches(script: ConvertedScript) -> None:
    layout = script.layout
    micro = script.number("micro_batch_size", default=0)
    if not micro:
        script.refuse("micro_batch_size", "there is no --micro-batch-size")
        return
    total = script.number("global_batch_size", default=micro * max(1, layout.world // layout.split))
    if not script.has("global_batch_size"):
        script.default("--global-batch-size", f"global_batch_size: {total}, micro-batch * data-parallel processes")
    replicas = max(count for count in range(1, layout.replicas + 1) if total % count == 0)
    if replicas < layout.replicas:
        noun = "processes" if layout.replica_size == 1 else f"replicas of {layout.replica_size} processes"
        script.notes.append(f"the global batch of {total} is divided by {replicas} {noun}, not {layout.replicas}")
        layout.world = replicas * layout.replica_size
        layout.machines = layout.machines if layout.world % layout.machines == 0 else 1
    micro_batch = max(size for size in range(1, micro + 1) if (total // replicas) % size == 0)
    note = f", accumulation {total // replicas // micro_batch}"
    script.carry("micro_batch_size", "per_device_train_batch_size", micro_batch, note)
    script.carry("global_batch_size", "global_batch_size", total)
    script.batch = total
    script.recipe["per_device_eval_batch_size"] = micro_batch


def _convert_optimizer(script: ConvertedScript) -> None:
    peak = script.number("lr", float)
    if not peak:
        script.refuse("lr", "there is no --lr")
        return
    script.carry("lr", "learning_rate", peak)
    if script.has("min_lr"):
        script.carry("min_lr", "min_lr_ratio", script.number("min_lr", float, 0.0) / peak, f", of {peak:g}")
    if script.text("optimizer") not in (None, "adam"):
        script.refuse("optimizer", "AdamW is the only optimizer here")
    if script.text("weight_decay_incr_style") not in (None, "constant"):
        script.refuse("weight_decay_incr_style", "weight decay is constant here")
    shape = (script.text("lr_decay_style") or "linear").lower()
    if shape not in LR_DECAY_STYLES:
        script.refuse("lr_decay_style", f"there are {', '.join(LR_DECAY_STYLES)}")
        return
    decay = length_in_updates(script, "lr_decay", "lr_decay_steps")
    warmup = length_in_updates(script, "lr_warmup", "num_warmup_steps") or 0
    length = decay or script.recipe["max_train_steps"] or 1
    if script.has("lr_warmup_fraction"):
        warmup = math.ceil(round(script.number("lr_warmup_fraction", float, 0.0) * length, 6))
        script.carried("lr_warmup_fraction", f"num_warmup_steps: {warmup}")
    if shape == "constant" and warmup:
        shape = "constant_with_warmup"
    script.carry("lr_decay_style", "lr_scheduler_type", shape, default="linear")
    if warmup:
        script.recipe["num_warmup_steps"] = warmup
    if shape.startswith("constant"):
        script.recipe.pop("min_lr_ratio", None)
        for name in ("min_lr", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"):
            script.satisfied(name, "a constant rate does not decay")
    elif decay:
        script.recipe["lr_decay_steps"] = decay
    if shape == "wsd":
        updates = length_in_updates(script, "lr_wsd_decay", "wsd_decay_ratio, updates")
        if not updates or script.text("lr_wsd_decay_style") != "linear":
            script.refuse("lr_decay_style", "give --lr-wsd-decay-iters, and say --lr-wsd-decay-style linear")
            return
        script.satisfied("lr_wsd_decay_style", "wsd ends in a straight line")
        script.recipe["wsd_decay_ratio"] = updates / length


def _convert_precision_and_memory(script: ConvertedScript) -> None:
    given = [name for name in ("fp16", "bf16") if script.has(name)]
    if len(given) == 2:
        script.refuse("fp16", "--bf16 is there as well: keep one of the two")
    script.recipe["precision"] = given[0] if given else "fp32"
    for name in given:
        script.carried(name, f"precision: {name}")
    if not given:
        script.default("neither --bf16 nor --fp16", "precision: fp32")
    # Recomputation: Megatron's --recompute-activations sets the granularity; its older flags mean full layers.
    value: str | bool = True
    note = ""
    if script.has("recompute_activations") or script.text("recompute_granularity") == "selective":
        value = "selective"
        note = f" ({SELECTIVE_NOTE})"
    for name in filter(script.has, RECOMPUTATION_FLAGS):
        script.carry(name, "gradient_checkpointing", value, note)
    if script.text("recompute_method") == "block":
        script.unsupported("recompute_method", "all layers are recomputed")
    if script.has("checkpoint_in_cpu"):
        if "gradient_checkpointing" in script.recipe:
            script.carry("checkpoint_in_cpu", "activation_offload", True)
        else:
            script.satisfied("checkpoint_in_cpu", "no layer is recomputed")


def _convert_checkpoints_and_trackers(script: ConvertedScript, options: MegatronArgsOptions) -> None:
    load = script.text("load")
    model = options.model_name_or_path
    if load and model:
        script.satisfied("load", f"model_name_or_path: {model}, from the option")
    elif load and load == script.text("save") and not script.has("finetune"):
        script.satisfied("load", "the same command resumes from the newest checkpoint of output_dir (resume: auto)")
    elif load:
        script.refuse("load", "Megatron's checkpoints are not read: set --model_name_or_path to a folder")
    elif script.has("finetune") and not model:
        script.refuse("finetune", "weights to begin with are not named: say --model_name_or_path FOLDER")
    trackers = {"wandb_project": "wandb", "tensorboard_dir": "tensorboard"}
    if given := [tracker for flag, tracker in trackers.items() if script.has(flag)]:
        script.recipe |= {"with_tracking": True, "report_to": given[0] if len(given) == 1 else "all"}
    script.carried("tensorboard_dir", "report_to: tensorboard; its files lie in the run's folder")
    if "wandb" in given:
        script.carry("wandb_project", "report_name", script.text("wandb_project"))


def _read_search_layout(flags: FlagLedger, call: MegatronCall, processes: int | None) -> ConvertedLayout:
    """Return the layout of a job that SEARCH_PROGRAM plans: --world-size and --local-world-size are its processes."""
    total = flags.number("world_size")
    layout = read_processes(flags, call, processes or total)
    flags.carried("world_size", f"zerofit plan --num_gpus {total}")
    local = flags.number("local_world_size")
    flags.carried("local_world_size", f"zerofit plan --gpus_per_node {local}")
    if local and layout.world % local == 0:
        layout.machines = layout.world // local
    for name in SEARCHED_FLAGS:
        flags.unsupported(name, "zerofit plan tries degrees and stages, and chooses")
    if (flags.text("task_type") or "GPT").endswith("GPT"):
        flags.satisfied("task_type", "the models of its flags are converted")
    else:
        flags.refuse("task_type", "only llmacc.megatron.GPT is converted")
    return layout


def _convert_search_batches(script: ConvertedScript) -> None:
    """Read the global batch, or the largest one that is allowed."""
    name = script.first_of("global_batch_size", "max_global_batch_size")
    script.batch = script.number(name, default=1)
    if not script.has(name):
        script.refuse("", "there is neither --max-global-batch-size nor --global-batch-size")
    elif name == "global_batch_size":
        script.carry(name, name, script.batch)
    else:
        script.carried(name, f"zerofit plan --max_global_batch_size {script.batch}")
        script.notes.append(f"lengths in samples or tokens are counted in updates of {script.batch} samples")
    script.unsupported("micro_batch_size", "zerofit plan chooses it")
