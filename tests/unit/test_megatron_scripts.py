"""Bash reads launch scripts: what they would start, what only a machine knows, lines to mend, and what is confined."""

import json
import re
import socket

import pytest
from helpers import refusal

from zerofit.cli import main as zerofit
from zerofit.recipe import UserError
from zerofit.tools.convert.convert_options import MegatronArgsOptions
from zerofit.tools.convert.megatron_args.calls import calls_in
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining
from zerofit.tools.convert.megatron_args.sandbox import Sandbox, Unconfined
from zerofit.tools.convert.megatron_args.shell import Shell, shown


@pytest.fixture(autouse=True, scope="module")
def confined():
    try:
        with Sandbox():
            pass
    except Unconfined as error:
        pytest.skip(f"no bash, or no namespaces: {error}")


def runs(script: str, given: dict | None = None) -> list[list[str]]:
    """The commands of a script that are called `run`, without that word."""
    commands = Shell(script, given or {}).read().commands
    return [[shown(word) for word in command.words[1:]] for command in commands if command.words[0] == "run"]


CASES = [  # (lines of a script, what `run` gets)
    ("A=1; run $A ${B:-two} '$A' \"$A b\"", ["1", "two", "$A", "1 b"]),
    ("A=(x 'y z'); A+=(w); run \"${A[@]}\" ${A[0]}", ["x", "y z", "w", "x"]),
    ("A='a b'; run --x=$A", ["--x=a", "b"]),
    ("N=$((2*3+1)); M=$(( ${N} / 2 )); run $N $M", ["7", "3"]),
    ("if [ -f x ]; then run no; elif [[ -n $A ]]; then run no; else run yes; fi", ["yes"]),
    ("for I in 1 2; do J=$I; done; run $J", ["2"]),
    ("case two in one) run no ;; t*) run yes ;; esac", ["yes"]),
    ("f() { run inside $1; }; f x", ["inside", "x"]),
    ("exec run replaced 2>&1 | tee x/log; exit 1", ["replaced"]),
    ("cd elsewhere || exit 1; run `pwd`/x $(dirname a/b) $PWD", ["./x", "a", "."]),
    ("[[ -f vocab ]] || { echo missing; exit 1; }; run after exit", ["after", "exit"]),
    ("C='run a \"b c\" > log'; echo $C; eval $C", ["a", "b c"]),
    ("set -eo pipefail; false; run on", ["on"]),
    ("run x$(nproc)", ["x$"]),
    ('[ -z "$P" ] && P=4; run $P', ["4"]),
]


def test_what_bash_makes_of_it():
    """Each case in a shell of its own, of one script."""
    script = "#!/bin/bash\n" + "\n".join(f"({lines})" for lines, _ in CASES)
    assert runs(script) == [words for _, words in CASES]


def test_what_nothing_says_is_marked():
    shell = Shell(
        'A=$(nproc)\nB=$A/x\nif [ "$1" = x ]; then C=1; fi\nrun $A $B $C $D\nE=<Specify path>/v.json\nrun $E\r\n'
        "F=$(( $(lspci | wc -l) - 2 ))\nrun $F --g ${G:?the number}",
        {},
    ).read()
    found = [[shown(word) for word in command.words[1:]] for command in shell.commands if command.words[0] == "run"]
    assert found == [["$A", "$A/x", "$C", "$D"], ["$E"], ["$F", "--g", "$G"]]
    assert shell.reasons["A"] == "line 1: A=$(nproc)"
    assert shell.reasons["C"].startswith("line 3: if")
    assert (shell.reasons["D"], shell.reasons["1"]) == ("nothing sets it", "an argument of the script")
    assert "is to be filled in" in shell.reasons["E"]
    assert list(shell.doubts) == ["1"]
    assert "line 3 of the script tests $1" in shell.doubts["1"]


def test_values_from_the_command_line_win():
    script = "A=theirs\nfor B in 1 2; do :; done\nN=$(( $(nvidia-smi | wc -l) / 2 ))\nrun $A $B $N $1 $@"
    given = {"A": "it's mine", "B": "3", "N": "8", "1": "first"}
    assert runs(script, given) == [["it's", "mine", "3", "8", "first", "first"]]


def test_files_are_written_as_bash_writes_them():
    shell = Shell(
        'A=1\nmkdir -p a/b\ncat <<EOT > ./a/b/out.json\n{"a": $A, "b": [1,\n2]}\nEOT\ncat > raw <<\'E\'\n$A\nE\n'
        "cat raw | tee /mnt/copy\nsed s/1/2/ template > made",
        {},
    ).read()
    assert json.loads(shell.file("a/b/out.json")) == {"a": 1, "b": [1, 2]}
    assert shell.file("./raw") == shell.file("/mnt/copy") == "$A\n"
    assert shell.file("made") is None, "only a running sed knows it"


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("srun -N 2 bash -c \"python -m torch.distributed.run --nproc-per-node 4 x/pretrain_gpt.py --num-layers 2\"",
         ["python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "srun", "-N", "2"]),
        ("R=\"torchrun --nproc_per_node=4 pretrain_gpt.py $@ --num-layers 2\"\neval ${R}",
         ["torchrun", "--nproc_per_node=4"]),
        ("#SBATCH --ntasks-per-node=4\nsrun /opt/conda/bin/python pretrain_gpt.py --num-layers 2",
         ["srun", "/opt/conda/bin/python", "--ntasks-per-node", "4"]),
        ("PY=/opt/conda/bin/torchrun\n$PY --nproc_per_node 4 pretrain_gpt.py --num-layers 2 &",
         ["/opt/conda/bin/torchrun", "--nproc_per_node", "4"]),
    ],
)  # fmt: skip
def test_a_program_is_found_behind_any_launcher(script, launcher):
    (call,) = calls_in(script, {})
    assert (call.program, call.arguments, call.launcher) == ("pretrain_gpt.py", ["--num-layers", "2"], launcher)
    assert call.processes == 4


