"""One of the processes that answer a file of prompts: `zerofit generate --num_processes N` launches them."""

import json
import os
from pathlib import Path

import psutil
import torch
from torch.distributed.device_mesh import init_device_mesh

from zerofit.model.tensor_parallel.cut import TensorGroup
from zerofit.recipe.errors import leave, reports_user_errors
from zerofit.recipe.parse import parse_recipe
from zerofit.tools.generate.answers import PART, AnswerJournal, answer_share
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import load
from zerofit.tools.generate.respond import find
from zerofit.tools.generate.text_writer import Writer


@reports_user_errors
def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(GenerateOptions, argv, prog="zerofit generate", tool=True)
    part = json.loads(os.environ[PART])
    asker = psutil.Process(part["pid"])
    rank, world_size, tensor = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.tensor_parallel
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    asked = find(options)
    writer = Writer(
        load(asked.source, options, _tensor_group(world_size, tensor) if tensor > 1 else None),
        asked.source.tokenizer,
        options,
        asked.renderer.end_of_turn(),
    )
    rows, _ = writer.rows(asked.prompts, asked.renderer)
    journal = AnswerJournal(Path(options.output).expanduser(), part["size"])

    def leave_with_asker() -> None:
        if not asker.is_running():  # it was killed, and its journal may be that of another run by now
            leave(1)

    leave_with_asker()
    share = rank // tensor, world_size // tensor
    answer_share(writer, rows, options, journal, share, writes=rank % tensor == 0, after=leave_with_asker)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return 0


def _tensor_group(world_size: int, size: int):
    """The group of this process, whose ranks follow each other."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("data", "tensor"))
    return TensorGroup(mesh.get_group("tensor"), mesh.get_local_rank("tensor"), size)


if __name__ == "__main__":
    leave(main())
