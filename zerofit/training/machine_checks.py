"""Whether all machines of a run have the same run, the same data and the same output folder."""

from zerofit.data.sources import files_and_sizes
from zerofit.recipe.files import appears, is_there
from zerofit.strategy.engine import Engine
from zerofit.strategy.machines import SHARED_FOLDER_REMEDY, check_same
from zerofit.training.configuration import RunConfiguration


def check_machines(config: RunConfiguration) -> None:
    """Check that all ranks train the same run on the same files.

    Raises:
        UserError: one does not; it names the machine.
    """
    options = {f"option {name}": value for name, value in config.resume.identity.items()}
    files = {f"{name} (files and their bytes)": sizes for name, sizes in files_and_sizes(config.recipe).items()}
    resumed = {f"run to resume in output_dir = {str(config.folder.path)!r}": config.resume.sources}
    check_same(options, "Start all machines with the same recipe and options")
    check_same(files, "Copy the data to all machines, or put it where all of them see it")
    check_same(resumed, SHARED_FOLDER_REMEDY)


def check_output_folder(config: RunConfiguration, engine: Engine) -> None:
    """Check that all ranks see the folder into which each of them writes its part of a checkpoint."""
    if config.recipe.save_strategy == "no":
        return
    file = config.folder.path / "recipe.yaml"
    text = engine.from_main(file.read_text() if engine.is_main else None)
    is_seen = appears(lambda: is_there(file) and file.read_text() == text)
    view = f"view of output_dir = {str(config.folder.path)!r}"
    check_same({view: "the run" if is_seen else "no such run"}, f"{SHARED_FOLDER_REMEDY}, or --save_strategy no")
