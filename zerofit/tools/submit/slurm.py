"""`zerofit submit slurm`: a batch script.

One task on each node runs `zerofit launch`, which reads SLURM_NODEID and the like inside the step. The script itself
runs on the first node, where they would have that node's values. `--signal=TERM@600` without `B:` signals the tasks of
the step and not the script: the launchers pass it on to their ranks, which save, and the script waits for srun.
`scancel` ends the script itself, and so the job is not queued again. Source: slurm.schedmd.com/sbatch.html, srun.html.
"""

import re
import shlex
from pathlib import Path

from zerofit.recipe.errors import UserError
from zerofit.tools.submit.job import VARIABLES, Job
from zerofit.tools.submit.submit_options import GRACE_S, SlurmOptions

OF_A_TASK = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|STEP_\w+|TASK_PID))\b")

TEMPLATE = """\
#!/bin/bash
# {title}. Written by `zerofit submit slurm`; change it as you like.
# Start it with: sbatch FILE
{head}

{site}# torch's agent waits so long for processes that save
{variables}

zerofit=({program})
# The recipe and all options, as in `zerofit launch`
run=(
{run}
)

# One launcher on each node; what differs between nodes it reads inside the step. If one ends with an error, so do all;
# one that is lost with its node is waited for no longer than --wait.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60{step} "${{zerofit[@]}}" launch "${{run[@]}}"

# Queue the job again: always after 85 (saved, to be resumed), and after crashes and killed ranks; never after 0, 2 (a
# mistake), 86 (an anomaly) or 87 (out of memory), and not after two failures at the same update.
if code=$("${{zerofit[@]}}" submit requeue "$?" "${{run[@]}}"); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "${{code:-1}}"
"""


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """The batch script.

    Raises:
        UserError: the site's file cannot be read, or expands a variable of a task in the script.
    """
    head, site = _read_site(Path(options.site)) if options.site else ([], [])
    cpus = options.cpus_per_node
    known = [
        ("", f"--job-name={job.name}"),
        ("", f"--nodes={job.nodes}"),
        ("one launcher on each node", "--ntasks-per-node=1"),
        ("", f"--gpus-per-node={job.gpus}" if job.gpus else ""),
        ("the processes of a node share these", f"--cpus-per-task={cpus}" if cpus else ""),
        ("whole nodes: all cores, and all memory", "" if cpus else "--exclusive"),
        ("", "" if cpus else "--mem=0"),
        ("", f"--time={options.time}" if options.time else ""),
        (f"{GRACE_S} s before the limit all ranks save, and the job ends with 85", f"--signal=TERM@{GRACE_S}"),
        ("the same job, and the same log, may start several times", "--requeue"),
        ("", "--open-mode=append"),
        ("", "--output=%x-%j.log"),
    ]
    lines = []
    for comment, option in known:
        if option:
            lines += [f"# {comment}"] if comment else []
            lines.append(f"#SBATCH {option}")
    if head:
        lines += [f"# of {options.site}; the last line for an option holds", *head]
    before = "".join(f"{line}\n" for line in [f"# of {options.site}", *site, ""]) if site else ""
    return TEMPLATE.format(
        title=job.title,
        head="\n".join(lines),
        site=before,
        variables="\n".join(f"export {name}={value}" for name, value in VARIABLES.items()),
        program=shlex.join(job.program),
        run="\n".join(f"  {line}" for line in job.lines()),
        # srun does not take it from the script (since Slurm 22.05)
        step=f" --cpus-per-task={cpus}" if cpus else " --cpu-bind=none",
    )


def _read_site(file: Path) -> tuple[list[str], list[str]]:
    """(its #SBATCH lines, the others without empty ones at both ends), as they are."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"site = {str(file)!r}: this is no text in UTF-8") from None
    except OSError as error:
        raise UserError(f"site = {str(file)!r}: {error.strerror}") from None
    head = [line for line in lines if line.startswith("#SBATCH")]
    rest = [line for line in lines if not line.startswith(("#SBATCH", "#!"))]
    found = [match[1] for line in lines if not line.lstrip().startswith("# ") for match in OF_A_TASK.finditer(line)]
    if found:
        raise UserError(
            f"site = {str(file)!r} expands ${found[0]} in the batch script, which runs on the first node only. Remove "
            "it: zerofit launch reads it on each node"
        )
    return head, "\n".join(rest).strip("\n").splitlines()
