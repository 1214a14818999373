"""`zerofit plan`: what ZeRO-3 fetches and releases at the visits of modules, against DeepSpeed's own coordinator."""

import contextlib
import itertools

import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as deepspeed_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from zerofit.estimate.module_visits import ModuleVisits, Visit
from zerofit.estimate.traced_shares import linear_of_zero_3
from zerofit.estimate.zero3_weights import FetchRules, KnownPass

NUM_LAYERS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, hidden):
        return hidden + self.down(self.act(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).sum()


def visited(model: nn.Module, efficient: bool = True) -> list[Visit]:
    """The visits of a forward and backward pass, with DeepSpeed's linear function or with torch's."""
    visits: list[Visit] = []
    if "hooks" not in vars(model):
        model.hooks = ModuleVisits(model)
    model.hooks.begin(visits.append)
    with linear_of_zero_3() if efficient else contextlib.nullcontext():
        model(torch.zeros(1, 3, dtype=torch.int64)).backward()
    return visits


def sizes_of(model: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


class Handle:
    def __init__(self, weights):
        self.weights = weights

    def wait(self, **_):
        for weight in self.weights:
            weight.ds_status = ZeroParamStatus.AVAILABLE
        self.weights = []  # once is enough


class Shard:
    """Stands for a parameter that is sharded."""

    nvme_swapper = ds_secondary_tensor = None
    is_external_param, requires_grad, ds_tensor = False, True, object()

    def __init__(self, number: int, size: int, threshold: int):
        self.ds_id, self.ds_numel, self.ds_shape, self.ds_persist = number, size, (size,), size <= threshold
        self.ds_status = ZeroParamStatus.AVAILABLE if self.ds_persist else ZeroParamStatus.NOT_AVAILABLE
        self.ds_active_sub_modules = set()

    def ds_summary(self, **_):
        return self.ds_id

    def partition_numel(self):
        return self.ds_numel

    def partition(self, **_):
        self.ds_status = ZeroParamStatus.AVAILABLE if self.ds_persist else ZeroParamStatus.NOT_AVAILABLE

    def all_gather_coalesced(self, weights, **_):
        for weight in weights:
            weight.ds_status = ZeroParamStatus.INFLIGHT
        return Handle(weights)


class Met:
    """Stands for a module."""

    def __init__(self, number: int, weights: list[Shard]):
        self.ds_id, self.weights, self.ds_recompute_parameters, self.training = number, weights, set(), True

    def named_parameters(self, recurse=False):
        return [(str(weight.ds_id), weight) for weight in self.weights]

    def ds_external_parameters(self):
        return []


def deepspeed_passes(
    visits: list[Visit], sizes: dict[str, int], rules: FetchRules, checked: bool, monkeypatch
) -> list:
    """After each visit of a late pass, what DeepSpeed has fetched: (names there, names on their way)."""
    monkeypatch.setattr(deepspeed_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None)
    monkeypatch.setattr(deepspeed_coordinator, "print_rank_0", lambda *args, **kwargs: None)
    weights = {name: Shard(number, size, rules.threshold) for number, (name, size) in enumerate(sizes.items())}
    names = {visit.module: visit.weights for visit in visits}
    modules = {name: Met(at, [weights[one] for one in own]) for at, (name, own) in enumerate(names.items())}
    coordinator = deepspeed_coordinator.PartitionedParameterCoordinator(
        rules.ahead, rules.reuse, rules.live, None, deepspeed_coordinator.InflightParamRegistry()
    )
    forward = [*itertools.takewhile(lambda visit: visit.forward, visits)]
    for samples_per_micro_step in [*([forward] * 3 if checked else []), *[visits] * 5]:
        coordinator.reset_step()
        found = []
        for visit in samples_per_micro_step:
            module = modules[visit.module]
            if visit.enters:
                coordinator.trace_prologue(module)
                if coordinator.is_record_trace():
                    coordinator.record_module(module)
                coordinator.fetch_sub_module(module, visit.forward)
            else:
                coordinator.release_sub_module(module, visit.forward)
            found.append(tuple(
                {name for name, one in weights.items() if one.ds_status == status}
                for status in (ZeroParamStatus.AVAILABLE, ZeroParamStatus.INFLIGHT)
            ))  # fmt: skip
        coordinator.release_backward_leftovers()
    return found


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("ahead", "live", "reuse"), [(1, 10**9, 10**9), (300, 700, 10**9), (600, 10**9, 300)])
def test_the_same_weights_are_there_as_with_deepspeed(checked, ahead, live, reuse, monkeypatch):
    model = Model()
    visits, sizes, rules = visited(model), sizes_of(model), FetchRules(64, ahead, live, reuse, 2, False)
    found = deepspeed_passes(visits, sizes, rules, checked, monkeypatch)
    remembered = {}
    if checked:
        forward = [*itertools.takewhile(lambda visit: visit.forward, visits)]
        alone = KnownPass(forward, sizes, frozenset(), rules, {})
        assert all(alone.at(visit) >= 0 for visit in forward)
        remembered = alone.decided
    run, made = KnownPass(visits, sizes, frozenset(), rules, remembered), []
    for visit in visits:
        run.at(visit)
        made.append((set(run.here), {name for name in run.handles if name not in run.here}))
    assert made == found
    assert max(len(there) + len(coming) for there, coming in made) > 3 + 4 * NUM_LAYERS  # more than what persists
