"""Published architectures, parameter counts, weight decay, vocabulary, what is special about a family."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from helpers import NOT_SHARDED, check_refusal, refusal, small_sizes, tiny_model
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BlenderbotConfig,
    M2M100Config,
)

from zerofit.model.configuration import (
    apply_overrides,
    known_architectures,
    load_configuration,
    parse_overrides,
    usable_positions,
)
from zerofit.model.load import load_model
from zerofit.model.parameters import count_parameters
from zerofit.model.pretrained_io import read_model
from zerofit.model.tokenizer import check_vocabulary, load_tokenizer
from zerofit.recipe import ClmRecipe
from zerofit.training.run_configuration import check_layerdrop, check_model
from zerofit.training.setup import notes_on_weights

PUBLISHED = {  # parameters, from the papers or the hub's model pages
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-3.1-8b": 8_030_261_248, "open-calm-1b": 1.4e9,
    "open-calm-7b": 6.8e9, "gpt-22b": 22e9, "deberta-v2-xlarge": 885e6, "blenderbot-400M-distill": 365e6,
    "t5-large": 737_668_096, "t5-3b": 2_851_598_336, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400, "mixtral-8x7b": 46_702_792_704,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952, "modernbert-base": 149_014_272,
    "modernbert-large": 394_781_696, "deberta-v3-xsmall": 70_682_112, "deberta-v3-small": 141_304_320,
    "deberta-v3-base": 183_831_552, "deberta-v3-large": 434_012_160, "mdeberta-v3-base": 278_218_752,
    "bert-base-uncased": 109_482_240, "bert-large-uncased": 335_141_888, "bert-base-multilingual-cased": 177_853_440,
}  # fmt: skip
CLASSES = {"deberta-v2-xlarge": AutoModelForSequenceClassification} | dict.fromkeys(
    ("blenderbot-400M-distill", "t5-large", "t5-3b"), AutoModelForSeq2SeqLM
)
WITHOUT_HEAD = ("modernbert", "deberta-v3", "mdeberta", "bert-")


def test_all_architectures_in_the_tree_are_tested():
    assert {name.lower() for name in PUBLISHED} <= known_architectures().keys()
    assert len({id(fields) for fields in known_architectures().values()}) == len(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_architectures_need_no_network(name):
    config = load_configuration(ClmRecipe(config_name=name))
    with torch.device("meta"):
        default = AutoModel if name.startswith(WITHOUT_HEAD) else AutoModelForCausalLM
        counted, _ = count_parameters(CLASSES.get(name, default).from_config(config))
    expected = PUBLISHED[name]
    assert counted == expected if isinstance(expected, int) else counted == pytest.approx(expected, rel=0.03)


QUANTISED = {  # quant_method: (what its settings hold besides, the package that reads it)
    "bitsandbytes": ({"load_in_4bit": True}, "bitsandbytes"),
    "awq": ({"bits": 4}, "gptqmodel"),
    "compressed-tensors": ({"config_groups": {}}, "compressed_tensors"),
    "superquant": ({}, "superquant"),
}


@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("reads", ["train", "tools"])
def test_quantised_weights_name_the_package_before_anything_is_read(tmp_path, method, reads):
    settings, package = QUANTISED[method]
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    config = tiny_model("llama").config
    config.quantization_config = {"quant_method": method, **settings}
    config.save_pretrained(tmp_path)  # and no weights
    if reads == "train":
        recipe = ClmRecipe(model_name_or_path=str(tmp_path), train_file=["a.txt"])
        said = refusal(check_model, "clm", recipe, None, AutoModelForCausalLM)
    else:
        config = load_configuration(ClmRecipe(model_name_or_path=str(tmp_path)))
        said = refusal(read_model, AutoModelForCausalLM, "model", str(tmp_path), config, precision="fp32")
    assert f"quant_method {method}" in said
    assert package.replace("_", "-") in said
    recipe = ClmRecipe(config_name=str(tmp_path), train_file=["a.txt"])  # from scratch nothing is read
    assert not hasattr(check_model("clm", recipe, None, AutoModelForCausalLM), "quantization_config")


BAD_FILES = {  # name: (the file, what is in it, words)
    "family": ("config.json", '{"model_type": "foollama"}', ["`foollama`", "out of date"]),
    "sizes": ("config.json", '{"model_type": "llama", "num_hidden_layers": "two"}', ["num_hidden_layers", "int"]),
    "dtype": ("config.json", '{"model_type": "llama", "dtype": "float99"}', ["float99"]),
    "code": ("own.py", "import no_such_kernels\nfrom transformers import PretrainedConfig as C", ["no_such_kernels"]),
    "newer": ("own.py", "from transformers import Mistaken as C", ["Mistaken", "transformers"]),
    "tokenizer": ("tokenizer.json", "{}", ["cannot be loaded", "added_tokens"]),
    "pointer": ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", ["tokenizer.json", "git lfs pull"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_transformers_stumbles_over_are_one_sentence(tmp_path, name):
    file, content, words = BAD_FILES[name]
    config = {"auto_map": {"AutoConfig": "own.C"}} if file == "own.py" else {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(content)
    recipe = ClmRecipe(model_name_or_path=str(tmp_path), trust_remote_code=True)
    said = refusal(load_tokenizer, recipe, None) if file == "tokenizer.json" else refusal(load_configuration, recipe)
    assert "\n" not in said
    assert str(tmp_path) in said
    assert all(word in said for word in words), said


class Tokenizer:
    name_or_path = "some tokenizer"
    bos_token_id = eos_token_id = pad_token_id = 0
    mask_token_id = None

    def __init__(self, size: int):
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(self.size)}


KNOWN = {"gpt2": [31373, 995], "llama": [1, 22172, 3186]}  # "hello world" in the published vocabularies


def read_plainly(folder, text: str) -> list[int]:
    """A text's ids as the library reads them for which the vocabulary was published."""
    if not (folder / "tokenizer.model").is_file():
        return ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).encode(text).ids
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode(text, add_bos=True)


