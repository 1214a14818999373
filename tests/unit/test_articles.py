"""The launch scripts that articles print, through the converter.

The scripts are shortened; names and values of flags are those that were published.
"""

import pytest
import yaml

from zerofit.cli import main as zerofit
from zerofit.tools.convert.convert_options import MegatronArgsOptions
from zerofit.tools.convert.megatron_args.calls import calls_in
from zerofit.tools.convert.megatron_args.corpora import convert_preparation
from zerofit.tools.convert.megatron_args.ledger import FlagRow
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining
from zerofit.tools.convert.megatron_args.script_to_recipe import parameters_of

LLAMA_2 = """
DS_CONFIG=./deepspeed.json
DATASET="1 ./tmp/data/bookcorpus_train_1m_text_sentence"
TP=2; PP=2; ZERO_STAGE=0
GPUS_PER_NODE=8
NNODES=1
activation_checkpoint="false"
cat <<EOT > $DS_CONFIG
{
  "train_batch_size" : 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT
ds_args=" --zero-stage=$ZERO_STAGE --deepspeed_config=$DS_CONFIG --deepspeed "
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing --checkpoint-activations ${ds_args}"
fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank 0 --master_addr localhost"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \\
  --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 \\
  --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --save ./tmp \\
  --load ./tmp --data-path $DATASET --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer \\
  --tokenizer-model ./tmp/tokenizer.model --split 949,50,1 --distributed-backend nccl --lr 3e-4 \\
  --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000 --optimizer adam \\
  --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \\
  --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings \\
  --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear \\
  --num-key-value-heads 4 $ds_args
"""
GPT_22B = """
torchrun --nproc_per_node 8 --nnodes ${WORLD_SIZE} --node_rank ${RANK} --master_addr ${MASTER_ADDR} \\
  --master_port ${MASTER_PORT} pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 \\
  --sequence-parallel --recompute-activations --num-layers 48 --hidden-size 6144 --num-attention-heads 64 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 512 --train-iters 100 \\
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 40 --eval-interval 1000 \\
  --data-path /mnt/data/my-gpt2_text_document --vocab-file /mnt/data/gpt2-vocab.json \\
  --merge-file /mnt/data/gpt2-merges.txt --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 \\
  --adam-beta2 0.95 --init-method-std 0.006 --bf16 --use-flash-attn --use-distributed-optimizer \\
  --distributed-backend nccl --tensorboard-dir /mnt/data/tb --save /mnt/data/out --load /mnt/data/out \\
  --save-interval 1000
"""
CORPORA = """
python tools/preprocess_data.py --input my-corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json \\
  --dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod --workers 20 \\
  --chunk-size 25
"""
SCRIPTS = {  # name on the page: (text, what has to be said)
    "Llama 2": (LLAMA_2, {}), "22B": (GPT_22B, {"WORLD_SIZE": "2"}),
}  # fmt: skip


def converted(name: str):
    text, given = SCRIPTS[name]
    (call,) = calls_in(text, given)
    return convert_pretraining(call, MegatronArgsOptions())


def rows() -> dict[str, tuple[list[str], FlagRow]]:
    """{flag without its value: (the scripts that have it, what became of it in the first of them)}."""
    found: dict[str, tuple[list[str], FlagRow]] = {}
    of_each = {name: converted(name).flags for name in SCRIPTS}
    of_each["corpus"] = convert_preparation(calls_in(CORPORA, {})[0], None, [])[1]
    for name, flags in of_each.items():
        assert not flags.problems
        for row in flags.finish():
            flag = row.flag.strip().split()[0].rstrip(":") if row.flag[0] != "(" else row.flag
            found.setdefault(flag if name != "corpus" else f"{flag} ", ([], row))[0].append(name)
    return found


def test_every_flag_of_the_articles_is_known():
    table = rows()
    assert len(table) >= 70
    assert {row.status for _, row in table.values()} == {"carried over", "satisfied", "no counterpart"}


@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary", "strategy", "world"),
    [("Llama 2", 1_194_428_416, 32_000, "3d", 8), ("22B", 22_074_273_792, 51_200, "3d", 16)],
)  # fmt: skip
def test_the_models_and_processes_of_the_articles(name, parameters, vocabulary, strategy, world):
    done = converted(name)
    assert parameters_of(done.recipe, vocabulary) == parameters
    assert (done.layout.strategy, done.layout.world) == (strategy, world)


def test_a_job_of_two_machines_keeps_the_clouds_variables(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(GPT_22B)
    assert zerofit(["convert", "megatron-args", str(script), "--output", str(tmp_path / "no")]) == 2
    assert "the number of machines: $WORLD_SIZE (nothing sets it)" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    out = tmp_path / "out"
    assert zerofit(["convert", "megatron-args", str(script), "WORLD_SIZE=2", "--output", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "with its own --machine_rank (0 to 1)" in shown
    assert yaml.safe_load((out / "accelerate.yaml").read_text())["num_machines"] == 2
