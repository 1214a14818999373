"""pretrain_gpt.py's flags as a recipe: model, data, length, evaluation, checkpoints. The rest: schedule.py, pair.py.

Sources: megatron/arguments.py and megatron/training.py of Megatron-LM and Megatron-DeepSpeed, also for the defaults.
"""

import os
from pathlib import Path
from typing import Any

from zerofit.recipe.megatron_flags import CARRIED, SELECTIVE, shapes_the_model
from zerofit.recipe.parsing import counted
from zerofit.tools.convert.megatron_args.ledger import SEARCH, Call, FlagLedger, MegatronArgsOptions
from zerofit.tools.convert.megatron_args.pair import read_layout
from zerofit.tools.convert.megatron_args.script_schedule import (
    ConvertedScript,
    carry,
    in_updates,
    read_optimizer,
    read_precision,
)
from zerofit.tools.convert.megatron_args.searched import read_batches, read_job
from zerofit.tools.convert.megatron_args.shape import of_weights, read_shape

GPT2_VOCABULARY, LLAMA_VOCABULARY = 50257, 32000
SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
KNOWN = ("pretrain_gpt.py", "pretrain_llama.py", SEARCH)
PLAIN: dict[str, tuple[str, type, Any]] = {  # {flag: (its option, type, Megatron's default where ours differs)}
    "seq_length": ("block_size", int, None),
    "reset_position_ids": ("reset_position_ids", bool, None),
    "reset_attention_mask": ("reset_attention_mask", bool, None),
    "eod_mask_loss": ("eod_mask_loss", bool, None),
    "data_cache_path": ("cache_dir", str, None),
    "num_workers": ("dataloader_num_workers", int, None),
    "seed": ("seed", int, 1234),
    "weight_decay": ("weight_decay", float, 0.01),
    "adam_beta1": ("adam_beta1", float, None),
    "adam_beta2": ("adam_beta2", float, None),
    "adam_eps": ("adam_epsilon", float, None),
    "clip_grad": ("max_grad_norm", float, None),
    "save": ("output_dir", str, None),
    "save_interval": ("save_steps", int, None),
    "log_interval": ("logging_steps", int, 100),
}


def convert_pretraining(call: Call, options: MegatronArgsOptions) -> ConvertedScript:
    """The recipe of a call of pretrain_gpt.py. Its ledger has the result for each flag."""
    flags = FlagLedger.of(call)
    searched = call.program == SEARCH
    layout = (read_job if searched else read_layout)(flags, call, options.num_processes)
    if call.program not in KNOWN:
        flags.wrong("", f"{call.program} is not read: give its line after --, with pretrain_gpt.py in its place")
    shape = read_shape(flags, call.program)
    done = ConvertedScript({}, flags, layout, shape)
    _plain(done)
    _model(done, options)
    _tokenizer(done, options)
    _data(done)
    (read_batches if searched else _batches)(done)
    _length(done)
    _evaluation(done)
    read_optimizer(done)
    read_precision(done)
    _memory(done)
    _checkpoints(done, options)
    _trackers(done)
    for name in flags.flags:
        if name not in flags.rows and name not in CARRIED and shapes_the_model(name):
            flags.wrong(name, "not a known flag, and by its name it changes the model. Remove it if it does not")
    return done


def _plain(done: ConvertedScript) -> None:
    """Carry over the flags that are an option by another name."""
    flags = done.flags
    for name, (option, kind, default) in PLAIN.items():
        value: str | float | None = flags.has(name) or None
        if kind is not bool:
            value = flags.text(name) if kind is str else flags.number(name, kind, default)
        if value is not None:
            carry(done, name, option, value, default=default)


# ------------------------------------------------------------------------------------------------------ model and data


