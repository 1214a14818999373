"""Offload to disk (DeepSpeed's `device: nvme`): refused, since checkpoints would not hold what they should.

A checkpoint takes the optimizer's state parameter by parameter (train/strategy/state.py). DeepSpeed 0.19.8 reads the
whole sub-group of that parameter from disk, frees the buffers, and hands out a view of one, which its next read
overwrites (runtime/zero/stage3.py, _get_fp32_opt_state_partition). Only on a GPU is it copied in time, and there, too,
a checkpoint reads each sub-group three times for each of its parameters.
"""

WHY = {
    "offload_optimizer": "of state on disk DeepSpeed hands out buffers that its next read overwrites, and reads a "
    "whole sub-group for each parameter: checkpoints would be wrong, or take hours",
    "offload_param": "a resumed run cannot restore weights that are not in memory",
}


def look_at_disk(zero: dict) -> list[str]:
    """The problems of a zero_optimization section that puts something on disk."""
    problems = []
    for part, why in WHY.items():
        settings = zero.get(part)
        if isinstance(settings, dict) and settings.get("device") == "nvme":
            problems.append(f'zero_optimization.{part}.device = "nvme" is not supported: {why}. Write "cpu"')
    return problems
