"""Known GPUs: memory, peak arithmetic and links, as their makers' data sheets have them."""

from dataclasses import dataclass

from train.recipe.errors import UserError, nearest


@dataclass(frozen=True)
class Gpu:
    """A device. FLOP/s are dense (without structured sparsity); bytes/s are of one direction.

    Attributes:
        usable_bytes: what torch reports as the device's memory (ECC and the driver's own share are taken off).
    """

    name: str
    usable_bytes: int
    half_flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    has_bf16: bool = True


def _gpu(name, gib, half, fp32, memory, link, has_bf16=True) -> Gpu:
    return Gpu(name, int(gib * 2**30), half * 1e12, fp32 * 1e12, memory * 1e9, link * 1e9, has_bf16)


# Sources: the makers' data sheets (NVIDIA's fp32 with TF32 where there is TF32). Usable memory: about what
# torch.cuda.get_device_properties reports for such a device, written down from memory and not measured here:
# --gpu_memory overrides it.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100-16gb", 15.77, 125, 15.7, 900, 150, has_bf16=False),
        _gpu("v100-32gb", 31.74, 125, 15.7, 900, 150, has_bf16=False),
        _gpu("t4-16gb", 14.75, 65, 8.1, 320, 16, has_bf16=False),
        _gpu("rtx3090-24gb", 23.69, 71, 35.6, 936, 32),
        _gpu("rtx4090-24gb", 23.65, 165, 82.6, 1008, 32),
        _gpu("a10-24gb", 22.06, 125, 62.5, 600, 32),
        _gpu("l4-24gb", 22.17, 121, 60, 300, 32),
        _gpu("a6000-48gb", 47.54, 155, 77.4, 768, 56),
        _gpu("l40s-48gb", 44.52, 362, 183, 864, 32),
        _gpu("a100-40gb", 39.39, 312, 156, 1555, 300),
        _gpu("a100-80gb", 79.15, 312, 156, 2039, 300),
        _gpu("h100-80gb", 79.11, 989, 494, 3350, 450),
        _gpu("h100-pcie-80gb", 79.11, 756, 378, 2000, 64),
        _gpu("h200-141gb", 139.8, 989, 494, 4800, 450),
        _gpu("b200-180gb", 178.3, 2250, 1100, 8000, 900),
        _gpu("mi210-64gb", 63.98, 181, 22.6, 1638, 150),
        _gpu("mi250x-64gb", 63.98, 191, 23.9, 1638, 100),
        _gpu("mi300x-192gb", 191.98, 1307, 653, 5300, 448),
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