@pytest.mark.parametrize(("name", "config"), [("gpt2", "gpt2"), ("llama", "llama-2-7b")])
def test_bare_vocabulary_files_are_read_as_their_models_tokenizer(data, name, config):
    """AutoTokenizer alone refuses the first, and gives 12199 for "hello" in the second, as it was published."""
    folder = data(f"tokenizers/{name}")
    recipe = ClmRecipe(config_name=config, tokenizer_name=str(folder))
    ids = load_tokenizer(recipe, load_configuration(recipe))("hello world")["input_ids"]
    assert ids == read_plainly(folder, "hello world")
    assert len(ids) >= 2
    if data.real:
        assert ids == KNOWN[name]


def test_vocabulary_files_of_another_kind_are_refused(data):
    """GPT-2's, read as a Llama's, make nothing of a sentence, and a corpus would become a handful of tokens."""
    recipe = ClmRecipe(tokenizer_name=str(data("tokenizers/gpt2")))
    message = refusal(load_tokenizer, recipe, AutoConfig.for_model("llama"))
    assert "has vocabulary files of another tokenizer" in message
    tokenizer = load_tokenizer(recipe, AutoConfig.for_model("gpt2"))
    assert len(tokenizer("The quick brown fox")["input_ids"]) >= 4
    recipe = ClmRecipe(tokenizer_name=str(data("tokenizers/llama")))  # which are read without the space before a text
    assert "another tokenizer" in refusal(load_tokenizer, recipe, AutoConfig.for_model("mistral"))


@pytest.mark.parametrize("capital", ["The", "the"])
def test_a_bare_vocabulary_with_capitals_keeps_them(tmp_path, capital):
    """transformers reads each vocab.txt in lower case, if no other file says otherwise: BioBERT's, too."""
    words = f"[PAD] [UNK] [CLS] [SEP] [MASK] {capital} quick brown fox jumps over the lazy dog ."
    (tmp_path / "vocab.txt").write_text("\n".join(dict.fromkeys(words.split())))
    tokenizer = load_tokenizer(ClmRecipe(tokenizer_name=str(tmp_path)), AutoConfig.for_model("bert"))
    assert tokenizer.tokenize("The quick") == [capital, "quick"]


def test_from_scratch_the_model_takes_the_tokenizers_size():
    recipe = ClmRecipe(config_name="gpt2")
    config = load_configuration(recipe)
    assert check_vocabulary(config, Tokenizer(50257), recipe) is None
    assert "300 tokens" in check_vocabulary(config, Tokenizer(300), recipe)
    assert config.vocab_size == 300


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        (ClmRecipe(model_name_or_path="x"), 60000),
        (ClmRecipe(model_name_or_path="x"), 30000),
        (ClmRecipe(config_name="gpt2", config_overrides="vocab_size=400"), 600),
    ],
)
def test_vocabularies_that_do_not_belong_together(recipe, size):
    config = load_configuration(ClmRecipe(config_name="gpt2", config_overrides=recipe.config_overrides))
    assert "Set tokenizer_name" in refusal(check_vocabulary, config, Tokenizer(size), recipe)


