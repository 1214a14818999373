"""optim: what each optimizer keeps, where it is refused, and that a run with it resumes to the bit; Muon, and the mean
of the weights. Between strategies: test_agreement.py."""

import fcntl
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from helpers import refusal
from test_resuming import leave_a_run, recipe
from test_saving import Alone, save, saver_of
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from zerofit.checkpoint.manager import EarlierRuns, differences_from
from zerofit.model.parameters import hidden_matrices
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OPTIMIZERS, make_schedule
from zerofit.record.run_folder import identity_options
from zerofit.strategy.optimizers import (
    STATE_TENSORS,
    ReplicatedOptimizerState,
    check_kept,
    keep_group_rates,
    make_optimizer,
    rates_of,
    state_bytes,
)
from zerofit.strategy.state import ReplicatedState, check_async_io, own_folder, remove_disk_folder

SHAPES = ((128, 64), (40, 103), (3, 50, 60), (70,), (5000,), (7, 3))


@pytest.fixture(params=[name for name in OPTIMIZERS if name != "muon"])  # of Muon see below
def optim(request):
    if request.param == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="no dependency of the tests: pip install bitsandbytes")
    return request.param


def test_the_state_is_as_large_as_predicted(optim):
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    optimizer = make_optimizer(module, recipe("--optim", optim), torch.device("cpu"))
    for parameter in module:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in module:
        own = sum(each.nbytes for name, each in optimizer.state[parameter].items() if name in STATE_TENSORS[optim])
        assert own == state_bytes(optim, parameter.shape), parameter.shape


class Other(Alone):
    """An engine of one process with another optimizer than AdamW."""

    def __init__(self, optim: str, seed: int = 0, width: int = 640):
        super().__init__(seed, width)
        options = recipe("--optim", optim, "--learning_rate", "1e-2")
        self.torch_optimizer = make_optimizer(self.module, options, torch.device("cpu"))
        self.state = ReplicatedOptimizerState(self, optim)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_resumes_to_the_bit(tmp_path, optim, asynchronous):
    engine = Other(optim)
    engine.train(range(3))
    saver = saver_of(engine, tmp_path, asynchronous=asynchronous == "true")
    save(saver, engine, 3)
    assert not saver.wait()
    after = engine.train(range(3, 6))
    again = Other(optim, seed=5)
    folder, _ = saver.choose("auto")
    saver_of(again, tmp_path).load(folder)
    assert again.state.steps == 3
    assert again.train(range(3, 6)) == after
    for name, tensor in engine.state.whole_tensors().items():
        assert again.state.whole_tensors()[name].equal(tensor), name
    assert len(engine.state.whole_tensors()) >= 6
    tensors = sum(file.stat().st_size for file in (folder / "state").glob("*.safetensors"))
    assert engine.state.bytes_of_all() < tensors < engine.state.bytes_of_all() + 3000


def test_a_run_does_not_resume_with_another_optimizer(tmp_path):
    now, folder = recipe("--optim", "adafactor"), leave_a_run(tmp_path, recipe(), 8, 1)
    earlier = EarlierRuns.read(now, folder)
    assert "optim was 'adamw', now 'adafactor'" in refusal(earlier.plan, now, 8, folder)
    named = SimpleNamespace(**{**vars(now), "resume": "RUN"})
    named.to_dict, named.names_with = now.to_dict, now.names_with
    said = refusal(differences_from, named, 8, identity_options(recipe(), 8))
    assert "one optimizer cannot read what another has kept" in said


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("AdamW", ""),
        ("RAdam", ""),
        ("NAdam", "mu_product"),
        ("SGD", "nothing"),
        ("Rprop", "prev"),
        ("Adafactor", "variance"),
    ],
)
def test_what_checkpoints_cannot_keep_is_refused(kind, refused):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    if refused:
        assert refused in refusal(check_kept, optimizer)
    else:
        check_kept(optimizer)


@pytest.mark.parametrize(
    ("rates", "common", "scales"),
    [
        ((1e-3, 1e-3), 1e-3, (None, None)),
        ((1e-3, 1e-4), 1e-3, (None, 0.1)),
        ((0.0, 1e-3), 1e-3, (0.0, None)),
        ((0.5, 0.5), 0.5, (None, None)),  # the schedule's rates hold
        ((2e-3, 1e-4), 0.5, (2.0, 0.1)),  # no group has the optimizer's: in proportion to the recipe's
    ],
)
def test_groups_keep_their_rates_in_proportion(rates, common, scales):
    now = recipe("--learning_rate", "1e-3")
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates]
    optimizer = torch.optim.AdamW(groups, lr=common)
    warning = keep_group_rates(optimizer, now, make_schedule(now, 4))
    assert tuple(group.get("lr_scale") for group in optimizer.param_groups) == pytest.approx(scales)
    assert (warning is not None) == (rates == (0.5, 0.5))
    assert keep_group_rates(optimizer, now, lambda update: 1.0) is None


