"""Private parts of other libraries stand in zerofit/compat alone, and the libraries that are installed have them."""

import contextlib
import importlib
import inspect
import os
import re
import sys
import tempfile
from datetime import timedelta
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from helpers import ROOT, small_sizes, tiny_model

sys.path.insert(0, str(ROOT / "scripts"))
from private_parts import find_uses, sources

MOST_PARTS, MOST_NAMES = 40, 70  # in zerofit/compat


@pytest.fixture(scope="module")
def uses():
    return find_uses(sources())


def test_private_parts_stand_in_compat_alone(uses):
    elsewhere = [use for use in uses if not use.is_in_compat and not use.is_of_device]
    assert not elsewhere, "a private part of another library: look for a public one, else move it into zerofit/compat"


def test_compat_is_small(uses):
    """At most 40 parts, each with its reason; some stand on several names."""
    assert 20 <= len(PARTS) <= MOST_PARTS
    assert len([use for use in uses if use.is_in_compat]) <= MOST_NAMES
    assert len([use for use in uses if use.is_of_device]) <= 9, "a backend of these libraries, for tests"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from torch import _C", "torch._C"),
        ("import torch\nx = torch._C.function()", "torch._C"),
        ("def f(engine): return getattr(engine, '_step', None)", "_step"),
        ("import deepspeed\ndeepspeed.initialize = None", "deepspeed.initialize"),
        ("import torch\npatch.object(torch.distributed, 'get_rank', f)", "torch.distributed.get_rank"),
        ("import importlib\nx = importlib.import_module('a.b')\nx.c = 1", "a.b.c"),
        ("from transformers.activations import ACT2FN\nACT2FN['gelu'] = 1", "transformers.activations.ACT2FN[...]"),
        ("def f(config): config.save_pretrained = lambda path: None", "save_pretrained"),
        (
            "from torch.utils.data import DataLoader\nclass A(DataLoader):\n def _get_iterator(self): pass",
            "torch.utils.data.DataLoader._get_iterator",
        ),
        # Its own parts, Python's, and what is documented.
        ("class A:\n def _f(self): return self._g\n def g(self, other): self._g = other._f", None),
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", None),
        ("def f(model): model.forward = lambda x: x", None),
    ],
)
def test_what_is_found(line, found):
    assert [use.name for use in find_uses({"zerofit/a.py": line})] == ([found] if found else [])


# Each part of zerofit/compat, used by a function of its name.


def _number_of_tensors(part):
    storage = torch.zeros(3)
    whole = part(storage.untyped_storage())
    view = storage[:2]
    assert part(view.untyped_storage()) == whole + 1


def _dispatch_mode(part):
    class Noted(part):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Noted():
        torch.ones(2) + 1
    assert seen[-1] is torch.ops.aten.add.Tensor


def _run_backward(part):
    met = []

    class Meets(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            met.append(function)
            return function(*args, **(kwargs or {}))

    weight = torch.ones(2, requires_grad=True)
    with Meets():
        loss = torch.utils.checkpoint.checkpoint(lambda rows: torch.sigmoid(rows).sum(), weight, use_reentrant=False)
        part(loss)
    assert weight.grad is not None
    assert met.count(torch.sigmoid) == 2, "in the forward pass, and where it is recomputed"


def _computed_as_linear(part):
    class Doubled(torch.nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    layer = Doubled(2, 3)
    rows = torch.ones(1, 2)
    doubled = layer(rows)
    with part([layer]):
        assert torch.equal(2 * layer(rows), doubled)
    assert torch.equal(layer(rows), doubled)


def _fake_tensors(part):
    with part() as mode:
        product = torch.ones(2**20, 2**20) @ torch.ones(2**20, 3)  # 4 TiB
        assert product.shape == (2**20, 3)
        assert product.device.type == "cpu"
    with mode:
        torch.ones(2)


def _leave_scaling_to_scaler(part):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    assert optimizer._step_supports_amp_scaling
    part(optimizer)
    assert "_step_supports_amp_scaling" in inspect.getsource(torch.amp.GradScaler)


def _norms_of(part):
    halves = [torch.full((3,), 1.0, dtype=torch.bfloat16), torch.full((2,), 2.0, dtype=torch.bfloat16)]
    assert [float(norm) for norm in part(halves, torch.float32)] == pytest.approx([3**0.5, 8**0.5], rel=1e-6)


def _argument_names(part):
    assert part(torch.ops.aten.bernoulli_.float)[1] == ("p", 0.5)


def _flight_record(part):
    record = part()
    assert isinstance(record["entries"], list)
    assert isinstance(record["pg_config"], dict)


def _group_timeout(part):
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    with part(timedelta(days=3)):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        group = torch.distributed.new_group([0])
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(days=3)
    torch.distributed.destroy_process_group()
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == before


def _compute_uncompiled_after_errors(part):
    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    torch._dynamo.reset()
    part(True)
    try:
        assert torch.compile(lambda x: x + 1, backend=broken)(torch.ones(1)).item() == 2
    finally:
        part(False)


def _compiled_graphs(part):
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    before, _ = part()
    torch.compile(broken, backend="eager")(torch.ones(2))
    number, breaks = part()
    assert number == before + 1
    assert breaks


def _ring(part):
    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))
    forward, backward = part.kernels(query.device)
    output, sums = forward(query, key, value, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, expected)
    gradients = backward(torch.ones_like(output), query, key, value, output, sums, 0.0, True)
    assert [each.shape for each in gradients] == [query.shape] * 3
    with part.communicating_with("stand-in"):
        assert part().module.dist == part().module.ft_c == "stand-in"
    module = part().module  # tests/launch/split_rows.py lets ranks pass keys on
    assert callable(module._templated_ring_attention)
    assert callable(module._templated_ring_attention_backward)


