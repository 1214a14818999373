"""Known GPUs: their memory, and what their makers say of their speed."""

from dataclasses import dataclass

from train.recipe.errors import UserError, nearest

TERA, GIGA = 1e12, 1e9
PCIE = {3: 16 * GIGA, 4: 31 * GIGA, 5: 63 * GIGA}  # 16 lanes, one direction


@dataclass(frozen=True)
class Gpu:
    """A device. Bandwidths are in bytes/s, those of links in one direction; None: no source was found.

    Attributes:
        usable_bytes: what torch reports as the device's memory (ECC and the driver's own share are taken off).
        model: its name in the table of half-precision peaks (train/record/meters.py); empty: it is not there.
        single: FLOP/s of fp32 without tensor cores, as torch multiplies fp32 matrices by default.
        memory: bandwidth of its memory.
        link: to the other GPUs of a machine.
        pcie: to the host.
        network: to other machines, of one GPU, in the machine that its maker builds around it.
    """

    name: str
    usable_bytes: int
    has_bf16: bool = True
    model: str = ""
    single: float | None = None
    memory: float | None = None
    link: float | None = None
    pcie: float | None = None
    network: float | None = None


def _gpu(name: str, gib: float, model="", single=None, memory=None, link=None, pcie=None, network=None, has_bf16=True):
    return Gpu(
        name, int(gib * 2**30), has_bf16, model, single and single * TERA, memory and memory * GIGA,
        (link and link * GIGA) or PCIE.get(pcie), PCIE.get(pcie), network and network * GIGA,
    )  # fmt: skip


# Memory is about what torch.cuda.get_device_properties reports for such a device. Written down from memory, not
# measured here; --gpu_memory overrides it.
# fp32 (TFLOP/s), memory, NVLink or Infinity Fabric (GB/s) and the generation of PCIe are the makers', as listed by
# stas00/ml-engineering (744d01e, compute/accelerator and network), by G. Lockwood (glennklockwood.com: A100, H100) and
# by pages with the makers' tables (L40S, L4, T4, V100, A6000; bandwidths alone: A10, RTX 4090). Without a link of its
# own a GPU has PCIe. The network is that of a DGX (calculon-ai/calculon, systems/: 25 GB/s beside an A100, 50 beside
# an H100). An MI250X is one of its two dies; what links them to others was not found.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100-16gb", 15.77, "V100", 15.7, 897, 150, 3, has_bf16=False),
        _gpu("v100-32gb", 31.74, "V100", 15.7, 897, 150, 3, has_bf16=False),
        _gpu("t4-16gb", 14.75, "T4", 8.1, 320, None, 3, has_bf16=False),
        _gpu("rtx3090-24gb", 23.69, "RTX 3090", pcie=4),
        _gpu("rtx4090-24gb", 23.65, "RTX 4090", None, 1008, None, 4),
        _gpu("a10-24gb", 22.06, "A10", None, 600, None, 4),
        _gpu("l4-24gb", 22.17, "L4", 30.3, 300, None, 4),
        _gpu("a6000-48gb", 47.54, "A6000", 38.7, 768, None, 4),
        _gpu("l40s-48gb", 44.52, "L40S", 91.6, 864, None, 4),
        _gpu("a100-40gb", 39.39, "A100", 19.5, 1555, 300, 4, 25),
        _gpu("a100-80gb", 79.15, "A100", 19.5, 2039, 300, 4, 25),
        _gpu("h100-80gb", 79.11, "H100", 67, 3350, 450, 5, 50),
        _gpu("h100-pcie-80gb", 79.11, "H100 PCIe", 51, 2000, None, 5),
        _gpu("h200-141gb", 139.8, "H200", 67, 4800, 450, 5, 50),
        _gpu("b200-180gb", 178.3, "B200", 80, 8000, 900, 5),
        _gpu("mi210-64gb", 63.98),
        _gpu("mi250x-64gb", 63.98, "MI250X", 23.9, 1640),
        _gpu("mi300x-192gb", 191.98, "MI300X", 163.4, 5300, 448, 5),
    )
}
CPU = "cpu"


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, upper or lower case.

    Raises:
        UserError: it is not in the table.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        close = nearest(name.lower(), GPUS)
        suggestion = f"Did you mean {close}? " if close else ""
        raise UserError(
            f"gpu = {name!r} is not in the table of known GPUs. {suggestion}Known are {', '.join(GPUS)} and {CPU}. "
            "For another one leave --gpu out and set --gpu_memory, e.g. --gpu_memory 24GiB"
        )
    return gpu