def _model(done: ConvertedScript, options: MegatronArgsOptions) -> None:
    flags, shape = done.flags, done.shape
    if options.model_name_or_path:
        done.recipe["model_name_or_path"] = options.model_name_or_path
        of_weights(flags, shape, options.model_name_or_path)
    elif shape:
        done.recipe["config_name"] = shape.family
        done.recipe["config_overrides"] = shape.overrides()
        multiple = flags.number("make_vocab_size_divisible_by", default=128)
        tensor = flags.number("tensor_model_parallel_size", default=1)
        padded = multiple * tensor
        why = f" ({multiple} times the {tensor} tensor-parallel processes, as in Megatron)" if tensor > 1 else ""
        carry(done, "make_vocab_size_divisible_by", "make_vocab_size_divisible_by", padded, why, default=128)


def _tokenizer(done: ConvertedScript, options: MegatronArgsOptions) -> None:
    flags = done.flags
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file")
    kind = flags.text("tokenizer_type") or ("GPT2BPETokenizer" if flags.has("vocab_file") else "")
    file = flags.text("tokenizer_model")
    folder = options.tokenizer_name or flags.text("tokenizer_name_or_path") or file
    if kind in SENTENCEPIECE and not options.tokenizer_name:
        done.vocabulary = LLAMA_VOCABULARY
        folder = (os.path.dirname(file) or ".") if file else None
        if file and Path(file).name != "tokenizer.model":
            flags.wrong("tokenizer_model", "put it into a folder as tokenizer.model, and say --tokenizer_name FOLDER")
    if kind == "GPT2BPETokenizer" and not options.tokenizer_name:
        done.vocabulary = GPT2_VOCABULARY
        for name in ("vocab_file", "merge_file"):
            carry(done, name, name, flags.text(name))
        if not all(map(flags.text, ("vocab_file", "merge_file"))):
            flags.wrong("", "GPT2BPETokenizer reads --vocab-file and --merge-file: name both")
        flags.satisfied("tokenizer_type", "vocab_file and merge_file are of that kind")
    elif folder:
        done.recipe["tokenizer_name"] = folder
        for name in names:
            flags.carried(name, f"tokenizer_name: {folder}")
    else:
        flags.wrong("tokenizer_type", "the tokenizer is not named: say --tokenizer_name FOLDER")


def _data(done: ConvertedScript) -> None:
    flags = done.flags
    paths = flags.words("data_path")
    if paths:
        carry(done, "data_path", "data_path", paths if len(paths) > 1 else paths[0])
        carry(done, "split", "split", flags.text("split", "969,30,1").replace(" ", ""))
    elif not flags.problems:
        flags.wrong("data_path", "there is no --data-path: training and evaluation come from one, by --split")
    if flags.text("data_impl", "mmap") not in ("mmap", "infer"):
        flags.wrong("data_impl", "only mmap's .bin and .idx are read: prepare the corpus again with zerofit prepare")


# ------------------------------------------------------------------------------------------------- batches and length