def _asking_agent(part):
    """tests/launch/test_launchers.py lets it restart processes."""
    launcher, agent = importlib.import_module("torch.distributed.launcher.api"), part.__mro__[1]
    with part.launching():
        assert launcher.LocalElasticAgent is part
        assert "LocalElasticAgent(" in inspect.getsource(launcher.launch_agent)
    assert launcher.LocalElasticAgent is agent
    source = "".join(inspect.getsource(each) for each in agent.__mro__[:-1])
    for name in ("_monitor_workers(", "_start_workers(", "_exit_barrier(", "_remaining_restarts"):
        assert f"self.{name}" in source


@contextlib.contextmanager
def zero(stage, **config):
    """DeepSpeed's engine on one process after a backward pass, with AdamW."""
    deepspeed = importlib.import_module("deepspeed")
    config |= {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.1}
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        # ZeRO-3 puts a linear layer of its own there for as long as the process lives, which autocast does not reach.
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
        with importlib.import_module("zerofit.compat.deepspeed").without_shared_memory():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed("gloo", verbose=False)
        try:
            engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
            engine.backward(engine(torch.full((4, 3), 2.0, dtype=next(model.parameters()).dtype)).pow(2).sum())
            yield engine
        finally:
            deepspeed.comm.destroy_process_group()


def weights(engine, stage):
    utils = importlib.import_module("deepspeed.utils")
    return [utils.safe_get_full_fp32_param(each).clone() for each in engine.module.parameters()]


def _split_step(part):
    """An update that is left out leaves every weight; the next one is clipped by the norm that was taken."""
    assert not part.is_padding(torch.ones(2))
    assert "_zero_padding" in inspect.getsource(importlib.import_module("deepspeed.runtime.zero.stage_1_and_2"))
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for stage, config in ((1, {}), (2, {}), (3, {}), (1, bf16)):
        with zero(stage, **config) as engine:
            split, before = part(engine.optimizer, stage == 3, lambda norm: norm), weights(engine, stage)
            assert split.is_bf16 == bool(config)
            utils = importlib.import_module("deepspeed.utils")
            gradients = [utils.safe_get_full_grad(each) for each in engine.module.parameters()]
            norm = sum(float(each.float().pow(2).sum()) for each in gradients) ** 0.5
            assert split.norm() == pytest.approx(norm, rel=1e-2 if config else 1e-5)
            split.run(engine.step, discards=True)
            assert all(map(torch.equal, weights(engine, stage), before))
            inputs = torch.full((4, 3), 2.0, dtype=next(engine.module.parameters()).dtype)
            engine.backward(engine(inputs).pow(2).sum())
            assert split.norm() == pytest.approx(norm, rel=1e-2 if config else 1e-5), "of these gradients alone"
            split.run(engine.step, discards=False)
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-2 if config else 1e-5)
            assert not any(map(torch.equal, weights(engine, stage), before))


def _fragment_of(part):
    with zero(1) as engine:
        weight, bias = (part(each) for each in engine.module.parameters())
        assert (weight.start, weight.numel, bias.start, bias.numel) == (0, 6, 0, 2)
        flat = engine.optimizer.optimizer.param_groups[weight.group]["params"][0]
        assert torch.equal(flat[weight.offset :][:6].view(2, 3), engine.module.weight)
        assert torch.equal(flat[bias.offset :][:2], engine.module.bias)


