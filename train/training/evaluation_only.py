"""A launch without training: the task's own run up to the loop, and there an evaluation, or answers to a file."""

import time

from train.health.watchdog import Watchdog
from train.model.adapter_folder import TASK_TYPES, AdapterFolder, find_base, name_some, open_adapter, trained_config
from train.model.folders import is_adapter, model_folder
from train.recipe.errors import UserError
from train.recipe.inference_options import DATA_OPTIONS
from train.recipe.options import TrainingRecipe
from train.recipe.paths import answers_folder
from train.record.environment import describe_environment
from train.record.run_folder import RunFolder, differences, read_yaml
from train.record.terminal import duration
from train.record.timeline import Timeline
from train.strategy.gpus import describe_device
from train.training.evaluation import timed_evaluation
from train.training.summary import about_evaluations
from train.training.task import Task
from train.training.trainer import LONG, Trainer

NAMED_WITH = "adapter_config.json"


class EvaluationTrainer(Trainer):
    """Evaluates a stored model or an adapter, or lets it answer the records of a file, and leaves no model behind."""

    def __init__(self, task: str, recipe: TrainingRecipe, timeline: Timeline, watchdog: Watchdog):
        """See also that no training run's folder is written to.

        Raises:
            UserError: it would be; the model is an adapter without a base, or for another task.
        """
        self.asked_for = recipe.model_name_or_path
        recipe = recipe.draft()
        if not (recipe.source("output_dir") or "").startswith("--"):
            recipe.adopt("output_dir", answers_folder(task, recipe), "")
        folder = RunFolder(recipe.output_dir)
        self._refuse_a_training_run(folder)
        if not recipe.overwrite_output_dir:
            self._refuse_other_answers(folder, recipe)
        self.stored = self._find_model(task, recipe)
        super().__init__(task, recipe, timeline, watchdog)

    def _refuse_a_training_run(self, folder: RunFolder) -> None:
        held = [name for name in ("model", "checkpoints") if (folder.path / name).exists()]
        if held or folder.recorded() is not None:
            raise UserError(
                f"output_dir = {str(folder.path)!r} holds a training run, whose record would be replaced. Choose "
                f"another --output_dir, or leave it out"
            )

    def _refuse_other_answers(self, folder: RunFolder, recipe) -> None:
        """The same model may be asked the same again; answers of another, or to other data, stay."""
        if not (folder.metrics.read() or any(folder.path.glob("predictions*.jsonl"))):
            return  # nothing was answered
        asked = ("model_name_or_path", "predict_file", *DATA_OPTIONS)
        recorded = read_yaml(folder.path / "recipe.yaml")
        earlier = {name: value for name, value in recorded.items() if name in asked}
        if differing := differences(recipe, 0, earlier):
            folder.refuse_a_different_run(differing)

    def _find_model(self, task: str, recipe) -> AdapterFolder | None:
        """Let the recipe name the model that is loaded: of a run its model/, of an adapter its base. Returns the
        adapter."""
        stored, name = None, model_folder(recipe.model_name_or_path)
        recipe.adopt("lora", is_adapter(name), "")
        if recipe.lora:
            stored = open_adapter(name, "model_name_or_path")
            kind = stored.settings.get("task_type")
            if kind not in (None, TASK_TYPES[task]):
                tasks = {kind: task for task, kind in TASK_TYPES.items()}
                raise UserError(f"model_name_or_path = {name!r} is an adapter of train/{tasks[kind]}.py: use that")
            if stored.has_tokenizer and not recipe.tokenizer_name:
                recipe.adopt("tokenizer_name", name, "the adapter")
            name = find_base(stored, named_with=NAMED_WITH, trust_remote_code=recipe.trust_remote_code)[1]
        recipe.adopt("model_name_or_path", name, "--model_name_or_path")
        return stored

    def configuration(self, auto_class):
        config = super().configuration(auto_class)
        if self.stored:
            where = f"model_name_or_path = {self.asked_for!r}"
            config, notes = trained_config(self.stored, config, where, self.recipe.model_name_or_path)
            config.use_cache = False
            self.notes += notes
        return config

    def plan(self, num_samples):
        """There is no schedule."""
        self.schedule = None

    @property
    def _brought(self) -> list[str]:
        """Weights of the model that the adapter has and its base has not, or otherwise."""
        return [name for name in self.stored.shapes if "lora_" not in name] if self.stored else []

    def load(self, auto_class, config, ignored_weights=()):
        return super().load(auto_class, config, [*ignored_weights, *self._brought])

    def add_adapter(self, model):
        """Put the stored adapter onto its base.

        Raises:
            UserError: it is for another base, or weights of the model are nowhere.
        """
        from train.model.adapter_injection import inject_adapter

        if self.stored:
            quantised = self.recipe.quantised is not None
            self.notes += inject_adapter(self.stored, model, self.recipe.model_name_or_path, self.strategy, quantised)
        lacking = [name for name in getattr(model, "initialized_weights", ()) if name not in self._brought]
        if lacking:
            raise UserError(
                f"model_name_or_path = {self.asked_for!r} has no weights for {name_some(lacking)}: it would answer at "
                f"random. Name a model that was trained for {self.task_name}"
            )

    def announce(self, *lines):
        recipe = self.recipe
        base = f" on {recipe.model_name_or_path}" if self.stored else ""
        drawn = recipe.evaluate_only and recipe.train_file
        self.say(
            f"model     {self.asked_for}{base}: {self.parameters:,} parameters",
            f"strategy  {self.strategy.describe_layout}",
            f"device    {describe_device(self.engine.device)}",
            *lines,
            *([f"note      evaluated is what is held out of train_file ({recipe.validation_split_percentage:g} %); "
               "--validation_file names data of its own"] if drawn else []),
            f"folder    {self.folder.path}",
            *(f"note      {note.removeprefix('note: ')}" for note in [*self.notes, *self.strategy.notes]),
            *([f"note      without effect, since nothing is trained: {', '.join(recipe.without_effect)}"]
              if recipe.without_effect else []),
        )  # fmt: skip

    def answer(self, task: Task) -> int:
        """Evaluate, or answer the file, and leave the record. Returns the exit code.

        Raises:
            UserError: nothing is held out.
        """
        recipe, engine = self.recipe, self.engine
        if not recipe.predict_file and task.evaluate is None:
            raise UserError("evaluate_only: nothing is held out. Name a validation_file")
        if self.is_main:
            environment = describe_environment(self.strategy.launch.command, engine.device)
            options = {**recipe.to_dict(), "model_name_or_path": self.asked_for}
            self.folder.start_answers(options, engine.effective_strategy(), environment)
        self.watchdog.phase("evaluate", patience=LONG)
        began = time.perf_counter()
        if recipe.predict_file:
            files, figures, clock = task.predict(engine), {}, None
        else:
            figures, clock = timed_evaluation(task, engine)
            written = [path.name for path in sorted(self.folder.path.glob("predictions*.jsonl"))]
            files = ["metrics.jsonl", *written]
            if self.is_main:
                self.folder.metrics.add({"update": 0, **figures, **clock})
        seconds = time.perf_counter() - began
        if self.is_main:
            self.folder.metrics.close()
            environment |= {"seconds": seconds, "exit_code": 0}
            self.folder.write_environment(environment)
            done = [f"answered    in {duration(seconds)}"] if clock is None else about_evaluations([clock])
            for name, value in figures.items():
                self.say(f"held out    {name.removeprefix('eval_')} {value:.4f}")
            if figures:
                self.say(*task.remarks())
            self.say(*done, f"run folder  {self.folder.path}  ({', '.join(files)})")
        engine.close()
        return 0
