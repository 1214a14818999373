"""The speeds and links of the device that is planned for: measured, the user's, or the maker's."""

from types import SimpleNamespace
from typing import Any

from zerofit.estimate.calibration import cpu_name, read_calibration
from zerofit.estimate.links import Links, MeasuredLinks
from zerofit.estimate.operations import ATTENTION, MATH, MATRIX, MEMORY, RANDOM
from zerofit.estimate.speeds import Curve, Speeds
from zerofit.estimate.time_constants import (
    CONTENTION,
    GPUS_OF_A_HOST,
    HOST_ADAM,
    MULTIPROCESSORS,
    NETWORK,
    NEWER_ATTENTION,
    NEWER_HOST_ADAM,
    OF_MEMORY_BY_BYTES,
    OF_PCIE,
    OPERATION_S,
)
from zerofit.strategy.gpu_table import ATTENTION_OF_PEAK, GIGA, GPUS, OF_PEAK, TERA, Gpu

HOPPER_KERNELS = ("flash_attention_3", "flash_attention_4")
CALIBRATE = "zerofit plan --calibrate"
OVERRIDES = ("peak_tflops", "memory_bandwidth", "link_bandwidth")
STAND_IN = GPUS["a100-80gb"]  # whose speed ranks layouts where that of the device is not known


def device_speeds(
    options: Any, gpu: Gpu | None, on_gpu: bool
) -> tuple[Speeds | None, Links | MeasuredLinks | None, str]:
    """(speeds, links, why one of them is missing, or what they rest on).

    Args:
        options: of the plan: num_gpus, gpus_per_node, and what overrides a GPU's figures.
    """
    local = min(options.num_gpus, options.gpus_per_node)
    network = _network(options, gpu)
    device = cpu_name() if not on_gpu else gpu.model if gpu is not None else ""
    calibration = read_calibration(device) if device and not _overrides(options) else None
    if calibration is not None:
        speeds = calibration.speeds(local, gpu.half if gpu else None)
        links: Links | MeasuredLinks | None = calibration.links_of(network)
        if links is None and local > 1 and gpu is not None:
            links = _links(options, gpu, network)
        if links is None and options.num_gpus > 1:
            return speeds, None, f"not known: links were not measured; run {CALIBRATE} --num_gpus {local}"
        return speeds, links, speeds.source
    if not on_gpu:
        return None, None, f"not known: this machine was not measured; run {CALIBRATE} --num_gpus {local}"
    of_maker, missing = _of_maker(options, gpu)
    links = _links(options, gpu, network)
    if links is None and local > 1:
        missing = missing or "--link_bandwidth, in GB/s"
    if of_maker is None or missing:
        which, other = (f" of {gpu.name}", "") if gpu else ("", ", or --gpu")
        return of_maker, links, f"not known{which}: set {missing}{other}"
    between = f"; {network / GIGA:g} GB/s to other machines" if options.num_gpus > local else ""
    return of_maker, links, f"{of_maker.source}{between}"


def stand_in_speeds(options: Any) -> tuple[Speeds, Links | MeasuredLinks]:
    """(speeds, links) to rank layouts with where the device's own are not known."""
    plain = SimpleNamespace(**vars(options) | dict.fromkeys(OVERRIDES))
    speeds, links, _ = device_speeds(plain, STAND_IN, on_gpu=True)
    assert speeds is not None  # its maker states them
    assert links is not None
    return speeds, links


def _overrides(options: Any) -> bool:
    return any(getattr(options, name) for name in OVERRIDES)


def _network(options: Any, gpu: Gpu | None) -> float:
    return (options.network_bandwidth or 0) * GIGA or (gpu and gpu.network) or NETWORK


def _links(options: Any, gpu: Gpu | None, network: float) -> Links | None:
    link = (options.link_bandwidth or 0) * GIGA or (gpu and gpu.link)
    return Links(link, network, over_pcie=gpu is not None and link == gpu.pcie) if link else None


def _of_maker(options: Any, gpu: Gpu | None) -> tuple[Speeds | None, str]:
    """The maker's peaks, with stated efficiencies."""
    half = (options.peak_tflops or 0) * TERA or (gpu and gpu.half)
    memory = (options.memory_bandwidth or 0) * GIGA or (gpu and gpu.memory)
    if not half or not memory:
        lacking = [name for name, value in (("--peak_tflops", half), ("--memory_bandwidth", memory)) if not value]
        return None, f"{' and '.join(lacking)}, in TFLOP/s and GB/s" if len(lacking) > 1 else lacking[0]
    best, of_attention = (gpu.of_peak, gpu.attention_of_peak) if gpu else (OF_PEAK, ATTENTION_OF_PEAK)
    is_newer = gpu is not None and gpu.is_newer
    if is_newer and options.attn_implementation in HOPPER_KERNELS:
        of_attention = NEWER_ATTENTION
    moved = Curve(OF_MEMORY_BY_BYTES).times(memory)
    rates = {(kind, width): moved for kind in (MEMORY, MATH, RANDOM) for width in (False, True)}
    rates[MATRIX, True] = Curve(((1.0, half * best),))
    rates[ATTENTION, True] = Curve(((1.0, half * of_attention),))
    if gpu is not None and gpu.single:
        rates[MATRIX, False] = rates[ATTENTION, False] = Curve(((1.0, gpu.single * best),))
    pcie = OF_PCIE * gpu.pcie if gpu is not None and gpu.pcie else OF_PCIE * 16 * GIGA
    source = "makers' peaks, and efficiencies fitted on published runs (docs/plan.md); not measured"
    adam = (NEWER_HOST_ADAM if is_newer else HOST_ADAM) * min(
        1.0, min(options.num_gpus, options.gpus_per_node) / GPUS_OF_A_HOST
    )
    multiprocessors = (gpu and gpu.sms) or MULTIPROCESSORS
    return Speeds(rates, OPERATION_S, True, adam, pcie, CONTENTION, half, source, multiprocessors), ""
