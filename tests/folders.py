"""Small models, tokenizers and adapters as they lie in folders, for the tests of the `zerofit` command."""

import re
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import ROOT, tiny_model, write_records

VOCABULARY = 300


@contextmanager
def tools_in_this_process():
    """For tests that call a tool's `main`: what it sets for its own process is as before at the end.

    With one thread: on tiny models several would only wait for each other.
    """
    from transformers.utils import logging

    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def small_tokenizer(cache: Path, pairs: bool = False):
    """A byte-level tokenizer, trained on a text that does not change; <|endoftext|> (0) begins and ends texts, or,
    where they are `pairs`, [CLS] and [SEP] do."""
    from zerofit.model.tokenizer import train_tokenizer

    return train_tokenizer([(ROOT / "LICENSE").read_text()], VOCABULARY, "licence", cache, pairs=pairs)


def save_base(folder: Path, tokenizer, family: str = "llama", dtype: torch.dtype = torch.float32, **config):
    """A random model in its folder, with the tokenizer. Returns it."""
    marks = {"eos_token_id": 0, "bos_token_id": 0}
    model = tiny_model(family, vocab_size=VOCABULARY, **{**marks, **config}).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_writer(folder: Path, tokenizer, family: str = "llama"):
    """The same, for a look at what it writes: drawn as small as usual, a model repeats its last token."""
    model = save_base(folder, tokenizer, family, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def save_blenderbot(folder: Path, tokenizer):
    """A tiny BlenderBot: turns are joined by two spaces, it has 32 positions, and one matrix is its embeddings and
    its head."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "blenderbot", vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
        bos_token_id=0, pad_token_id=0, eos_token_id=0, decoder_start_token_id=0, forced_eos_token_id=None,
        init_std=0.5,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_adapter(folder: Path, model, base: Path | None, **settings):
    """An adapter that plain peft has written, moved away from zero. Returns the PeftModel in evaluation mode."""
    from peft import LoraConfig, get_peft_model

    model.__dict__["name_or_path"] = None if base is None else str(base)  # peft takes the base's name from there
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5, "task_type": "CAUSAL_LM", **settings}
    adapted = get_peft_model(model, LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return adapted


def answer(model) -> torch.Tensor:
    """The logits of a model of any task for some fixed ids."""
    ids = torch.arange(3, 35).reshape(2, 16)
    inputs = {"decoder_input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **inputs).logits.float()


def colours() -> list[dict]:
    """Labelled texts and dialogues: the first of five words is the label, the last one the reply."""
    lines = []
    for number in range(200):
        words = [("red", "blue", "green", "black")[(number * k) % 4] for k in range(1, 6)]
        lines.append({"text": " ".join(words), "label": words[0], "dialogue": [" ".join(words), words[-1]]})
    return lines


def hub_folder(folder: Path, config: str, splits: dict[str, list[dict]]) -> None:
    """A data set as the hub has it: a configuration with splits, in a folder of the same name."""
    folder.mkdir(parents=True)
    front = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        write_records(folder / f"{split}.jsonl", rows)
        front += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*front, "---", ""]))


def write_ported_model(folder: Path) -> None:
    """modeling_rms_gpt2.py, family.py and config.json as docs/porting-a-model.md prints them."""
    page = (ROOT / "docs" / "porting-a-model.md").read_text(encoding="utf-8")
    section = page[page.index("## A new layer, as code") :]
    modeling, family = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    (folder / "modeling_rms_gpt2.py").write_text(modeling)
    (folder / "family.py").write_text(family)
    (folder / "config.json").write_text(re.search(r"```json\n(.*?)```", section, re.DOTALL)[1])
