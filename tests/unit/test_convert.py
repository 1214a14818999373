"""`zerofit convert`: Meta's checkpoints become transformers', and what is not whole is refused."""

import base64
import json
from pathlib import Path

import pytest
import torch
from helpers import Harmful
from material.llama import write_meta
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from zerofit.cli import main
from zerofit.tools.convert import meta as meta_module
from zerofit.tools.convert.meta import equal_bits

pytestmark = pytest.mark.usefixtures("tools")
IDS = torch.arange(3, 67).view(2, 32) * 7 % 512
SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


def run(source: Path, output: Path, *more: str) -> None:
    assert main(["convert", "meta-to-hf", "--input", str(source), "--output", str(output), *more]) == 0


def refused(capsys, source: Path, output: Path, *more: str) -> str:
    """What is said of it; it is one line, and nothing is left."""
    before = set(output.parent.iterdir())
    assert main(["convert", "meta-to-hf", "--input", str(source), "--output", str(output), *more]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert set(output.parent.iterdir()) == before
    return said


def logits(folder: Path):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def save_llama(folder: Path, dtype=torch.float32, shards: int = 1, **config) -> None:
    """A random Llama, 4 heads of 8, vocabulary 512: transformers' in folder/hf, Meta's in folder/meta."""
    torch.manual_seed(1)
    settings = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    model.to(dtype).save_pretrained(folder / "hf")
    (folder / "meta").mkdir()
    write_meta(folder / "meta", model, shards)


@pytest.fixture
def meta(tmp_path) -> Path:
    """A small untied checkpoint of Meta's in one file."""
    save_llama(tmp_path / "small")
    return tmp_path / "small" / "meta"


def edit_params(folder: Path, **values) -> None:
    file = folder / "params.json"
    params = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in params.items() if value is not None}))


def test_metas_weights_give_transformers_logits(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(meta_module, "MAX_META_FILE_BYTES", 300_000)
    run(data("models/llama/meta"), tmp_path / "hf")
    assert "47 weights, bit for bit" in capsys.readouterr().out
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) == 4
    assert max(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")) < 310_000
    theirs = data("models/llama/hf")
    torch.testing.assert_close(logits(tmp_path / "hf"), logits(theirs), rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "hf/config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    plain = SentencePieceProcessor(model_file=str(data("models/llama/meta") / "tokenizer.model"))
    assert tokenizer("Once upon a time")["input_ids"] == plain.encode("Once upon a time", add_bos=True)
    if data.real:
        assert tokenizer("Once upon a time")["input_ids"] == [1, 403, 407, 261, 378]
    assert tokenizer.model_max_length == 512


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32),
        ({"num_key_value_heads": 4}, torch.bfloat16),
        ({"num_key_value_heads": 1, "tie_word_embeddings": True}, torch.float16),
        ({"rope_parameters": SCALED}, torch.bfloat16),
    ],
)
def test_any_number_of_shards(tmp_path, config, dtype, shards):
    save_llama(tmp_path, dtype, shards, **config)
    run(tmp_path / "meta", tmp_path / "two", "--tokenizer", "none")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "two"))
    assert len(one) >= 20
    assert one.keys() == two.keys()
    assert all(equal_bits(one[name], two[name]) for name in one)
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "two"))
    differing = {name for name in one | two if one.get(name) != two.get(name)}
    assert differing <= {"bos_token_id", "eos_token_id", "rms_norm_eps"}
    shapes = {name: tuple(each.shape) for name, each in torch.load(tmp_path / "meta" / "consolidated.00.pth").items()}
    heads = max(config.get("num_key_value_heads", 2) // shards, 1)  # of keys and values: none is cut, some are copied
    assert shapes["layers.0.attention.wk.weight"] == (8 * heads, 32)


def test_llama_3s_tokenizer(tmp_path, meta):
    """256 bytes and `he`, `ll`, `hell`; ids of the special tokens follow."""
    tokens = [bytes([value]) for value in range(253)] + [b"he", b"ll", b"hell"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (meta / "tokenizer.model").write_text("\n".join(lines) + "\n")
    edit_params(meta, rope_theta=500_000.0)
    run(meta, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("hello")["input_ids"] == [256, 255, ord("o")]
    assert tokenizer("<|eot_id|>", add_special_tokens=False)["input_ids"] == [265]
    assert tokenizer.decode([255, ord("o")]) == "hello"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [257, 265]


def test_a_file_that_would_execute_code(material, tmp_path, meta, capsys):
    made = tmp_path / "was-executed"
    torch.save({"norm.weight": Harmful(made)}, meta / "consolidated.00.pth")
    assert "would execute posix.mkdir. It was not read" in refused(capsys, meta, tmp_path / "hf")
    assert not made.exists()
    whole = (material / "models" / "llama" / "meta" / "consolidated.00.pth").read_bytes()
    (meta / "consolidated.00.pth").write_bytes(whole[:5000])
    assert "consolidated.00.pth is broken" in refused(capsys, meta, tmp_path / "hf")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"n_layers": 3}, "lacks layers.2.attention.wk.weight (9 such)"),
        ({"n_kv_heads": 4}, "layers.0.attention.wk.weight has (16, 32)"),
        ({"vocab_size": 500}, "vocab_size = 500 is not 512"),
        ({"sliding_window": 4096}, "not a Llama: params.json has sliding_window"),
    ],
)
def test_params_that_do_not_fit(tmp_path, meta, capsys, params, said):
    edit_params(meta, **params)
    assert said in refused(capsys, meta, tmp_path / "hf", "--tokenizer", "none")


def test_folders_and_options_that_do_not_fit(tmp_path, meta, capsys):
    assert "no tokenizer.model. Name it with --tokenizer FILE" in refused(capsys, meta, tmp_path / "hf")
    none = ("--tokenizer", "none")
    assert "is not empty" in refused(capsys, meta, tmp_path / "small" / "hf", *none)
    (meta / "tokenizer.model").write_bytes(b"\x00nothing")
    assert "neither sentencepiece's nor tiktoken's" in refused(capsys, meta, tmp_path / "hf")
    assert main(["convert", "back", "--input", "x"]) == 2
