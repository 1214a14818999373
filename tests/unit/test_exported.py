"""An export that is read back: what differs from its base is said, and what others stumble over."""

import json
import struct
from types import SimpleNamespace

import pytest
from helpers import recipe_of, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig

from zerofit.model.export import export_model
from zerofit.model.exported import review_export
from zerofit.model.load import build_model
from zerofit.strategy.strategy import Strategy

SHAPES = {
    "model.embed_tokens.weight": [300, 32],
    "model.layers.0.self_attn.q_proj.weight": [32, 32],
    "model.layers.0.input_layernorm.weight": [32],
    "lm_head.weight": [300, 32],
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "rope_theta": 500000.0}
TOKENIZER = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages }}"}


def write_weights(file, shapes, dtype="BF16") -> None:
    """A .safetensors that ends with its header: whoever reads a weight fails."""
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def folders(tmp_path):
    """(export, base), which are the same."""
    made = tmp_path / "export", tmp_path / "base"
    for folder in made:
        folder.mkdir()
        write_weights(folder / "model.safetensors", SHAPES)
        for name, content in (
            ("config.json", CONFIG),
            ("tokenizer_config.json", TOKENIZER),
            ("generation_config.json", {"temperature": 0.6}),
        ):
            (folder / name).write_text(json.dumps(content))
        for name in ("tokenizer.json", "tokenizer.model"):
            (folder / name).write_text("{}")
    return made


def test_an_export_like_its_base(folders):
    export, base = folders
    assert review_export(export, str(base)) == [f"4 weights, bfloat16, read back, compared with {base}"]
    assert review_export(export, None) == [
        "4 weights, bfloat16, read back, no safetensors of a base to compare them with"
    ]


def test_a_base_that_cannot_be_read_costs_no_model(folders):
    export, base = folders
    (base / "config.json").write_text("{")
    assert review_export(export, str(base)) == review_export(export, None)


def without(name: str) -> dict:
    return {other: shape for other, shape in SHAPES.items() if other != name}


HEADLESS = {name.removeprefix("model."): shape for name, shape in SHAPES.items()}  # saved without the head's class
PREFIXED = {name.replace("model.", "model.language_model."): shape for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "weights",
            without("model.layers.0.input_layernorm.weight"),
            "that are not here: model.layers.0.input_layern",
        ),
        ("weights", {**SHAPES, "score.weight": [2, 32]}, "weights that the base has not: score.weight"),
        (
            "weights",
            PREFIXED,
            "3 names differ from the base's (model.embed_tokens.weight: model.language_model.embed_tokens.w",
        ),
        ("weights", HEADLESS, "3 names differ from the base's (model.embed_tokens.weight: embed_tokens.weight)"),
        ("weights", {**SHAPES, "lm_head.weight": [304, 32]}, "another shape than in the base: lm_head.weight"),
        ("weights", without("lm_head.weight"), "lm_head.weight is missing"),
        ("weights in F32", SHAPES, "weights are float32, and the base's bfloat16; vLLM rounds them"),
        ("config.json", {**CONFIG, "tie_word_embeddings": True}, "lm_head.weight is stored, and config.json ties it"),
        ("config.json", {**CONFIG, "dtype": "float32"}, "config.json says float32, and the weights are bfloat16"),
        ("config.json", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta = 500000 is in config.json's rope_par"),
        ("tokenizer.model", None, "tokenizer.model is not here"),
        ("tokenizer_config.json", {**TOKENIZER, "tokenizer_class": "TokenizersBackend"}, "LlamaFactory#10310"),
        ("tokenizer_config.json", {**TOKENIZER, "extra_special_tokens": ["<a>"]}, "llama.cpp#24460"),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}, "this tokenizer has none"),
        ("chat_template.jinja", "{{ other }}", "the chat template is not the base's"),
        ("generation_config.json", {"temperature": 1.0, "top_k": 5}, "temperature 0.6 -> 1.0, top_k None -> 5"),
    ],
)
def test_each_difference_is_one_line(folders, file, content, said):
    export, base = folders
    if file.startswith("weights"):
        write_weights(export / "model.safetensors", content, "F32" if "F32" in file else "BF16")
    elif content is None:
        (export / file).unlink()
    else:
        (export / file).write_text(content if isinstance(content, str) else json.dumps(content))
    [line] = review_export(export, str(base))[1:]
    assert said in line


def test_names_that_loaders_know_are_no_difference(folders):
    """Buffers of old files, and a head that is tied."""
    export, base = folders
    write_weights(base / "model.safetensors", {**SHAPES, "model.layers.0.self_attn.rotary_emb.inv_freq": [16]})
    write_weights(export / "model.safetensors", without("lm_head.weight"))
    for folder in folders:
        (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert len(review_export(export, str(base))) == 1


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"r": 8}, {}, None),
        ({"r": 64}, {}, "vLLM needs --max-lora-rank 64"),
        ({"r": 64, "task_type": "CAUSAL_LM"}, {}, "vLLM needs --max-lora-rank 64"),
        ({"r": 64, "task_type": "SEQ_CLS", "modules_to_save": ["score"]}, {}, None),
        ({"r": 64, "task_type": "SEQ_2_SEQ_LM"}, {}, None),
        ({"use_dora": True}, {}, "vLLM refuses adapters with use_dora = True"),
        ({"modules_to_save": ["score"]}, {}, "vLLM refuses adapters with modules_to_save = ['score']"),
        ({"target_parameters": ["experts.down_proj"]}, {}, "vllm#41384"),
        (
            {},
            {"base_model.model.score.weight": [2, 32]},
            "llama.cpp's converter refuses base_model.model.score.weight",
        ),
    ],
)
def test_adapters(folders, settings, more, said):
    export, base = folders
    (export / "model.safetensors").unlink()
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    write_weights(export / "adapter_model.safetensors", {**{name: [4, 32] for name in names}, **more}, "F32")
    (export / "adapter_config.json").write_text(json.dumps({"r": 4, **settings}))
    lines = review_export(export, str(base))[1:]
    assert len(lines) == (said is not None)
    assert not lines or said in lines[0]