def _batches(done: ConvertedScript) -> None:
    flags, layout = done.flags, done.layout
    micro = flags.number("micro_batch_size", default=0)
    if not micro:
        flags.wrong("micro_batch_size", "there is no --micro-batch-size")
        return
    replicas = max(1, layout.world // layout.split)  # data-parallel processes there
    total = flags.number("global_batch_size", default=micro * replicas)
    if not flags.has("global_batch_size"):
        flags.default("--global-batch-size", f"global_batch_size: {total}, micro-batch * data-parallel processes")
    ours_replicas = max(count for count in range(1, layout.replicas + 1) if total % count == 0)
    if ours_replicas < layout.replicas:
        each = "processes" if layout.replica_size == 1 else f"replicas of {layout.replica_size} processes"
        done.notes.append(f"the global batch of {total} is divided by {ours_replicas} {each}, not {layout.replicas}")
        layout.world = ours_replicas * layout.replica_size
        layout.machines = layout.machines if layout.world % layout.machines == 0 else 1
    ours = max(size for size in range(1, micro + 1) if (total // ours_replicas) % size == 0)
    accumulation = total // ours_replicas // ours
    note = f", accumulation {accumulation}"
    if total % (replicas * micro):
        done.notes.append(f"Megatron refuses this global batch: {total} is not a multiple of {micro} * {replicas}")
    elif layout.split != layout.replica_size:
        note += f" ({total // replicas // micro} in Megatron, on {counted(replicas, 'data-parallel process')})"
    carry(done, "micro_batch_size", "per_device_train_batch_size", ours, note)
    carry(done, "global_batch_size", "global_batch_size", total)
    done.batch = total
    done.recipe["per_device_eval_batch_size"] = ours


def _length(done: ConvertedScript) -> None:
    flags = done.flags
    updates = in_updates(done, "train", "max_train_steps")
    if not updates:
        if not flags.problems:
            flags.wrong("", "the length of the run is unknown: --train-iters, --train-samples or --train-tokens")
        return
    done.recipe["max_train_steps"] = updates
    if minutes := flags.number("exit_duration_in_mins"):
        carry(done, "exit_duration_in_mins", "max_hours", round(minutes / 60, 4))


def _evaluation(done: ConvertedScript) -> None:
    flags, batch = done.flags, done.batch
    every, batches = flags.number("eval_interval", default=1000), flags.number("eval_iters", default=100)
    if not batches:
        done.recipe |= {"eval_steps": done.recipe.get("max_train_steps", every), "eval_on_start": False}
        done.recipe["max_eval_samples"] = batch
        flags.none("eval_iters", "an evaluation cannot be left out: one is made at the end, of one global batch")
        flags.none("eval_interval", "see --eval-iters")
        return
    carry(done, "eval_interval", "eval_steps", every, default=1000)
    note = f", {batches} global batches of {batch}; the same samples at each evaluation, Megatron uses different ones"
    carry(done, "eval_iters", "max_eval_samples", batches * batch, note, default=100)


def _memory(done: ConvertedScript) -> None:
    """Recomputation. Megatron's --recompute-activations sets the granularity; its older flags mean full layers."""
    flags = done.flags
    granularity = "selective" if flags.has("recompute_activations") else flags.text("recompute_granularity")
    older = ("checkpoint_activations", "deepspeed_activation_checkpointing", "activations_checkpoint_method")
    for name in ("recompute_activations", "recompute_granularity"):
        if granularity == "selective" and flags.has(name):
            carry(done, name, "gradient_checkpointing", "selective", f" ({SELECTIVE})")
    if granularity != "selective":
        for name in ("recompute_granularity" if granularity == "full" else "", *older):
            if flags.has(name):
                carry(done, name, "gradient_checkpointing", True)
    if flags.text("recompute_method") == "block":
        flags.none("recompute_method", "all layers are recomputed")
    if flags.has("checkpoint_in_cpu"):
        if "gradient_checkpointing" in done.recipe:
            carry(done, "checkpoint_in_cpu", "activation_offload", True)
        else:
            flags.satisfied("checkpoint_in_cpu", "no layer is recomputed")


# --------------------------------------------------------------------------------------------------- the run's record


def _checkpoints(done: ConvertedScript, options: MegatronArgsOptions) -> None:
    flags = done.flags
    save, load = flags.text("save"), flags.text("load")
    if load:
        if options.model_name_or_path:
            flags.satisfied("load", f"model_name_or_path: {options.model_name_or_path}, from the option")
        elif load == save and not flags.has("finetune"):
            flags.satisfied("load", "the same command resumes from the newest checkpoint of output_dir (resume: auto)")
        else:
            flags.wrong("load", "Megatron's checkpoints are not read: set --model_name_or_path to a folder")
    elif flags.has("finetune") and not options.model_name_or_path and not flags.problems:
        flags.wrong("finetune", "weights to begin with are not named: say --model_name_or_path FOLDER")


def _trackers(done: ConvertedScript) -> None:
    flags, options = done.flags, {"wandb_project": "wandb", "tensorboard_dir": "tensorboard"}
    found = [tracker for flag, tracker in options.items() if flags.has(flag)]
    if found:
        done.recipe |= {"with_tracking": True, "report_to": found[0] if len(found) == 1 else "all"}
    if "tensorboard" in found:
        flags.carried("tensorboard_dir", "report_to: tensorboard; its files lie in the run's folder")
    if "wandb" in found:
        carry(done, "wandb_project", "report_name", flags.text("wandb_project"))
