"""Offload to disk (DeepSpeed's `device: nvme`): refused, since a run could be saved and not resumed.

Seen with DeepSpeed 0.19.8 on two CPU ranks: with the optimizer on disk, updates and a checkpoint's moments are those
of zero3. But a run that resumes from it fails: before its first update the moments have size 0 in memory, and nothing
can be written into them (runtime/zero/stage3.py, line 3163, _get_fp32_opt_state_partition). And of each parameter that
a checkpoint takes, the whole sub-group is read. By reading: weights on disk have no tensor that state.py could fill.
"""

WHY = {
    "offload_optimizer": "the run could be saved and not resumed, since DeepSpeed has nothing to put moments into "
    "before the first update",
    "offload_param": "a resumed run could not restore weights that are not in memory",
}


def look_at_disk(zero: dict) -> list[str]:
    """The problems of a zero_optimization section that puts something on disk."""
    problems = []
    for part, why in WHY.items():
        settings = zero.get(part)
        if isinstance(settings, dict) and settings.get("device") == "nvme":
            problems.append(f'zero_optimization.{part}.device = "nvme" is not supported: {why}. Write "cpu"')
    return problems
