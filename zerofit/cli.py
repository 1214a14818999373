"""The `zerofit` command, for everything except training itself. COMMANDS has one line for each subcommand.

    zerofit merge --adapter outputs/notes/model --output outputs/notes-merged
    zerofit generate --model outputs/notes-merged --prompt "Once upon a time"

A subcommand's `main(argv) -> int` is imported only when it is called, so `zerofit --help` is fast.
"""

import atexit
import gc
import importlib
import os
import sys

from zerofit.recipe.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, nearest
from zerofit.record.terminal import doing, log_to_stderr

COMMANDS = {  # {name: (line of the help, module with `main`)}
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
WORDS_FOR_TRAINING = ("train", "run", "finetune", "fine-tune", "pretrain", "start")  # names of other tools' commands
COMMAND_LINES = "\n".join(f"  {name:<8}  {line}" for name, (line, _) in COMMANDS.items())
HELP = f"""usage: zerofit COMMAND [--option value]

{COMMAND_LINES}

`zerofit COMMAND --help` shows the options of a command.
Training is started by accelerate launch, torchrun or zerofit launch:
`python train/clm.py --help` shows its options; so do dpo.py, distill.py, cls.py and seq2seq.py."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Return its exit code; 2 after a user error, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # while BrokenPipeError can still be caught
    except UserError as error:
        log_to_stderr(error.report("nothing was done"))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr, flush=True)  # start the shell's prompt on a new line
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python prints an error at exit
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
    gc.disable()  # imports create few objects to free, and collections meanwhile take a second
    try:
        with doing() as say_now:
            if name == "plan":  # its imports take seconds
                say_now("loading libraries ...")
            command = importlib.import_module(COMMANDS[name][1]).main
    finally:
        gc.enable()
    atexit.register(gc.freeze)  # no collection at exit either
    return int(command(words))


if __name__ == "__main__":
    sys.exit(main())
