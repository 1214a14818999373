"""Options of other programs that users type here (the Trainer and examples of transformers, LLaMA-Factory, axolotl,
Megatron-LM): for each, a message names the option to type instead."""

from dataclasses import fields

from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.tasks import TASKS

# {options of a recipe: names of them in other programs that are not similar}; a message names those that the task has.
FOREIGN_NAMES = {
    "num_train_epochs": "epochs",
    "max_train_steps": "total_steps",
    "per_device_train_batch_size": "batch_size train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "block_size max_length max_source_length max_target_length": "cutoff_len sequence_len max_length max_seq_length "
    "max_seq_len model_max_length seq_len",
    "length_grouping packing": "group_by_length",
    "packing": "sample_packing",
    "pad_to_max_length packing": "pad_to_sequence_len",
    "warmup_ratio num_warmup_steps": "warmup_steps",
    "ema_decay": "use_ema model_ema",
    "max_grad_norm": "gradient_clipping grad_clip",
    "precision": "fp32 torch_dtype dtype half_precision_backend",
    "attn_implementation": "flash_attn flash_attention use_flash_attn sdp_attention xformers_attention",
    "loss": "enable_liger_kernel use_liger_kernel",
    "model_name_or_path": "base_model model model_id",
    "config_overrides": "rope_scaling rope_theta num_layers hidden_size num_attention_heads",
    "train_file dataset_name": "dataset datasets data_files dataset_dir train_data",
    "validation_file": "eval_dataset val_file eval_file test_datasets",
    "max_train_samples": "max_samples",
    "cache_dir": "dataset_prepared_path",
    "text_columns source_column text_column": "dataset_text_field field_text",
    "target_lang": "forced_bos_token",
    "system_prompt": "default_system",
    "preference_loss": "dpo rl rlhf loss_type",
    "preference_beta": "beta dpo_beta rl_beta",
    "resize_embeddings": "resize_vocab",
    "lora": "use_peft use_lora adapter peft finetuning_type",
    "lora_r": "r",
    "lora_modules_to_save": "additional_target",
    "load_in_4bit": "quantization_bit",
    "evaluate_only": "do_eval",
    "eval_steps": "evaluation_strategy eval_strategy evals_per_epoch",
    "report_name": "wandb_project",
    "output_dir": "save run_name wandb_name experiment_name",
    "with_tracking report_to": "use_wandb logging_dir tensorboard_dir",
    "val_max_target_length": "generation_max_length max_new_tokens",
    "seed": "random_seed data_seed",
}
LAUNCHER = "it belongs to accelerate launch, before the script's name; `zerofit plan --num_gpus N` says what fits"
STRATEGY = (
    "the strategy is the launcher's: accelerate launch --config_file accelerate_configs/NAME.yaml, which names the "
    "DeepSpeed JSON; under torchrun say --strategy NAME, or --strategy FILE.json"
)
MEGATRON = "it is Megatron's: zerofit convert megatron-args -- COMMAND"
TOKENIZING = "the tokenizer uses all cores by its own threads (RAYON_NUM_THREADS sets their number); remove it"
# {hint: names in other programs}, where naming one option is not enough.
HINTS = {
    LAUNCHER: "num_processes num_machines config_file local_rank nproc_per_node nnodes master_port use_cpu no_cuda "
    "world_size",
    STRATEGY: "deepspeed zero_stage fsdp fsdp_config",
    "there is no option for it: `ddp` in zerofit/strategy/processes.py takes find_unused_parameters=True":
    "ddp_find_unused_parameters",
    MEGATRON: "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel use_distributed_optimizer "
    "ffn_hidden_size max_position_embeddings swiglu min_lr eval_iters load tokenizer_type tokenizer_model",
    "say --save_strategy epoch, or --save_steps N": "checkpointing_steps saves_per_epoch",
    "say --validation_split_percentage 10 for 0.1": "val_size val_set_size test_size",
    "say --precision bf16": "bf16 pure_bf16 bf16_full_eval",
    "say --precision fp16": "fp16",
    "`zerofit compare` finds the largest batch": "auto_find_batch_size",
    "say --model_name_or_path with the adapter's folder to train it further; it names its base":
    "adapter_name_or_path lora_model_dir",
    "`zerofit merge` folds an adapter into its base": "export_dir",
    TOKENIZING: "dataset_num_proc num_proc",
    "line breaks are kept; --document_separator line takes each line for itself": "no_keep_linebreaks keep_linebreaks",
    "log in once with `hf auth login`": "token hub_token use_auth_token",
    "--push_to_hub owner/name": "hub_model_id",
    "remove it: the script, the model or the data decide it, or it is always so":
    "do_train plot_loss streaming logging_nan_inf_filter ignore_data_skip save_safetensors low_cpu_mem_usage "
    "ignore_pad_token_for_loss use_slow_tokenizer use_fast_tokenizer greater_is_better task_type stage",
    "the number of classes follows from the labels of the data; remove it": "num_labels num_classes",
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


def foreign_option_hints(cls: type, tool: bool) -> dict[str, str]:
    """{name of an option in another program: what to type instead}. `tool`: the recipe is a tool's, which accelerate
    launch does not start."""
    if not issubclass(cls, TrainingRecipe):
        return REMOVED
    names, hints = {field.name for field in fields(cls)}, dict[str, str]()
    for task, kind in reversed(TASKS.items()):
        hints |= {field.name: f"it is one of train/{task}.py" for field in fields(kind) if field.name not in names}
    hints |= REMOVED
    for options, foreign_names in FOREIGN_NAMES.items():
        if flags := [f"--{option}" for option in options.split() if option in names]:
            hints |= dict.fromkeys(foreign_names.split(), f"say {' or '.join(flags)}")
    for hint, foreign_names in HINTS.items():
        if not (tool and hint in (LAUNCHER, STRATEGY, MEGATRON)):
            hints |= dict.fromkeys(foreign_names.split(), hint)
    return hints
