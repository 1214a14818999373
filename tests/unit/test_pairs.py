"""Strategy pairs: every file through the real parsers, "auto" filled in, contradictions refused."""

import json

import pytest
import yaml
from helpers import ROOT, check_refusal, recipe_of, refusal

from zerofit.recipe import ClmRecipe, UserError
from zerofit.strategy import launch as launch_module
from zerofit.strategy.batches import resolve_batches
from zerofit.strategy.deepspeed_config import resolve_config
from zerofit.strategy.deepspeed_json import read_deepspeed_config
from zerofit.strategy.launch import FSDP_VALUES, Launch, check_launch, find_launch, problems_of_yaml
from zerofit.strategy.layout import ParallelLayout, take_degrees
from zerofit.strategy.read import read_strategy

YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))


def launch(json_path=None, world_size=2, **changes) -> Launch:
    settings = {"world_size": world_size, "rank": 0, "deepspeed": True, "precision": None,
                "json_path": None if json_path is None else str(json_path), "config_file": "some.yaml"}  # fmt: skip
    return Launch(**{**settings, **changes})


def layout_of(config: dict, world_size: int = 2) -> ParallelLayout:
    return ParallelLayout(world_size, 0, *take_degrees(config, "mine.json"))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_through_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    content = yaml.safe_load(path.read_text())
    section = content.get("deepspeed_config") or {}
    assert not problems_of_yaml(content, str(path))
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header) >= 3, "what it does, what it needs, the command"
    assert f"accelerate launch --config_file accelerate_configs/{path.stem}.yaml" in " ".join(header)
    if "deepspeed_config_file" in section:
        assert section["deepspeed_config_file"] == f"ds_configs/{path.stem}.json"
        assert (ROOT / section["deepspeed_config_file"]).is_file()
    settings = content.get("fsdp_config") or {}
    assert bool(settings) == (path.stem in ("fsdp2", "hsdp", "ep"))
    assert all(str(value).lower() in FSDP_VALUES[key] for key, value in settings.items())
    for owned in ("mixed_precision", "gradient_accumulation_steps", "gradient_clipping"):
        assert owned not in content
        assert owned not in section, f"{owned} belongs to the recipe"


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_json_through_deepspeed(path, precision, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    config, source, _ = read_deepspeed_config(launch(path))
    options = recipe_of(precision=precision, global_batch_size=16, per_device_train_batch_size=4, adam_beta2=0.95)
    layout = layout_of(config, 4)
    assert (layout.tensor > 1) == path.stem.startswith(("tp", "3d"))
    assert (layout.pipeline > 1) == (path.stem in ("pp", "3d"))
    assert (layout.sequence > 1) == (path.stem == "sp")
    resolved, batches = resolve_config(config, source, options, layout)
    resolved["bf16"] = {"enabled": precision == "bf16"}
    left_to_accelerate = {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
    zero = resolved["zero_optimization"]
    assert {key for key, value in zero.items() if value == "auto"} <= left_to_accelerate
    zero.update(dict.fromkeys(left_to_accelerate & zero.keys(), 1000))
    resolved["fp16"] = {"enabled": False}
    assert "auto" not in json.dumps(resolved)
    samples_per_micro_step = 4 * layout.data_size
    assert (batches.micro_batch, batches.accumulation, batches.global_batch) == (4, 16 // samples_per_micro_step, 16)
    assert resolved["optimizer"]["params"]["betas"] == [0.9, 0.95]
    one_process = {"train_batch_size": 4 * batches.accumulation}  # the parser believes in it
    parsed = DeepSpeedConfig({**resolved, **one_process})
    assert parsed.zero_optimization_stage == zero["stage"]
    assert parsed.bfloat16_config.enabled == (precision == "bf16")
    assert not parsed.timers_config.enabled, "it would wait for the device in each pass"


# --------------------------------------------------------------------------------------------- what a user's JSON says


def resolve(tmp_path, content: dict, options: ClmRecipe) -> tuple[dict, ClmRecipe]:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **content}))
    config, source, _ = read_deepspeed_config(launch(path))
    resolved, _ = resolve_config(config, source, options, layout_of(config))
    return resolved, options


