"""Private parts of other libraries stand in zerofit/compat alone, and the libraries that are installed have them."""

import functools
import importlib
import inspect
import re
import sys
from importlib.metadata import version

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from private_parts import find_uses, sources


@pytest.fixture(scope="module")
def uses():
    return find_uses(sources())


def test_private_parts_stand_in_compat_alone(uses):
    assert len(uses) > 30
    overridden = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._monitor_workers"
    found = {use.name for use in uses}
    assert {"torch._C._storage_Use_Count", "deepspeed.initialize", "is_remote_code", overridden} <= found
    assert "huggingface_hub.constants.HF_HUB_OFFLINE" in found
    elsewhere = [use for use in uses if not use.is_in_compat and not use.is_of_device]
    assert not elsewhere, "a private part of another library: look for a public one, else move it into zerofit/compat"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def f(engine): return getattr(engine, '_step', None)", "_step"),
        ("import torch\npatch.object(torch.distributed, 'get_rank', f)", "torch.distributed.get_rank"),
        ("import importlib\nx = importlib.import_module('a.b')\nx.c = 1", "a.b.c"),
        ("from transformers.activations import ACT2FN\nACT2FN['gelu'] = 1", "transformers.activations.ACT2FN[...]"),
        # Its own parts, Python's, and what is documented.
        ("class A:\n def _f(self): return self._g\n def g(self, other): self._g = other._f", None),
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", None),
        ("def f(model): model.forward = lambda x: x", None),
    ],
)
def test_what_is_found(line, found):
    assert [use.name for use in find_uses({"zerofit/a.py": line})] == ([found] if found else [])


ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
C10D = "torch.distributed.distributed_c10d"
MODEL = "transformers:PreTrainedModel"
RING = "torch.distributed.tensor.experimental._context_parallel._attention"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
EXPERTS = "transformers.distributed.expert_parallel"
STANDS_ON = {  # part: module:name.of.what.it.uses, or module|text in its source
    "AskingAgent": f"{AGENT}._monitor_workers {AGENT}._start_workers {AGENT}._exit_barrier "
    "torch.distributed.elastic.agent.server.api|self._remaining_restarts "
    "torch.distributed.launcher.api:LocalElasticAgent",
    "DispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "Ring": f"{RING}:_templated_ring_attention {RING}:_templated_ring_attention_backward {RING}:dist {RING}:ft_c "
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "SplitStep": f"{ZERO}.scaled_global_norm {ZERO}.get_grad_norm_direct {ZERO}._update_scale "
    f"{ZERO3}._get_norm_groups {ZERO3}._update_scale deepspeed.runtime.zero.stage_1_and_2|_zero_padding "
    "deepspeed.runtime.bf16_optimizer:is_invalid_grad_norm "
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.get_grads_for_norm",
    "argument_names": "torch:ops.aten.mm.default._schema.arguments",
    "as_first_rank": "torch.distributed:get_rank",
    "attention_of": "transformers.configuration_utils|_attn_implementation",
    "attentions_of": f"{MODEL}._can_set_attn_implementation {MODEL}._supports_flash_attn "
    "transformers.modeling_utils|_compatible_flash_implementations",
    "compiled_graphs": "torch._dynamo.utils:counters",
    "compute_uncompiled_after_errors": "torch._dynamo.config:suppress_errors",
    "computed_as_linear": "torch.nn:Linear.forward",
    "documents_found_by": "transformers.masking_utils:find_packed_sequence_indices",
    "exchanging_heads_with": "deepspeed.runtime.sequence_parallel.ulysses_sp:dist deepspeed.sequence.layer:dist",
    "exchanging_tokens_with": f"{EXPERTS}:all_to_all_single_autograd {EXPERTS}:_WaitTensor",
    "fake_tensors": "torch._subclasses.fake_tensor:FakeTensorMode",
    "flight_record": f"torch._C._distributed_c10d:_dump_fr_trace {C10D}:_world.pg_group_ranks {C10D}:_world.pg_names",
    "forget_state": "accelerate.state:AcceleratorState._reset_state",
    "fragment_of": "deepspeed.utils.tensor_fragment|_hp_mapping deepspeed.utils.tensor_fragment|lp_fragment_address",
    "group_timeout": f"{C10D}:default_pg_timeout {C10D}:default_pg_nccl_timeout",
    "initialize": f"{MODEL}._init_weights transformers.modeling_utils|_is_hf_initialized",
    "initializing_with": "accelerate.accelerator|deepspeed.initialize",
    "keep_conversions": "transformers.core_model_loading|_weight_conversions",
    "leave_scaling_to_scaler": "torch.amp.grad_scaler|_step_supports_amp_scaling",
    "load_without_pickles": "megatron.core.datasets.gpt_dataset|numpy.load(",
    "multiplying_without_groups": "transformers.integrations.moe:_can_use_grouped_mm",
    "norms_of": "torch:_foreach_norm",
    "number_of_tensors": "torch:_C._storage_Use_Count",
    "recomputing_functions": "transformers.modeling_utils|_gradient_checkpointing_func",
    "run_backward": "torch.autograd.graph:_engine_run_backward",
    "run_schedule": "deepspeed.runtime.pipe.engine:PipelineEngine._exec_schedule "
    "deepspeed.runtime.pipe.engine:PipelineEngine._exec_optimizer_step",
    "step_sub_group": f"{ZERO3}._optimizer_step",
    "swapped_in": f"{ZERO3}._swappable_optimizer_subgroup {ZERO3}._optimizer_states_and_gradient_swap_in "
    f"{ZERO3}._optimizer_states_and_gradient_swap_out {ZERO3}._release_swap_buffers",
    "undivided_modules": f"{MODEL}._no_split_modules",
    "visit_modules": "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module",
    "weights_alone": f"{MODEL}.is_remote_code",
    "with_attention": "transformers.integrations.flash_attention|module.config._attn_implementation",
    "with_groups": "deepspeed.runtime.pipe.module|PipelineParallelGrid(",
    "without_shared_memory": "deepspeed.comm.torch|build_shm_op()",
    "work_offline": "huggingface_hub.constants:HF_HUB_OFFLINE",
}


