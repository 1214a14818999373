"""What several test files use: tiny models of each family, and runs of the product."""

import functools
import json
import os
import pty
import runpy
import shutil
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from ranks import RankServer, rank_environments

from zerofit.strategy.launch import find_strategies
from zerofit.strategy.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# The strategy of one process.
NOT_SHARDED = Strategy(SimpleNamespace(world_size=1, rank=0), None, precision="fp32", deepspeed=None, source="")

TINY = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                 "max_position_embeddings": 64, "tie_word_embeddings": False},
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True},
}  # fmt: skip

SIZES = {  # of models of any family, by the names that configurations of transformers have for them
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 160, "max_position_embeddings": 256, "sliding_window": None, "n_embd": 64, "n_layer": 3,
    "n_head": 4, "n_positions": 256, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "ffn_dim": 160,
    "word_embed_proj_dim": 64, "embedding_size": 64, "num_local_experts": 4, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


def small_sizes(family: str, **sizes) -> dict[str, object]:
    """What makes a configuration of a family a small model without dropout; `sizes` win."""
    from transformers import AutoConfig

    names = AutoConfig.for_model(family).to_dict()
    without = {name: 0 for name in names if name.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))}
    if "sliding_attention" in (names.get("layer_types") or ()):
        names.pop("sliding_window", None)  # such layers need one
    return {**{name: value for name, value in {**SIZES, **sizes}.items() if name in names}, **without}