def test_what_the_recipe_leaves_open_the_json_decides(tmp_path):
    adam = {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99]}}
    content = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}
    resolved, options = resolve(tmp_path, {**content, "optimizer": adam}, recipe_of())
    assert resolved["train_batch_size"] == 16
    assert (options.max_grad_norm, options.learning_rate, options.adam_beta2) == (0.5, 3e-4, 0.99)
    assert options.source("learning_rate").endswith("mine.json")
    assert resolved["optimizer"]["params"]["eps"] == 1e-8


@pytest.mark.parametrize(
    ("content", "options", "accumulation"),
    [
        ({"train_batch_size": 32}, {"per_device_train_batch_size": 4}, 4),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 8}, 2),
        ({"train_batch_size": 32}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, 2),
        ({"train_batch_size": 32.0, "train_micro_batch_size_per_gpu": 4e0}, {}, 4),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 1}, {}, 1),  # the micro-batch follows from both
    ],
)
def test_the_accumulation_follows_from_a_jsons_train_batch_size(tmp_path, content, options, accumulation):
    resolved, _ = resolve(tmp_path, content, recipe_of(**options))
    sizes = resolved["train_batch_size"], resolved["gradient_accumulation_steps"]
    assert json.dumps(sizes) == f"[32, {accumulation}]"


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, ["gradient_clipping = 0.5", "max_grad_norm = 1.0"]),
        ({"train_batch_size": 5}, {"per_device_train_batch_size": 8}, ["batch_size = 5", "16"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"learning_rate": 1e-4}, ["lr = 0.001", "0.0001"]),
        ({"optimizer": {"type": "Lion", "params": {}}}, {}, ["Lion", "AdamW"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}},
            {"warmup_ratio": 0.1},
            ["warmup_num_steps = 9", "warmup_ratio = 0.1"],
        ),
    ],
)
def test_contradictions_name_both_values_and_both_sources(tmp_path, content, options, words):
    check_refusal(["mine.json", *words], resolve, tmp_path, content, recipe_of(OF_FILE, **options))


@pytest.mark.parametrize(("content", "flags", "found", "words"), [
    ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, {"gradient_clipping": 1.0}, "gradient_clipping = 0.5"),
    ({"gradient_accumulation_steps": 3}, {"gradient_accumulation_steps": 4},
     {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 3"),
    ({"train_micro_batch_size_per_gpu": 2}, {"per_device_train_batch_size": 4},
     {"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu = 2"),
    ({"train_batch_size": 64}, {"global_batch_size": 32}, {"train_batch_size": 32}, "train_batch_size = 64"),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
     {"per_device_train_batch_size": 4}, {"train_batch_size": 32}, "train_batch_size = 64"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"learning_rate": 1e-4},
     {"lr": 1e-4}, "params.lr = 0.001"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}, {"adam_beta2": 0.95},
     {"betas": [0.9, 0.95]}, "betas[1] = 0.99"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, {"lr_scheduler_type": "cosine"}, {},
     'scheduler.type = "WarmupLR"'),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}, {"num_warmup_steps": 7}, {},
     "warmup_num_steps = 5"),
])  # fmt: skip
def test_a_flag_wins_over_the_json(tmp_path, content, flags, found, words):
    resolved, options = resolve(tmp_path, content, recipe_of(**flags))
    params = resolved.get("optimizer", {}).get("params", {})
    assert {name: {**resolved, **params}[name] for name in found} == found
    assert {name: getattr(options, name) for name in flags} == flags
    assert any(words in note and next(iter(flags)) in note for note in options.left_out), options.left_out


OF_FILE = "recipe.yaml, line 3"
DISK = {"device": "nvme", "nvme_path": "/tmp"}


