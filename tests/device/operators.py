"""The simulated device itself: errors, counters, limit, and the CPU's digits. test_device.py runs this on a device."""

import pytest
import torch
import torch.nn.functional as F

DEVICE = torch.device("simgpu")
accelerator = torch.accelerator


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device=DEVICE)


MIXED = {
    "addition": lambda: ones(3) + torch.ones(3),
    "embedding": lambda: F.embedding(torch.tensor([1]), ones(3, 3)),
    "linear layer": lambda: torch.nn.Linear(3, 3).to(DEVICE)(torch.ones(2, 3)),
    "cross entropy": lambda: F.cross_entropy(ones(3, 3), torch.zeros(3, dtype=torch.long)),
    "index on the device": lambda: torch.ones(3)[torch.tensor([1], device=DEVICE)],
    "layer norm": lambda: F.layer_norm(torch.ones(2, 3), (3,), ones(3)),
    "optimizer": lambda: torch._foreach_add_([ones(3)], [torch.ones(3)]),
    "generator": lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
}


@pytest.mark.parametrize("operation", MIXED)
def test_host_and_device_do_not_mix(operation):
    with pytest.raises(RuntimeError, match="device"):
        MIXED[operation]()


def test_what_may_cross():
    """As on CUDA: copies, scalar tensors, and indices on the host."""
    assert (ones(3) + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert ones(4)[torch.tensor([True, False, True, True])].shape == (3,)
    with pytest.raises(TypeError, match="device type tensor to numpy"):
        ones(3).numpy()
    pinned = torch.arange(3.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert pinned.to(DEVICE, non_blocking=True).cpu().tolist() == [0, 1, 2]


def test_counters_are_exact():
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    some = ones(1000)  # 4,000 bytes: eight blocks of 512
    assert accelerator.memory_allocated() - before == 4096
    more = some * 2 + 1
    assert accelerator.memory_allocated() - before == 2 * 4096
    assert accelerator.max_memory_allocated() - before == 3 * 4096
    view, host = more[10:], more.cpu()
    assert accelerator.memory_allocated() - before == 2 * 4096
    del some, more, view, host
    assert accelerator.memory_allocated() == before
    assert torch.simgpu.memory_reserved() >= before + 3 * 4096
    accelerator.empty_cache()
    assert torch.simgpu.memory_reserved() == before


@pytest.fixture
def limit():
    """limit(bytes): what may be allocated from here on, beyond what is."""
    total = accelerator.get_memory_info()[1]
    yield lambda more: torch.simgpu.set_per_process_memory_fraction((accelerator.memory_allocated() + more) / total)
    torch.simgpu.set_per_process_memory_fraction(1.0)


def test_beyond_the_limit_is_out_of_memory(limit):
    """To the block, for tensors and for results of operators; nothing is lost by a refusal."""
    column, row, before = ones(128, 1), ones(1, 128), accelerator.memory_allocated()
    limit(2**16)
    assert (column @ row).shape == (128, 128)  # 2**16 bytes
    held = ones(1)
    for refused in (lambda: torch.empty(2**14, device=DEVICE), lambda: column @ row):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 64\.00 KiB\. GPU 0 has a total capacity"):
            refused()
    del held
    assert accelerator.memory_allocated() == before
    assert (column @ row).shape == (128, 128)


WAITS = {  # None: the host goes on
    "a number": (lambda: ones(3).sum().item(), "item"),
    "to the host": (lambda: ones(3).cpu(), "copy to host"),
    "from the host": (lambda: torch.ones(3).to(DEVICE), "copy to device"),
    "pinned memory": (lambda: torch.ones(3).pin_memory().to(DEVICE, non_blocking=True), None),
    "a mask": (lambda: ones(3)[ones(3) > 0], "aten::index"),
    "unknown shape": (lambda: ones(3).nonzero(), "aten::nonzero"),
    "clipping": (lambda: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(ones(3))], 1.0), None),
    "a stream": (lambda: torch.simgpu.current_stream().synchronize(), "synchronize stream"),
    "the device": (lambda: torch.simgpu.synchronize(), "synchronize device"),
}


@pytest.mark.parametrize("operation", WAITS)
def test_an_observer_is_told_what_the_host_waits_for(operation):
    does, expected = WAITS[operation]
    seen = []
    torch.simgpu.observe(lambda event, size, group: seen.append(event))
    try:
        does()
    finally:
        torch.simgpu.observe(None)
    does()
    assert seen == ([expected] if expected else [])
