"""The degrees of model parallelism in a DeepSpeed JSON, under DeepSpeed's own names, and what does not go with it."""

import json
from typing import Any

from train.recipe.errors import UserError
from train.strategy.layout import ParallelLayout

OFFLOADED = ("offload_optimizer", "offload_param")
ZERO_PLUS_PLUS = {  # and the value that means: not used
    "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False,
    "mics_shard_size": -1,
}  # fmt: skip
SEQUENCE, TENSOR, PIPELINE = "sequence_parallel_size", "tensor_parallel", "pipeline"
PIPELINE_KEYS = {  # and the only value that the engine has a use for
    "use_reentrant": False,  # transformers recomputes activations, as option gradient_checkpointing says
    "pipe_partitioned": False,  # DeepSpeed remembers the shape of the first micro-batch, and rows differ in length
    "grad_partitioned": False,
}
MASKS_ONLY = ("eager", "flex_attention")  # attention that cannot do without a mask made by the model


def read_sequence_degree(config: dict[str, Any], source: str) -> int:
    """The number of ranks that split each row. The key stays: DeepSpeed reads it where ZeRO-3 shards a new model.

    Raises:
        UserError: it is no such number.
    """
    degree = config.get(SEQUENCE, 1)
    if problems := _degree_problems(f"{source}: {SEQUENCE}", degree):
        raise UserError(problems)
    return degree


def check_sequence_parallel(config: dict[str, Any], source: str, recipe, degree: int) -> None:
    """Check that nothing is asked for that does not go together with sequence parallelism.

    Raises:
        UserError: all that does not.
    """
    if degree == 1:
        return
    beside = f"{source}: {SEQUENCE} = {degree} does not go together with"
    problems = _common_problems(config, recipe, beside, SEQUENCE)
    attention = getattr(recipe, "attn_implementation", None)
    if attention in MASKS_ONLY:
        problems.append(f"{beside} attn_implementation = {attention}. Use --attn_implementation sdpa")
    # Without it ZeRO-3 divides the gradients of large and small parameters by different numbers (zero/stage3.py).
    if config["zero_optimization"].get("reduce_scatter") is False:
        problems.append(f"{beside} zero_optimization.reduce_scatter = false. Remove one of them")
    problems += [f"{beside} {name}. Remove one of them" for name in ("prescale_gradients",) if config.get(name)]
    if problems:
        raise UserError(problems)


def take_tensor_degree(config: dict[str, Any], source: str) -> int:
    """Take `tensor_parallel` out of the configuration. Returns the number of ranks that share each layer.

    DeepSpeed would replace layers by its own (AutoTP), which know neither GPT-2 nor a tied vocabulary that is cut.

    Raises:
        UserError: it is no such number, or there are other settings beside it.
    """
    section = config.pop(TENSOR, {"autotp_size": 1})
    problems = [
        f"{source}: {TENSOR}.{key} is of DeepSpeed's own layers, which are not used. Remove it"
        for key in sorted(section.keys() - {"autotp_size"})
    ]
    degree = section.get("autotp_size")
    problems += _degree_problems(f"{source}: {TENSOR}.autotp_size", degree)
    if problems:
        raise UserError(problems)
    return degree


def check_tensor_parallel(config: dict[str, Any], source: str, recipe, degree: int) -> None:
    """Check that nothing is asked for that does not go together with tensor parallelism.

    Raises:
        UserError: all that does not.
    """
    if degree == 1:
        return
    beside = f"{source}: {TENSOR}.autotp_size = {degree} does not go together with"
    problems = _common_problems(config, recipe, beside, TENSOR)
    if config.get(SEQUENCE, 1) != 1:
        problems.append(f"{beside} {SEQUENCE}. Remove one of them")
    if getattr(recipe, "loss", None) == "liger":
        problems.append(f"{beside} loss = liger. Use --loss auto")
    if problems:
        raise UserError(problems)


