"""The strategy of a Megatron command line: the number of processes, the ZeRO stage, and the strategy pair."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zerofit.recipe.files import read_text
from zerofit.recipe.megatron_flags import DATA_PARALLEL, DEGREE
from zerofit.recipe.parsing import parse_json, read_yaml
from zerofit.recipe.places import place
from zerofit.strategy.layout import PIPELINE, SEQUENCE, TENSOR, with_degrees
from zerofit.tools.convert.megatron_args.ledger import MACHINES, PROCESSES, Call, FlagLedger, FlagRow

SPLITTING = {  # {flag: (the degree of the layout, its key in the pair's JSON)}
    "tensor_model_parallel_size": ("tensor", f"{TENSOR}.autotp_size"),
    "pipeline_model_parallel_size": ("pipeline", f"{PIPELINE}.stages"),
    "context_parallel_size": ("sequence", SEQUENCE),
    "ds_sequence_parallel_size": ("sequence", SEQUENCE),
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
    world = processes or (call.processes or FALLBACK) * machines
    if not processes:
        _say_processes(flags, call, world)
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
        layout.split *= degree if name in SPLITTING else 1
        if degree == 1:
            flags.satisfied(name, "1: it splits nothing")
        elif why := _take_degree(layout, name, degree):
            refused[name] = why
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


def _say_processes(flags: FlagLedger, call: Call, world: int) -> None:
    remedy = "Set --num_processes N, of all machines"
    for what, names in (("processes", PROCESSES), ("machines", MACHINES)):
        if call.of_launcher(names) == "":
            flags.wrong("", f"the number of {what}: the launcher's option has no value. Set its variable, or {remedy}")
    if (said := call.of_launcher(PROCESSES)) in ("gpu", "auto"):
        flags.wrong("", f"the number of processes: {said} is as many GPUs as a machine has. {remedy}")
    elif call.processes is None:
        words = f"num_processes: {world}, a guess: the launcher does not say. {remedy}"
        flags.rows["=processes"] = FlagRow("(processes)", "carried over", words)


def _take_degree(layout: Layout, name: str, degree: int) -> str:
    """Take a degree over into the layout. Returns why it cannot be; empty: it is taken."""
    kind, _ = SPLITTING.get(name, ("", ""))
    size = layout.replica_size * degree
    if not kind:
        return "not supported: "
    if kind == "sequence" and layout.replica_size > 1:
        return "rows are not split together with another kind of parallelism: "
    if layout.world % size:
        return f"num_processes = {layout.world} is not a multiple of {size}: "
    setattr(layout, kind, degree)
    return ""


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
    files, settings = {}, read_yaml(place(f"accelerate_configs/{layout.strategy}.yaml"))
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
