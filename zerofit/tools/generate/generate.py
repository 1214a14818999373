r"""`zerofit generate`: let a model continue a text, answer a file of prompts, or chat.

    zerofit generate --model outputs/notes/model --prompt "Once upon a time" --temperature 0.8
    zerofit generate --model BASE --adapter outputs/notes/model --prompt_file asked.jsonl --output answered.jsonl
    zerofit generate --model outputs/chat/model --chat

Generated text goes to stdout token by token, and to the file `output` if it is given; notes go to stderr.
"""

from dataclasses import dataclass

from zerofit.recipe.base import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.tools.tool_recipe import PRECISIONS


@dataclass
class WriterOptions(Recipe):
    """The model and the prompts"""

    model: str = option(None, "The model: a folder, a hub name, an adapter's folder, or a run's.")
    adapter: str | None = option(None, "A LoRA adapter's folder, to be put on the model.")
    prompt: list[str] | None = option(None, "Texts to continue, each for itself.", excludes="prompt_file chat")
    prompt_file: str | None = option(
        None, ".txt, a prompt a line, or .jsonl with `prompt` or `messages`.", excludes="chat"
    )
    chat: bool = option(False, "Chat, a line at a time; /reset forgets what was said, an empty line ends.")
    system_prompt: str | None = option(
        None, "What a conversation begins with: a system message, or a persona.", aliases=("context",)
    )
    chat_template: str | None = option(None, "A .jinja file or a known name; by default the tokenizer's own.")
    source_lang: str | None = option(
        None, "Language of the texts for a translation model: its tokenizer's code; by default the stored one."
    )
    target_lang: str | None = option(None, "Language to translate into; by default the stored one.")
    raw: bool = option(
        False,
        "Give the prompts to the model as they are, not through the chat template.",
        excludes="chat system_prompt chat_template",
    )
    precision: str | None = option(None, "By default that of the weights; without a GPU fp32.", choices=PRECISIONS)
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")
    output: str | None = option(
        None, "A .jsonl file for prompts and generated texts; replaced if it is there.", excludes="chat"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.model:
            problems.append("no model: set --model to a folder or a hub name")
        if not (self.prompt or self.prompt_file or self.chat):
            problems.append("nothing to continue: give --prompt TEXT, --prompt_file FILE or --chat")
        return problems


@dataclass
class SamplingOptions(Recipe):
    """The choice of the next token"""

    max_new_tokens: int = option(256, "Write at most this many; by default an encoder-decoder's own.", positive=True)
    num_beams: int | None = option(None, "Beams of the search; by default the model's own number.", positive=True)
    do_sample: bool | None = option(None, "Sample the next token; by default if temperature, top_k or top_p is given.")
    temperature: float | None = option(None, "Sampling temperature.", positive=True, zero="Leave it out")
    top_k: int | None = option(None, "Top-k sampling.", positive=True)
    top_p: float | None = option(None, "Top-p (nucleus) sampling.", positive=True, at_most=1)
    seed: int | None = option(
        None,
        "Sampling seed; by default another one each time, which is shown.",
        minimum=0,
        needs="do_sample|temperature|top_k|top_p",
    )

    @property
    def sampling(self) -> dict[str, float]:
        """The given options of temperature, top_k and top_p."""
        names = ("temperature", "top_k", "top_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def problems(self) -> list[str]:
        problems = super().problems()
        for name, value in self.sampling.items():
            if self.do_sample is False:
                problems.append(f"do_sample = false and {name} = {value:g}: keep one of the two")
        return problems


@dataclass
class GenerateOptions(SamplingOptions, WriterOptions):
    """Let a model write."""


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(GenerateOptions, argv, prog="zerofit generate", tool=True)
    from zerofit.tools.generate.respond import respond

    return respond(options)
