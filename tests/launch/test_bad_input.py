"""Bad input: exit code 2, one message that names option, value and remedy, and no traceback.

What is found before a script loads its data and model is refused in tests/unit, next to what refuses it.
"""

import pytest
from helpers import main_of

SCRATCH = ["--config_name", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=32,n_positions=64",
           "--train_tokenizer_vocab_size", "270"]  # fmt: skip
SIZES = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,max_position_embeddings=64"
CLASSIFIER = ["--model_type", "bert", "--train_tokenizer_vocab_size", "280", "--config_overrides", SIZES]
DIALOGUE = ["--config_name", "blenderbot-400M-distill", "--train_tokenizer_vocab_size", "300", "--config_overrides",
            "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,"
            "encoder_ffn_dim=32,decoder_ffn_dim=32"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    fox = "the quick brown fox jumps over the lazy dog"
    texts = {
        "good.txt": f"{fox}\n" * 80,
        "blank.txt": "   \n\n",
        "good.csv": "text,label\n" + "".join(f"{fox} {n},{'yes' if n % 2 else 'no'}\n" for n in range(40)),
        "comma.csv": f"text,label\n{fox}, indeed,yes\n{fox}, not,no\n",
        "colon.csv": f"text:label\n{fox}:yes\n",
        "good.jsonl": "".join(f'{{"dialogue": ["hi {n}", "{fox}", "{fox} {n}"]}}\n' for n in range(40)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


CASES = {
    "a file without text": (["--train_file", "{folder}/blank.txt", "--document_separator", "line"], ["no text"]),
    "block size": (["--block_size", "65"], ["block_size = 65 (--block_size)", "64 positions"]),
    "a split that holds out nothing": (
        ["--validation_split_percentage", "0.0001", "--document_separator", "file"],
        ["validation_split_percentage = 0.0001", "no sample"],
    ),
    "fewer samples than one global batch": (
        ["--global_batch_size", "4096"],
        ["fewer than one global batch of 4096", "per_device_train_batch_size"],
    ),
}


CLS_CASES = {
    "a text with a comma": (["--train_file", "{folder}/comma.csv"], ["comma.csv", "3 fields", "2 columns"]),
    "another separator": (["--train_file", "{folder}/colon.csv"], ["'text:label'", "--delimiter"]),
    "a model of another kind": (
        ["--model_type", "blenderbot", "--config_overrides", "d_model=32"],
        ["'blenderbot'", "seq2seq.py"],
    ),
}
SEQ2SEQ_CASES = {
    "a model of another kind": (
        ["--config_name", "gpt2", "--config_overrides", "n_layer=1"],
        ["config_name = 'gpt2'", "train/clm.py"],
    ),
}
TASKS = {
    "clm": (CASES, ["--block_size", "32", *SCRATCH], "good.txt"),
    "cls": (CLS_CASES, CLASSIFIER, "good.csv"),
    "seq2seq": (SEQ2SEQ_CASES, DIALOGUE, "good.jsonl"),
}
ALL = [pytest.param(task, case, id=f"{task}, {case}") for task in TASKS for case in TASKS[task][0]]


@pytest.mark.parametrize(("task", "case"), ALL)
def test_one_message_and_exit_code_2(task, case, folder, tmp_path, cache, capfd):
    cases, scratch, good = TASKS[task]
    flags, words = cases[case]
    flags = [flag.replace("{folder}", str(folder)) for flag in flags]
    arguments = ["--output_dir", str(tmp_path / "run"), "--cache_dir", cache, *scratch]
    if not {"--dataset_name", "--train_file"} & set(flags):
        arguments += ["--train_file", str(folder / good)]
    assert main_of(task)([*arguments, *flags]) == 2
    shown = capfd.readouterr().err
    assert shown.count("error: ") == 1, shown
    assert "Traceback" not in shown
    for word in words:
        assert word in shown, shown
    assert not (tmp_path / "run").exists(), "nothing is left behind"
