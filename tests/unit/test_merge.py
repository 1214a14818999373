"""`zerofit merge`: the merged folder gives the logits of base and adapter, and what does not fit is refused."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from folders import VOCABULARY, save_adapter, save_base, save_blenderbot, small_tokenizer
from helpers import tiny_deberta, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from zerofit.cli import main

pytestmark = [pytest.mark.usefixtures("tools"), pytest.mark.filterwarnings("ignore::UserWarning")]  # of peft

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "gpt_neox": ["query_key_value"]}
IDS = torch.arange(3, 40)[None]


@dataclass
class Case:
    """A base and an adapter in their folders, and the logits of the two together."""

    base: Path
    adapter: Path
    logits: torch.Tensor
    alone: torch.Tensor  # the logits of the base without the adapter

    def edit(self, name: str, change) -> None:
        """Change a JSON file of the adapter's."""
        file = self.adapter / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    def edit_weights(self, change) -> None:
        file = self.adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


@pytest.fixture
def build(tmp_path, tokenizer):
    """Makes a base of one of the families and an adapter for it."""

    def made(family: str = "llama", dtype: torch.dtype = torch.float32, config=(), base: bool = True, **settings):
        folder = tmp_path / "base"
        model = save_base(folder, tokenizer, family, dtype, **dict(config))
        settings = {"target_modules": TARGETS[family], **settings}
        return _adapted(model, folder, tmp_path / "adapter", base=folder if base else None, **settings)

    return made


def _adapted(model, folder: Path, adapter: Path, **settings) -> Case:
    with torch.no_grad():
        alone = model(input_ids=IDS).logits
        logits = save_adapter(adapter, model, **settings)(input_ids=IDS).logits
    assert (logits - alone).abs().max() > 1e-2, "the adapter does nothing: the test would show nothing"
    return Case(folder, adapter, logits, alone)


def merge(case: Case, *flags: str) -> Path:
    output = case.base.parent / "merged"
    assert main(["merge", "--adapter", str(case.adapter), "--output", str(output), *flags]) == 0
    return output


def refusal(case: Case, capsys, *flags: str, adapter: Path | None = None) -> str:
    output = case.base.parent / "merged"
    capsys.readouterr()  # what is printed while the case is made
    code = main(["merge", "--adapter", str(adapter or case.adapter), "--output", str(output), *flags])
    shown = capsys.readouterr()
    assert code == 2, shown
    assert not output.exists()
    assert not list(output.parent.glob("*partial*"))
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    return shown.err


