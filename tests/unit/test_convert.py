"""`zerofit convert`: Meta's checkpoints become transformers' and back, and what is not whole is refused."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Harmful
from meta_forward import meta_logits
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from zerofit.cli import main
from zerofit.tools.convert import convert as convert
from zerofit.tools.convert.meta import conversion
from zerofit.tools.convert.meta.config import ffn_params, ffn_size
from zerofit.tools.convert.meta.folder import MetaFolder
from zerofit.tools.convert.meta.layout import (
    same_bits,
    to_meta,
)

pytestmark = pytest.mark.usefixtures("tools")
IDS = torch.arange(3, 67).view(2, 32) * 7 % 512
SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


def run(direction: str, source: Path, output: Path, *more: str) -> None:
    assert main(["convert", direction, "--input", str(source), "--output", str(output), *more]) == 0


def refused(capsys, source: Path, output: Path, *more: str, direction: str = "meta-to-hf") -> str:
    """What is said of it; it is one line, and nothing is left."""
    before = set(output.parent.iterdir())
    assert main(["convert", direction, "--input", str(source), "--output", str(output), *more]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert set(output.parent.iterdir()) == before
    return said


def logits(folder: Path):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def save_llama(folder: Path, dtype=torch.float32, **config):
    """A random Llama in transformers' folder, 4 heads of 8, vocabulary 512."""
    torch.manual_seed(1)
    settings = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    model.to(dtype).save_pretrained(folder)


@pytest.fixture
def meta(tmp_path) -> Path:
    """A small untied checkpoint of Meta's in one file."""
    save_llama(tmp_path / "small")
    run("hf-to-meta", tmp_path / "small", tmp_path / "meta")
    return tmp_path / "meta"


def edit_params(folder: Path, **values) -> None:
    file = folder / "params.json"
    params = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in params.items() if value is not None}))


def test_metas_weights_give_transformers_logits(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(conversion, "LARGEST_FILE", 300_000)
    run("meta-to-hf", data("models/llama/meta"), tmp_path / "hf")
    assert "47 weights there and back" in capsys.readouterr().out
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) == 4
    assert max(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")) < 310_000
    torch.testing.assert_close(logits(tmp_path / "hf"), logits(data("models/llama/hf")), rtol=0, atol=1e-5)
    by_meta = meta_logits(MetaFolder(data("models/llama/meta")), IDS)
    torch.testing.assert_close(logits(tmp_path / "hf"), by_meta, rtol=1e-4, atol=1e-3)
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "hf", data("models/llama/hf"))
    )
    assert ours == theirs
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    plain = SentencePieceProcessor(model_file=str(data("models/llama/meta") / "tokenizer.model"))
    assert tokenizer("Once upon a time")["input_ids"] == plain.encode("Once upon a time", add_bos=True)
    if data.real:
        assert tokenizer("Once upon a time")["input_ids"] == [1, 403, 407, 261, 378]
    assert tokenizer.model_max_length == 512


