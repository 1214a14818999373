"""What no data sheet says about time, each with its source. None is fitted to a published throughput."""

MILLION = 1e6

# How near a product of (size in FLOP) comes to that best. Source: Isaev et al. 2023, Calculon, systems/a100_80g.json
# and h100_80g_nvl8.json (matrix, gflops_efficiency), relative to the largest.
OF_BEST_BY_FLOPS = ((0.1e9, 0.1 / 0.95), (1e9, 0.6 / 0.95), (16e9, 0.9 / 0.95), (128e9, 1.0))

# What operations that move (size in bytes) reach of the memory's bandwidth. Source: the same, mem1, MB_efficiency.
OF_MEMORY_BY_BYTES = ((0.1 * MILLION, 0.3), (MILLION, 0.6), (10 * MILLION, 0.75), (100 * MILLION, 0.9))

# Python and torch start operations one after another. An assumption: it matters for small models only, and calibration
# replaces it.
OPERATION_S = 6e-6

# What collectives reach of a link. Source: NCCL's own limit on an A100, 235 of 300 GB/s (src/graph/tuning.cc), and
# S. Bekman's "about 80 %"; between machines Calculon's 0.9; of PCIe 55.4 of 63 GB/s measured beside an H200 (network).
OF_LINK, OF_NETWORK, OF_PCIE = 0.78, 0.9, 0.88

# What a hop of a ring takes, and of a tree (NVLink, PCIe, network), in the protocols LL and Simple; LL has a quarter
# of the bandwidth. Source: NCCL, src/graph/tuning.cc at 01afd20 (baseLat, hwLat).
BASE_S = {"ring": (3.6e-6, 8.4e-6), "tree": (4.4e-6, 4.4e-6)}
HOP_S = {"link": (0.47e-6, 3.4e-6), "pcie": (1.0e-6, 5.7e-6), "network": (2.7e-6, 9.6e-6)}
TREE_HOP_S = {"link": 1.2e-6, "pcie": 1.9e-6, "network": 8.5e-6}
LL_OF_BANDWIDTH = 0.25

# Computation loses this part of the time of communication that runs beside it. Source: Calculon, processor_usage of
# NVLink. On a CPU both take the same cores: nothing is hidden.
CONTENTION, CONTENTION_CPU = 0.15, 1.0

# The network of one GPU where its maker's machine is not known: 100 Gbit/s. An assumption; --network_bandwidth.
NETWORK = 12.5e9

# Bytes that AdamW moves for each element: weight, gradient and two moments are read, three of them are written; fp32.
ADAM_BYTES = 28

# The same of others. In 8 bits both moments take a byte each. Adafactor's single operations (transformers 5.23,
# Adafactor.step) read and write a tensor of the parameter's size 21 times.
MOVED_BYTES = {"adamw": ADAM_BYTES, "adamw_8bit": 16, "adafactor": 21 * 4}

# An optimizer on a disk: of each element weight, moments and gradient in fp32 are read and written in an update, at
# what a machine's disk does. An assumption: one NVMe disk of PCIe 4.
DISK_BYTES, DISK = 2 * 16, 3e9

# The host's Adam, elements a second of a machine with two processors: 10 billion in 2.57 s. Source: Ren et al. 2021,
# ZeRO-Offload, table 4 (CPU-Adam on a DGX-2). That a GPU has an eighth of the machine is an assumption: so are most
# machines rented and most jobs submitted. --calibrate measures it.
HOST_ADAM, GPUS_OF_A_HOST = 10e9 / 2.57, 8

# What a step on the host takes, relative to its Adam alone: each fp32 gradient is also scaled for clipping (read and
# written), and each weight cast to half precision (4 bytes read, 2 written). Source: DeepSpeed 0.19,
# unscale_and_clip_grads and step in runtime/zero/stage_1_and_2.py and stage3.py.
HOST_STEP = (ADAM_BYTES + 8 + 6) / ADAM_BYTES
