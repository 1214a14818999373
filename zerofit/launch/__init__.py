"""Start the processes of a run, let them meet, start them again, and end them with one exit code.

0: finished. 2: a mistake of the user. 85: stopped (signal, Ctrl-C, --max_hours) and saved, or stopped by a signal when
there was nothing to save yet: queue it again. 86: needs a person, also where a stopped run could not be saved. 87: out
of memory. 130: Ctrl-C while the run starts, or a second one: nothing saved. 143: a second signal of another kind,
nothing saved. 1: an error.

After a failure `zerofit launch --max_restarts` starts the ranks again (exit_code.py), but never after a signal to
itself: it passes that on and ends with its ranks. The batch script of `zerofit submit slurm` queues the job again
after all codes but 0, 2, 86, 87 and 130, and not after two failures at one update; the templates of other schedulers
say in their comments what they do.

`zerofit launch` (command.py) reads the machines from the scheduler's variables (machines.py). Its process runs
`accelerate launch` with torch's elastic agent (agent.py), and passes signals on (supervisor.py); the ranks get SIGTERM
when it is gone. The agents of several machines meet and restart together (agent.py). The ranks of several machines
meet before they have a process group (rendezvous.py), also under other launchers.

Which process writes `exit_code` to environment.json, and when: the supervisor and rank 0 remove the code of an earlier
launch as they start. A rank that fails writes the code of its own failure, unless there is a code: the first failure
is the cause of the others. Rank 0 writes how all ranks have left together, at the end of a run or after the update at
which a signal stopped it, and the signal that ends a rank while it starts. The supervisor of machine 0 writes what
happens without a rank: a mistake in its own options, a launcher that refuses to start, a signal before there are
ranks. No process writes the code of one that was killed. (exit_code.py)
"""
