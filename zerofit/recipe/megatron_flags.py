"""Flags of Megatron-LM and Megatron-DeepSpeed: what to type instead of each, or why no option replaces it.

The parser of recipes prints these hints, and `zerofit convert megatron-args` uses the same ones.
"""

import re

SHAPE = "say --config_name, and --config_overrides with the names of that configuration"
DROPOUT = (
    "say --config_overrides attn_pdrop=0,resid_pdrop=0,embd_pdrop=0 (GPT-2), attention_dropout=0 (Llama, which has no "
    "other)"
)
STRATEGY = "the strategy is the launcher's: accelerate launch --config_file accelerate_configs/NAME.yaml"
DATA_PARALLEL = "its processes are data-parallel ones here"
DEGREE = f"{DATA_PARALLEL}, and ZeRO-3 shards the weights over them (--config_file accelerate_configs/zero3.yaml)"
SPLIT_ROWS = f"{STRATEGY}; of sp.yaml the JSON has the degree, sequence_parallel_size"
IN_PARTS = "between the layers that are cut each tensor-parallel process has a part of the tokens, in every such pair"
TOKENIZER = "name the tokenizer's folder with --tokenizer_name"
FULL = "each layer is recomputed by itself"
SELECTIVE = (
    "linear products and attention are kept, and all else is recomputed; there only attention's core is, which a "
    "flash kernel does by itself"
)
BLOCK = "say --gradient_checkpointing N, every N-th layer; Megatron's block recomputes the first ones"
TRACKERS = "say --with_tracking --report_to tensorboard or wandb; they get every figure of metrics.jsonl"