def small_model(folder: Path, family: str, auto_class, tokenizer: Path) -> None:
    """A model of these sizes with random weights, and a tokenizer for it."""
    from transformers import AutoConfig, AutoTokenizer, BlenderbotTokenizer

    loader = BlenderbotTokenizer if tokenizer.name == "blenderbot" else AutoTokenizer
    vocabulary = loader.from_pretrained(tokenizer)
    marks = {name: getattr(vocabulary, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(family, **{**small_sizes(family), **marks, "vocab_size": len(vocabulary)})
    if config.is_encoder_decoder:
        config.decoder_start_token_id = vocabulary.pad_token_id
    torch.manual_seed(0)
    auto_class.from_config(config).save_pretrained(folder)
    vocabulary.save_pretrained(folder)


def tiny_model(family: str, attn_implementation: str = "sdpa", vocab_size: int = 97, **changes):
    """A small random causal model of one of the families, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=vocab_size, **{**TINY.get(family, {}), **changes})
    config.use_cache = False  # as zerofit.model.configuration sets it: with a cache, transformers sees no documents
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()


def tiny_deberta(folder: Path, num_labels: int) -> None:
    """A DeBERTa-v2 with relative attention and random weights, without dropout, and a tokenizer for its family."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from zerofit.model.tokenizer import train_tokenizer

    words = (file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    tokenizer = train_tokenizer(words, 600, "docs", folder.parent, pairs=True)
    config = AutoConfig.for_model(
        "deberta-v2", vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        relative_attention=True, position_buckets=16, pos_att_type="p2c|c2p", norm_rel_ebd="layer_norm",
        share_att_key=True, position_biased_input=False, type_vocab_size=0, conv_kernel_size=3, conv_act="gelu",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_dropout=0.0, num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_t5(folder: Path, vocabulary: Path) -> None:
    """A T5 with random weights, without dropout, and BlenderBot's tokenizer."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, BlenderbotTokenizer

    tokenizer = BlenderbotTokenizer.from_pretrained(vocabulary)
    config = AutoConfig.for_model(
        "t5", vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loss_and_gradients(model, kind: str, batch: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of `kind`, and the gradients of a seventh of it, by parameter."""
    from zerofit.model.loss import install_loss

    install_loss(model, kind)
    model.zero_grad()
    loss = model(**batch)
    (loss / 7).backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check_chunked_loss(model, batch: dict) -> None:
    """That the memory-saving loss is the plain one, and so are its gradients."""
    full, full_gradients = loss_and_gradients(model, "full", batch)
    chunked, chunked_gradients = loss_and_gradients(model, "chunked", batch)
    torch.testing.assert_close(chunked, full, rtol=1e-6, atol=0)
    assert len(full_gradients) > 10
    for name, gradient in full_gradients.items():
        limit = 1e-5 * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(chunked_gradients[name], gradient, rtol=1e-4, atol=limit, msg=name)


def refusal(function, *args, **kwargs) -> str:
    """What a function says as it refuses its arguments: a mistake of the user."""
    from zerofit.recipe.errors import UserError

    try:
        function(*args, **kwargs)
    except UserError as error:
        return error.report()
    raise AssertionError(f"{function.__name__} refuses nothing")


def check_refusal(words: Iterable[str], function, *args, **kwargs) -> None:
    """That a function refuses its arguments with all of these words."""
    message = refusal(function, *args, **kwargs)
    assert not [word for word in words if word not in message], message


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Samples(list):
    """Samples as a task takes them, in a list."""

    lengths = sort_key = None


def write_records(path: Path, records: list[dict]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def launch(output: Path, *arguments: str, **how) -> list[dict]:
    """A launch that has to end well: the lines of its metrics.jsonl."""
    completed(output, *arguments, **how)
    return metrics(output)


def completed(output: Path, *arguments: str, **how) -> subprocess.CompletedProcess:
    """`launched`, which has to end well."""
    done = launched(output, *arguments, **how)
    assert done.returncode == 0, f"{' '.join(map(str, done.args))}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def launched(output: Path, *arguments: str, strategy: str | None = None, processes: int | None = None,
             task: str = "clm", cwd: Path = ROOT, timeout: int = 400, launcher: bool = False, machines: int = 1,
             through: tuple = (),
             **variables: str) -> subprocess.CompletedProcess:  # fmt: skip
    """Run train/TASK.py to its end: in forked ranks (ranks.py), or under `accelerate launch`.

    Args:
        launcher: whether it is launched for real; so it is where there is a device: the process that ranks are forked
            from is one of the CPU.
        variables: of the ranks' environment.
        machines: as many as the forked ranks believe to be on.
        through: a script that the forked ranks run, with its arguments; it runs the task's.
    """
    if launcher or torch.accelerator.is_available():
        command = launch_command(output, *arguments, strategy=strategy, processes=processes, task=task)
        return subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment(**variables)
        )
    words = [*map(str, through), str(ROOT / "train" / f"{task}.py"), "--output_dir", str(output), *map(str, arguments)]
    if strategy:
        words += ["--strategy", strategy]
        (pair,) = find_strategies([strategy]).values()
        processes = processes or yaml.safe_load(pair.read_text())["num_processes"]
    done = _rank_server().run(words, rank_environments(environment(**variables), processes, machines), cwd, timeout)
    # In any group ranks may wait for one that reads or writes a checkpoint: COLLECTIVE_TIMEOUT.
    assert all(seconds >= 24 * 3600 for seconds in done.group_timeouts), done.group_timeouts
    return done


def recipe_of(said_by: str = "--{}", **options):
    """A causal recipe that knows these options as flags, or from where `said_by` says."""
    from zerofit.recipe import ClmRecipe, DistillRecipe, DpoRecipe

    kind = next(
        (cls for name, cls in (("preference_loss", DpoRecipe), ("teacher", DistillRecipe)) if name in options),
        ClmRecipe,
    )
    made = kind(**{"config_name": "gpt2", **options})
    made.remember_sources({name: said_by.format(name) for name in options})
    return made


def labelled_recipe(file: Path, records: list[dict], tokenizer: Path, *flags):
    """That of a BERT on these records, a quarter of them held out; `file` is written."""
    from zerofit.recipe import ClsRecipe, parse_recipe

    words = ["--model_type", "bert", "--tokenizer_name", tokenizer, "--train_file", write_records(file, records),
             "--cache_dir", file.parent / "cache", "--validation_split_percentage", "25", *flags]  # fmt: skip
    return parse_recipe(ClsRecipe, [str(word) for word in words])


def planned_bert(*flags: str) -> tuple[str, int]:
    """(class of the model, peak of four samples in bytes beside the states) of train/cls.py in `zerofit plan`."""
    from zerofit.estimate.planned_model import read_planned_model
    from zerofit.estimate.planned_strategy import PlannedStrategy
    from zerofit.strategy.layout import ParallelLayout
    from zerofit.tools.plan.plan_options import PlanOptions
    from zerofit.tools.tool_recipe import read_with_recipe

    shape = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    words = ["--task", "cls", "--model_type", "bert", "--config_overrides", shape, "--train_tokenizer_vocab_size",
             "300", "--max_length", "64", "--precision", "fp32", "--gpu_memory", "8GiB", *flags]  # fmt: skip
    model = read_planned_model(read_with_recipe(PlanOptions, words, "test")[0], "cls", on_gpu=True)
    steps = model.tracer(PlannedStrategy("single", ParallelLayout(), "fp32", None)).steps(4)
    return type(model.full).__name__, max(step.start + step.rise for step in steps)


def main_of(task: str) -> Callable[[list[str]], int]:
    """What a script of train/ runs, in this process, which goes on afterwards."""
    from zerofit.recipe.tasks import TASKS
    from zerofit.training.entry import run_once

    main = runpy.run_path(str(ROOT / "train" / f"{task}.py"))["main"]
    return lambda arguments: run_once(task, TASKS[task], arguments, main)


def not_installed(programs: tuple[str, ...], packages: tuple[str, ...]) -> str:
    """Why programs are not there; empty where they are. Installs Debian's packages where apt can."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing and not shutil.which("apt-get"):
        return f"{', '.join(missing)}: not installed"
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(install)}: {done.stderr.strip().splitlines()[-1:]}"
    return ""


def forked(script: str | Path, *arguments: object, processes: int = 2, refused: bool = False) -> str:
    """Run a script of the tests in forked ranks, and return what it wrote to stderr. `refused`: it ends with a
    UserError."""
    ours = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    words = [str(script), *map(str, arguments)]
    done = _rank_server().run(words, rank_environments(ours, processes), ROOT, timeout=300)
    assert done.returncode == (2 if refused else 0), done.stderr[-4000:]
    return done.stderr


def tensor_group(rank: int, size: int, folder: str):
    """The group of this process and of the others that share its layers, which meet in a folder."""
    from zerofit.model.tensor_parallel import TensorGroup

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    limit = timedelta(minutes=5)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return TensorGroup(torch.distributed.group.WORLD, rank, size)


@functools.cache
def _rank_server() -> RankServer:
    return RankServer(environment())


def launch_command(
    output: Path, *arguments: str, strategy: str | None = None, processes: int | None = None, task: str = "clm"
) -> list[str]:
    """What is typed to run a task."""
    command = [str(BIN / "accelerate-launch"), "--main_process_port", "0"]  # the same, which imports less
    if strategy:
        named = strategy if strategy.endswith(".yaml") else f"accelerate_configs/{strategy}.yaml"
        command += ["--config_file", named]
    if processes:
        command += ["--num_processes", str(processes)]
    return [*command, str(ROOT / "train" / f"{task}.py"), "--output_dir", str(output), *map(str, arguments)]


def launcher_variables(config: Path) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` puts into the environment of each of two processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch as of_accelerate

    words = ["--config_file", str(config), "--num_processes", "2", "--main_process_port", "0", "train/clm.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config or ())
    if arguments.use_deepspeed:
        variables = of_accelerate.prepare_deepspeed_cmd_env(arguments)[1]
    elif str(defaults.distributed_type).endswith("NO"):
        variables = of_accelerate.prepare_simple_launcher_cmd_env(arguments)[1]
    else:
        variables = of_accelerate.prepare_multi_gpu_env(arguments)
    return {
        name: value for name, value in variables.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))
    }


def pair_with(folder: Path, strategy: str, config: dict) -> str:
    """The pair of a strategy with another DeepSpeed JSON, in a folder; its YAML."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(config))
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text())
    settings["deepspeed_config"]["deepspeed_config_file"] = str(folder / "mine.json")
    (folder / "mine.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "mine.yaml")


def environment(**changes: str) -> dict[str, str]:
    """This environment without what an outer launcher may have left in it."""
    ours = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ACCELERATE_", "MASTER_"))
        and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return {**ours, "OMP_NUM_THREADS": "1", **changes}  # tiny models: threads would only wait for each other


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def largest_differences(ours: list[dict], theirs: list[dict], figures: Iterable[str]) -> dict[str, float]:
    """The largest relative difference of each figure over all updates, of which both runs have the same."""
    pairs = list(zip(updates(ours), updates(theirs), strict=True))
    assert pairs
    return {name: max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-12) for a, b in pairs) for name in figures}


def check_alike(ours: list[dict], theirs: list[dict], rel: float = 1e-5) -> None:
    """That the lines of two runs agree, held-out figures included."""
    assert updates(theirs)
    for line, other in zip(ours, theirs, strict=True):
        for name in {"loss", "grad_norm", "learning_rate", "targets", "eval_loss"} & other.keys():
            assert line[name] == pytest.approx(other[name], rel=rel, abs=1e-15), (name, line["update"])


def check_same_weights(ours: Path, theirs: Path) -> None:
    """That transformers loads two exported causal models, and that they are whole and the same."""
    from transformers import AutoModelForCausalLM

    first, second = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).state_dict() for each in (ours, theirs)
    )
    assert first.keys() == second.keys()
    assert len(first) > 20
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=2e-5, msg=name)


