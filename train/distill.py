r"""Distillation: a causal model learns the distribution of a teacher as well as the next tokens of the data.

    accelerate launch train/distill.py --config recipes/distill/stdlib-distilled.yaml
    accelerate launch train/distill.py --model_name_or_path gpt2 --teacher gpt2-xl --train_file notes.txt \
        --output_dir outputs/student

Read `main` from top to bottom, and change what you like. It is train/clm.py with another loss: `loss_sum`. The
held-out loss is that of the data's next tokens alone, so that it compares with other runs.
"""

from zerofit.recipe import DistillRecipe
from zerofit.training.entry import Start, begin, end

if __name__ == "__main__":
    start = begin("distill", DistillRecipe)  # a mistake in an option or a path is reported before the slow imports

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import Batch, CausalCollator, multiple_for
from zerofit.model.loss import TEACHER_HIDDEN, model_loss
from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary, padding_token
from zerofit.recipe.options import make_schedule
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.causal import check_kernels, choose_loss_and_attention, load_teacher
from zerofit.training.evaluation import held_out_batches, held_out_loss
from zerofit.training.generation import continue_prompts, sample_text
from zerofit.training.run import Run
from zerofit.training.setup import add_lora, build_model


def main(start: Start) -> int:
    # Read the launcher's strategy, the output folder and an earlier run. If settings contradict, the run ends here.
    run = Run.open(start)
    recipe = run.recipe  # every option with its effective value

    # Text, chats or a tokenized corpus -> documents -> token ids -> blocks of block_size.
    config = run.model_config(AutoModelForCausalLM)
    data = prepare_causal_data(recipe, config, run.strategy.batches.consumed)
    run.log_at_start(check_vocabulary(config, data.tokenizer, recipe), pad_vocabulary(config, recipe))
    run.start(data)  # the number of updates is known; the ranks' process group starts

    # The student: the same weights under every strategy.
    model = build_model(AutoModelForCausalLM, config, run)
    add_lora(model, run)  # if the recipe says so; everything else is frozen then
    choose_loss_and_attention(model, run)
    collate = CausalCollator(
        padding_token(data.tokenizer),
        multiple=multiple_for(run.device, config),
        marks_padding=model.routing is not None,
    )

    # Accelerate or DeepSpeed wraps, shards and places model and optimizer as the strategy says.
    optimizer = make_optimizer(model, recipe, run.device, run.strategy)
    schedule = make_schedule(recipe, run.num_updates)  # update -> learning rate
    engine = run.prepare(model, optimizer, schedule)
    run.log_at_start(*check_kernels(engine, recipe, collate))

    # The teacher, next to the student on each rank, reads each micro-batch as well; the loss compares the two.
    teacher = load_teacher(run, model, data, collate) if recipe.trains else None

    def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        assert teacher is not None, "a run that trains has one"
        hidden = teacher.hidden(batch)  # (B, T, H), without gradients: the loss makes logits of it with its head
        return model_loss(model, replace(batch, inputs={**batch.inputs, TEACHER_HIDDEN: hidden}))

    def evaluate() -> dict[str, float]:
        batches = held_out_batches(engine, data.parts, collate, recipe.per_device_eval_batch_size)
        return held_out_loss(engine, batches, model_loss)

    def predict() -> list[str]:  # the completions of predict_file's prompts
        return continue_prompts(engine, data, recipe, run.folder)

    run.log_start(data)
    if not recipe.trains:
        return run.answer(evaluate, predict, data.num_held_out)

    # From the first update that is not done. Update k has the same samples under every strategy.
    for update in run.updates(data, collate, evaluate_first=evaluate):
        # This rank's micro-batches. Their loss is a sum over target tokens, divided by the number of these in the
        # whole global batch: it does not depend on how that is split.
        losses = engine.forward_backward(update.micro_batches, loss_sum, update.scale)
        # Clip, and move the weights, unless the loss or the norm is out of bounds: all ranks decide alike.
        outcome = engine.step(losses, run.bounds())
        run.log(update, outcome)  # metrics.jsonl, terminal, trackers; on_anomaly
        if run.should_evaluate(update):
            run.log_held_out(update, evaluate())
        if run.should_save(update):
            run.save(update)

    run.export()  # model/: what from_pretrained loads
    run.log_lines(*sample_text(run, data))
    return run.finish()


if __name__ == "__main__":
    end(main, start)