def test_a_script_that_starts_nothing_asks_for_what_it_misses():
    with pytest.raises(UserError, match=r"\$1 .*Add 1=value"):
        calls_in('if [ "$1" = x ]; then C="torchrun pretrain_gpt.py"; fi\neval "$C --num-layers 2"', {})


# ------------------------------------------------------------------------------------------------------ lines to mend


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("python pretrain_gpt.py \\\n  --lr 1\n--fp16", "line 3: --fp16 is a command"),
        ("< A=1\n> A=2\npython pretrain_gpt.py \\\n> --fp16", "line 1: < or > at its beginning is a mark of a diff"),
        ("python pretrain_gpt.py --data-path <DATA> --fp16", "line 1: --data-path <DATA> is to be filled in"),
    ],
)  # fmt: skip
def test_the_line_to_mend(script, said):
    message = refusal(calls_in, script, {})
    assert said in message


TRAINING = (
    "deepspeed pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3 --data-path A --vocab-file v.json --merge-file m.txt"
)


def converted(script: str, given: dict | None = None):
    (call,) = calls_in(script, given or {})
    return convert_pretraining(call, MegatronArgsOptions())


# ----------------------------------------------------------------------------------------------------------- corpora


def test_a_loop_over_the_files_of_a_folder_is_one_corpus_and_is_merged_by_its_name(tmp_path, capsys):
    script = tmp_path / "wiki.sh"
    script.write_text(
        'find text/ -type d | sed s/a/b/ | sh\nfind text/ -type f -name "wiki_*" | xargs -P $(nproc) -I{} \\\n'
        'bash -c "python tools/preprocess_data.py --input {} --output-prefix datasets/{} --vocab-file v.json '
        '--merge-file m.txt --append-eod"\npython tools/merge_datasets.py --output-prefix wiki --input flat/\n'
    )
    assert zerofit(["convert", "megatron-args", str(script)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("zerofit")]
    assert lines == [
        "zerofit prepare --input text --output_prefix datasets/text --vocab_file v.json --merge_file m.txt "
        "--append_eod",
        "zerofit prepare merge --input datasets/text_text_document --output_prefix wiki",
    ]


# --------------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("script", "world"),
    [
        (TRAINING, 8),
        (f"#SBATCH --ntasks-per-node=2\n{TRAINING}".replace("deepspeed", "srun --nodes 3 python"), 6),
    ],
)
def test_processes_are_those_of_the_launcher(script, world):
    done = converted(script)
    assert not done.flags.problems
    assert done.layout.world == world


# ------------------------------------------------------------------------------------------------------------- attacks


def test_a_script_sees_and_changes_nothing_outside(tmp_path):
    """Programs by their path, files, signals, the network."""
    victim = tmp_path / "victim"
    victim.write_text("whole")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        script = f"""
            /bin/rm -rf {tmp_path}
            (builtin exec /usr/bin/touch {tmp_path}/made)
            echo gone > {victim}
            read -r LINE < /etc/passwd
            run "[$LINE]" /etc/* /home/* /proc/* /usr/bin/* {tmp_path}/*
            kill -9 -1 $PPID
            (builtin exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && run connected)
            (enable -f {victim} x && run loaded)
            run $((9**9**9)) > bomb
            run "$SECRET"
        """
        words = runs(script, {"SECRET": "none"})
        with pytest.raises(TimeoutError):
            server.accept()
    assert words[0] == ["[$LINE]", "/etc/*", "/home/*", "/proc/*", "/usr/bin/*", str(victim)], "files of the sandbox"
    assert words[-1] == ["none"]
    assert not {"connected", "loaded"} & {word for line in words for word in line}
    assert victim.read_text() == "whole"
    assert [file.name for file in tmp_path.iterdir()] == ["victim"]


@pytest.mark.parametrize(
    "script",
    [
        "while :; do :; done",
        pytest.param("f() { f | f & }; f", marks=pytest.mark.long),
        pytest.param("while :; do A+=$A.; done", marks=pytest.mark.long),
        pytest.param("for ((N = 0; ; N++)); do printf %1000000s x > $N; done", marks=pytest.mark.long),
    ],
)
def test_a_script_that_does_not_end(script):
    with pytest.raises(UserError, match=r"has not ended in \d+ s|starts none"):
        calls_in(script, {})


def test_a_script_that_forges_its_record():
    assert "writes into the record" in refusal(calls_in, "echo /here/x >> /.calls/order\npython pretrain_gpt.py", {})


def test_control_characters_of_a_script_do_not_reach_the_terminal(tmp_path, capsys):
    script = tmp_path / "x.sh"
    script.write_text("python preprocess_data.py --input $'a\\e]0;b' --output-prefix p --vocab-file v --merge-file m")
    assert zerofit(["convert", "megatron-args", str(script)]) == 0
    assert "\\x1b]0;b" in (shown_text := capsys.readouterr().out)
    assert "\x1b" not in shown_text


def test_a_machine_that_confines_nothing_takes_the_command_line_instead(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.sh"
    script.write_text(TRAINING)
    monkeypatch.setattr("zerofit.tools.convert.megatron_args.sandbox.NAMESPACES", ("--no-such-namespace",))
    assert zerofit(["convert", "megatron-args", str(script)]) == 2
    assert re.search(r"cannot be confined here \(.*unshare.*after --", capsys.readouterr().err)
