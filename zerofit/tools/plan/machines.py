"""Machines by name, and topology files: what `--machine` sets of the plan's options."""

from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError, nearest
from zerofit.recipe.parsing import read_yaml

# Host memory as the cloud or maker states it; bandwidths in GB/s of one GPU, in one direction. Sources: NVIDIA's user
# guides of DGX A100, H100, H200 and B200; AWS, "Accelerated computing instances" (p4d and p4de: 400 Gbit/s of EFA, p5:
# 3,200, g5.12xlarge: 40); Google Cloud, "GPU machine types" (a3-highgpu-8g 1,000, a3-megagpu-8g 1,800 Gbit/s); Azure,
# ND-H100-v5 and ND A100 v4 series (400 and 200 Gbit/s of InfiniBand a GPU).
_DGX = {"gpus_per_node": 8, "host_memory": "2TB"}
MACHINES: dict[str, dict[str, Any]] = {
    "dgx-h100": {**_DGX, "gpu": "h100-80gb", "network_bandwidth": 50},
    "dgx-h200": {**_DGX, "gpu": "h200-141gb", "network_bandwidth": 50},
    "dgx-b200": {**_DGX, "gpu": "b200-180gb", "network_bandwidth": 50},
    "dgx-a100": {**_DGX, "gpu": "a100-80gb", "network_bandwidth": 25},
    "p5.48xlarge": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "2TiB", "network_bandwidth": 50},
    "p4d.24xlarge": {"gpu": "a100-40gb", "gpus_per_node": 8, "host_memory": "1152GiB", "network_bandwidth": 6.25},
    "p4de.24xlarge": {"gpu": "a100-80gb", "gpus_per_node": 8, "host_memory": "1152GiB", "network_bandwidth": 6.25},
    "g5.12xlarge": {"gpu": "a10g-24gb", "gpus_per_node": 4, "host_memory": "192GiB", "network_bandwidth": 1.25},
    "a3-highgpu-8g": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1872GiB", "network_bandwidth": 15.6},
    "a3-megagpu-8g": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1872GiB", "network_bandwidth": 25},
    "nd-h100-v5": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1900GiB", "network_bandwidth": 50},
    "nd-a100-v4": {"gpu": "a100-40gb", "gpus_per_node": 8, "host_memory": "900GiB", "network_bandwidth": 25},
    "1x-rtx4090": {"gpu": "rtx4090-24gb", "gpus_per_node": 1, "host_memory": "64GiB", "network_bandwidth": 1.25},
    "2x-rtx4090": {"gpu": "rtx4090-24gb", "gpus_per_node": 2, "host_memory": "128GiB", "network_bandwidth": 1.25},
}
KEYS = ("gpu", "gpus_per_node", "gpu_memory", "host_memory", "link_bandwidth", "network_bandwidth",
        "memory_bandwidth", "peak_tflops")  # fmt: skip


def find_machine(name: str) -> dict[str, Any]:
    """The options of a machine by its name, or of a topology file (NAME.yaml) with some of KEYS.

    Raises:
        UserError: there is no such machine or file; a key or value that the plan does not have.
    """
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if not name.endswith((".yaml", ".yml")):
        close = nearest(name.lower(), MACHINES)
        suggestion = f"Did you mean {close}? " if close else ""
        raise UserError(
            f"machine = {name!r} is not known. {suggestion}Known are {', '.join(MACHINES)}. For another one name a "
            f".yaml file with {', '.join(KEYS)}"
        )
    found = read_yaml(Path(name))
    if not isinstance(found, dict) or not found or not set(found) <= set(KEYS):
        unknown = sorted(map(str, set(found) - set(KEYS))) if isinstance(found, dict) else []
        named = f" ({', '.join(unknown)} is not one)" if unknown else ""
        raise UserError(f"machine = {name}: expected some of {', '.join(KEYS)}{named}")
    for key, value in found.items():
        is_text = key in ("gpu", "gpu_memory", "host_memory")
        kinds = str if is_text else int if key == "gpus_per_node" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or (not is_text and value <= 0):
            raise UserError(f"machine = {name}: {key} = {value!r} is no {'text' if is_text else 'number above 0'}")
    return found
