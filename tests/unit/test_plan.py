"""`zerofit plan`: sums against hand-computed bytes, traces against real passes, and the command."""

import json

import pytest
import torch
import transformers
from helpers import recipe_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from zerofit.cli import main
from zerofit.estimate.allocations import MATRIX, unused_bytes
from zerofit.estimate.peak import trace_cache
from zerofit.estimate.planned_model import read_planned_model
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import Seq2SeqRecipe
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.plan import planner as planner_module

ON_GPUS = ["--gpu", "a100-40gb", "--num_gpus", "16"]
RECIPE = ["--task", "clm", "--config_name", "gpt2", "--block_size", "32", "--precision", "bf16",
          "--config_overrides", "n_layer=3,n_head=2,n_embd=32,n_positions=32,vocab_size=512"]  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "held", "needed"),
    [
        ([8, 8, -8, -8], 20 - 16, 20 - 16),  # a segment of 20 MiB holds two of 8 MiB,
        ([8, 8, 8, -8, -8, -8], 40 - 24, 40 - 24),  # and not three
        ([8, 8, 4, -4, -8, -8], 0, 0),
        ([12, -12, 11.5, -11.5], 0, 0),  # what is left of it is too little to be split off
        ([12, -12, 14, -14], 12, 0),  # the segment of 12 MiB is of no use to one of 14, and can go back to the driver
        ([12, 2, -12, 13, -13, -2], 32 - 15, 32 - 15),  # that of 2 MiB has a segment of 20
        ([6, 6, -6, -6, 12, -12], 20 - 12, 20 - 12),  # neighbours join
        ([0.5, -0.5], 0, 0),  # small blocks lie elsewhere
    ],
)
def test_what_the_allocator_holds_beyond_tensors(blocks, held, needed):
    """MiB; CUDACachingAllocator.cpp's sizes of segments, best fit, splitting and joining, by hand."""
    found = unused_bytes(tuple(int(size * 2**20) for size in blocks))
    assert (found.held, found.needed) == (held * 2**20, needed * 2**20)