def loss_of_transformers(folder: Path, texts: Iterable[str], length: int) -> float:
    """The loss of an exported causal model over some texts, one by one, without zerofit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:length]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def cut_after(run: Path, update: int) -> None:
    """Make a run that is finished one that was killed after an update: newer checkpoints and the model are gone."""
    for folder in (run / "checkpoints").glob("update_*"):
        if folder.name > f"update_{update:08}":
            shutil.rmtree(folder)
    shutil.rmtree(run / "model", ignore_errors=True)


def on_a_terminal(command: list, columns: int = 80, **how) -> tuple[int, str]:
    """(exit code, what is shown) of a command at a terminal, until no process has it any more."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, columns))
    with subprocess.Popen(list(map(str, command)), stdin=its, stdout=its, stderr=its, **how) as process:
        os.close(its)
        shown = b""
        try:
            while read := os.read(ours, 65536):
                shown += read
        except OSError:  # Linux: nobody is left at the other end
            pass
    os.close(ours)
    return process.returncode, shown.decode()


def at_once(*acts: Callable[[], object]) -> list:
    """Call all of them, each in a thread of its own: what each returns, or the exception that it raises."""
    results: list = [None] * len(acts)

    def work(place: int) -> None:
        try:
            results[place] = acts[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def read_data(recipe):
    """The tables that a recipe names."""
    from zerofit.data.options import DataOptions
    from zerofit.data.sources import read_source

    return read_source(DataOptions.of(recipe))


def load_texts(recipe):
    """The training and held-out texts that a recipe names."""
    from zerofit.data.options import DataOptions
    from zerofit.data.text import read_records, take_texts

    options = DataOptions.of(recipe)
    source = read_records(recipe, options)
    parts = take_texts(source, recipe, options)
    return SimpleNamespace(train=parts.get("train"), validation=parts.get("validation"), notes=source.notes)


def updates(lines: list[dict]) -> list[dict]:
    """The lines of updates, without that of update 0."""
    return [line for line in lines if line["update"] > 0]


def check_offloaded_inputs(device: torch.device) -> None:
    """That inputs wait on the host: gradients are the same, and of 12 layers at most half of the inputs are on the
    device."""
    from zerofit.model.recomputation import enable_recomputation, offload_inputs

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = tiny_model("llama", vocab_size=64, num_hidden_layers=12, max_position_embeddings=256, **shape)
    model = model.to(device).train()
    rows = torch.arange(2048, device=device).reshape(8, 256) % 64
    enable_recomputation(model, True)

    def measured() -> tuple[list[torch.Tensor], int]:
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats()
        model(rows, labels=rows).loss.backward()
        peak = torch.accelerator.max_memory_allocated()
        return [parameter.grad.cpu() for parameter in model.parameters()], peak

    measured()
    plain, before = measured()
    offload_inputs(model, torch.autograd.graph.save_on_cpu)
    for _ in range(2):
        offloaded, peak = measured()
        torch.testing.assert_close(offloaded, plain, rtol=1e-6, atol=1e-8)
        assert before - peak >= 6 * rows.numel() * 64 * 4
