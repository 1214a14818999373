"""What `zerofit plan` believes that compiled layers keep, beside what torch's partitioner lets them keep."""

import contextlib

import pytest
import torch
from helpers import tiny_model

from zerofit.estimate.allocations import AllocationTracker, FusedLayers

IDS = torch.arange(2 * 64).view(2, 64) % 97


def planned(model, fuses: bool, is_float8: bool = False) -> int:
    """Bytes that the second layer keeps beside its output, as a plan counts them."""
    ledger, alive, handles = AllocationTracker(is_float8=is_float8), [], []
    ledger.exclude([*model.parameters(), *model.buffers()])
    layer = model.model.layers[1]
    if fuses:
        handles += FusedLayers(ledger).watch(layer)
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
    known, kept, handles = set(), {}, []
    known |= {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    layer, hooks = model.model.layers[1], contextlib.ExitStack()

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def enter(_, args, kwargs):
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        known.update(tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, torch.Tensor))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

    layer.compile(backend="aot_eager_decomp_partition")
    handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
    handles.append(layer.register_forward_hook(lambda *_: hooks.close()))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)


def test_it_is_what_torch_s_partitioner_keeps():
    model = tiny_model("llama", hidden_size=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=1)
    assert planned(model, True) == pytest.approx(partitioned(model), rel=0.1)