def _step_sub_group(part):
    with zero(3) as engine:
        flat = engine.optimizer.fp32_partitioned_groups_flat[0]
        before, flat.grad = flat.clone(), torch.ones_like(flat)
        part(engine.optimizer, 0)
        torch.testing.assert_close(flat, before * (1 - 0.1 * 0.01) - 0.1)


def _swapped_in(part):
    """On a disk: tests/launch. Here the optimizer is in memory, and nothing is to be done."""
    with zero(3) as engine:
        with part(engine.optimizer, 0):
            assert engine.optimizer.fp32_partitioned_groups_flat[0].numel() == 8
        for name in part.__wrapped__.__code__.co_names:
            if name.startswith("_"):
                assert callable(getattr(engine.optimizer, name))


def _run_schedule(part):
    engine, done = importlib.import_module("deepspeed.runtime.pipe.engine").PipelineEngine, []
    stands_in = SimpleNamespace(_exec_schedule=done.append, _exec_optimizer_step=lambda: done.append("step"))
    part(stands_in, "schedule")
    part(stands_in, None)
    assert done == ["schedule", "step"]
    assert callable(engine._exec_schedule)
    assert callable(engine._exec_optimizer_step)
    assert "self._compute_loss and self.module.loss_fn" in inspect.getsource(engine)


def _visit_modules(part):
    met = []

    class Visitor:
        def __init__(self):
            self.forward_hooks, self.backward_hooks = [], []

        def __getattr__(self, name):
            return lambda module=None: met.append((name, module))

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.ds_status = None
    part(Visitor(), model)
    model(torch.ones(1, 2))
    names = [name for name, module in met if module is model[0]]
    assert names == ["pre_sub_module_forward_function", "post_sub_module_forward_function"]


def _work_offline(part):
    hub = importlib.import_module("huggingface_hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_HUB_OFFLINE", "0")
        part()
        assert hub.constants.HF_HUB_OFFLINE
        assert hub.is_offline_mode()


def _load_without_pickles(part):
    core = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    before = core.numpy
    part([core], "numpy")
    try:
        assert core.numpy == "numpy"
    finally:
        core.numpy = before
    assert "numpy.load(" in inspect.getsource(core)


def _as_first_rank(part):
    with part():
        assert torch.distributed.get_rank() == 0
    with pytest.raises(ValueError, match="not been initialized"):
        torch.distributed.get_rank()


def _attention_of(part):
    for name in ("eager", "sdpa"):
        assert part(tiny_model("llama", name).config) == name


def _attentions_of(part):
    assert part(tiny_model("llama")) == (True, [])
    assert part(tiny_model("falcon", **small_sizes("falcon"))) == (False, [])
    assert part(tiny_model("bloom", "eager", **small_sizes("bloom")))[1] is None
    assert "_compatible_flash_implementations" in inspect.getsource(
        importlib.import_module("transformers").PreTrainedModel
    )


def _with_attention(part):
    function = importlib.import_module("transformers.integrations.flash_attention").flash_attention_forward
    assert "module.config._attn_implementation" in inspect.getsource(function)
    layer = tiny_model("llama").model.layers[0].self_attn
    assert part(layer, "another").config._attn_implementation == "another"
    assert part(layer, "another").head_dim == layer.head_dim
    assert layer.config._attn_implementation == "sdpa"


def _documents_found_by(part):
    masking_utils = importlib.import_module("transformers.masking_utils")
    before, asked = masking_utils.find_packed_sequence_indices, []
    with part(asked.append):
        tiny_model("llama")(input_ids=torch.arange(4)[None])
    assert [positions.shape for positions in asked] == [(1, 4)]
    assert masking_utils.find_packed_sequence_indices is before


def _initialize(part):
    model = tiny_model("gpt2")
    layer, drawn = model.transformer.h[0].attn.c_attn, torch.nn.Parameter(torch.full((32, 96), 7.0))
    weight, bias = layer.weight, layer.bias
    with torch.no_grad():
        bias.fill_(3.0)
    part(model, layer, "weight", drawn)
    assert 0 < drawn.std() < 0.1
    assert layer.weight is weight
    assert layer.bias is bias
    assert (bias == 3.0).all()


def _keep_conversions(part):
    loading = importlib.import_module("transformers.core_model_loading")
    assert "_weight_conversions" in inspect.getsource(loading.revert_weight_conversion)
    model = SimpleNamespace(_weight_conversions=[1, 2])
    part(model, lambda step: step > 1)
    assert model._weight_conversions == [2]
    part(model, lambda step: False)
    assert model._weight_conversions == []
    part(model, bool, or_usual=True)
    assert model._weight_conversions is None