def zero(stage: int, **settings) -> dict:
    return {"zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gradient_cliping": 1.0}, ["gradient_cliping", "Did you mean gradient_clipping?"]),
        ({"bf16": True}, ["bf16 = true", "expected an object"]),
        ({"zero_optimization": True}, ["zero_optimization = true", "expected an object"]),
        (zero(2, overlap_com=True), ["zero_optimization.overlap_com", "overlap_comm?"]),
        (zero(3, offload_optimizer=DISK, offload_param=DISK), ['.offload_param.device = "nvme"', 'Write "cpu"']),
        (zero(2, offload_optimizer=DISK), ["under stage 2", "ds_configs/zero3_offload_nvme.json"]),
        (zero(7), ["zero_optimization.stage = 7"]),
        ({"tensor_parallel": {"autotp_size": 3}}, ["num_processes = 2 is not", "= 3. Use --num_processes 3"]),
        ({"curriculum_learning": {"enabled": True}}, ["curriculum_learning = ", "order of samples"]),
        ({"fp16": {"enabled": "auto", "loss_scale_windw": 1000}}, ["loss_scale_window?"]),
        ({"comms_logger": {"enabled": True, "verbos": True}}, ["Did you mean verbose?"]),
        ({"prescale_gradients": "yes"}, ['prescale_gradients = "yes"']),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, ["Did you mean params?"]),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ["its place is gradient_clipping"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, ["the optimizer is AdamW"]),
        ({"train_micro_batch_size_per_gpu": 4.5}, ["train_micro_batch_size_per_gpu = 4.5: it must be an integer"]),
        ({"train_micro_batch_size_per_gpu": 0}, ["train_micro_batch_size_per_gpu = 0: it must be above 0"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping = NaN: it must be a finite number"]),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [2, 0.9]}}}, ["betas[0] = 2: it must be below 1"]),
        ({"scheduler": {"type": "WarmupLR", "params": None}}, ["scheduler.params = None: expected an object"]),
        ({"wandb": {"enabled": True}}, ["wandb.enabled = true", "open a second run", "--report_to wandb"]),
    ],
)
def test_wrong_types_and_unknown_keys(tmp_path, content, words):
    check_refusal(words, resolve, tmp_path, content, recipe_of())


def read(tmp_path, **content) -> tuple[dict, list[str]]:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **content}))
    config, _, notes = read_deepspeed_config(launch(tmp_path / "mine.json"))
    return config, notes


def old_names() -> dict[str, dict]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        name: field
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if field.alias or (field.json_schema_extra or {}).get("deprecated")
    }


def test_each_other_name_of_a_setting_is_read_as_deepspeed_reads_it(tmp_path):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert len(old_names()) >= 12
    for name, field in old_names().items():
        section = {"stage": 3, name: True if "bool" in str(field.annotation) else 12345}
        config, notes = read(tmp_path, zero_optimization=dict(section))
        made = config["zero_optimization"]
        assert name not in made, name
        ours, theirs = (DeepSpeedZeroConfig(**each).model_dump(exclude={name}) for each in (made, section))
        assert ours == theirs, name
        assert bool(field.alias) != any(name in note for note in notes), name  # what is deprecated is said


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}, ["Did you mean stage3_prefetch_bucket_size?"]),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, ["deprecated parameter 'cpu_offload'"]),
        ({"cpu_offload_params": True}, ["cpu_offload_params", "Did you mean offload_param?"]),
        ({"offload_param": "cpu"}, ["expected an object", '{"device": "cpu"}']),
        ({"offload_optimizer": {"device": "cpu", "pin_memry": True}}, ["offload_optimizer.pin_memry", "pin_memory?"]),
        ({"offload_optimizer": {"device": "disk"}}, ["offload_optimizer.device", "nvme"]),
        ({"overlap_comm": "maybe"}, ["overlap_comm", "valid boolean"]),
        ({"reduce_bucket_size": -1}, ["reduce_bucket_size = -1"]),
    ],
)
def test_what_deepspeed_does_not_translate_is_refused(tmp_path, section, words):
    check_refusal(["mine.json", *words], read, tmp_path, zero_optimization={"stage": 3, **section})


def test_older_forms_and_words_of_truth(tmp_path):
    config, notes = read(tmp_path, bf16={"enabled": "on"})
    assert config["bf16"] == {"enabled": True}
    assert len(notes) == 1
    assert read(tmp_path, fp16={"enabled": 1})[0]["fp16"]["enabled"] is True
    assert read(tmp_path, bfloat16={"enabled": True})[0]["bf16"] == {"enabled": True}
    adam = {"type": "AdamW", "params": {"adam_w_mode": True, "bias_correction": True, "torch_adam": True}}
    params = resolve(tmp_path, {"optimizer": adam}, recipe_of())[0]["optimizer"]["params"]
    assert params.keys() == {"lr", "betas", "eps", "weight_decay", "torch_adam"}