def logits_of(folder: Path, auto_class=AutoModelForCausalLM, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = auto_class.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


# -------------------------------------------------------------------------------------------------------------- merged


@pytest.mark.parametrize("family", sorted(TARGETS))
def test_the_merged_folder_is_base_and_adapter(build, family, capsys):
    case = build(family, fan_in_fan_out=family == "gpt2")
    capsys.readouterr()
    output = merge(case)
    agree(logits_of(output), case.logits)
    shown = capsys.readouterr()
    assert "read back" in shown.out
    assert not shown.err
    assert not (output / "adapter_config.json").exists()
    written = {file.name for file in output.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= written
    card = (output / "README.md").read_text()
    assert f"base_model: {case.base.name}" in card
    assert str(case.base.parent) not in card, "no path of this machine"
    assert "content" in AutoTokenizer.from_pretrained(output).chat_template
    assert not list(output.parent.glob("*partial*"))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": "all-linear"},
        {"rank_pattern": {"v_proj": 2}, "layers_to_transform": [1]},
        {"task_type": None},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_kinds_of_adapters(build, settings, tied):
    """Also those that tear tied embeddings apart: the folder must not tie them again."""
    case = build("llama", config={"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}, **settings)
    output = merge(case)
    agree(logits_of(output), case.logits)
    touches = {"lm_head", "embed_tokens"} & {*settings.get("modules_to_save", []), *settings.get("target_modules", [])}
    config = json.loads((output / "config.json").read_text())
    assert config["tie_word_embeddings"] is (tied and not touches)


@pytest.mark.parametrize(
    ("stored", "flags", "written"),
    [
        (torch.bfloat16, [], "bfloat16"),
        (torch.bfloat16, ["--precision", "fp32"], "float32"),
        (torch.float32, ["--precision", "fp16"], "float16"),
    ],
)
def test_precision(build, stored, flags, written):
    case = build(dtype=stored)
    output = merge(case, *flags)
    assert {str(tensor.dtype) for tensor in load_file(output / "model.safetensors").values()} == {f"torch.{written}"}
    assert json.loads((output / "config.json").read_text())["dtype"] == written
    spread = case.logits.float().max() - case.logits.float().min()
    assert (logits_of(output).float() - case.logits.float()).abs().max() < 5e-2 * spread


def test_a_base_given_by_hand(build):
    case = build(base=False)
    moved = case.base.rename(case.base.with_name("moved"))
    agree(logits_of(merge(case, "--base", str(moved))), case.logits)


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS"])
@pytest.mark.parametrize("zerofit", [True, False], ids=["with config.json", "plain peft"])
def test_a_classifier_keeps_its_head_and_labels(tmp_path, zerofit, task_type):
    base, labels = tmp_path / "base", {0: "bad", 1: "so-so", 2: "good"}
    auto_class = AutoModelForSequenceClassification if task_type == "SEQ_CLS" else AutoModelForTokenClassification
    tiny_deberta(base, num_labels=2)
    more = {"num_labels": 3, "ignore_mismatched_sizes": True}
    if zerofit:
        more |= {"id2label": labels, "label2id": {name: index for index, name in labels.items()}}
    model = auto_class.from_pretrained(base, **more).eval()
    whole = ["classifier", "pooler"] if task_type == "SEQ_CLS" else ["classifier"]
    case = _adapted(
        model, base, tmp_path / "adapter", base=base, task_type=task_type, use_dora=True,
        target_modules=["query_proj", "value_proj"], modules_to_save=whole,
    )  # fmt: skip
    if zerofit:
        model.config.save_pretrained(case.adapter)
    output = merge(case)
    agree(logits_of(output, auto_class), case.logits)
    config = json.loads((output / "config.json").read_text())
    names = config["id2label"].values()
    assert list(names) == (list(labels.values()) if zerofit else ["LABEL_0", "LABEL_1", "LABEL_2"])
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("whole", [[], ["model.shared", "embed_tokens", "lm_head"]], ids=["", "embeddings too"])
def test_an_encoder_decoder(tmp_path, tokenizer, whole):
    base, adapter, output = (tmp_path / name for name in ("base", "adapter", "merged"))
    model = save_blenderbot(base, tokenizer)
    settings = {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q_proj", "v_proj"], "modules_to_save": whole or None}
    adapted = save_adapter(adapter, model, base, **settings)
    with torch.no_grad():
        one = adapted.get_base_model().lm_head.weight if whole else None
        for name, parameter in adapted.named_parameters():  # one matrix under four names
            if whole and "modules_to_save" in name:
                parameter.copy_(one)
        adapted.save_pretrained(adapter)
        expected = adapted(input_ids=IDS[:, :30], decoder_input_ids=IDS[:, 5:20]).logits
    assert main(["merge", "--adapter", str(adapter), "--output", str(output)]) == 0
    merged = AutoModelForSeq2SeqLM.from_pretrained(output).eval()
    with torch.no_grad():
        agree(merged(input_ids=IDS[:, :30], decoder_input_ids=IDS[:, 5:20]).logits, expected)
    written = load_file(output / "model.safetensors")
    assert merged.config.tie_word_embeddings
    assert "model.shared.weight" in written
    assert not [name for name in written if "embed_tokens" in name or "lm_head" in name]


# ------------------------------------------------------------------------------------------------------------- refused


def file(name: str, content: bytes | None):
    """Another content of a file of the adapter's, or none."""
    return lambda case: (case.adapter / name).write_bytes(content) if content else (case.adapter / name).unlink()


def config(**settings):
    return lambda case: case.edit("adapter_config.json", lambda content: content.update(settings))


def weights(change):
    return lambda case: case.edit_weights(change)


def base(**changes):
    return lambda case: tiny_model("llama", vocab_size=VOCABULARY, **changes).save_pretrained(case.base)


def without_tokenizer(case: Case) -> None:
    for file in [*case.base.glob("tokenizer*"), *case.base.glob("*.jinja")]:
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (file("adapter_model.safetensors", None), ["adapter_model.safetensors", "missing"]),
        (file("adapter_model.safetensors", b"nonsense, not tensors"), ["adapter_model.safetensors", "broken"]),
        (file("adapter_config.json", b"{"), ["adapter_config.json", "cannot be read"]),
        (config(peft_type="PREFIX_TUNING"), ["PREFIX_TUNING", "LoRA"]),
        (config(base_model_name_or_path="/no/such/folder"), ["/no/such/folder", "no such folder", "--base"]),
        (config(target_modules=["q_proj", "v_proj"]), ["no place for model.layers.0.mlp.down_proj"]),
        (config(from_the_future=1), ["newer peft", "from_the_future"]),
        (weights(lambda of: of.update({name: torch.empty(0) for name in list(of)[:3]})), ["9 of its 12 tensors"]),
        (weights(lambda of: [tensor.fill_(torch.nan) for tensor in of.values()]), ["diverged"]),
        (weights(lambda of: of.pop(next(name for name in of if "lora_A" in name))), ["no weights", "lora_A"]),
        (base(num_hidden_layers=1), ["another base", "no place for model.layers.1."]),
        (base(num_hidden_layers=3), ["another base", "no weights for model.layers.2."]),
        (base(hidden_size=48), ["another base", "has the shape"]),
        (without_tokenizer, ["no tokenizer"]),
    ],
)
def test_what_cannot_be_merged(build, capsys, spoil, words):
    case = build()
    spoil(case)
    message = refusal(case, capsys)
    for word in words:
        assert word in message, message


def test_a_base_of_another_size_where_the_configuration_lies_beside_the_adapter(build, capsys):
    """Loaded with that configuration, the layers that the base lacks would be random."""
    case = build()
    shutil.copy(case.base / "config.json", case.adapter)
    tiny_model("llama", vocab_size=VOCABULARY, num_hidden_layers=1).save_pretrained(case.base)
    capsys.readouterr()  # transformers' progress bar
    message = refusal(case, capsys)
    assert "num_hidden_layers = 2" in message
    assert "has 1" in message
    tiny_model("llama", vocab_size=VOCABULARY - 1).save_pretrained(case.base)
    assert "embed_tokens.weight" in refusal(case, capsys)


def test_a_head_that_nobody_has(tmp_path, capsys):
    """A base without a pooler, and an adapter that did not save it: it was random, and is lost."""
    base = tmp_path / "base"
    tiny_deberta(base, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(base)
    case = _adapted(model, base, tmp_path / "adapter", base=base, task_type="SEQ_CLS", target_modules=["query_proj"])
    weights = load_file(base / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if "pooler" not in name},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert "pooler.dense" in refusal(case, capsys)


def test_an_adapter_that_was_trained_on_quantised_weights(build):
    """The configuration as trained says so; the base in its folder is not quantised, and is what is merged into."""
    case = build()
    config = json.loads((case.base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (case.adapter / "config.json").write_text(json.dumps(config))
    output = merge(case)
    agree(logits_of(output), case.logits)
    assert "quantization_config" not in json.loads((output / "config.json").read_text())


def test_a_merge_that_is_wrong_writes_nothing(build, monkeypatch):
    """The proof has to be able to fail: fold the adapter in with the wrong sign."""
    from peft.tuners.lora import Linear

    case, true = build(), Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: -true(self, adapter))
    with pytest.raises(RuntimeError, match="logits differ by"):
        main(["merge", "--adapter", str(case.adapter), "--output", str(case.base.parent / "merged")])
    assert not list(case.base.parent.glob("merged*"))