def test_back_to_what_meta_had(data, tmp_path):
    run("hf-to-meta", data("models/llama/hf"), tmp_path / "meta")
    ours, theirs = (
        torch.load(folder / "consolidated.00.pth") for folder in (tmp_path / "meta", data("models/llama/meta"))
    )
    assert len(theirs) == 48
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    params, of_meta = (
        json.loads((folder / "params.json").read_text()) for folder in (tmp_path / "meta", data("models/llama/meta"))
    )
    assert {name: params[name] for name in of_meta} == of_meta


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
def test_there_and_back(tmp_path, config, dtype, shards):
    save_llama(tmp_path / "one", dtype, **config)
    run("hf-to-meta", tmp_path / "one", tmp_path / "meta", "--shards", str(shards))
    run("meta-to-hf", tmp_path / "meta", tmp_path / "two", "--tokenizer", "none")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert len(one) >= 20
    assert one.keys() == two.keys()
    assert all(same_bits(one[name], two[name]) for name in one)
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    differing = {name for name in one | two if one.get(name) != two.get(name)}
    assert differing <= {"bos_token_id", "eos_token_id", "rms_norm_eps"}
    shapes = {name: tuple(each.shape) for name, each in torch.load(tmp_path / "meta" / "consolidated.00.pth").items()}
    heads = max(config.get("num_key_value_heads", 2) // shards, 1)  # of keys and values: none is cut, some are copied
    assert shapes["layers.0.attention.wk.weight"] == (8 * heads, 32)
    of_llama_3 = config.get("rope_parameters", {}).get("rope_theta") == 500_000.0
    assert shapes["tok_embeddings.weight"] == ((512 // shards, 32) if of_llama_3 else (512, 32 // shards))


@pytest.mark.parametrize("rope", [None, SCALED])
def test_metas_own_computation_agrees(tmp_path, rope):
    save_llama(tmp_path / "hf", rope_parameters=rope)
    run("hf-to-meta", tmp_path / "hf", tmp_path / "meta", "--shards", "2")
    ours = meta_logits(MetaFolder(tmp_path / "meta"), IDS, (rope or {}).get("factor"))
    torch.testing.assert_close(ours, logits(tmp_path / "hf"), rtol=1e-4, atol=1e-3)


def test_a_wrong_permutation_is_noticed(tmp_path, meta, monkeypatch):
    monkeypatch.setattr(conversion, "to_hf", lambda tensor, heads: to_meta(tensor, heads))
    with pytest.raises(RuntimeError, match="converted back differs from"):
        run("meta-to-hf", meta, tmp_path / "hf", "--tokenizer", "none")
    assert not list(tmp_path.glob("hf*"))


def test_llama_3s_tokenizer(tmp_path, meta):
    """256 bytes and `he`, `ll`, `hell`; ids of the special tokens follow."""
    tokens = [bytes([value]) for value in range(253)] + [b"he", b"ll", b"hell"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (meta / "tokenizer.model").write_text("\n".join(lines) + "\n")
    edit_params(meta, rope_theta=500_000.0)
    run("meta-to-hf", meta, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("hello")["input_ids"] == [256, 255, ord("o")]
    assert tokenizer("<|eot_id|>", add_special_tokens=False)["input_ids"] == [265]
    assert tokenizer.decode([255, ord("o")]) == "hello"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [257, 265]
    run("hf-to-meta", tmp_path / "hf", tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == (meta / "tokenizer.model").read_bytes()


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
        ({"n_layers": 3}, "n_layers = 3, and the weights have 2 layers"),
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
    assert "is not empty" in refused(capsys, meta, tmp_path / "small", *none)
    (meta / "tokenizer.model").write_bytes(b"\x00nothing")
    assert "neither sentencepiece's nor tiktoken's" in refused(capsys, meta, tmp_path / "hf")
    assert main(["convert", "back", "--input", "x"]) == 2


def test_models_that_meta_does_not_know(tmp_path, capsys):
    back = {"direction": "hf-to-meta"}
    save_llama(tmp_path / "biased", attention_bias=True)
    assert "has attention_bias = True" in refused(capsys, tmp_path / "biased", tmp_path / "meta", **back)
    save_llama(tmp_path / "linear", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert "has rope_type = linear" in refused(capsys, tmp_path / "linear", tmp_path / "meta", **back)
    (tmp_path / "odd").mkdir()
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2"}))
    assert "is not a Llama: its config.json says gpt2" in refused(capsys, tmp_path / "odd", tmp_path / "meta", **back)
    shutil.rmtree(tmp_path / "odd")
    assert "has no config.json" in refused(capsys, tmp_path / "odd", tmp_path / "meta", **back)


@pytest.mark.parametrize(
    ("dim", "ffn", "params"),
    [  # Llama 1 and 2 7B, 13B, Llama 2 70B, Llama 3 8B and 70B, Llama 3.2 1B and 3B
        (4096, 11008, {}), (5120, 13824, {}), (8192, 28672, {"multiple_of": 4096, "ffn_dim_multiplier": 1.3}),
        (4096, 14336, {"multiple_of": 1024, "ffn_dim_multiplier": 1.3}),
        (2048, 8192, {"multiple_of": 256, "ffn_dim_multiplier": 1.5}), (3072, 8192, {}),
    ],
)  # fmt: skip
def test_the_size_of_the_ffn(dim, ffn, params):
    assert ffn_size(dim, **params) == ffn
    assert all(ffn_size(64, **ffn_params(64, size)) == size for size in (ffn, *range(1, 3000, 7)))