def test_an_incomplete_export_is_an_error(folders):
    export, base = folders
    index = {"weight_map": {**dict.fromkeys(SHAPES, "model.safetensors"), "model.norm.weight": "model-2.safetensors"}}
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        review_export(export, str(base))
    (export / "model.safetensors.index.json").unlink()
    (export / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="holds no weights"):
        review_export(export, str(base))


ALONE = SimpleNamespace(world_size=1, rank=0)  # a launch
NOT_SHARDED = Strategy(launch=ALONE, batches=None, precision="fp32", deepspeed=None, source="")
VALID = {"max_new_tokens": 20, "eos_token_id": 5}
REFUSED = [  # (settings beside the valid ones, the names that are dropped)
    ({"pad_token_id": -1}, {"pad_token_id"}),
    ({"output_scores": True, "output_attentions": True, "output_hidden_states": True, "output_logits": True},
     {"output_scores", "output_attentions", "output_hidden_states", "output_logits"}),
    ({"output_scores": True, "return_dict_in_generate": True}, set()),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature", "top_p"}),
    ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, set()),
    ({"num_return_sequences": 3}, {"num_return_sequences"}),
    ({"num_return_sequences": 3, "num_beams": 4, "early_stopping": True}, set()),
    ({"num_return_sequences": 3, "num_beams": 2}, {"num_return_sequences"}),
    ({"early_stopping": "soon"}, {"early_stopping"}),
    ({"early_stopping": [1]}, {"early_stopping"}),
    ({"cache_implementation": "none"}, {"cache_implementation"}),
    ({"watermarking_config": {"seeding_scheme": "x"}}, {"watermarking_config"}),
    ({"compile_config": {"mode": "x"}}, {"compile_config"}),
    ({"pad_token_id": "<pad>"}, {"pad_token_id"}),
    ({"max_new_tokens": 0}, {"max_new_tokens"}),
    ({"suppress_tokens": [3], "forced_eos_token_id": 3}, {"forced_eos_token_id"}),
    ({"a_setting_of_ours": 1}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "dropped"), REFUSED)
def test_generation_settings_that_cannot_be_saved_are_dropped_at_load(tmp_path, settings, dropped):
    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({**VALID, **settings}))
    recipe, strategy = recipe_of(model_name_or_path=str(tmp_path / "base")), NOT_SHARDED
    loaded = build_model(AutoModelForCausalLM, model.config, recipe, strategy, 1)
    assert set(loaded.dropped_settings) == dropped
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="", save_pretrained=lambda folder: None)
    assert export_model(loaded, loaded.named_parameters(), tokenizer, tmp_path / "export") == {}
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    expected = {name: value for name, value in {**VALID, **settings}.items() if name not in dropped}
    assert {name: value for name, value in written.items() if name in {**VALID, **settings}} == expected
    GenerationConfig.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize("text", ["[1, 2]", "3", "{", ""])
def test_a_file_of_generation_settings_that_is_none_is_not_used(tmp_path, text):
    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(text)
    recipe = recipe_of(model_name_or_path=str(tmp_path / "base"))
    assert build_model(AutoModelForCausalLM, model.config, recipe, NOT_SHARDED, 1).generation_config is not None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "the model's code", "the tokenizer",
                                  "tokenizer.model"])  # fmt: skip
def test_a_file_that_cannot_be_written_costs_neither_the_weights_nor_the_other_files(tmp_path, monkeypatch, name):
    def fail(*args, **kwargs):
        raise KeyError("odd")

    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="")
    tokenizer.save_pretrained = lambda folder: (folder / "tokenizer.json").touch()
    if name == "the tokenizer":
        tokenizer.save_pretrained = fail
    model.is_remote_code = lambda: name == "the model's code"
    owners = {"config.json": (type(model.config), "save_pretrained"),
              "generation_config.json": (GenerationConfig, "save_pretrained"),
              "the model's code": ("zerofit.model.export.custom_object_save",),
              "tokenizer.model": ("zerofit.model.export._copy_sentencepiece_model",)}  # fmt: skip
    if name in owners:
        monkeypatch.setattr(*owners[name], fail)
    failed = export_model(model, model.named_parameters(), tokenizer, tmp_path / "export")
    assert list(failed) == [name]
    files = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    lost = {"the tokenizer": "tokenizer.json"}.get(name, name)
    assert {file.name for file in (tmp_path / "export").iterdir()} == files - {lost}


def test_the_code_of_a_model_is_written_beside_it(tmp_path):
    """And config.json names it, as transformers writes it."""
    (tmp_path / "base").mkdir()
    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "modeling_ours.py").write_text(
        "from transformers import GPT2LMHeadModel\n\n\nclass Ours(GPT2LMHeadModel):\n    pass\n"
    )
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_ours.Ours"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", trust_remote_code=True)
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="", save_pretrained=lambda folder: None)
    assert export_model(loaded, loaded.named_parameters(), tokenizer, tmp_path / "export") == {}
    loaded.save_pretrained(tmp_path / "expected")
    names = {file.name for file in (tmp_path / "expected").iterdir()}
    assert "modeling_ours.py" in names
    assert {file.name for file in (tmp_path / "export").iterdir()} == names
    written, expected = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("export", "expected"))
    assert {**written, "use_cache": True} == {**expected, "use_cache": True}