def _weights_alone(part):
    model = tiny_model("llama")
    with tempfile.TemporaryDirectory() as folder:
        part(model).save_pretrained(folder)
        assert os.listdir(folder) == ["model.safetensors"]
        model.save_pretrained(folder)
        assert "config.json" in os.listdir(folder)


def _undivided_modules(part):
    assert part(tiny_model("gpt2")) == {"GPT2Block"}


def _recomputing_functions(part):
    model, called = tiny_model("llama").train(), []
    assert part(model) == []
    model.gradient_checkpointing_enable()

    def noted(function):
        return lambda layer, *args: called.append(function) or layer(*args)

    functions = part(model, noted)
    model(input_ids=torch.arange(4)[None])
    assert len(called) == len(model.model.layers)
    assert set(called) <= set(functions)


def _forget_state(part):
    accelerator = importlib.import_module("accelerate").Accelerator
    for precision in ("bf16", "no"):
        part()
        assert accelerator(mixed_precision=precision, cpu=True).mixed_precision == precision
    part()


RESULTS = {"Fragment", "Renamed"}  # what a part returns
# Parts that put other values into modules, and back: {part: (its arguments, {module: names}, what reads them)}.
REPLACES = {
    "exchanging_heads_with": (
        ["stand-in"],
        {"deepspeed.runtime.sequence_parallel.ulysses_sp": ["dist"], "deepspeed.sequence.layer": ["dist"]},
        ("deepspeed.runtime.sequence_parallel.ulysses_sp", "dist."),
    ),
    "exchanging_tokens_with": (
        ["counts", "rows"],
        {"transformers.distributed.expert_parallel": ["all_to_all_single_autograd", "_WaitTensor"]},
        ("transformers.distributed.expert_parallel", "_WaitTensor.apply("),
    ),
    "multiplying_without_groups": (
        [], {"transformers.integrations.moe": ["_can_use_grouped_mm"]},
        ("transformers.integrations.moe", "torch.ops.transformers.grouped_mm_fallback"),
    ),
    "without_shared_memory": (
        [], {"deepspeed.comm.torch": ["build_shm_op"]}, ("deepspeed.comm.torch", "= build_shm_op()")
    ),
    "with_groups": (
        ["groups"], {"deepspeed.runtime.pipe.module": ["PipelineParallelGrid"]},
        ("deepspeed.runtime.pipe.module", "PipelineParallelGrid("),
    ),
    "initializing_with": (
        ["groups"], {"deepspeed": ["initialize"]}, ("accelerate.accelerator", "= deepspeed.initialize\n")
    ),
}  # fmt: skip


def replaces(part, values, replaced, reader):
    """Within the context each name has another value, and afterwards its own; the library's code reads it."""

    def found():
        return [getattr(importlib.import_module(module), name) for module in replaced for name in replaced[module]]

    before = found()
    with part(*values):
        assert not any(now is own for now, own in zip(found(), before, strict=True))
    assert found() == before
    assert reader[1] in inspect.getsource(importlib.import_module(reader[0]))


def touch(name: str, part) -> None:
    """Use a part: by the function above that has its name, in small letters behind a line."""
    if name in REPLACES:
        replaces(part, *REPLACES[name])
    else:
        globals()["_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()](part)


def parts(library):
    module = importlib.import_module(f"zerofit.compat.{library}")
    of_module = {
        name: part for name, part in vars(module).items() if getattr(part, "__module__", "") == module.__name__
    }
    return {name: part for name, part in of_module.items() if name not in RESULTS}


LIBRARIES = sorted({path.stem for path in (ROOT / "zerofit" / "compat").glob("*.py")} - {"__init__"})
PARTS = [(library, part) for library in LIBRARIES for part in parts(library)]


@pytest.mark.parametrize(("library", "part"), PARTS)
def test_the_library_has_it(library, part):
    try:
        touch(part, parts(library)[part])
    except Exception as error:
        pytest.fail(
            f"{library} {version(library.partition('_')[0])} has changed what zerofit.compat.{library}.{part} stands "
            f"on ({type(error).__name__}: {error}). Look at:\n{inspect.getdoc(parts(library).get(part)) or part}"
        )


@pytest.mark.parametrize(("library", "part"), PARTS)
def test_each_part_says_why(library, part):
    """A sentence on why, the versions, and what happens otherwise."""
    text = " ".join(inspect.getdoc(parts(library)[part]).split())
    assert "Tried with" in text
    assert "Without it:" in text
