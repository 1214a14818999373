"""The degrees of model parallelism in a DeepSpeed JSON, under DeepSpeed's own names, and what does not go with it."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.layout import ParallelLayout

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


def take_degrees(config: dict[str, Any], source: str) -> tuple[int, int, int]:
    """Return (tensor, pipeline, sequence): the ranks that share each layer, the layers, and each row.

    `tensor_parallel` is taken out: DeepSpeed would replace layers by its own (AutoTP), which know neither GPT-2 nor a
    tied vocabulary that is cut. What DeepSpeed reads beside the stages is filled in. `sequence_parallel_size` stays:
    DeepSpeed reads it where ZeRO-3 shards a new model.

    Raises:
        UserError: one is no number of processes, or there are settings beside it that have no effect or do harm.
    """
    problems, degrees = [], {}
    for name, key, others in ((TENSOR, "autotp_size", {}), (PIPELINE, "stages", PIPELINE_KEYS)):
        section = config.get(name, {key: 1})
        for other in sorted(section.keys() - {key}):
            if other not in others:
                problems.append(f"{source}: {name}.{other} has no effect here. Remove it")
            elif section[other] is not others[other]:
                problems.append(
                    f"{source}: {name}.{other} = {json.dumps(section[other])} is not supported. Write false"
                )
        degrees[f"{name}.{key}"] = section.get(key)
    degrees[SEQUENCE] = config.get(SEQUENCE, 1)
    problems += [
        f"{source}: {key} = {degree!r}: expected a number of processes, e.g. 2"
        for key, degree in degrees.items()
        if type(degree) is not int or degree < 1
    ]
    if problems:
        raise UserError(problems)
    tensor, pipeline, sequence = degrees.values()
    config.pop(TENSOR, None)
    if PIPELINE in config:
        config[PIPELINE] = {"stages": pipeline, **PIPELINE_KEYS}
    return tensor, pipeline, sequence


def with_degrees(config: dict[str, Any], tensor: int, pipeline: int, sequence: int) -> dict[str, Any]:
    """A copy of a configuration, with these degrees in place of those that it has. It gets no other kind of them."""
    degrees = {
        TENSOR: {"autotp_size": tensor},
        SEQUENCE: sequence,
        PIPELINE: {**config.get(PIPELINE, {}), "stages": pipeline},
    }
    return {key: degrees.get(key, value) for key, value in config.items()}


def check_degrees(
    config: dict[str, Any], source: str, recipe: TrainingRecipe, precision: str, layout: ParallelLayout
) -> None:
    """Check that nothing is asked for that does not go together with the degrees.

    Raises:
        UserError: all that does not.
    """
    degrees = {
        SEQUENCE: layout.sequence,
        f"{TENSOR}.autotp_size": layout.tensor,
        f"{PIPELINE}.stages": layout.pipeline,
    }
    degrees = {key: degree for key, degree in degrees.items() if degree > 1}
    if not degrees:
        return
    zero, problems = config["zero_optimization"], []

    def refuse(what: str, remedy: str, key: str = next(iter(degrees))) -> None:
        problems.append(f"{source}: {key} = {degrees[key]} does not go together with {what}. {remedy}")

    if recipe.lora:
        refuse(f"lora ({recipe.source('lora')})", "Remove it, or use a pair without model parallelism, such as zero3")
    compiled = recipe.torch_compile
    if compiled and layout.sequence > 1:  # DeepSpeed's exchange of heads looks a group up that a graph has not
        refuse(f"torch_compile ({recipe.source('torch_compile')})", "Remove one of them")
    elif str(compiled) == "model":
        refuse(f"torch_compile = model ({recipe.source('torch_compile')})", "Use --torch_compile blocks")
    settings = [part for part in OFFLOADED if (zero.get(part) or {}).get("device", "none") != "none"]
    settings += [name for name, unused in ZERO_PLUS_PLUS.items() if zero.get(name, unused) != unused]
    for setting in settings:
        refuse(f"zero_optimization.{setting}", "Remove one of them")
    if layout.sequence > 1:
        _check_sequence(config, recipe, precision, refuse)
        if len(degrees) > 1:
            refuse(" and ".join(key for key in degrees if key != SEQUENCE), "Remove one of them")
    if layout.pipeline > 1:
        _check_pipeline(config, recipe, precision, partial(refuse, key=f"{PIPELINE}.stages"))
    if problems:
        raise UserError(problems)


def _check_sequence(
    config: dict[str, Any], recipe: TrainingRecipe, precision: str, refuse: Callable[[str, str], None]
) -> None:
    zero = config["zero_optimization"]
    attention = recipe.attn_implementation
    if attention in MASKS_ONLY:
        refuse(f"attn_implementation = {attention}", "Use --attn_implementation sdpa")
    # Without it ZeRO-3 divides the gradients of large and small parameters by different numbers (zero/stage3.py).
    if zero.get("reduce_scatter") is False:
        refuse("zero_optimization.reduce_scatter = false", "Remove one of them")
    if config.get("prescale_gradients"):
        refuse("prescale_gradients", "Remove one of them")
    # BF16_Optimizer asks for groups that are not there.
    if zero.get("stage") == 1 and precision == "bf16" and _accumulation_dtype(config):
        refuse(f"data_types.grad_accum_dtype in {precision}", "Remove it")


def _check_pipeline(
    config: dict[str, Any], recipe: TrainingRecipe, precision: str, refuse: Callable[[str, str], None]
) -> None:
    zero = config["zero_optimization"]
    stage = zero.get("stage")
    if stage in (2, 3):
        refuse(f"zero_optimization.stage = {stage}: gradients of many micro-batches are added up in full", "Write 1")
    if zero.get("overlap_comm"):  # DeepSpeed turns it off
        refuse("zero_optimization.overlap_comm: gradients are exchanged after the last micro-batch", "Remove it")
    if getattr(recipe, "predict_file", None):
        refuse("predict_file: no rank has all layers", "Use a pair without it, such as tp or zero3")
    # The ends would not add up a tied vocabulary's gradient: runtime/pipe/engine.py reads what stage_1_and_2.py has
    # moved away.
    if precision == "fp16" and _accumulation_dtype(config):
        refuse(f"data_types.grad_accum_dtype in {precision}", "Remove it")


def _accumulation_dtype(config: dict[str, Any]) -> str | None:
    """The dtype in which gradients are added up, where it is another one."""
    return (config.get("data_types") or {}).get("grad_accum_dtype")


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