def check_there(name: str) -> None:
    """Raises what is raised where a library has no such name, or text in its source, any more."""
    module = importlib.import_module(re.split("[:|]", name)[0])
    if "|" in name:
        assert name.partition("|")[2] in inspect.getsource(module), name
    else:
        functools.reduce(getattr, name.partition(":")[2].split("."), module)


def parts(library):
    module = importlib.import_module(f"zerofit.compat.{library}")
    own = {name: part for name, part in vars(module).items() if getattr(part, "__module__", "") == module.__name__}
    return {name: part for name, part in own.items() if name not in ("Fragment", "Renamed")}  # what a part returns


LIBRARIES = sorted({path.stem for path in (ROOT / "zerofit" / "compat").glob("*.py")} - {"__init__"})


@pytest.mark.parametrize(("library", "part"), [(library, part) for library in LIBRARIES for part in parts(library)])
def test_the_library_has_it(library, part):
    if library == "megatron":
        pytest.importorskip("megatron.core")
    try:
        for name in STANDS_ON[part].split():
            check_there(name)
    except Exception as error:
        pytest.fail(
            f"{library} {version(library.partition('_')[0])} has changed what zerofit.compat.{library}.{part} stands "
            f"on ({type(error).__name__}: {error}). Look at:\n{inspect.getdoc(parts(library).get(part)) or part}"
        )


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_part_says_why(library):
    """What happens without it; the module says with which versions it was tried."""
    assert "Tried with" in importlib.import_module(f"zerofit.compat.{library}").__doc__
    for name, part in parts(library).items():
        assert "Without it:" in " ".join(inspect.getdoc(part).split()), name