def test_sizes_that_follow_others_follow_their_overrides():
    """T5's decoder had six layers and DeBERTa's pooler 1,536 units, whatever was overridden."""
    t5 = load_configuration(ClmRecipe(model_type="t5", config_overrides="num_layers=2"))
    assert (t5.num_layers, t5.num_decoder_layers) == (2, 2)
    t5 = load_configuration(ClmRecipe(model_type="t5", config_overrides="num_layers=2,num_decoder_layers=3"))
    assert t5.num_decoder_layers == 3
    sizes = "hidden_size=32,num_attention_heads=2,num_hidden_layers=1,intermediate_size=64"
    deberta = load_configuration(ClmRecipe(config_name="deberta-v2-xlarge", config_overrides=sizes))
    assert (deberta.attention_head_size, deberta.pooler_hidden_size) == (16, 32)
    model = AutoModelForSequenceClassification.from_config(deberta)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 2)


SMALL = "num_hidden_layers=3,num_attention_heads=4,hidden_size=64,intermediate_size=96,vocab_size=300"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("named", ["type", "folder"])
def test_a_configuration_that_is_made_smaller_can_be_stored(family, named, tmp_path):
    """Its class derives kinds of layers and heads of keys from other sizes; else the export would fail."""
    recipe = ClmRecipe(model_type=family, config_overrides=SMALL)
    if named == "folder":
        AutoConfig.for_model(family).save_pretrained(tmp_path / "base")
        recipe = ClmRecipe(config_name=str(tmp_path / "base"), config_overrides=SMALL)
    config = load_configuration(recipe)
    expected = AutoConfig.for_model(family, **parse_overrides(SMALL))
    names = [name for name in ("layer_types", "num_key_value_heads") if hasattr(expected, name)]
    assert {name: getattr(config, name) for name in names} == {name: getattr(expected, name) for name in names} != {}
    config.save_pretrained(tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 3


def test_the_stated_kinds_of_layers_stay(tmp_path):
    """A folder's own list is not a list that its class would make; of fewer layers it keeps the first ones."""
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]
    AutoConfig.for_model("gemma2", num_hidden_layers=6, layer_types=kinds).save_pretrained(tmp_path)
    for count in (2, 4):
        recipe = ClmRecipe(config_name=str(tmp_path), config_overrides=f"num_hidden_layers={count}")
        assert load_configuration(recipe).layer_types == kinds[:count]
    recipe = ClmRecipe(config_name=str(tmp_path), config_overrides="num_hidden_layers=8")
    check_refusal(["config_overrides = 'num_hidden_layers=8'", "layer_types"], load_configuration, recipe)


