"""Options of other programs that users type here (the Trainer and examples of transformers, LLaMA-Factory, axolotl):
for each, a message names the option to type instead. And the flags of Megatron-LM and Megatron-DeepSpeed: those that
`zerofit convert megatron-args` carries over, and what it says of the others.
"""

import re
from dataclasses import fields

from zerofit.recipe.base import OptionType
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.tasks import TASKS

LAUNCHER_DECIDES = "the strategy is the launcher's: accelerate launch --config_file accelerate_configs/NAME.yaml"
DATA_PARALLEL = "its processes are data-parallel ones here"
DEGREE = f"{DATA_PARALLEL}, and ZeRO-3 shards the weights over them (--config_file accelerate_configs/zero3.yaml)"
SELECTIVE = "linear layers' products and attention are kept, and all else is recomputed"


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """{flag: words} of {words: flags}."""
    return {name: words for words, names in table.items() for name in names.split()}


# Flags that the converter carries over.
CARRIED = (
    "min_lr eval_iters num_layers hidden_size ffn_hidden_size ffn_hidden_coeff num_attention_heads "
    "num_query_groups num_key_value_heads kv_channels max_position_embeddings norm_epsilon layernorm_epsilon "
    "rotary_percent init_method_std no_bias_gelu_fusion openai_gelu squared_relu rotary_base "
    "rotary_position_embeddings_theta attention_dropout hidden_dropout train_samples train_tokens "
    "lr_decay_samples lr_decay_tokens lr_warmup_samples lr_warmup_tokens lr_wsd_decay_iters "
    "exit_duration_in_mins num_workers save load tokenizer_type tokenizer_model tokenizer_name_or_path "
    "zero_stage deepspeed deepspeed_config use_distributed_optimizer tensor_model_parallel_size "
    "pipeline_model_parallel_size context_parallel_size ds_sequence_parallel_size recompute_granularity "
    "recompute_activations recompute_num_layers checkpoint_activations deepspeed_activation_checkpointing "
    "checkpoint_in_cpu wandb_project wandb_exp_name tensorboard_dir"
).split()
# What is always so here, or decided by the model, the strategy or the GPU's kernels.
SATISFIED = (
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
OWN_FIGURES = "metrics.jsonl has loss, gradient norm, rate, tokens/s, FLOP/s and memory of every update"
NONE = _by_name({  # what is not supported, and why
    "the launcher, the strategy or the libraries decide it":
    "distributed_backend local_rank use_cpu_initialization no_initialization init_model_with_meta_device "
    "vocab_size vocab_extra_ids tiktoken_pattern no_mmap_bin_files mmap_warmup data_parallel_random_init "
    "manual_gc empty_unused_memory_level disable_bf16_reduced_precision_matmul",
    "GPT2BPETokenizer alone reads it": "vocab_file merge_file",
    "the models of Megatron's flags are GPT and Llama": "task_type",
    "the scaler begins and grows as accelerate's or, under ZeRO, as the fp16 block of the JSON says":
    "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "say --global_batch_warmup START@UPDATES, in updates and in steps of START": "rampup_batch_size",
    "the global batch has one size from the first update on": "step_batch_size_schedule",
    "the same command resumes, and a signal or --max_hours ends a run":
    "exit_interval adlr_autoresume reset_iteration kill_switch_file kill_switch_path",
    "a checkpoint has all that a run needs to resume; model/ is exported without it": "no_save_optim",
    "the recipe has all options, and a run with another schedule is another run":
    "override_opt_param_scheduler use_checkpoint_opt_param_scheduler override_lr_scheduler use_checkpoint_args",
    "Megatron's checkpoints are not read or written here": "universal_checkpoint load_tag ckpt_step",
    "all samples are used, with one seed, one learning rate and a constant weight decay":
    "decoupled_lr decoupled_min_lr start_weight_decay end_weight_decay weight_decay_incr_style lr_warmup_init "
    "seed_for_dataloader sample_rate",
    "master weights and the loss are in fp32, and computation in the run's precision":
    "embedding_weights_in_fp32 fp32_residual_connection fp16_lm_cross_entropy",
    "communication_data_type of the DeepSpeed JSON sets it": "grad_reduce_in_bf16",
    f"{LAUNCHER_DECIDES}; zero2_offload or zero3_offload_optimizer keep the optimizer on the host":
    "cpu_optimizer cpu_torch_adam",
    "--watchdog_minutes ends a run if a process makes no progress": "distributed_timeout_minutes",
    "wandb's files are in the run folder; set WANDB_ENTITY": "wandb_save_dir wandb_entity",
    "NaN and infinity are never hidden; --on_anomaly decides what follows": "no_check_for_nan_in_loss_and_grad",
    "ZeRO-3 shards the weights (--config_file accelerate_configs/zero3.yaml)":
    "use_megatron_fsdp data_parallel_sharding_strategy",
    "stages are not interleaved, and the first has the embedding":
    "num_layers_per_virtual_pipeline_stage standalone_embedding_stage pipeline_model_parallel_split_rank "
    "overlap_p2p_communication",
    "there are no experts": "create_moe_param_group mlp_type",
    OWN_FIGURES: "logging_level synchronize_each_layer",
})  # fmt: skip
FAMILIES = (  # by their prefix
    ("fp8", "float8 is --float8 here, through torchao, with a scale of its own for each tensor"),
    ("moe", "there are no experts"),
    ("retro", "no retrieval"),
    (("log_", "no_log_", "timing_"), OWN_FIGURES),
    ("tensorboard_", "say --with_tracking --report_to tensorboard; it gets every figure of metrics.jsonl"),
    (("profile", "nvtx"), "say --profile N:M, the updates that torch's profiler records"),
    ("tp_comm", "tensor-parallel processes wait for each other; nothing is overlapped"),
    ("enable_zbh1", "forward and backward passes take turns (1F1B)"),
    ("ds_sequence_parallel", "rows are split in one way (accelerate_configs/sp.yaml)"),
    (("kd", "mos"), "train/distill.py learns from a teacher"),
    (("fsdp", "ddp_"), "the strategy's own settings"),
    (("use_nccl", "nccl"), "NCCL's settings are its environment variables"),
    ("overlap_", "communication overlaps computation by default (overlap_comm in the DeepSpeed JSON)"),
    ("zero_", "the DeepSpeed JSON has it under zero_optimization"),
    ("inference_", "a run trains"),
    ("bert_", "no part of GPT"),
)
MEGATRON_HINTS = dict.fromkeys(
    (*CARRIED, *NONE, *SATISFIED), "it is Megatron's: zerofit convert megatron-args -- COMMAND"
)
PREPARE_HINTS = _by_name({  # tools/preprocess_data.py, tools/merge_datasets.py
    "say --tokenizer: a folder, a hub name, or a tokenizer.model":
    "tokenizer_type tokenizer_model tokenizer_name_or_path",
    "remove it: the .bin and .idx of mmap are what is written": "dataset_impl data_impl",
    "remove it: the --workers, by default one per core, read parts of files":
    "partitions chunk_size find_optimal_num_workers",
    "remove it: progress is always shown": "log_interval",
    "remove it: documents are kept whole, as they are, in the order of the input":
    "keep_sequential_samples keep_newlines",
    "remove it: sentences are BERT's; documents are kept whole": "split_sentences lang",
    "remove it: the tokenizer knows": "vocab_size",
    "remove it: samples are cut in training, by --block_size": "seq_length",
    "remove it: corpora hold text": "multimodal",
})  # fmt: skip


SHAPING = re.compile(  # parts of names of flags that change the model
    r"norm|rms|activation|gelu|glu|relu|bias|position|rotary|rope|alibi|embed|layer|hidden|head|kv|quer|attention|attn|ffn|"
    r"mlp|expert|residual|window|channels|tie|spec|sink|mamba|ssm|conv"
)


def shapes_the_model(name: str) -> bool:
    """Return whether a flag that is not known changes the model, by its name."""
    return flag_status(name)[0] == "unknown" and bool(SHAPING.search(name))


def flag_status(name: str) -> tuple[str, str]:
    """Return (satisfied, no counterpart or unknown; why) of a flag that is not carried over."""
    if name in SATISFIED:
        return "satisfied", "it is always so, or the model, the strategy or the GPU's kernels decide it"
    if name.endswith("_teacher"):
        return "no counterpart", "train/distill.py learns from a teacher"
    if name in NONE:
        return "no counterpart", NONE[name]
    why = next((why for start, why in FAMILIES if name.startswith(start)), None)
    return ("no counterpart", why) if why else ("unknown", "not a known flag: check whether it matters")


# {options of a recipe: names of them in other programs}; a message names the options that the task has.
FOREIGN_NAMES = {
    ("num_train_epochs",): "epochs num_epochs n_epochs train_epochs",
    ("max_train_steps",): "max_steps num_train_steps total_steps",
    ("per_device_train_batch_size",): "batch_size train_batch_size train_micro_batch_size_per_gpu "
    "per_gpu_train_batch_size",
    ("per_device_eval_batch_size",): "eval_batch_size per_gpu_eval_batch_size",
    ("gradient_accumulation_steps",): "grad_accum accumulation_steps",
    (
        "block_size",
        "max_length",
        "max_source_length",
        "max_target_length",
    ): "cutoff_len sequence_len max_length max_seq_length max_seq_len model_max_length seq_len",
    ("length_grouping", "packing"): "group_by_length",
    ("packing",): "sample_packing",
    ("pad_to_max_length", "packing"): "pad_to_sequence_len",
    ("warmup_ratio", "num_warmup_steps"): "warmup_steps warmup",
    ("lr_scheduler_type",): "lr_scheduler scheduler",
    ("optim",): "optimizer optimizer_type",
    ("ema_decay",): "model_ema_decay use_ema model_ema ema",
    ("max_grad_norm",): "gradient_clipping grad_clip",
    ("precision",): "mixed_precision fp32 torch_dtype dtype half_precision_backend",
    ("gradient_checkpointing",): "use_gradient_checkpointing activation_checkpointing",
    ("activation_offload",): "activation_offloading enable_activation_offloading cpu_checkpointing",
    ("attn_implementation",): "flash_attn flash_attention use_flash_attn sdp_attention xformers_attention",
    ("torch_compile",): "compile",
    ("loss",): "enable_liger_kernel use_liger_kernel liger_fused_linear_cross_entropy",
    ("model_name_or_path",): "base_model model model_name model_id pretrained_model_name_or_path",
    ("tokenizer_name",): "tokenizer tokenizer_name_or_path",
    ("config_overrides",): "rope_scaling rope_theta num_layers hidden_size num_attention_heads",
    ("train_file", "dataset_name"): "dataset datasets data_files dataset_dir train_data train_data_path",
    ("validation_file",): "eval_dataset val_file eval_file test_datasets",
    ("dataset_config_name",): "dataset_config",
    ("max_train_samples",): "max_samples",
    ("dataloader_num_workers",): "num_workers",
    ("cache_dir",): "dataset_prepared_path",
    ("text_columns", "source_column", "text_column"): "text_column_name sentence1_key dataset_text_field field_text",
    ("source_lang",): "src_lang",
    ("target_lang",): "tgt_lang forced_bos_token",
    ("label_column",): "label_column_name label_key",
    ("z_loss",): "z_loss_coefficient z_loss_multiplier lm_z_loss logit_z_loss",
    ("layer_decay",): "layerwise_lr_decay layer_wise_lr_decay llrd lr_layer_decay layer_lr_decay",
    ("class_weights",): "class_weight pos_weight loss_weights",
    ("chat_template",): "template conversation_template",
    ("train_on_prompt",): "train_on_inputs train_on_input",
    ("system_prompt",): "default_system",
    ("preference_loss",): "pref_loss dpo rl rlhf loss_type",
    ("preference_beta",): "pref_beta beta dpo_beta rl_beta",
    ("resize_embeddings",): "resize_vocab resize_token_embeddings resize_token_embeddings_to_32x resize_vocabulary",
    ("lora",): "use_peft use_lora adapter peft finetuning_type",
    ("lora_r",): "lora_rank r",
    ("lora_bias",): "bias",
    ("lora_target_modules",): "lora_target lora_target_linear target_modules",
    ("lora_modules_to_save",): "additional_target modules_to_save",
    ("load_in_4bit",): "quantization_bit load_in_8bit",
    ("evaluate_only",): "do_eval eval_only",
    ("predict_file",): "do_predict",
    ("eval_steps",): "evaluation_strategy eval_strategy evals_per_epoch",
    ("eval_on_start",): "eval_delay",
    ("logging_steps",): "log_steps logging_strategy logging_first_step",
    ("report_name",): "wandb_project project_name",
    ("output_dir",): "out_dir save run_name wandb_name wandb_run_id experiment_name",
    ("with_tracking", "report_to"): "use_wandb logging_dir tensorboard_dir",
    ("val_max_target_length",): "generation_max_length max_new_tokens",
    ("num_beams",): "generation_num_beams",
    ("seed",): "random_seed data_seed",
}
LAUNCHER = "it belongs to accelerate launch, before the script's name"
STRATEGY = (
    "the strategy is the launcher's: accelerate launch --config_file accelerate_configs/NAME.yaml, which names the "
    "DeepSpeed JSON; under torchrun say --strategy NAME, or --strategy FILE.json"
)
PROCESSES = (
    "`accelerate launch --num_processes N` starts processes, and `zerofit plan --num_gpus N --gpus_per_node M` says "
    "beforehand what fits on them"
)
TOKENIZING = "the tokenizer uses all cores by its own threads (RAYON_NUM_THREADS sets their number); remove it"
# {hint: names in other programs}, where naming one option is not enough.
HINTS = {
    LAUNCHER: "num_processes num_machines config_file local_rank nproc_per_node nnodes master_port use_cpu no_cuda",
    PROCESSES: "world_size local_world_size data_parallel_size",
    "`zerofit plan --max_global_batch_size N` finds the fastest one": "max_global_batch_size",
    STRATEGY: "deepspeed zero_stage fsdp fsdp_config ddp_find_unused_parameters sharded_ddp",
    "say --save_strategy epoch, or --save_steps N": "checkpointing_steps saves_per_epoch",
    "say --validation_split_percentage 10 for 0.1": "val_size val_set_size test_size",
    "say --precision bf16": "bf16 pure_bf16 bf16_full_eval",
    "say --precision fp16": "fp16",
    "`zerofit compare` finds the largest batch": "auto_find_batch_size",
    "say --model_name_or_path with the adapter's folder to train it further; it names its base":
    "adapter_name_or_path lora_model_dir",
    "`zerofit merge` folds an adapter into its base": "export_dir",
    TOKENIZING: "dataset_processes dataset_num_proc num_proc",
    "line breaks are kept; --document_separator line takes each line for itself": "no_keep_linebreaks keep_linebreaks",
    "log in once with `hf auth login`": "token hub_token use_auth_token",
    "--push_to_hub owner/name": "hub_model_id",
    "remove it: the script, the model or the data decide it, or it is always so":
    "do_train plot_loss streaming logging_nan_inf_filter ignore_data_skip save_safetensors low_cpu_mem_usage "
    "ignore_pad_token_for_loss use_slow_tokenizer use_fast_tokenizer use_fast greater_is_better task_type "
    "stage",
    "the number of classes follows from the labels of the data; remove it": "num_labels num_classes n_classes",
}  # fmt: skip
# {option of an earlier commit: what to use instead} (CHANGELOG.md).
REMOVED = {
    "difficulty_warmup": "it is gone; block_size_warmup and global_batch_warmup let rows and batches grow",
    **dict.fromkeys(
        ("contrastive_group", "contrastive_temperature", "num_texts"),
        "embeddings are gone; sentence-transformers trains them",
    ),
    "logprobs": "it is gone; train/distill.py reads a teacher beside the student with --teacher FOLDER",
    "data_format": "it is gone: the names of the columns say it. For running text name its column with --text_column",
    "preprocessing_num_workers": TOKENIZING,
    "data_cache_path": "the index of a corpus lies in --cache_dir",
    "profile_ranks": "--profile records rank 0",
    "profile_memory": "--profile records memory, too",
    "on_save_failure": "it is gone: a run goes on, and says so, where a checkpoint cannot be written",
    "peak_tflops": "it belongs to zerofit plan; MFU is reported for GPUs of the table",
    "calibrate": "it is gone: tell a GPU by --peak_tflops, --memory_bandwidth, --link_bandwidth, --network_bandwidth",
    "hub_strategy": "--push_to_hub pushes once, at the end; --mirror copies each checkpoint",
    "save_keep_every": "it is gone: --save_total_limit keeps the newest ones; without it all stay",
    "save_best": "the best weights are kept where metric_for_best_model is set, or a task has metrics beside the loss",
    "early_stopping_threshold": "it is gone: whatever is better counts as an improvement",
    "rendezvous_minutes": "it belongs to zerofit launch",
    "save_only_model": "it is gone: a checkpoint can always be resumed from; --save_total_limit keeps few of them",
    "mixture_temperature": "it is gone: write the weights before the files of train_file",
    "stop_source": "it is gone: an epoch of a mixture ends when its first source has been read in full",
    "messages_column": "it is gone: call the column of the turns messages",
    "lengths": "`zerofit plan --lengths 8k,16k,32k` finds the longest rows",
    "shards": "conversion to Meta's format is gone; outputs/RUN/model is a transformers folder",
}


def foreign_option_hints(cls: type, names: dict[str, OptionType], tool: bool) -> dict[str, str]:
    """{name of an option in another program: what to type instead}. `names`: the options of the recipe, with the kind
    of each. `tool`: the recipe is a tool's, which accelerate launch does not start."""
    if not issubclass(cls, TrainingRecipe):
        return REMOVED
    of_others = {
        field.name: f"it is one of train/{task}.py" for task, kind in reversed(TASKS.items()) for field in fields(kind)
    }
    hints = {name: hint for name, hint in of_others.items() if name not in names} | REMOVED
    for options, foreign_names in FOREIGN_NAMES.items():
        if flags := [f"--{option}" for option in options if option in names]:
            hints |= {name: f"say {' or '.join(flags)}" for name in foreign_names.split()}
    for hint, foreign_names in HINTS.items():
        if not (tool and hint in (LAUNCHER, STRATEGY, PROCESSES)):
            hints |= dict.fromkeys(foreign_names.split(), hint)
    return {**({} if tool else MEGATRON_HINTS), **hints}
