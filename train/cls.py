r"""Classification and regression of sentences and pairs: DeBERTa, BERT, RoBERTa, Llama and every other model with an
AutoModelForSequenceClassification; multiple choice, with an AutoModelForMultipleChoice; and words of
sentences (named entities, parts of speech), with an AutoModelForTokenClassification.

    accelerate launch train/cls.py --config recipes/cls/stdlib-packages.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/cls.py --config recipes/cls/deberta-xl-mrpc.yaml
    accelerate launch train/cls.py --model_name_or_path roberta-base --train_file reviews.csv \
        --output_dir outputs/reviews

Read `main` from top to bottom, and change what you like: docs/own-loop.md has examples.
"""

from zerofit.recipe import ClsRecipe
from zerofit.training.entry import Start, begin, end

if __name__ == "__main__":
    start = begin("cls", ClsRecipe)  # a mistake in an option or a path is reported before the slow imports

from dataclasses import replace

import torch
from transformers import AutoModelForSequenceClassification

from zerofit.data.collate import Batch, ExampleCollator, multiple_for
from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.labels import class_weights, describe_weights
from zerofit.model.loss import logits_of_examples, loss_of_examples
from zerofit.model.tokenizer import check_vocabulary, padding_values, set_padding_token
from zerofit.recipe.options import make_schedule
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.classification import (
    choose_head,
    evaluate_examples,
    figures_of,
    predict_examples,
    report_classes,
)
from zerofit.training.evaluation import eval_batches, held_out_batches
from zerofit.training.run import Run
from zerofit.training.setup import add_lora, build_model


def main(start: Start) -> int:
    # Read the launcher's strategy, the output folder and an earlier run. If settings contradict, the run ends here.
    run = Run.open(start)
    recipe = run.recipe  # every option with its effective value

    # Records -> checked texts and labels -> rows of token ids, one row an example.
    config = run.model_config(AutoModelForSequenceClassification)
    data = prepare_examples(recipe, config)
    weights = class_weights(recipe, data)
    run.log_at_start(describe_weights(weights, data.labels.names) if weights else None)
    run.log_at_start(check_vocabulary(config, data.tokenizer, recipe))
    auto_class, new_weights, notes = choose_head(config, data.labels, recipe)  # classifies sequences, words or choices
    run.log_at_start(*notes)
    set_padding_token(config, data.tokenizer)
    run.start(data)  # the number of updates is known; the ranks' process group starts

    # The model: the same weights under every strategy.
    model = build_model(auto_class, config, run, new_weights)
    add_lora(model, run)  # if the recipe says so; everything else is frozen then

    # Accelerate or DeepSpeed wraps, shards and places model and optimizer as the strategy says.
    optimizer = make_optimizer(model, recipe, run.device, run.strategy)
    schedule = make_schedule(recipe, run.num_updates)  # update -> learning rate
    engine = run.prepare(model, optimizer, schedule)

    width = data.max_length if recipe.pad_to_max_length else None
    collate = ExampleCollator(padding_values(data.tokenizer), width, multiple_for(run.device, config))
    on_device = None if weights is None else torch.tensor(weights, device=run.device)

    def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = logits_of_examples(model, batch)  # (B, classes); of words (B, T, classes)
        return loss_of_examples(logits, batch.labels, on_device, recipe.label_smoothing, recipe.focal_gamma)

    def evaluate() -> dict[str, float]:  # the held-out loss is plain cross entropy
        figures: dict[str, float] = {}
        for part in data.held_out:
            sources = part.sources or {"": part.samples}  # a mixture is evaluated source by source
            batches = held_out_batches(engine, sources, collate, recipe.per_device_eval_batch_size)
            figures |= evaluate_examples(engine, batches, data.labels, part, run.folder)
        return figures

    def predict() -> list[str]:
        (part,) = data.held_out
        batches = eval_batches(engine, part.samples, collate, recipe.per_device_eval_batch_size)
        return predict_examples(engine, batches, data.labels, part, run.folder)

    def remarks() -> list[str]:
        return report_classes(run.folder, data.labels, data.held_out)

    run.log_start(data)
    if not recipe.trains:
        return run.answer(evaluate, predict, data.num_held_out, remarks)

    # From the first update that is not done. Update k has the same samples under every strategy.
    updates = run.updates(
        data,
        replace(collate, class_weights=weights),
        figures=figures_of(data.labels, data.held_out, recipe.task_name),
        unit=data.labels.unit,
        evaluate_first=evaluate,
    )
    for update in updates:
        # This rank's micro-batches. Their loss is a sum over examples, divided by their number in the whole global
        # batch (or by the sum of their weights).
        losses = engine.forward_backward(update.micro_batches, loss_sum, update.scale)
        # Clip, and move the weights, unless the loss or the norm is out of bounds: all ranks decide alike.
        outcome = engine.step(losses, run.bounds())
        run.log(update, outcome)  # metrics.jsonl, terminal, trackers; on_anomaly
        if run.should_evaluate(update):
            run.log_held_out(update, evaluate())
        if run.should_save(update):
            run.save(update)

    run.export(remarks)  # model/: what from_pretrained loads
    return run.finish()


if __name__ == "__main__":
    end(main, start)