def read_pipeline_degree(config: dict[str, Any], source: str) -> int:
    """The number of stages that share the layers. What DeepSpeed reads beside it is filled in.

    Raises:
        UserError: it is no such number, or there are settings beside it that have no effect or do harm.
    """
    if PIPELINE not in config:
        return 1
    section = config[PIPELINE]
    degree = section.get("stages")
    problems = _degree_problems(f"{source}: {PIPELINE}.stages", degree)
    for key in sorted(section.keys() - {"stages"}):
        if key not in PIPELINE_KEYS:
            problems.append(f"{source}: {PIPELINE}.{key} has no effect here. Remove it")
        elif section[key] is not PIPELINE_KEYS[key]:
            problems.append(f"{source}: {PIPELINE}.{key} = {json.dumps(section[key])} is not supported. Write false")
    if problems:
        raise UserError(problems)
    config[PIPELINE] = {"stages": degree, **PIPELINE_KEYS}
    return degree


def check_pipeline(config: dict[str, Any], source: str, recipe, degree: int) -> None:
    """Check that nothing is asked for that does not go together with pipeline parallelism.

    Raises:
        UserError: all that does not.
    """
    if degree == 1:
        return
    beside = f"{source}: {PIPELINE}.stages = {degree} does not go together with"
    problems = _common_problems(config, recipe, beside, PIPELINE)
    stage = config["zero_optimization"].get("stage")
    if stage in (2, 3):
        problems.append(
            f"{beside} zero_optimization.stage = {stage}: gradients of many micro-batches are added up in full. "
            "Write 1"
        )
    if config.get(SEQUENCE, 1) != 1:
        problems.append(f"{beside} {SEQUENCE}. Remove one of them")
    if getattr(recipe, "predict_file", None):
        problems.append(f"{beside} predict_file: no rank has all layers. Use a pair without it, such as tp or zero3")
    if problems:
        raise UserError(problems)


def check_accumulation(config: dict[str, Any], source: str, precision: str, layout: ParallelLayout) -> None:
    """Check that gradients which are added up in another dtype go together with the degrees.

    Raises:
        UserError: they do not. Under a pipeline in fp16 the ends would not add up a tied vocabulary's gradient
            (runtime/pipe/engine.py reads what stage_1_and_2.py has moved away); with split rows BF16_Optimizer asks
            for groups that are not there.
    """
    if (config.get("data_types") or {}).get("grad_accum_dtype") is None:
        return
    is_first = config["zero_optimization"].get("stage") == 1
    key = f"{PIPELINE}.stages" if layout.pipeline > 1 else SEQUENCE
    if (layout.pipeline > 1 and precision == "fp16") or (layout.sequence > 1 and is_first and precision == "bf16"):
        raise UserError(
            f"{source}: data_types.grad_accum_dtype does not go together with {key} in {precision}. Remove it"
        )


def idle_share(stages: int, micro_batches: int) -> float:
    """The part of an update's time in which a stage of a pipeline waits for others (Huang et al. 2019, GPipe)."""
    return (stages - 1) / (micro_batches + stages - 1)


def idle_note(stages: int, micro_batches: int) -> str | None:
    """A warning about a pipeline that idles for want of micro-batches."""
    if micro_batches >= stages:
        return None
    idle = f"(p - 1)/(m + p - 1) = {idle_share(stages, micro_batches):.0%}"
    return (
        f"warning: gradient_accumulation_steps = {micro_batches} is below the {stages} stages of the pipeline, which "
        f"stand idle {idle} of the time. Use a smaller --per_device_train_batch_size, or a larger --global_batch_size"
    )


def _degree_problems(key: str, degree: Any) -> list[str]:
    is_number = isinstance(degree, int) and not isinstance(degree, bool) and degree > 0
    return [] if is_number else [f"{key} = {degree!r}: expected a number of processes, e.g. 2"]


def _common_problems(config: dict[str, Any], recipe, beside: str, key: str) -> list[str]:
    """What goes with no kind of model parallelism."""
    problems = [
        f"{beside} {name} ({recipe.source(name)}). Remove it, or use a pair without {key}, such as zero3"
        for name in ("lora", "torch_compile") if getattr(recipe, name, False)
    ]  # fmt: skip
    zero = config["zero_optimization"]
    settings = [part for part in OFFLOADED if (zero.get(part) or {}).get("device", "none") != "none"]
    settings += [name for name, unused in ZERO_PLUS_PLUS.items() if zero.get(name, unused) != unused]
    return problems + [f"{beside} zero_optimization.{setting}. Remove one of them" for setting in settings]
