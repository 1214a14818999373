"""Known GPUs: their memory."""

from dataclasses import dataclass

from train.recipe.errors import UserError, nearest


@dataclass(frozen=True)
class Gpu:
    """A device.

    Attributes:
        usable_bytes: what torch reports as the device's memory (ECC and the driver's own share are taken off).
    """

    name: str
    usable_bytes: int
    has_bf16: bool = True


def _gpu(name: str, gib: float, has_bf16: bool = True) -> Gpu:
    return Gpu(name, int(gib * 2**30), has_bf16)


# About what torch.cuda.get_device_properties reports for such a device. Written down from memory, not measured here;
# --gpu_memory overrides it.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100-16gb", 15.77, has_bf16=False),
        _gpu("v100-32gb", 31.74, has_bf16=False),
        _gpu("t4-16gb", 14.75, has_bf16=False),
        _gpu("rtx3090-24gb", 23.69),
        _gpu("rtx4090-24gb", 23.65),
        _gpu("a10-24gb", 22.06),
        _gpu("l4-24gb", 22.17),
        _gpu("a6000-48gb", 47.54),
        _gpu("l40s-48gb", 44.52),
        _gpu("a100-40gb", 39.39),
        _gpu("a100-80gb", 79.15),
        _gpu("h100-80gb", 79.11),
        _gpu("h100-pcie-80gb", 79.11),
        _gpu("h200-141gb", 139.8),
        _gpu("b200-180gb", 178.3),
        _gpu("mi210-64gb", 63.98),
        _gpu("mi250x-64gb", 63.98),
        _gpu("mi300x-192gb", 191.98),
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