def test_vocabulary_files_of_any_name(data, tmp_path):
    """GPT-2's two files as Megatron's guide and others call them."""
    config = AutoConfig.for_model("llama")  # which says nothing of them
    files = {
        "vocab_file": str(tmp_path / "gpt2-tiny-vocab.json"),
        "merge_file": str(tmp_path / "gpt2-tiny-merges.txt"),
    }
    for path, name in zip(files.values(), ("vocab.json", "merges.txt")):
        shutil.copyfile(data("tokenizers/gpt2") / name, path)
    named = load_tokenizer(ClmRecipe(**files), config)
    text = "def hello(world): return 1"
    assert named(text)["input_ids"] == read_plainly(data("tokenizers/gpt2"), text)
    assert named.name_or_path == files["vocab_file"]
    assert named.decode([named.eos_token_id]) == "<|endoftext|>"
    folder = ClmRecipe(tokenizer_name=str(tmp_path))
    assert load_tokenizer(folder, AutoConfig.for_model("gpt2"))(text)["input_ids"] == named(text)["input_ids"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named_as_they_are_loaded(tmp_path, dtype):
    model = tiny_model("gpt2").to(dtype)
    with torch.no_grad():
        model.transformer.wte.weight[3, :5] = torch.nan
        model.transformer.h[1].ln_1.bias[0] = -torch.inf
    model.save_pretrained(tmp_path)
    recipe = ClmRecipe(model_name_or_path=str(tmp_path))
    said = refusal(load_model, AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)
    assert "2 of its 28 weights hold NaN or infinity: transformer.wte.weight, transformer.h.1.ln_1.bias" in said
    said = refusal(read_model, AutoModelForCausalLM, "model", str(tmp_path), model.config, precision=None)
    assert "2 of its 28 weights hold NaN" in said


def stored_as(folder, rename, family: str = "llama"):
    """(a model, the recipe that reads it); its weights are stored in `folder` under other names."""
    model = tiny_model(family)
    model.save_pretrained(folder)
    named = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in named.items()}, folder / "model.safetensors", {"format": "pt"})
    return model, ClmRecipe(model_name_or_path=str(folder))


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "layers.1.mlp"), ("gpt2", "h.0.ln_1"), ("gpt_neox", "embed_in")]
)
def test_weights_that_a_checkpoint_lacks_are_told(tmp_path, family, part):
    """But for those of a head that is to be trained."""
    model, recipe = stored_as(tmp_path / "damaged", str, family)
    file = tmp_path / "damaged" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if part not in name}, file, {"format": "pt"})
    built = load_model(AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)
    (note,) = notes_on_weights(built, (), "damaged")
    assert "model_name_or_path = 'damaged' lacks" in note
    assert part in note
    built.initialized_weights = ["score.weight", "bert.pooler.dense.bias", "a.b"]
    assert notes_on_weights(built, ["a.b"], "damaged") == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_that_the_model_does_not_have_are_told(tmp_path, family):
    model, recipe = stored_as(tmp_path / "wider", str, family)
    file = tmp_path / "wider" / "model.safetensors"
    save_file(load_file(file) | {f"adapter.{n}.weight": torch.ones(2) for n in range(4)}, file, {"format": "pt"})
    built = load_model(AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)
    (note,) = notes_on_weights(built, (), "wider")
    named = "adapter.0.weight, adapter.1.weight, adapter.2.weight, ..."
    assert note == f"model_name_or_path = 'wider' has 4 weights, which this model does not use: {named}"


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("llama", "module.{}".format),  # DDP's
        ("gpt_neox", "_orig_mod.module.{}".format),  # torch.compile's, around that
        ("gpt2", lambda name: name.replace("h.1.", "h.1._orig_mod.")),  # of one block
        ("llama", lambda name: "_fsdp_wrapped_module." + name.replace("mlp.", "_checkpoint_wrapped_module.mlp.")),
    ],
)
def test_weights_of_a_wrapped_model_are_those_of_the_model(tmp_path, family, rename):
    model, recipe = stored_as(tmp_path / "wrapped", rename, family)
    built = load_model(AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)
    assert built.initialized_weights == []
    read, missing = read_model(AutoModelForCausalLM, "model", str(tmp_path / "wrapped"), model.config, precision=None)
    assert missing == []
    model.save_pretrained(tmp_path / "plain")
    for number, each in enumerate((built, read)):
        each.save_pretrained(tmp_path / str(number))
        stored, plain = (load_file(tmp_path / name / "model.safetensors") for name in (str(number), "plain"))
        assert stored.keys() == plain.keys()
        assert all(torch.equal(stored[name], plain[name]) for name in plain)


def test_files_without_a_weight_of_the_model_are_refused(tmp_path):
    model, recipe = stored_as(tmp_path, "state_dict.{}".format)
    said = refusal(load_model, AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)
    assert "none of the weights of a LlamaForCausalLM, such as model.embed_tokens.weight" in said
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    assert "SafetensorError" in refusal(load_model, AutoModelForCausalLM, model.config, recipe, NOT_SHARDED)


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert"])
def test_folders_without_a_tokenizer_or_a_configuration(tmp_path, family):
    """A BERT got a tokenizer of five tokens, to which each word is unknown."""
    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path / "run" / "checkpoint-500")
    recipe = ClmRecipe(model_name_or_path=str(tmp_path / "run" / "checkpoint-500"))
    assert "the folder has no tokenizer" in refusal(load_tokenizer, recipe, config)
    recipe = ClmRecipe(model_name_or_path=str(tmp_path / "run"))
    assert f"Name {tmp_path / 'run' / 'checkpoint-500'}" in refusal(load_configuration, recipe)


def test_the_end_of_a_text_is_that_of_the_model_where_a_tokenizer_names_none(byte_tokenizer, tmp_path):
    shutil.copyfile(byte_tokenizer / "tokenizer.json", tmp_path / "tokenizer.json")
    recipe, config = ClmRecipe(model_name_or_path=str(tmp_path)), AutoConfig.for_model("gpt_neox", eos_token_id=[0, 1])
    assert load_tokenizer(recipe, config).eos_token_id == 0
    assert load_tokenizer(recipe, AutoConfig.for_model("gpt_neox", eos_token_id=[])).eos_token is None


