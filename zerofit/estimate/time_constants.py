"""What no data sheet says about time, each with its source."""

MILLION = 1e6

# What is marked "fitted" was fitted on published measurements (zerofit/estimate/measured_rows.csv) by
# benchmarks/published_times.py; docs/measurements/plan-times.md says on how many.

# How a GPU divides a product among its multiprocessors: tiles of (rows, columns), and what small ones reach of the
# best. Source: cuBLAS and CUTLASS choose among these; NVIDIA, Matrix Multiplication Background (tile and wave
# quantization). The parts that small tiles reach are assumptions.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))
MULTIPROCESSORS = 108  # where the table of GPUs has none: those of an A100

# A product reaches K / (K + FILL) of the best: a tile has to be filled and written, whatever its depth. Fitted.
FILL = 124

# What a product reaches whose widths are not multiples of 64 elements, or not of 8, which tensor cores ask for.
# Fitted.
UNEVEN, MISALIGNED = 0.64, 0.27

# Attention reaches S / (S + ROWS) of its best on rows of S tokens, and less with heads of at most 64. Fitted.
ATTENTION_ROWS, NARROW_HEADS = 296, 0.82

# What kernels written for Hopper and Blackwell reach of the peak in attention, forward and backward. Fitted on rows of
# flash attention 3 and 4; Shah et al. 2024 have 0.75 forward.
NEWER_ATTENTION = 0.65

# What torch.compile leaves of the time of operations that move bytes, and of starting operations. Fitted; assumption.
FUSED, FUSED_STARTS = 0.15, 0.4

# What operations that move (size in bytes) reach of the memory's bandwidth. Source: the same, mem1, MB_efficiency.
OF_MEMORY_BY_BYTES = ((0.1 * MILLION, 0.3), (MILLION, 0.6), (10 * MILLION, 0.75), (100 * MILLION, 0.9))

# Python, torch, transformers and peft start an operation of the forward pass in so many seconds; autograd, which runs
# without Python, one of the backward pass in a part of it. Fitted on LoRA with short rows; calibration replaces it.
OPERATION_S, BACKWARD_STARTS = 22e-6, 0.6

# What collectives reach of a link. Source: NCCL's own limit on an A100, 235 of 300 GB/s (src/graph/tuning.cc), and
# S. Bekman's "about 80 %"; between machines Calculon's 0.9; of PCIe 55.4 of 63 GB/s measured beside an H200 (network).
OF_LINK, OF_NETWORK, OF_PCIE = 0.78, 0.9, 0.88

# What a hop of a ring takes, and of a tree (NVLink, PCIe, network), in the protocols LL and Simple; LL has a quarter
# of the bandwidth. Source: NCCL, src/graph/tuning.cc at 01afd20 (baseLat, hwLat).
BASE_S = {"ring": (3.6e-6, 8.4e-6), "tree": (4.4e-6, 4.4e-6)}
HOP_S = {"link": (0.47e-6, 3.4e-6), "pcie": (1.0e-6, 5.7e-6), "network": (2.7e-6, 9.6e-6)}
TREE_HOP_S = {"link": 1.2e-6, "pcie": 1.9e-6, "network": 8.5e-6}
LL_OF_BANDWIDTH = 0.25

# A network between many machines has its links shared: it reaches 1 / (1 + machines / SHARED_BY) of one link. Fitted.
SHARED_BY = 110

# Collectives within a pass, which wait for it and which it waits for, take longer than alone by this factor. Fitted.
WAITED = 1.44

# Computation loses this part of the time of communication that runs beside it. Fitted; Calculon has 0.15 for NVLink's
# processor_usage. On a CPU both take the same cores: nothing is hidden.
CONTENTION, CONTENTION_CPU = 0.1, 1.0

# The network of one GPU where its maker's machine is not known: 100 Gbit/s. An assumption; --network_bandwidth.
NETWORK = 12.5e9

# Bytes that AdamW moves for each element: weight, gradient and two moments are read, three of them are written; fp32.
ADAM_BYTES = 28

# The same of others. In 8 bits both moments take a byte each. Adafactor's single operations (transformers 5.23,
# Adafactor.step) read and write a tensor of the parameter's size 21 times. Of Muon see newton_schulz.py.
MOVED_BYTES = {"adamw": ADAM_BYTES, "muon": ADAM_BYTES, "adamw_8bit": 16, "adafactor": 21 * 4}

# An optimizer on a disk: of each element weight, moments and gradient in fp32 are read and written in an update, at
# what a machine's disk does. An assumption: one NVMe disk of PCIe 4.
DISK_BYTES, DISK = 2 * 16, 3e9

# The host's Adam, elements a second of a machine of eight GPUs. Fitted: on hosts of H200 and B200 (6.4e9, two rows),
# and of V100 and A800 (1e9, six rows). Ren et al. 2021, ZeRO-Offload, table 4, has 3.9e9 for Adam alone on a DGX-2.
# One process reaches half of that: measured beside an H100, with 16 cores (docs/measurements/gpu.md). --calibrate
# measures it.
HOST_ADAM, NEWER_HOST_ADAM, ADAM_OF_ONE = 1e9, 6.4e9, 0.5

# What a step on the host takes, relative to its Adam alone: each fp32 gradient is also scaled for clipping (read and
# written), and each weight cast to half precision (4 bytes read, 2 written). Source: DeepSpeed 0.19,
# unscale_and_clip_grads and step in runtime/zero/stage_1_and_2.py and stage3.py.
HOST_STEP = (ADAM_BYTES + 8 + 6) / ADAM_BYTES
