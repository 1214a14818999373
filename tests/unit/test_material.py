"""What the tests' own data must be, so that what reads it proves something."""

import math

import torch
from transformers import AutoModelForCausalLM, LlamaTokenizer


def test_the_llama_has_learnt(material):
    """Held-out documents: far below the ln 512 of a model that knows nothing."""
    folder = material / "models" / "llama" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 260_032
    text = (material / "text" / "valid.txt").read_text()[:40_000]
    ids = torch.tensor(LlamaTokenizer.from_pretrained(folder)(text)["input_ids"][:12_800]).view(100, 128)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < math.log(512) - 1.5
