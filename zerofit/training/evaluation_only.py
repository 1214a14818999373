"""A launch without training: an evaluation, or answers to a file."""

import time

from zerofit.recipe.errors import UserError
from zerofit.record.environment import describe_environment
from zerofit.record.metrics import UpdateMetrics
from zerofit.record.terminal import duration
from zerofit.training.evaluation import timed_evaluation
from zerofit.training.prepare import Prepared
from zerofit.training.session import LONG
from zerofit.training.summary import about_evaluations
from zerofit.training.task import Task


def answer(prepared: Prepared, task: Task) -> int:
    """Evaluate, or answer the file, leave the record and the process group. Returns the exit code.

    Raises:
        UserError: nothing is held out.
    """
    session, engine, recipe = prepared.session, prepared.engine, prepared.session.recipe
    folder, stored = session.folder, session.stored
    assert stored is not None, "a launch that trains nothing has a stored model"
    if not recipe.predict_file and task.evaluate is None:
        raise UserError("evaluate_only: nothing is held out. Name a validation_file")
    if session.is_main:
        environment = describe_environment(session.strategy.launch.command, engine.device)
        options = {**recipe.to_dict(), "model_name_or_path": stored.asked_for}
        folder.start_answers(options, engine.effective_strategy(), environment)
    session.watchdog.phase("evaluate", patience=LONG)
    began = time.perf_counter()
    if task.predict is not None and recipe.predict_file:
        files, figures, clock = task.predict(engine), dict[str, float](), None
    else:
        figures, clock = timed_evaluation(task, engine)
        written = [path.name for path in sorted(folder.path.glob("predictions*.jsonl"))]
        files = ["metrics.jsonl", *written]
        if session.is_main:
            folder.metrics.add(UpdateMetrics.of_evaluation(figures, clock).to_line())
    seconds = time.perf_counter() - began
    if session.is_main:
        folder.metrics.close()
        folder.write_environment({**environment, "seconds": seconds, "exit_code": 0})
        done = [f"answered    in {duration(seconds)}"] if clock is None else about_evaluations([clock])
        session.say(*(f"held out    {name.removeprefix('eval_')} {value:.4f}" for name, value in figures.items()))
        if figures:
            session.say(*task.remarks())
        session.say(*done, f"run folder  {folder.path}  ({', '.join(files)})")
    engine.close()
    return 0
