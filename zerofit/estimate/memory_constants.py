"""Sizes that no configuration and no trace gives, each with its source. None is fitted to a published table."""

GIB = 2**30

# What the driver holds for a process beside torch's allocator, and outside its limit: the CUDA context and the
# libraries' code. Source: 287 MB at first, and 667 MB with all of torch's kernels loaded (pytorch/pytorch#86509).
CUDA_CONTEXT_BYTES = 640 * 2**20

# Host memory of a rank before it has a model: Python, torch and transformers. Source: measured.
PROGRAM_BYTES = 400 * 2**20

# Buffers of an NCCL communicator, in each process of a group of several. Source: NCCL's documentation of
# NCCL_BUFFSIZE (4 MiB for each channel and peer; rings of 16 to 32 channels, send and receive). An estimate.
NCCL_BYTES = 256 * 2**20

# On a CPU, beyond what the process takes with its libraries imported: buffers of MKL,
# and what is too small to be a tensor. Under DeepSpeed also the stacks of the three threads of its second gloo group,
# 8 MiB each (pthread_create(3): as large as `ulimit -s` allows). Source: measured with models of two layers, 8 wide,
# whose tensors take next to nothing (docs/measurements/plan.md).
CPU_PROGRAM_BYTES = 8 * 2**20
CPU_DEEPSPEED_BYTES = 26 * 2**20

# On a CPU, the stacks of a gloo group's three threads, and the groups that a process has beside the two of plain
# DeepSpeed. Source: threads of a process under tp, sp and pp, less those under zero2.
CPU_GROUP_BYTES = 3 * 8 * 2**20
CPU_GROUPS = {"tensor": 3, "sequence": 1, "pipeline": 5}  # a pipeline's grid has those of its tensor parallelism too

# cuBLAS keeps a workspace for each handle and stream: 32 MiB on Hopper, 8 MiB before. Source: torch's documentation
# of CUBLAS_WORKSPACE_CONFIG.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20

# An NF4 weight with double quantisation: 4 bits and 0.127 bits of scales. Source: Dettmers et al. 2023, QLoRA.
NF4_BYTES = (4 + 0.127) / 8

# Bytes of a gradient's norm, element by element: DeepSpeed turns each gradient to fp64 (runtime/zero/utils.py,
# get_norm_dtype), and so does zerofit/strategy/torch_engine.py on a CPU.
NORM_BYTES = 8

# Adam: two moments in fp32, and under DeepSpeed a copy of the weights in fp32. Source: Rajbhandari et al. 2020, ZeRO.
MOMENTS_BYTES, MASTER_BYTES = 8, 4
AVERAGE_BYTES = 4  # of the mean of the weights, with ema_decay

# What a step of Adafactor makes of each parameter on its way: its squared gradient, or the update and its negative.
# Source: transformers/optimization.py 5.23, Adafactor.step, where `update` lives on while the next one is made.
ADAFACTOR_BYTES = 2 * 4
