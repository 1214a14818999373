"""The code of docs/porting-a-model.md: a new layer in a folder of one's own, and its family."""

import importlib.util
from pathlib import Path

import pytest
import torch
from folders import write_ported_model
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.model.families import BY_MODEL_TYPE
from zerofit.model.loss import install_loss
from zerofit.model.stages import keep_stage


def model_of(folder: Path) -> torch.nn.Module:
    """The model with weights that are not zero or one; its family is known from then on."""
    spec = importlib.util.spec_from_file_location("family_of_the_page", folder / "family.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    BY_MODEL_TYPE.update({name: family for family in module.FAMILIES for name in family.model_types})
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.use_cache, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop = False, 0.0, 0.0, 0.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.train()


@pytest.fixture
def folder(tmp_path):
    write_ported_model(tmp_path)
    yield tmp_path
    BY_MODEL_TYPE.pop("rms_gpt2", None)


def test_stages_of_a_pipeline_find_what_the_model_finds(folder):
    whole, stages = model_of(folder), [model_of(folder) for _ in range(2)]
    for stage, model in enumerate(stages):
        keep_stage(model, stage, 2, torch.float32)
    for model in (whole, *stages):
        install_loss(model, "full")
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(3))
    hidden = stages[0].base_model(input_ids=ids).last_hidden_state
    loss = stages[1](inputs_embeds=hidden, labels=ids)
    torch.testing.assert_close(loss, whole(input_ids=ids, labels=ids), rtol=1e-6, atol=0)
