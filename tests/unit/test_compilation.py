"""torch_compile: its values, how many graphs there are, and that a compiled model computes what another one does;
what auto takes, on machines that are made up: this one has no GPU."""

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers import recipe_of, refusal, tiny_model
from torch._dynamo.utils import counters

from zerofit.checkpoint.manager import EarlierRuns
from zerofit.estimate.allocations import AllocationTracker, FusedLayers
from zerofit.model.attention import set_attention
from zerofit.model.compilation import blocks_of, compile_model, round_embeddings
from zerofit.model.recomputation import enable_recomputation
from zerofit.training import run_configuration
from zerofit.training.export import compilation_line
from zerofit.training.run_configuration import choose_compilation, decide_compilation

LONG = pytest.mark.long
LAYERS, ROWS, TOKENS = 4, 2, 32
SHAPES = {"llama": {"num_hidden_layers": LAYERS}, "gpt2": {"n_layer": LAYERS}}


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    counters.clear()


def test_zero3_is_refused(under_torchrun):
    words = "torch_compile (--torch_compile). DeepSpeed gathers the weights of each module"
    assert words in refusal(under_torchrun, "zero3", "--torch_compile")
    assert under_torchrun("zero2", "--torch_compile")[1].name == "zero2"


def packed_rows(count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches whose rows are of two documents; where the first one ends differs."""
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 60, (ROWS, TOKENS), generator=draw)
        cuts = torch.randint(1, TOKENS, (ROWS,), generator=draw)
        positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]) for cut in cuts])
        yield {"input_ids": ids, "position_ids": positions, "labels": ids}


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        ("llama", False),
        ("llama", "selective"),
        pytest.param("llama", True, marks=LONG),
        pytest.param("gpt2", "selective", marks=LONG),
    ],
)
def test_all_blocks_run_one_graph(name, recomputed):
    """In evaluation there is one more for each kind of layer."""
    model = tiny_model(name, **SHAPES[name]).train()
    set_attention(model, "sdpa")
    plain, names = copy.deepcopy(model), list(model.state_dict())
    for each in (model, plain) if recomputed else ():
        enable_recomputation(each, recomputed, compiled=each is model)
    compile_model(model, "blocks", backend="aot_eager")
    for batch in packed_rows(5):
        for ours, theirs in zip(loss_and_gradients(model, batch), loss_and_gradients(plain, batch), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert counters["stats"]["unique_graphs"] == 1
    model.eval()
    with torch.no_grad():
        for batch in packed_rows(3):
            model(**batch)
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    assert list(model.state_dict()) == names


def test_what_the_compiler_fails_at_is_computed_as_it_is():
    """Where it was chosen by auto; where it was asked for, the run ends."""

    def broken(graph, inputs):
        raise RuntimeError("no Triton")

    batch = next(packed_rows(1))
    for falls_back in (True, False):
        torch._dynamo.reset()
        model, plain = tiny_model("llama"), tiny_model("llama")
        compile_model(model, "blocks", backend=broken, falls_back=falls_back)
        if falls_back:
            for ours, theirs in zip(loss_and_gradients(model, batch), loss_and_gradients(plain, batch), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            assert not counters["stats"]["unique_graphs"]
            assert compilation_line().startswith("compiled    nothing")
        else:
            with pytest.raises(Exception, match="no Triton"):
                loss_and_gradients(model, batch)


# ------------------------------------------------------------------------------------------------- the residual stream


def entering(model, dtype):
    """The dtypes in which hidden states enter the blocks, under autocast in a dtype."""
    seen = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args or [*kwargs.values()])[0].dtype), with_kwargs=True
        )
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(input_ids=torch.arange(48).reshape(2, 24)).logits.float().sum().backward()
    return set(seen)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_is_in_bf16_under_autocast_alone(family):
    assert entering(tiny_model(family), torch.bfloat16) == {torch.float32}
    for dtype, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (None, torch.float32)):
        model = tiny_model(family)
        round_embeddings(model)
        assert entering(model, dtype) == {expected}
        gradients = {each.grad.dtype for each in model.parameters() if each.grad is not None}
        assert gradients == {torch.float32}


# ------------------------------------------------------------------------------------------- what compiled layers keep


IDS = torch.arange(2 * 64).view(2, 64) % 97


def planned(model) -> int:
    """Bytes that the second layer keeps beside its output, as a plan counts them."""
    ledger, alive, layer = AllocationTracker(), [], model.model.layers[1]
    ledger.exclude([*model.parameters(), *model.buffers()])
    handles = FusedLayers(ledger).watch(layer)
    handles.append(layer.register_forward_pre_hook(lambda *_: alive.append(ledger.live)))
    handles.append(layer.register_forward_hook(lambda *_: alive.append(ledger.live)))
    with ledger, torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS).logits.sum()
    loss.backward()
    for handle in handles:
        handle.remove()
    return alive[1] - alive[0] - IDS.numel() * model.config.hidden_size * 4


def partitioned(model) -> int:
    """Bytes that the second layer keeps beside its inputs and weights, compiled with torch's partitioner."""
    known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}
    layer, hooks = model.model.layers[1], contextlib.ExitStack()

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def enter(_, args, kwargs):
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        known.update(tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, torch.Tensor))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

    layer.compile(backend="aot_eager_decomp_partition")
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: hooks.close())
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)


