"""optim muon: its step, what takes it, what it keeps, where it is refused. Between strategies: test_agreement.py."""

import torch
from test_resuming import recipe
from test_saving import Alone
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.model.parameters import hidden_matrices
from zerofit.strategy.optimizers import make_optimizer
from zerofit.strategy.state import ReplicatedState

FLAGS = ("--optim", "muon", "--learning_rate", "1e-2", "--weight_decay", "0.1")


def model_with(kind: str, **values) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                  intermediate_size=24, **values)  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


class Alternating(Alone):
    """An engine of one process, whose blocks are linear layers."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.module._no_split_modules = ["Linear"]
        self.torch_optimizer = make_optimizer(self.module, recipe(*FLAGS), torch.device("cpu"))
        self.state = ReplicatedState(self)


def test_a_step_is_torch_s(monkeypatch):
    """In half precision, and in fp32, which torch's own has not."""
    for precision in ("bf16", "fp32"):
        ours, theirs = model_with("llama"), model_with("llama")
        if precision == "fp32":
            monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        optimizer = make_optimizer(ours, recipe(*FLAGS, "--precision", precision), torch.device("cpu"))
        chosen, every = hidden_matrices(theirs), dict(theirs.named_parameters())
        rest = [each for name, each in every.items() if name not in chosen]
        pair = (
            torch.optim.Muon([*chosen.values()], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([
                {"params": [each for each in rest if each.dim() == 2], "weight_decay": 0.1},
                {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
            ], lr=1e-2, fused=True),
        )  # fmt: skip
        for step in range(3):
            for model in (ours, theirs):
                torch.manual_seed(step)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
            for each in (optimizer, *pair):
                each.step()
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter, every[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_matrices_of_the_blocks_take_it():
    llama = hidden_matrices(model_with("llama", tie_word_embeddings=False))
    assert len(llama) == 2 * 7
    assert {tuple(each.shape) for each in llama.values()} == {(16, 16), (24, 16), (16, 24)}
    mixture = hidden_matrices(model_with("mixtral", num_local_experts=4))
    assert len(mixture) == 2 * 7, "attention, router, and of all experts two tensors"
    assert {each.dim() for each in mixture.values()} == {2, 3}
    gpt2 = model_with("gpt2")
    assert len(hidden_matrices(gpt2)) == 2 * 4
    assert all(each.dim() == 2 for each in hidden_matrices(gpt2).values())