@pytest.mark.parametrize(("padding", "read"), [(-1, None), (32000, None), (0, 0)])
def test_padding_that_has_no_row(tmp_path, padding, read):
    AutoConfig.for_model("llama", pad_token_id=padding).save_pretrained(tmp_path)
    assert load_configuration(ClmRecipe(model_name_or_path=str(tmp_path))).pad_token_id == read


def test_a_folder_of_vocabulary_files_does_not_hide_an_architecture(tmp_path, monkeypatch):
    """GPT-2's vocab.json and merges.txt lie in a folder that people call gpt2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_text("{}")
    assert load_configuration(ClmRecipe(config_name="gpt2")).n_layer == 12
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    assert load_configuration(ClmRecipe(config_name="gpt2")).n_layer == 3


def test_without_a_network_the_hub_is_not_asked(monkeypatch):
    """No waiting for what cannot come."""
    from huggingface_hub import constants

    from zerofit.model import configuration

    asked, waited = [], []

    def nobody(host, port):
        asked.append(host)
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(configuration, "getproxies", dict)
    monkeypatch.setattr(configuration.socket, "getaddrinfo", nobody)
    monkeypatch.setattr(configuration.time, "sleep", waited.append)
    configuration.work_offline_without_network.cache_clear()
    said = refusal(configuration.load_configuration, ClmRecipe(model_name_or_path="gpt2"))
    assert "model_name_or_path = 'gpt2'" in said
    assert "name a local folder" in said
    assert len(asked) == 3
    assert set(asked) == {"huggingface.co"}
    assert sum(waited) == 3, "and nothing has waited but this"
    assert constants.is_offline_mode()
    configuration.work_offline_without_network.cache_clear()


@pytest.mark.parametrize(
    ("processes", "overrides", "refused"),
    [
        (1, None, False),
        (2, None, True),
        (2, "encoder_layerdrop=0,decoder_layerdrop=0", False),
        (2, "encoder_layerdrop=0.1,decoder_layerdrop=0", True),
    ],
)
def test_layers_that_are_skipped_at_random_are_refused_on_several_processes(processes, overrides, refused):
    """Each rank would skip others, and a reduction of their gradients would never end."""
    config = M2M100Config(encoder_layers=2, decoder_layers=2)
    assert config.encoder_layerdrop > 0
    apply_overrides(config, overrides)
    if refused:
        assert "--config_overrides encoder_layerdrop=0" in refusal(check_layerdrop, config, processes, "ddp.yaml")
    elif processes > 1:
        check_layerdrop(config, processes, "ddp.yaml")
    check_layerdrop(BlenderbotConfig(), 2, "ddp.yaml")


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", "rope_theta=no"),
        ("llama", "rope_theta=null"),
        ("t5", "tie_word_embeddings=3"),
        ("gpt2", "n_embd=2.5"),
    ],
)
def test_a_value_of_another_kind_is_refused(family, given):
    """Also where the configuration's class checks no type: T5's, and what stands in rope_parameters."""
    assert given.partition("=")[0] in refusal(apply_overrides, AutoConfig.for_model(family), given)


@pytest.mark.parametrize(
    ("model_type", "sizes", "positions"),
    [
        ("gpt2", {"n_positions": 32}, 32),
        ("roberta", {"max_position_embeddings": 34, "pad_token_id": 1}, 32),
        ("xlnet", {}, None),
        ("deberta-v2", {"position_biased_input": False}, None),
    ],
)
def test_usable_positions(model_type, sizes, positions):
    assert usable_positions(AutoConfig.for_model(model_type, **sizes)) == positions


@pytest.mark.parametrize(
    "model_type", ["camembert", "data2vec-text", "ibert", "luke", "markuplm", "roberta-prelayernorm", "xlm-roberta-xl"]
)
def test_a_row_of_all_usable_positions_has_a_place_in_the_model(model_type):
    """Positions of a RoBERTa begin after the padding token's id."""
    sizes = small_sizes(model_type, max_position_embeddings=40)
    config = AutoConfig.for_model(model_type, **sizes | {"pad_token_id": 1, "vocab_size": 50})
    model, row = AutoModel.from_config(config).eval(), torch.full((1, usable_positions(config)), 5)
    assert model(input_ids=row).last_hidden_state.shape[1] == 38
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 39), 5))
