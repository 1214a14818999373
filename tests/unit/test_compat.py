"""Private parts of other libraries stand in zerofit/compat alone; what a library could drop unnoticed is in it."""

import importlib
import inspect
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from private_parts import find_uses, sources


@pytest.fixture(scope="module")
def uses():
    return find_uses(sources())


def test_private_parts_stand_in_compat_alone(uses):
    assert len(uses) > 30
    elsewhere = [use for use in uses if not use.is_in_compat and not use.is_of_device]
    assert not elsewhere, "a private part of another library: look for a public one, else move it into zerofit/compat"


SILENT = """
accelerate.accelerator|deepspeed.initialize
deepspeed.comm.torch|build_shm_op()
deepspeed.runtime.pipe.module|PipelineParallelGrid(
deepspeed.runtime.zero.stage_1_and_2|_zero_padding
deepspeed.utils.tensor_fragment|_hp_mapping
torch.amp.grad_scaler|_step_supports_amp_scaling
torch.distributed.elastic.agent.server.api|self._remaining_restarts
transformers.configuration_utils|_attn_implementation
transformers.core_model_loading|_weight_conversions
transformers.integrations.flash_attention|module.config._attn_implementation
transformers.modeling_utils|_compatible_flash_implementations
transformers.modeling_utils|_gradient_checkpointing_func
transformers.modeling_utils|_is_hf_initialized
""".split()


@pytest.mark.parametrize("use", SILENT)
def test_what_a_library_could_stop_to_read_without_an_error_is_still_in_its_source(use):
    module, _, text = use.partition("|")
    assert text in inspect.getsource(importlib.import_module(module))