def planned(capsys, *flags: str) -> dict:
    assert main(["plan", *RECIPE, *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_largest_batch_fits_and_the_next_does_not(capsys):
    found = planned(capsys, "--gpu", "cpu", "--gpu_memory", "128MiB", "--num_gpus", "2", "--strategies", "ddp,zero3")
    assert {one["strategy"] for one in found["largest"]} == {"ddp", "zero3"}
    for largest in found["largest"]:
        sizes = {
            one["per_device_train_batch_size"]: one
            for one in found["predictions"]
            if one["strategy"] == largest["strategy"]
        }
        size = largest["per_device_train_batch_size"]
        assert sizes[size]["fits"]
        assert not sizes[size + 1]["fits"]
        assert sizes[size]["peak_allocated_bytes"] == sum(sizes[size]["components"].values()) <= 128 * 2**20


@pytest.mark.parametrize("refuses", ["_can_fork", "_can_differentiate"])
def test_a_plan_is_the_same_in_one_process_and_in_two(refuses, monkeypatch, capfd):
    """Also where a copy of this process cannot be made, or refuses to differentiate as one of torch 2.14 does."""
    monkeypatch.setattr(planner_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(planner_module, "_can_fork", lambda: True)
    flags = (*ON_GPUS, "--strategies", "ddp,zero2", "--batch_sizes", "1,2")
    several = planned(capfd, *flags)
    monkeypatch.setattr(planner_module, refuses, bool)  # False; a lambda cannot be sent to a copy
    assert several == planned(capfd, *flags)
    assert len(several["predictions"]) >= 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h100-80g"], "Did you mean h100-80gb?"),
        (["--gpu", "cpu"], "set the memory of one process"),
        (["--gpu", "h100-80gb", "--num_gpus", "12"], "gpus_per_node = 8"),
        (["--gpu", "v100-32gb", "--strategies", "single"], "--precision fp16"),
        ([*ON_GPUS, "--max_global_batch_size", "8"], "at least 16"),
        (["--gpu", "cpu", "--gpu_memory", "lots"], "gpu_memory = 'lots'"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_message(capsys, flags, words):
    strategies = [] if "--strategies" in flags else ["--strategies", "ddp,zero2"]
    assert main(["plan", *RECIPE, *flags, *strategies]) == 2
    assert capsys.readouterr().err.count(words) == 1  # one reason, however many strategies have it


def test_a_model_without_a_configuration_at_hand(capsys):
    flags = "--task clm --model_name_or_path ./missing/model --gpu h100-80gb --strategies single".split()
    assert main(["plan", *flags]) == 2
    assert "--architecture" in capsys.readouterr().err
    assert main(["plan", *flags, "--architecture", "gpt2", "--batch_sizes", "1"]) == 0
    assert "124,439,808 parameters" in capsys.readouterr().out


def test_a_published_model_is_planned_without_network_or_kernels(capsys):
    flags = ["--task", "clm", "--precision", "bf16", "--gpu", "a100-80gb", "--strategies", "single", "--batch_sizes",
             "1", "--attn_implementation", "flash_attention_2"]  # fmt: skip
    assert main(["plan", *flags, "--model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct"]) == 0
    assert "494,032,768 parameters" in capsys.readouterr().out


def test_a_model_from_scratch_has_the_vocabulary_of_the_named_tokenizer(byte_tokenizer):
    shape = "n_layer=1,n_head=2,n_embd=32,n_positions=32"
    recipe = recipe_of(config_name="gpt2", config_overrides=shape, tokenizer_name=str(byte_tokenizer))
    assert read_planned_model(recipe, "clm", on_gpu=False).config.vocab_size == 300
    overrides = f"{shape},vocab_size=200"
    recipe = recipe_of(config_name="gpt2", config_overrides=overrides, tokenizer_name=str(byte_tokenizer))
    with pytest.raises(UserError, match="vocab_size"):
        read_planned_model(recipe, "clm", on_gpu=False)


def test_traced_products_are_those_of_a_real_pass():
    sizes = "n_layer=3,n_head=4,n_embd=64,n_positions=48,vocab_size=256,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    recipe = recipe_of(config_name="gpt2", config_overrides=sizes, block_size=48, loss="full")
    planned_model = read_planned_model(recipe, "clm", on_gpu=False)
    model = AutoModelForCausalLM.from_config(planned_model.config, attn_implementation="sdpa")
    ids = torch.zeros(2, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    steps = planned_model.tracer(PlannedStrategy("single", ParallelLayout(), "fp32", None)).steps(2)
    traced = sum(one.flops for step in steps for one in step.operations if one.kind == MATRIX)
    assert traced == counter.get_total_flops() > 0  # it does not know a CPU's attention


def test_the_parts_of_a_time_add_up_and_a_cpu_has_none(capsys):
    found = planned(capsys, *ON_GPUS, "--strategies", "ddp", "--batch_sizes", "4")["predictions"][0]
    assert found["seconds_per_update"] == pytest.approx(sum(found["seconds"].values()))
    assert found["tokens_per_s"] == pytest.approx(4 * 32 * found["layout"]["data"] / found["seconds_per_update"])
    assert found["bound"] in found["seconds"]
    flags = "--gpu cpu --gpu_memory 400MiB --num_gpus 2 --strategies ddp --batch_sizes 4".split()
    assert planned(capsys, *flags)["predictions"][0]["seconds_per_update"] is None


LARGER = [
    "--block_size",
    "512",
    "--config_overrides",
    "n_layer=3,n_head=16,n_embd=2048,n_positions=512,vocab_size=8192",
]


def test_the_fastest_come_first(capsys):
    found = planned(capsys, *LARGER, *ON_GPUS, "--strategies", "all", "--batch_sizes", "4")
    of_layouts = {(one["strategy"], *one["layout"].values()): one["tokens_per_s"] for one in found["predictions"]}
    order = [of_layouts[one["strategy"], *one["layout"].values()] for one in found["best"]]
    assert order == sorted(order, reverse=True)
    speeds = {one["strategy"]: one["tokens_per_s"] for one in found["predictions"]}
    assert len(order) > 6
    assert speeds["zero3"] > max(speeds["zero3_offload_optimizer"], speeds["zero3_offload"])
    assert speeds["zero2"] > speeds["zero2_offload"]


def test_padded_rows_take_the_time_of_their_mean_length_and_the_memory_of_the_longest(capsys):
    flags = [*LARGER, *ON_GPUS, "--strategies", "ddp", "--batch_sizes", "4", "--packing", "none"]
    full, short = (planned(capsys, *flags, *more)["predictions"][0] for more in ([], ["--mean_length", "128"]))
    assert short["peak_allocated_bytes"] == full["peak_allocated_bytes"]
    assert short["seconds_per_update"] < full["seconds_per_update"]
    assert short["tokens_per_s"] == pytest.approx(128 * 4 * 16 / short["seconds_per_update"])


SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 90}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 90,
      "decoder_start_token_id": 0}  # fmt: skip
MODELS = [transformers.BlenderbotConfig(**SMALL), transformers.BartConfig(**SMALL), transformers.T5Config(**T5)]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
def test_keys_and_values_are_those_of_a_search(config):
    batch, beams, source, target = 3, 2, 7, 5
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    written = model.generate(
        torch.full((batch, source), 8),
        num_beams=beams,
        min_new_tokens=target,
        max_new_tokens=target,
        return_dict_in_generate=True,
    )
    cache = written.past_key_values
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    with torch.device("meta"):
        counted = trace_cache(transformers.AutoModelForSeq2SeqLM.from_config(config))
    recipe = Seq2SeqRecipe(max_source_length=source, max_target_length=target)
    parts = counted.parts(recipe, batch * beams, 4)
    assert parts["keys and values"] == held
    assert parts["activations"] == batch * beams * source * 32 * 4
