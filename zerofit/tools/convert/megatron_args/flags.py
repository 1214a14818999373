"""The status of Megatron's flags that the converter does not carry over, and the reason for each."""

import re

REPLICAS_NOTE = "its processes are data-parallel ones here"
ZERO3_NOTE = f"{REPLICAS_NOTE}, and ZeRO-3 shards the weights over them (--config_file accelerate_configs/zero3.yaml)"
# These hold always, or the model, the strategy or the GPU's kernels decide them.
SATISFIED_FLAGS = (
    "sequence_parallel distribute_saved_activations distribute_checkpointed_activations partition_activations "
    "swiglu activation_func_type use_rotary_position_embeddings no_position_embedding disable_bias_linear no_bias "
    "untie_embeddings_and_output_weights normalization layernorm_type position_embedding_type "
    "group_query_attention apply_layernorm_1p no_query_key_layer_scaling attention_softmax_in_fp32 optimizer "
    "ds_fused_adam data_impl dataloader_type repeated_dataloader use_flash_attn use_flash_attn_v1 "
    "use_flash_attn_v2 use_flash_attn_triton attention_backend use_mcore_models transformer_impl "
    "no_pipeline_parallel recompute_method recompute_num_layers activations_checkpoint_num_layers "
    "checkpoint_num_layers overlap_grad_reduce overlap_param_gather accumulate_allreduce_grads_in_fp32 "
    "no_load_optim no_load_rng no_load_lr_state finetune exit_signal_handler DDP_impl calculate_per_token_loss "
    "cross_entropy_loss_fusion no_create_attention_mask_in_dataloader dist_ckpt_format ckpt_format use_dist_ckpt "
    "async_save use_fused_rmsnorm no_gradient_accumulation_fusion no_masked_softmax_fusion no_bias_dropout_fusion "
    "no_bias_swiglu_fusion no_rope_fusion no_persist_layer_norm no_async_tensor_model_parallel_allreduce "
    "disable_mem_efficient_ln eod_mask_loss"
).split()
METRICS_NOTE = "metrics.jsonl has loss, gradient norm, rate, tokens/s, FLOP/s and memory of every update"
NO_EXPERTS_NOTE = "there are no experts"
DISTILLATION_NOTE = "train/distill.py learns from a teacher"
UNSUPPORTED_FLAGS = {  # {reason: names of flags}
    "the launcher, the strategy or the libraries decide it": (
        "distributed_backend local_rank use_cpu_initialization no_initialization init_model_with_meta_device "
        "vocab_size vocab_extra_ids tiktoken_pattern no_mmap_bin_files mmap_warmup data_parallel_random_init "
        "manual_gc empty_unused_memory_level disable_bf16_reduced_precision_matmul vocab_file merge_file loss_scale "
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis grad_reduce_in_bf16 use_megatron_fsdp "
        "data_parallel_sharding_strategy"
    ),
    "the models of Megatron's flags are GPT and Llama": "task_type",
    "say --global_batch_warmup START@UPDATES, in updates and in steps of START": "rampup_batch_size",
    "the same command resumes, and a signal or --max_hours ends a run": (
        "exit_interval adlr_autoresume reset_iteration kill_switch_file kill_switch_path"
    ),
    "checkpoints are zerofit's own, have all that a run needs to resume, and another schedule is another run": (
        "no_save_optim override_opt_param_scheduler use_checkpoint_opt_param_scheduler override_lr_scheduler "
        "use_checkpoint_args universal_checkpoint load_tag ckpt_step"
    ),
    "all samples are used, in batches of one size, with one seed, one learning rate and a constant weight decay": (
        "decoupled_lr decoupled_min_lr start_weight_decay end_weight_decay weight_decay_incr_style lr_warmup_init "
        "seed_for_dataloader sample_rate step_batch_size_schedule"
    ),
    "master weights and the loss are in fp32, and computation in the run's precision": (
        "embedding_weights_in_fp32 fp32_residual_connection fp16_lm_cross_entropy"
    ),
    "zero2_offload or zero3_offload_optimizer of accelerate_configs/ keep the optimizer on the host": (
        "cpu_optimizer cpu_torch_adam"
    ),
    "--watchdog_minutes ends a run if a process makes no progress": "distributed_timeout_minutes",
    "wandb's files are in the run folder; set WANDB_ENTITY": "wandb_save_dir wandb_entity",
    "NaN and infinity are never hidden; --on_anomaly decides what follows": "no_check_for_nan_in_loss_and_grad",
    "stages are not interleaved, and the first has the embedding": (
        "num_layers_per_virtual_pipeline_stage standalone_embedding_stage pipeline_model_parallel_split_rank "
        "overlap_p2p_communication"
    ),
    NO_EXPERTS_NOTE: "create_moe_param_group mlp_type",
    METRICS_NOTE: "logging_level synchronize_each_layer",
}
UNSUPPORTED_PREFIXES = (  # (prefix or prefixes of flags, reason)
    ("fp8", "float8 is --float8 here, through torchao, with a scale of its own for each tensor"),
    ("moe", NO_EXPERTS_NOTE),
    ("retro", "no retrieval"),
    (("log_", "no_log_", "timing_"), METRICS_NOTE),
    ("tensorboard_", "say --with_tracking --report_to tensorboard; it gets every figure of metrics.jsonl"),
    (("profile", "nvtx"), "say --profile N:M, the updates that torch's profiler records"),
    ("tp_comm", "tensor-parallel processes wait for each other; nothing is overlapped"),
    ("enable_zbh1", "forward and backward passes take turns (1F1B)"),
    ("ds_sequence_parallel", "rows are split in one way (accelerate_configs/sp.yaml)"),
    (("kd", "mos"), DISTILLATION_NOTE),
    (("fsdp", "ddp_"), "the strategy's own settings"),
    (("use_nccl", "nccl"), "NCCL's settings are its environment variables"),
    ("overlap_", "communication overlaps computation by default (overlap_comm in the DeepSpeed JSON)"),
    ("zero_", "the DeepSpeed JSON has it under zero_optimization"),
    ("inference_", "a run trains"),
    ("bert_", "no part of GPT"),
)
MODEL_FLAG_PARTS = re.compile(  # matches names of flags that change the model
    r"norm|rms|activation|gelu|glu|relu|bias|position|rotary|rope|alibi|embed|layer|hidden|head|kv|quer|attention|attn|ffn|"
    r"mlp|expert|residual|window|channels|tie|spec|sink|mamba|ssm|conv"
)


def flag_status(name: str) -> tuple[str, str]:
    """Return (status, reason) of a flag that is not carried over: satisfied, no counterpart or unknown."""
    if name in SATISFIED_FLAGS:
        return "satisfied", "it is always so, or the model, the strategy or the GPU's kernels decide it"
    if name.endswith("_teacher"):
        return "no counterpart", DISTILLATION_NOTE
    reason = next((reason for reason, names in UNSUPPORTED_FLAGS.items() if name in names.split()), None)
    reason = reason or next((reason for prefix, reason in UNSUPPORTED_PREFIXES if name.startswith(prefix)), None)
    return ("no counterpart", reason) if reason else ("unknown", "not a known flag: check whether it matters")