def test_a_scheduler_of_transformers_is_a_function_of_the_update():
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], **rate} for rate in ({}, {"lr": 1e-4})]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=4)
    assert [rates_of(scheduler)(update) for update in range(5)] == pytest.approx([0, 5e-4, 1e-3, 5e-4, 0])
    keep_group_rates(optimizer, recipe("--learning_rate", "1e-3"), rates_of(scheduler))
    assert [group.get("lr_scale") for group in optimizer.param_groups] == [None, pytest.approx(0.1)]
    with pytest.raises(UserError, match="a factor for each group"):
        rates_of(LambdaLR(optimizer, [lambda update: 1.0, lambda update: 0.5]))


FLAGS = ("--optim", "muon", "--learning_rate", "1e-2", "--weight_decay", "0.1")


def model_with(kind: str, **values) -> torch.nn.Module:
    config = AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, **values
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


class Alternating(Alone):
    """An engine of one process, whose blocks are linear layers."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.module._no_split_modules = ["Linear"]
        self.torch_optimizer = make_optimizer(self.module, recipe(*FLAGS), torch.device("cpu"))
        self.state = ReplicatedState(self)


def test_a_step_of_muon_is_torch_s(monkeypatch):
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
            torch.optim.AdamW(
                [
                    {"params": [each for each in rest if each.dim() == 2], "weight_decay": 0.1},
                    {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
                ],
                lr=1e-2,
                fused=True,
            ),
        )
        for step in range(3):
            for model in (ours, theirs):
                torch.manual_seed(step)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
            for each in (optimizer, *pair):
                each.step()
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter, every[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_matrices_of_the_blocks_take_muon():
    llama = hidden_matrices(model_with("llama", tie_word_embeddings=False))
    assert len(llama) == 2 * 7
    assert {tuple(each.shape) for each in llama.values()} == {(16, 16), (24, 16), (16, 24)}
    mixture = hidden_matrices(model_with("mixtral", num_local_experts=4))
    assert len(mixture) == 2 * 7, "attention, router, and of all experts two tensors"
    assert {each.dim() for each in mixture.values()} == {2, 3}
    gpt2 = model_with("gpt2")
    assert len(hidden_matrices(gpt2)) == 2 * 4
    assert all(each.dim() == 2 for each in hidden_matrices(gpt2).values())


ENGINES = {"adamw": Alone, "muon": Alternating, "adafactor": lambda seed=0: Other("adafactor", seed)}


def average(engine: Alone, updates: range) -> list[list[torch.Tensor]]:
    """Train, and move the mean after each update; returns the weights of each."""
    seen = []
    for update in updates:
        engine.train(range(update, update + 1))
        engine.state.update_ema(0.7)
        seen.append([each.detach().clone() for each in engine.module.parameters()])
    return seen


@pytest.mark.parametrize("optim", ENGINES)
def test_the_mean_of_the_weights_is_exact_and_resumes_to_the_bit(tmp_path, optim):
    engine, undisturbed = ENGINES[optim](), ENGINES[optim]()
    by_hand = [each.detach().clone() for each in engine.module.parameters()]
    engine.state.start_ema()
    weights = average(engine, range(3))
    saver = saver_of(engine, tmp_path, asynchronous=False)
    save(saver, engine, 3)
    assert not saver.wait()
    weights += average(engine, range(3, 6))
    undisturbed.train(range(6))
    assert all(map(torch.equal, weights[-1], undisturbed.module.parameters())), "training is as it was"
    again = ENGINES[optim](seed=5)
    again.state.start_ema()
    folder, _ = saver.choose("auto")
    saver_of(again, tmp_path).load(folder)
    average(again, range(3, 6))
    for of_update in weights:
        by_hand = [0.7 * mean + 0.3 * weight for mean, weight in zip(by_hand, of_update)]
    with engine.state.averaged(), again.state.averaged():
        for mean, ours, resumed in zip(by_hand, engine.module.parameters(), again.module.parameters()):
            torch.testing.assert_close(ours, mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(ours, resumed)
    assert all(map(torch.equal, weights[-1], engine.module.parameters())), "the weights are back"


def test_a_mean_that_never_moves_is_refused():
    assert "ema_decay" in refusal(recipe, "--ema_decay", "1")


def test_without_libaio_a_run_ends_with_the_remedy(monkeypatch):
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: False)
    assert "Install them (apt install libaio-dev), or use --strategy zero3_offload" in refusal(check_async_io)


def test_a_process_has_a_folder_of_its_own_and_clears_up_after_the_dead(tmp_path):
    disk = tmp_path / "disk"
    one = own_folder(str(disk))
    other = own_folder(str(disk))
    assert one != other
    assert one.is_dir()
    (one / "state.swp").write_text("kept")

    killed, alive = disk / "zerofit-killed", disk / "zerofit-alive"
    for folder in (killed, alive):
        folder.mkdir()
        (folder / "state.swp").write_text("")
        folder.with_suffix(".lock").touch()
    (disk / "mine").mkdir()
    with alive.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        third = own_folder(str(disk))
    kept = {one, other, third, alive, disk / "mine"}
    assert {path for path in disk.iterdir() if path.is_dir()} == kept
    assert (one / "state.swp").read_text() == "kept"
    assert not killed.with_suffix(".lock").exists()

    for folder in (one, other, third):
        remove_disk_folder(folder)
    assert {path.name for path in disk.iterdir()} == {alive.name, f"{alive.name}.lock", "mine"}
