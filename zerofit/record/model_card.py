"""README.md of a model that a run leaves: what it is, how it is loaded, how it was trained, what was measured."""

import json
import re
from typing import Any

from zerofit.recipe.errors import escape_controls
from zerofit.recipe.files import strip_folders
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.tasks import model_kind
from zerofit.record.terminal import decimals

HEADS = {"clm": "CausalLM", "cls": "SequenceClassification", "seq2seq": "Seq2SeqLM"}


def model_card(
    task: str,
    recipe: TrainingRecipe,
    held_out: dict[str, float],
    environment: dict[str, Any],
    is_adapter: bool,
    *,
    model_class: str = "",
    base: str | None = None,
) -> str:
    """The text, which names no folder of this machine. `base`: of an adapter that was trained on; None: what the
    recipe names."""
    public = recipe.to_publish()
    began = public["model_name_or_path"]
    library = "peft" if is_adapter else "transformers"
    base = strip_folders(base) if base else began
    quoted = _quoted(base)
    front = ["---", f"library_name: {library}", *([f"base_model: {quoted}"] if base else []), "tags: [zerofit]", "---"]
    corpora = [strip_folders(prefix) for _, prefix in getattr(recipe, "blend", [])]
    data = public["dataset_name"] or ", ".join(public["train_file"] or corpora)
    figures = [f"| {name.removeprefix('eval_')} | {decimals(value)} |" for name, value in held_out.items()]
    measured = ["", "| held out | |", "|---|---|", *figures] if figures else []
    packages = environment["packages"]
    libraries = [name for name in ("torch", "transformers", "peft", "accelerate", "deepspeed") if name in packages]
    versions = ", ".join(f"{name} {packages[name]}" for name in libraries)
    options = {name: value for name, value in public.items() if recipe.source(name)}
    head = next(
        (head for head in ("MultipleChoice", "TokenClassification") if head in model_class), HEADS[model_kind(task)]
    )
    about = f"Task {task}; {'continued from ' + began if began else 'trained from scratch'} on {data}."
    in_one_line = escape_controls(" ".join(about.splitlines()))
    return "\n".join(
        [
            *front,
            "",
            "# A model trained with zerofit",
            "",
            re.sub(r"([\\`*<>\[\]#|])", r"\\\1", in_one_line),  # names are not markup
            *measured,
            *_loading(f"AutoModelFor{head}", base, is_adapter),
            "",
            f"zerofit {(environment['zerofit_commit'] or 'unknown')[:12]}, {versions}",
            "",
            "```json",
            json.dumps(options, indent=2),
            "```",
            "",
        ]
    )


def _quoted(text: str | None) -> str:
    """A string of YAML, which is one of Python as well."""
    return escape_controls(json.dumps(text, ensure_ascii=False))


def _loading(auto_class: str, base: str | None, is_adapter: bool) -> list[str]:
    """Lines of Python that load the model; none for an adapter whose frozen weights nobody has."""
    if is_adapter and not base:
        return []
    from_transformers = f"from transformers import {'AutoConfig, ' if is_adapter else ''}{auto_class}, AutoTokenizer"
    model = [f"model = {auto_class}.from_pretrained(path)"]
    if is_adapter:
        model = [
            f"base = {auto_class}.from_pretrained({_quoted(base)}, config=AutoConfig.from_pretrained(path))",
            "model = PeftModel.from_pretrained(base, path)",
        ]
    return [
        "",
        "```python",
        *(["from peft import PeftModel"] if is_adapter else []),
        from_transformers,
        "",
        'path = "."  # this folder, or the name under which it was published',
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        *model,
        "```",
    ]
