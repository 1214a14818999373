"""The launch scripts that articles print, through the converter.

The scripts are shortened; names and values of flags are those that were published.
"""

import yaml

from zerofit.cli import main as zerofit
from zerofit.tools.convert.convert_options import MegatronArgsOptions
from zerofit.tools.convert.megatron_args.calls import calls_in
from zerofit.tools.convert.megatron_args.corpora import convert_preparation
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining
from zerofit.tools.convert.megatron_args.script_to_recipe import parameters_of

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


def test_every_flag_of_the_articles_is_known():
    (call,) = calls_in(GPT_22B, {"WORLD_SIZE": "2"})
    done = convert_pretraining(call, MegatronArgsOptions())
    found = [done.flags, convert_preparation(calls_in(CORPORA, {})[0], None, [])[1]]
    assert not any(flags.problems for flags in found)
    rows = [row for flags in found for row in flags.finish()]
    assert len(rows) >= 40
    assert {row.status for row in rows} == {"carried over", "satisfied", "no counterpart"}
    assert parameters_of(done.recipe, 51_200) == 22_074_273_792
    assert (done.layout.strategy, done.layout.world) == ("3d", 16)


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