def test_it_is_what_torch_s_partitioner_keeps():
    model = tiny_model("llama", hidden_size=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=1)
    assert planned(model) == pytest.approx(partitioned(model), rel=0.1)


# ---------------------------------------------------------------------------------------------------------------- auto


CUDA = torch.device("cuda")


def a_strategy(sequence: int = 1, **changes):
    about = {"name": "ddp", "precision": "bf16", "shards_parameters": False, "divides_experts": False}
    return SimpleNamespace(**{**about, **changes}, layout=SimpleNamespace(sequence=sequence))


@pytest.mark.parametrize(
    ("options", "strategy", "how", "words"),
    [
        ({}, {}, {}, None),
        ({}, {}, {"num_updates": 299}, "299 updates, fewer than 300"),
        ({}, {"precision": "fp16"}, {"num_updates": 300}, None),
        ({}, {"precision": "fp32"}, {}, "precision is fp32"),
        ({}, {"shards_parameters": True, "name": "zero3"}, {}, "zero3 gathers"),
        ({}, {"sequence": 2, "name": "sp"}, {}, "sp splits rows"),
        ({}, {"divides_experts": True}, {}, "experts"),
        ({}, {}, {"config": SimpleNamespace(num_local_experts=8)}, "experts"),
        ({}, {}, {"config": SimpleNamespace(num_local_experts=None)}, None),
        ({"lora": True, "load_in_4bit": True}, {}, {}, "load_in_4bit is on"),
        ({"gradient_checkpointing": True, "activation_offload": True}, {}, {}, "activation_offload is on"),
        ({"gradient_checkpointing": True}, {}, {}, None),
        ({"packing": "none", "block_size": 4096}, {}, {}, "widths"),
        ({"packing": "none", "block_size": 64}, {}, {}, None),
        ({"preference_loss": "dpo", "block_size": 4096}, {}, {}, "widths"),
        ({"block_size_warmup": "32@6"}, {}, {}, "lets rows grow"),
        ({}, {}, {"missing": "Triton is not installed"}, "Triton"),
        ({}, {}, {"compiled_before": False}, "the run that it resumes was not"),
        ({}, {}, {"compiled_before": "blocks", "num_updates": 3}, None),
        ({}, {"shards_parameters": True}, {"compiled_before": "blocks"}, "gathers"),
    ],
)
def test_each_condition(options, strategy, how, words):
    found = choose_compilation(recipe_of(**options), a_strategy(**strategy), **how)
    assert found.value == (False if words else "blocks")
    assert (words or "") in found.why


def decided(recipe, device=CUDA, before=None, updates=4000, **strategy):
    return decide_compilation(recipe, a_strategy(**strategy), None, updates, before, device=device)


def test_a_decline_is_said_with_its_reason(monkeypatch):
    monkeypatch.setattr(run_configuration, "failing_compiler", lambda device: None)
    recipe = recipe_of()
    assert decided(recipe, updates=40) == (
        "auto: false, 40 updates, fewer than 300",
        ["layers are not compiled: 40 updates, fewer than 300"],
    )
    assert recipe.torch_compile is False
    assert decided(recipe_of(), torch.device("cpu")) == ("auto: false, without a GPU to train on", [])
    assert decided(recipe_of(torch_compile="blocks"), torch.device("cpu")) == (None, [])


def test_a_compiler_that_fails_is_a_note_under_auto_and_else_an_error(monkeypatch):
    monkeypatch.setattr(run_configuration, "failing_compiler", lambda device: "there is no C compiler (gcc)")
    recipe = recipe_of()
    _, (note,) = decided(recipe)
    assert recipe.torch_compile is False
    assert note == "layers are not compiled: there is no C compiler (gcc)"
    said = refusal(decided, recipe_of(torch_compile="blocks"))
    assert "torch_compile = blocks (--torch_compile): there is no C compiler" in said
    assert decided(recipe_of(torch_compile=False)) == (None, [])


def test_one_rank_without_a_compiler_leaves_it_out_on_all(monkeypatch):
    monkeypatch.setattr(run_configuration, "failing_compiler", lambda device: None)
    monkeypatch.setattr(run_configuration, "all_gather_objects", lambda mine: [mine, "Triton is not installed"])
    recipe = recipe_of()
    _, (note,) = decided(recipe)
    assert recipe.torch_compile is False
    assert "Triton" in note


def test_a_resumed_run_goes_on_as_it_was():
    recorded, plan = {"torch_compile": "blocks"}, SimpleNamespace(sources=("auto",))
    assert EarlierRuns(in_folder=recorded).compiled(plan) == "blocks"
    assert EarlierRuns(in_folder={"torch_compile": False}).compiled(plan) is False
    assert EarlierRuns(in_folder={}).compiled(plan) is False
    named = SimpleNamespace(sources=("run/checkpoints/update_2",))
    assert EarlierRuns(in_folder={"torch_compile": False}, of_checkpoint=recorded).compiled(named) == "blocks"
    assert EarlierRuns(in_folder=recorded).compiled(SimpleNamespace(sources=())) is None