TYPED = {  # flags that another option replaces
    "min_lr": "say --min_lr_ratio, the minimum as a fraction of learning_rate",
    "eval_iters": "say --max_eval_samples, eval_iters * global_batch_size",
    "num_layers": SHAPE,
    "hidden_size": SHAPE,
    "ffn_hidden_size": SHAPE,
    "ffn_hidden_coeff": SHAPE,
    "num_attention_heads": SHAPE,
    "num_query_groups": SHAPE,
    "num_key_value_heads": SHAPE,
    "kv_channels": SHAPE,
    "max_position_embeddings": SHAPE,
    "init_method_std": "say --config_overrides initializer_range=0.02",
    "norm_epsilon": SHAPE,
    "layernorm_epsilon": SHAPE,
    "rotary_percent": SHAPE,
    "no_bias_gelu_fusion": "say --config_overrides activation_function=gelu, which the kernel without fusion computes",
    "openai_gelu": "a GPT-2 has it: activation_function gelu_new",
    "squared_relu": "say --config_overrides activation_function=relu2",
    "rotary_base": "say --config_overrides rope_theta=10000",
    "rotary_position_embeddings_theta": "say --config_overrides rope_theta=10000",
    "attention_dropout": DROPOUT,
    "hidden_dropout": DROPOUT,
    "train_samples": "say --max_train_steps, samples / global_batch_size",
    "train_tokens": "say --max_train_steps, tokens / (global_batch_size * block_size)",
    "lr_decay_samples": "say --lr_decay_steps, samples / global_batch_size",
    "lr_decay_tokens": "say --lr_decay_steps, tokens / (global_batch_size * block_size)",
    "lr_warmup_samples": "say --num_warmup_steps, samples / global_batch_size",
    "lr_warmup_tokens": "say --num_warmup_steps, tokens / (global_batch_size * block_size)",
    "lr_wsd_decay_iters": "say --wsd_decay_ratio, a fraction of the updates of the schedule",
    "exit_duration_in_mins": "say --max_hours",
    "num_workers": "say --dataloader_num_workers",
    "save": "say --output_dir",
    "load": "say --model_name_or_path (weights to begin with), or --resume (to resume a run)",
    "tokenizer_type": TOKENIZER,
    "tokenizer_model": TOKENIZER,
    "tokenizer_name_or_path": TOKENIZER,
    "zero_stage": STRATEGY,
    "deepspeed": STRATEGY,
    "deepspeed_config": f"{STRATEGY}, which names the DeepSpeed JSON",
    "use_distributed_optimizer": f"{STRATEGY}; that flag is accelerate_configs/zero1.yaml",
    "tensor_model_parallel_size": f"{STRATEGY}; of tp.yaml the JSON has the degree, tensor_parallel.autotp_size",
    "pipeline_model_parallel_size": f"{STRATEGY}; of pp.yaml and 3d.yaml the JSON has the degree, pipeline.stages",
    "context_parallel_size": SPLIT_ROWS,
    "ds_sequence_parallel_size": SPLIT_ROWS,
    "recompute_granularity": f"say --gradient_checkpointing full: {FULL}; or selective: {SELECTIVE}",
    "recompute_activations": f"say --gradient_checkpointing selective: {SELECTIVE}",
    "recompute_num_layers": BLOCK,
    "checkpoint_activations": "say --gradient_checkpointing",
    "checkpoint_in_cpu": "say --activation_offload, with --gradient_checkpointing",
    "deepspeed_activation_checkpointing": "say --gradient_checkpointing",
    "wandb_project": "say --report_name, with --with_tracking --report_to wandb",
    "wandb_exp_name": "say --run_name, with --with_tracking --report_to wandb",
    "tensorboard_dir": "say --with_tracking --report_to tensorboard; the files are in the run folder",
}
OF_LLAMA = "a Llama (--config_name llama-2-7b) has it"
NORMS = "a Llama has rmsnorm, a GPT-2 layernorm"
FLASH = "on a GPU a flash kernel runs by default, in half precision (--attn_implementation)"
FUSED = "a matter of Megatron's kernels; the figures are the same"
OVERLAP = "communication overlaps computation by default (overlap_comm in the DeepSpeed JSON)"
SATISFIED = {  # what is always so
    "sequence_parallel": IN_PARTS,
    "distribute_saved_activations": IN_PARTS,
    "distribute_checkpointed_activations": IN_PARTS,
    "partition_activations": IN_PARTS,
    "swiglu": OF_LLAMA,
    "activation_func_type": OF_LLAMA,
    "normalization": NORMS,
    "layernorm_type": NORMS,
    "use_rotary_position_embeddings": OF_LLAMA,
    "position_embedding_type": "a Llama has rope, a GPT-2 learned positions",
    "no_position_embedding": "a Llama has no learned positions",
    "untie_embeddings_and_output_weights": "say --config_overrides tie_word_embeddings=false (llama-2-7b has it)",
    "disable_bias_linear": OF_LLAMA,
    "no_bias": OF_LLAMA,
    "group_query_attention": "the number of key and value heads decides it",
    "apply_layernorm_1p": "the same norm, whose weights count from 1 and not from 0",
    "no_query_key_layer_scaling": "no such scaling is done; it would cancel out but for rounding",
    "attention_softmax_in_fp32": "softmax is computed in fp32",
    "optimizer": "AdamW is the optimizer",
    "data_impl": "corpora are mapped into memory, as with mmap",
    "dataloader_type": "samples come in one order for all epochs, as with single",
    "use_flash_attn": FLASH,
    "use_flash_attn_v1": FLASH,
    "use_flash_attn_v2": FLASH,
    "use_flash_attn_triton": FLASH,
    "attention_backend": FLASH,
    "use_mcore_models": "there is one implementation of each model",
    "transformer_impl": "there is one implementation of each model",
    "no_pipeline_parallel": "there is a pipeline in the pairs pp and 3d only",
    "recompute_method": f"{FULL}, which is uniform with 1 layer",
    "recompute_num_layers": FULL,
    "overlap_grad_reduce": OVERLAP,
    "overlap_param_gather": OVERLAP,
    "accumulate_allreduce_grads_in_fp32": "it is so under ddp; under ZeRO the JSON sets it (data_types)",
    "no_load_optim": "no optimizer state comes with the weights that a run starts from",
    "no_load_rng": "no random state comes with the weights that a run starts from",
    "exit_signal_handler": "SIGTERM, SIGUSR1 and Ctrl-C save and leave",
    "DDP_impl": "the strategy is the launcher's",
    "finetune": "nothing else comes with the weights that a run starts from",
    "calculate_per_token_loss": "the loss is a sum over tokens, divided by their number in the global batch",
    "cross_entropy_loss_fusion": "the memory-saving loss is the default (--loss)",
    "no_create_attention_mask_in_dataloader": "no mask is made where the kernel needs none",
    "dist_ckpt_format": "checkpoints have one format, which any number of processes reads",
    "ckpt_format": "checkpoints have one format, which any number of processes reads",
    "use_dist_ckpt": "checkpoints have one format, which any number of processes reads",
    "async_save": "checkpoints are written while training continues",
    "use_fused_rmsnorm": FUSED,
    "no_gradient_accumulation_fusion": FUSED,
    "no_masked_softmax_fusion": FUSED,
    "no_bias_dropout_fusion": FUSED,
    "no_bias_swiglu_fusion": FUSED,
    "no_rope_fusion": FUSED,
    "no_persist_layer_norm": FUSED,
    "no_async_tensor_model_parallel_allreduce": FUSED,
    "disable_mem_efficient_ln": FUSED,
    "ds_fused_adam": "the optimizer is a fused one",
    "eod_mask_loss": "the same",
    "repeated_dataloader": "the data is read as often as the run is long",
}
OWN_FIGURES = "metrics.jsonl has loss, gradient norm, rate, tokens/s, FLOP/s and memory of every update"
MEGATRONS_FORMAT = "Megatron's checkpoints are not read or written here"
ONE_SCALE = "the scaler begins and grows as accelerate's or, under ZeRO, as the fp16 block of the JSON says"
NONE = {  # what is not supported, and why
    "distributed_backend": "NCCL on GPUs, gloo without",
    "local_rank": "the launcher's",
    "task_type": "the models of Megatron's flags are GPT and Llama",
    "loss_scale": ONE_SCALE,
    "initial_loss_scale": ONE_SCALE,
    "min_loss_scale": ONE_SCALE,
    "loss_scale_window": ONE_SCALE,
    "hysteresis": ONE_SCALE,
    "rampup_batch_size": "say --global_batch_warmup START@UPDATES, in updates and in steps of START",
    "step_batch_size_schedule": "the global batch has one size from the first update on",
    "exit_interval": "stop a run with --max_hours or a signal; a smaller max_train_steps makes another schedule",
    "no_save_optim": "say --save_only_model",
    "override_opt_param_scheduler": "the schedule is the recipe's; a run with another one is another run",
    "use_checkpoint_opt_param_scheduler": "the schedule is the recipe's; a run with another one is another run",
    "use_checkpoint_args": "the recipe has all options",
    "universal_checkpoint": MEGATRONS_FORMAT,
    "load_tag": MEGATRONS_FORMAT,
    "ckpt_step": MEGATRONS_FORMAT,
    "decoupled_lr": "all weights have one learning rate",
    "decoupled_min_lr": "all weights have one learning rate",
    "start_weight_decay": "weight decay is constant",
    "end_weight_decay": "weight decay is constant",
    "weight_decay_incr_style": "weight decay is constant",
    "lr_warmup_init": "the warm-up begins at 0",
    "embedding_weights_in_fp32": "master weights are in fp32, and computation in the run's precision",
    "fp32_residual_connection": "the residual stream has the run's precision",
    "fp16_lm_cross_entropy": "the loss is summed in fp32",
    "grad_reduce_in_bf16": "communication_data_type of the DeepSpeed JSON sets it",
    "cpu_optimizer": f"{STRATEGY}; zero2_offload or zero3_offload_optimizer keep the optimizer on the host",
    "cpu_torch_adam": "the host's optimizer is DeepSpeed's",
    "use_cpu_initialization": "weights are drawn where the strategy needs them",
    "no_initialization": "weights are drawn or read, never both",
    "vocab_size": "the tokenizer's",
    "vocab_extra_ids": "the tokenizer's",
    "tiktoken_pattern": "the tokenizer's",
    "no_mmap_bin_files": "corpora are mapped into memory",
    "mmap_warmup": "the system reads ahead by itself",
    "data_parallel_random_init": "all processes begin with the same weights",
    "checkpoint_num_layers": FULL,
    "manual_gc": "Python's own",
    "empty_unused_memory_level": "torch's own",
    "distributed_timeout_minutes": "--watchdog_minutes ends a run if a process makes no progress",
    "adlr_autoresume": "the same command resumes by itself",
    "seed_for_dataloader": "one seed for all",
    "sample_rate": "all samples are used",
    "kill_switch_file": "a signal ends a run",
    "kill_switch_path": "a signal ends a run",
    "synchronize_each_layer": "a matter of Megatron's timers",
    "wandb_save_dir": "wandb's files are in the run folder",
    "wandb_entity": "set WANDB_ENTITY",
    "no_load_lr_state": "no schedule comes with the weights that a run starts from",
    "override_lr_scheduler": "the schedule is the recipe's; a run with another one is another run",
    "reset_iteration": "a run begins at update 0, or resumes where it stopped",
    "no_check_for_nan_in_loss_and_grad": "NaN and infinity are never hidden; --on_anomaly decides what follows",
    "use_megatron_fsdp": "ZeRO-3 shards the weights (--config_file accelerate_configs/zero3.yaml)",
    "data_parallel_sharding_strategy": "ZeRO-3 shards the weights (--config_file accelerate_configs/zero3.yaml)",
    "init_model_with_meta_device": "under ZeRO-3 no process ever holds the full model",
    "num_layers_per_virtual_pipeline_stage": "stages are not interleaved",
    "standalone_embedding_stage": "the embedding is in the first stage",
    "pipeline_model_parallel_split_rank": "a pipeline has no encoder",
    "overlap_p2p_communication": "a stage waits for what it gets",
    "disable_bf16_reduced_precision_matmul": "torch's default",
    "logging_level": "the log has one level",
    "create_moe_param_group": "there are no experts",
    "mlp_type": "there are no experts",
}
FAMILIES = (  # by their prefix
    ("fp8", "there is no fp8; the recipe's precision is bf16, fp16 or fp32"),
    ("moe", "there are no experts"),
    ("retro", "no retrieval"),
    ("log_", OWN_FIGURES),
    ("no_log_", OWN_FIGURES),
    ("timing_", OWN_FIGURES),
    ("tensorboard_", TRACKERS),
    ("profile", "a profiler is not built in; environment.json says where the seconds before the first update go"),
    ("tp_comm", "tensor-parallel processes wait for each other; nothing is overlapped"),
    ("enable_zbh1", "forward and backward passes take turns (1F1B)"),
    ("ds_sequence_parallel", "rows are split in one way (accelerate_configs/sp.yaml)"),
    ("kd", "nothing is distilled from a teacher"),
    ("mos", "nothing is distilled from a teacher"),
    ("fsdp", "the strategy's own settings"),
    ("use_nccl", "NCCL's settings are its environment variables"),
    ("nccl", "NCCL's settings are its environment variables"),
    ("nvtx", "a profiler is not built in"),
    ("overlap_", OVERLAP),
    ("ddp_", "the strategy's own settings"),
    ("zero_", "the DeepSpeed JSON has it under zero_optimization"),
    ("inference_", "a run trains"),
    ("bert_", "no part of GPT"),
)
HINTS = {
    **{name: f"remove it: {why}" for name, why in (NONE | SATISFIED).items()},
    **TYPED,
    "no_save_optim": NONE["no_save_optim"],
    "untie_embeddings_and_output_weights": SATISFIED["untie_embeddings_and_output_weights"],
}
TOKENIZER_OF_PREPARE = "say --tokenizer: a folder, a hub name, or a tokenizer.model"
MMAP = "remove it: the .bin and .idx of mmap are what is written"
PREPARE_HINTS = {  # tools/preprocess_data.py, tools/merge_datasets.py
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path"),
        TOKENIZER_OF_PREPARE,
    ),
    "dataset_impl": MMAP,
    "data_impl": MMAP,
    "partitions": "remove it: the --workers read parts of files in parallel",
    "chunk_size": "remove it: the parts of a file are chosen by size",
    "log_interval": "remove it: progress is always shown",
    "keep_sequential_samples": "remove it: documents are always kept in the order of the input",
    "vocab_size": "remove it: the tokenizer knows",
    "seq_length": "remove it: samples are cut in training, by --block_size",
    "split_sentences": "remove it: sentences are BERT's; documents are kept whole",
    "keep_newlines": "remove it: texts are kept as they are",
    "lang": "remove it: sentences are BERT's; documents are kept whole",
    "find_optimal_num_workers": "remove it: --workers is the number of cores by default",
    "multimodal": "remove it: corpora hold text",
}


SHAPING = re.compile(  # parts of names of flags that change the model
    r"norm|rms|activation|gelu|glu|relu|bias|position|rotary|rope|alibi|embed|layer|hidden|head|kv|quer|attention|attn|ffn|"
    r"mlp|expert|residual|window|channels|tie|spec|sink|mamba|ssm|conv"
)


def shapes_the_model(name: str) -> bool:
    """Whether a flag that is not known changes the model, by its name."""
    return flag_status(name)[0] == "unknown" and bool(SHAPING.search(name))


def flag_status(name: str) -> tuple[str, str]:
    """(satisfied, no counterpart or unknown; why) of a flag that is not carried over."""
    if name in SATISFIED:
        return "satisfied", SATISFIED[name]
    if name.endswith("_teacher"):
        return "no counterpart", "nothing is distilled from a teacher"
    if name in NONE:
        return "no counterpart", NONE[name]
    why = next((why for start, why in FAMILIES if name.startswith(start)), None)
    return ("no counterpart", why) if why else ("unknown", "not a known flag: see whether it matters")