def test_numbers_and_truth_values_in_quotes_are_read(tmp_path):
    path = tmp_path / "mine.json"
    content = {
        "wall_clock_breakdown": "true",
        "gradient_clipping": "1.0",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "5e-4"}},
    }
    path.write_text(json.dumps({**content, "zero_optimization": {"stage": 2, "reduce_bucket_size": "2e8"}}))
    config, _, notes = read_deepspeed_config(launch(path))
    assert (config["wall_clock_breakdown"], config["gradient_clipping"]) == (True, 1)
    assert config["optimizer"]["params"]["lr"] == 5e-4
    assert config["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert len(notes) == 4


def test_a_broken_json(tmp_path):
    for text, words in (
        ("{,}", "not valid JSON"),
        ('{"bf16": {"enabled": 1},} // mine', "no comments, no comma behind the last value"),
        ('{"bf16": {"enabled": 1, "enabled": 0}}', "enabled is there twice"),
    ):
        (tmp_path / "broken.json").write_text(text)
        assert words in refusal(read_deepspeed_config, launch(tmp_path / "broken.json"))


# ------------------------------------------------------------------------------------------------ what accelerate says


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Pretend that `accelerate launch --config_file FILE` started this process."""

    def pretend(content: dict, **variables: str) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(content))
        command = ["accelerate", "launch", "--config_file", str(path)]
        monkeypatch.setattr(launch_module, "find_launcher", lambda: launch_module.Launcher(command, 0.0, False))
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return pretend


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"zero_stage": 2, "offload_optimiser_device": "cpu"}, "offload_optimiser_device. Did you mean offload_optim"),
        ({"deepspeed_config_file": "x.json", "gradient_clipping": 1.0}, "gradient_clipping = 1.0"),
    ],
)
def test_nested_keys_that_would_be_ignored_are_refused(launched, section, words):
    launched({"deepspeed_config": section})
    assert words in refusal(check_launch, find_launch())


def test_precision_in_two_places(launched):
    launched({"mixed_precision": "bf16"}, ACCELERATE_MIXED_PRECISION="bf16")
    with pytest.raises(UserError, match=r"bf16 \(.*mine.yaml\) and fp32 \(recipe.yaml, line 3\)"):
        read_strategy(recipe_of(OF_FILE, precision="fp32"))
    by_flag = recipe_of(precision="fp32")
    assert read_strategy(by_flag).precision == "fp32"
    assert "precision bf16" in by_flag.left_out[0]
    assert read_strategy(recipe_of(precision="bf16")).precision == "bf16"
    assert read_strategy(recipe_of()).precision == "bf16"


def test_precision_of_a_json(launched, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    launched({}, **variables)
    assert read_strategy(recipe_of()).deepspeed["bf16"]["enabled"] is True
    with pytest.raises(UserError, match=r"bf16 \(.*mine.json\) and fp32 \(recipe.yaml, line 3\)"):
        read_strategy(recipe_of(OF_FILE, precision="fp32"))
    assert read_strategy(recipe_of(precision="fp32")).deepspeed["bf16"]["enabled"] is False


def test_offload_in_a_plain_yaml(launched):
    launched(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_nvme_path": "/fast"}},
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="nvme",
    )
    disk = {"device": "nvme", "nvme_path": "/fast"}
    assert read_strategy(recipe_of()).deepspeed["zero_optimization"]["offload_optimizer"] == disk
    launched(
        {},
        ACCELERATE_DEEPSPEED_ZERO_STAGE="2",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="none",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu",
    )
    assert "offload_param has no effect under stage 2" in read_strategy(recipe_of()).notes[0]


def test_clipping_in_a_plain_yaml(launched):
    launched({}, ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_GRADIENT_CLIPPING="0.5")
    assert read_strategy(recipe_of()).deepspeed["gradient_clipping"] == 0.5
    with pytest.raises(UserError, match=r"mine\.yaml says gradient_clipping = 0\.5, and max_grad_norm = 1\.0"):
        read_strategy(recipe_of(OF_FILE, max_grad_norm=1.0))


# ------------------------------------------------------------------------------------------------------------- batches


def test_batches_that_do_not_fit_say_what_would():
    for options, words in (
        ({"per_device_train_batch_size": 5, "global_batch_size": 24}, "make it a multiple of 10"),
        ({"per_device_train_batch_size": 4, "global_batch_size": 24, "gradient_accumulation_steps": 2}, "is 3"),
        ({"per_device_train_batch_size": 2, "global_batch_size": 24, "global_batch_warmup": "16@9"}, "4, 8, 12"),
    ):
        assert words in refusal(resolve_batches, recipe_of(**options), 2)
