"""The `zerofit` command: everything that is not a training run. One line below for each subcommand.

    zerofit merge --adapter outputs/notes/model --output outputs/notes-merged
    zerofit generate --model outputs/notes-merged --prompt "Once upon a time"

A subcommand's `main(argv) -> int` is imported only when it is used: `zerofit --help` is fast.
"""

import atexit
import gc
import importlib
import os
import sys

from zerofit.recipe.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, nearest
from zerofit.record.terminal import doing, log_to_stderr

COMMANDS = {  # {name: (its line in the help, the module of its `main`)}
    "launch": ("Start a run on all accelerators and machines.", "zerofit.launch.command"),
    "submit": ("Write a job for Slurm, Kubernetes or SkyPilot.", "zerofit.tools.submit.submit"),
    "show": ("Runs side by side, in one table.", "zerofit.tools.show"),
    "prepare": ("Text to corpora in Megatron's format; merge them.", "zerofit.tools.prepare.prepare"),
    "merge": ("Fold a LoRA adapter into its base: a plain model folder.", "zerofit.tools.merge"),
    "convert": ("Meta's Llama to transformers; Megatron's flags to a recipe.", "zerofit.tools.convert.convert"),
    "compare": ("The largest batch that each strategy holds, by running it.", "zerofit.tools.compare.compare"),
    "doctor": ("Who set what, and whether it can run here.", "zerofit.tools.doctor.doctor"),
    "plan": ("What fits and how fast, predicted without a GPU.", "zerofit.tools.plan.plan"),
    "verify": ("Prove on a recipe: strategies agree, kills lose nothing.", "zerofit.tools.verify"),
    "evaluate": ("Tasks of lm-evaluation-harness on a model.", "zerofit.tools.evaluate.evaluate"),
    "generate": ("Let a model continue a text, or talk with it.", "zerofit.tools.generate.generate"),
}
WORDS_FOR_TRAINING = ("train", "run", "finetune", "fine-tune", "pretrain", "start")  # what others call it
COMMAND_LINES = "\n".join(f"  {name:<8}  {line}" for name, (line, _) in COMMANDS.items())
HELP = f"""usage: zerofit COMMAND [--option value]

{COMMAND_LINES}

`zerofit COMMAND --help` shows the options of a command.
Training is started by accelerate launch, torchrun or zerofit launch:
`python train/clm.py --help` shows its options; so do dpo.py, distill.py, cls.py and seq2seq.py."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code; 2 for a mistake of the user, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here a closed pipe can still be reported
    except UserError as error:
        log_to_stderr(error.report("nothing was done"))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr, flush=True)  # the shell's prompt begins a line
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains as it ends
        return EXIT_BROKEN_PIPE


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if argv else EXIT_USER_ERROR
    if argv[0] == "--version":
        from zerofit import __version__

        print(f"zerofit {__version__}")
        return 0
    name, *words = argv
    if name not in COMMANDS and nearest(name, [*COMMANDS, *WORDS_FOR_TRAINING]) in WORDS_FOR_TRAINING:
        raise UserError(
            f"{name!r} is not a command of zerofit. Training is started by `zerofit launch RECIPE`, or `accelerate "
            "launch train/TASK.py --config RECIPE` (TASK is clm, dpo, distill, cls or seq2seq)"
        )
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        remedy = f"Did you mean {close}?" if close else "The commands are " + ", ".join(COMMANDS)
        raise UserError(f"{name!r} is not a command of zerofit. {remedy}")
    gc.disable()  # what libraries make as they are imported stays: to look for garbage in it takes a second
    try:
        with doing() as say_now:
            if name == "plan":  # whose libraries take seconds
                say_now("loading libraries ...")
            command = importlib.import_module(COMMANDS[name][1]).main
    finally:
        gc.enable()
    atexit.register(gc.freeze)  # nor does the interpreter look again as it ends
    return int(command(words))


if __name__ == "__main__":
    sys.exit(main())
