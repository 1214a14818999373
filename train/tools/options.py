"""The options of the `zerofit` command's tools, each a recipe of its own."""

import re
from dataclasses import dataclass

from train.recipe.base import Recipe
from train.recipe.fields import option

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class MergeOptions(Recipe):
    """Fold a LoRA adapter into its base"""

    adapter: str | None = option(None, "The adapter's folder: adapter_config.json and adapter_model.safetensors.")
    output: str | None = option(None, "The folder to write; it must not exist yet, or be empty.")
    base: str | None = option(None, "The base model, a folder or a hub name; by default the one the adapter names.")
    precision: str | None = option(
        None, "Precision of the merged weights; by default that of the base.", choices=PRECISIONS
    )
    dequantize: bool = option(False, "Merge into a quantised base, whose weights are turned back to floats first.")
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.adapter:
            found.append("no adapter: set --adapter to the folder of one, e.g. outputs/RUN/model")
        if not self.output:
            found.append("no output: set --output to the folder that the merged model is to be written to")
        return found


@dataclass
class ConvertOptions(Recipe):
    """What is converted"""

    input: str | None = option(None, "The folder of the checkpoint.")
    output: str | None = option(None, "The folder to write; it must not exist yet, or be empty.")
    check_text: str | None = option(
        None, "A text file: Meta's computation and transformers' must have the same mean loss on it, in fp32."
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.input:
            found.append("no input: set --input to the folder of the checkpoint")
        if not self.output:
            found.append("no output: set --output to the folder that the checkpoint is to be written to")
        return found


@dataclass
class FromMetaOptions(ConvertOptions):
    """Meta's consolidated.*.pth, params.json and tokenizer.model to a folder that transformers loads"""

    tokenizer: str | None = option(
        None, "Meta's tokenizer.model; by default that of the input folder or of the one above. none: weights only."
    )
    max_position_embeddings: int | None = option(
        None,
        "Longest text of the model, which Meta's files do not tell; by default that of its version.",
        positive=True,
    )
    rope_scaling_factor: float | None = option(
        None, "Of use_scaled_rope; by default 8 (Llama 3.1), and 32 with tied embeddings (3.2).", positive=True
    )
    max_shard_size: str = option("4GiB", "Largest .safetensors file, and about the memory that is taken.")

    def problems(self) -> list[str]:
        found = super().problems()
        try:
            parse_bytes(self.max_shard_size)
        except ValueError:
            found.append(f"max_shard_size = {self.max_shard_size!r}: expected a size such as 4GiB, 800MiB or 5GB")
        return found


@dataclass
class ToMetaOptions(ConvertOptions):
    """A transformers Llama folder to Meta's consolidated.*.pth, params.json and tokenizer.model"""

    shards: int = option(1, "Cut for this many tensor-parallel processes, a file of each.", positive=True)


@dataclass
class MegatronArgsOptions(Recipe):
    """A Megatron launch script (pretrain_gpt.py, preprocess_data.py, merge_datasets.py) to a recipe and a pair"""

    output: str | None = option(None, "The folder to write; by default outputs/ and the script's name.")
    overwrite: bool = option(False, "Replace what a conversion has left there.")
    tokenizer_name: str | None = option(None, "The tokenizer's folder or hub name, in place of the script's files.")
    model_name_or_path: str | None = option(
        None, "Weights to begin with: a transformers folder, in place of Megatron's --load."
    )
    num_processes: int | None = option(None, "Processes; by default as many as the script starts.", positive=True)


@dataclass
class LaunchOptions(Recipe):
    """What is launched"""

    task: str | None = option(
        None,
        "What is trained; by default what the recipe's folder is called.",
        choices=("clm", "cls", "seq2seq"),
        common=True,
    )
    strategies: list[str] = option(  # noqa: RUF009
        ["ddp", "zero2", "zero3"],
        "Names in accelerate_configs/, or .yaml files: zero2,zero3 or zero2 zero3.",
        common=True,
    )
    num_processes: int = option(2, "Processes of each strategy.", positive=True, common=True)

    @property
    def names(self) -> list[str]:
        """The strategies, each once."""
        return list(dict.fromkeys(name for text in self.strategies for name in text.split(",") if name))

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.names:
            found.append("no strategy: set --strategies, e.g. --strategies ddp,zero2")
        return found


@dataclass
class StartOptions(Recipe):
    """How it is started; what follows the recipe or the program is the recipe's (python train/TASK.py --help)"""

    strategy: str | None = option(
        None, "A name in accelerate_configs/, or a .yaml file; by default ddp, or single for one process."
    )
    num_processes: int | None = option(
        None, "Processes of all machines together; by default one an accelerator.", positive=True
    )
    num_machines: int | None = option(
        None, "Machines; by default what a scheduler says (WORLD_SIZE, Slurm), else 1.", positive=True
    )
    machine_rank: int | None = option(None, "This machine's number, from 0; by default what it says.", minimum=0)
    main_process_ip: str | None = option(None, "Address of machine 0; by default what it says.")
    main_process_port: int | None = option(
        None, "Port of machine 0; by default what it says, else 29500. 0: any that is free, on one machine.", minimum=0
    )
    dry_run: bool = option(False, "Print the line, and run nothing.")


@dataclass
class VerifyOptions(LaunchOptions):
    """Strategies agree, and a killed run loses nothing; options of the training recipe change that"""

    reference: str = option("single", "Strategy of the one process that all others are compared with.")
    updates: int = option(12, "Length of the runs.", minimum=2, common=True)
    kills: int = option(
        3, "How often a run of each strategy is killed and resumed; 0: not at all.", minimum=0, common=True
    )
    kill_seed: int = option(0, "Seeds the moments of the kills.", minimum=0)
    resumed_processes: int = option(
        1, "Processes of every third launch of a run that is killed; the others have num_processes.", positive=True
    )
    tolerance: float | None = option(
        None, "Largest relative difference; by default 1e-5 in fp32, and 5e-2 in half precision.", positive=True
    )
    launch_minutes: float = option(60.0, "A launch that has not ended by then has failed.", positive=True)
    output: str | None = option(None, "Folder of the runs; by default outputs/verify-RECIPE.")
    keep: bool = option(False, "Keep the runs also where all is well; those that are not well are kept anyway.")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.kills >= self.updates:
            found.append(f"kills = {self.kills} and updates = {self.updates}: there must be more updates than kills")
        return found


@dataclass
class CompareOptions(LaunchOptions):
    """The largest batch of each strategy; zero2:lora=true, say, is zero2 with an option of the recipe of its own"""

    memory_limit: str | None = option(
        None,
        "Memory of one process' device, e.g. 24GiB; by default what the device has (of a CPU: a fair share).",
        common=True,
    )
    host_memory_limit: str | None = option(None, "Host memory of all processes together; by default what there is.")
    batch_sizes: list[str] = option(  # noqa: RUF009
        ["auto"], "auto: find the largest; or the sizes to try, of one process: 8,16,40.", common=True
    )
    granularity: int = option(1, "The largest batch is found as a multiple of this.", positive=True)
    max_batch_size: int = option(4096, "No larger batch is tried.", positive=True)
    steps: int = option(5, "Timed updates of each batch size, after one or two that warm up.", minimum=2)
    trial_minutes: float = option(20.0, "A launch that shows nothing new for this long has timed out.", positive=True)
    finish: bool = option(
        False,
        "Then train each strategy at its best batch, as the recipe says, and compare times and held-out figures.",
        common=True,
    )
    output: str | None = option(None, "Folder of the comparison; by default outputs/compare-RECIPE.")

    @property
    def sizes(self) -> list[int] | None:
        """The sizes that were named, in order; None: auto."""
        texts = [text for given in self.batch_sizes for text in given.split(",") if text]
        return None if texts == ["auto"] else sorted({int(text) for text in texts})

    def problems(self) -> list[str]:
        found = super().problems()
        for name in ("memory_limit", "host_memory_limit"):
            try:
                parse_bytes(getattr(self, name) or "1GiB")
            except ValueError:
                found.append(f"{name} = {getattr(self, name)!r}: expected a size such as 24GiB, 800MiB or 24GB")
        try:
            wrong = self.sizes is not None and (not self.sizes or self.sizes[0] < 1)
        except ValueError:
            wrong = True
        given = " ".join(self.batch_sizes)
        if wrong:
            found.append(f"batch_sizes = {given!r}: expected auto, or sizes such as 8,16,40")
        elif self.sizes:
            useless = [name for name in ("granularity", "max_batch_size") if self.source(name)]
            found += [f"{name} = {getattr(self, name)} has no effect with batch_sizes = {given}" for name in useless]
        elif self.granularity > self.max_batch_size:
            found.append(
                f"granularity = {self.granularity} and max_batch_size = {self.max_batch_size}: there is nothing to try"
            )
        return found


def parse_bytes(text: str) -> int:
    """24GiB -> 25769803776. Powers of 1024 are KiB, MiB, GiB, TiB, powers of 1000 kB, MB, GB, TB; the B may be left
    out, and then G is GiB.

    Raises:
        ValueError: it is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)\s*", text)
    if not match or (match[3] and not match[2]):
        raise ValueError(text)
    base = 1000 if match[4] and not match[3] else 1024
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise ValueError(text)
    return size


@dataclass
class WriterOptions(Recipe):
    """Who writes, and what about"""

    model: str | None = option(None, "The model: a folder, a hub name, an adapter's folder, or a run's.")
    adapter: str | None = option(None, "A LoRA adapter's folder, to be put on the model.")
    prompt: list[str] | None = option(None, "Texts to continue, each for itself.")  # noqa: RUF009
    prompt_file: str | None = option(
        None, ".txt with a prompt in each line, or .jsonl with a `prompt` or `messages` in each record."
    )
    chat: bool = option(
        False, "Talk with the model, a line at a time; /reset forgets what was said, an empty line ends."
    )
    system_prompt: str | None = option(
        None, "What a conversation begins with: a system message, or what an encoder-decoder reads first (a persona).",
        aliases=("context",),
    )  # fmt: skip
    chat_template: str | None = option(
        None, "How conversations are written: a .jinja file or a known name; by default the tokenizer's own."
    )
    raw: bool = option(False, "Give the prompts to the model as they are, not through the chat template.")
    precision: str | None = option(
        None, "Precision to compute in; by default that of the weights on a GPU, and fp32 without.", choices=PRECISIONS
    )
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")
    output: str | None = option(None, "A .jsonl file for prompts and generated texts; replaced if it is there.")

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.model:
            found.append("no model: set --model to a folder or a hub name")
        given = [name for name in ("prompt", "prompt_file", "chat") if getattr(self, name)]
        if not given:
            found.append("nothing to continue: give --prompt TEXT, --prompt_file FILE or --chat")
        if len(given) > 1:
            found.append(f"{' and '.join(f'--{name}' for name in given)}: keep one of them")
        if self.output and self.chat:
            found.append(f"output = {self.output!r}: it goes with --prompt and --prompt_file, not with --chat")
        for name in ("chat", "system_prompt", "chat_template"):
            if self.raw and getattr(self, name):
                found.append(f"--raw takes prompts as they are, and --{name} the chat template: keep one of the two")
        return found


@dataclass
class SamplingOptions(Recipe):
    """How the next token is chosen"""

    max_new_tokens: int = option(
        256, "Write at most this many tokens; an encoder-decoder as many as in training.", positive=True
    )
    num_beams: int | None = option(
        None, "Beams of the search; by default an encoder-decoder's own number, else 1.", positive=True
    )
    do_sample: bool | None = option(
        None, "Draw the next token, in place of the likeliest; by default if temperature, top_k or top_p is given."
    )
    temperature: float | None = option(None, "Below 1 likely tokens are drawn more often, above 1 less.", minimum=0)
    top_k: int | None = option(None, "Draw from this many likeliest tokens.", positive=True)
    top_p: float | None = option(None, "Draw from the likeliest tokens that have this probability.", positive=True)
    seed: int | None = option(None, "Seeds the drawing; by default another one each time, which is shown.", minimum=0)

    @property
    def sampling(self) -> dict[str, float]:
        """Those of temperature, top_k and top_p that were given."""
        names = ("temperature", "top_k", "top_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def problems(self) -> list[str]:
        found = super().problems()
        if self.temperature == 0:
            found.append("temperature = 0: the likeliest token is what is taken without it; leave it out")
        if self.top_p is not None and self.top_p > 1:
            found.append(f"top_p = {self.top_p:g}: a probability is at most 1")
        useless = [*self.sampling, *(["seed"] if self.seed is not None else [])]
        if self.do_sample is False and useless:
            found.append(f"do_sample = false and {useless[0]} = {getattr(self, useless[0]):g}: keep one of the two")
        elif not (self.do_sample or self.sampling) and useless:
            found.append(f"seed = {self.seed}: nothing is drawn, add --do_sample, --temperature, --top_k or --top_p")
        return found


@dataclass
class GenerateOptions(SamplingOptions, WriterOptions):
    """Let a model write."""
