r"""Classification and regression of sentences and pairs: DeBERTa, BERT, RoBERTa, Llama and every other model with an
AutoModelForSequenceClassification; multiple choice, with an AutoModelForMultipleChoice; and words of
sentences (named entities, parts of speech), with an AutoModelForTokenClassification.

    accelerate launch train/cls.py --config recipes/cls/stdlib-packages.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/cls.py --config recipes/cls/deberta-xl-mrpc.yaml
    accelerate launch train/cls.py --model_name_or_path roberta-base --train_file reviews.csv \
        --output_dir outputs/reviews

Read `main` from top to bottom: what is loaded, how records become batches, what the loss and the metrics are.
"""

from dataclasses import replace

from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.recipe.errors import reports_user_errors
from zerofit.record.timeline import Timeline
from zerofit.training.entry import open_session, run_program


@reports_user_errors
def main(argv: list[str] | None = None) -> int:
    timeline = Timeline()
    timeline.mark("interpreter")

    # What to train, and how. Whatever is wrong on paper is found here, before anything is read or waited for.
    recipe = parse_recipe(ClsRecipe, argv, prog="train/cls.py")
    session = open_session("cls", recipe, timeline)
    recipe = session.recipe  # every option with the value that holds

    import torch
    from transformers import (
        AutoModelForMultipleChoice,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from zerofit.data.collate import ExampleCollator, multiple_for
    from zerofit.data.labelled.examples import prepare_examples
    from zerofit.data.labelled.labels import configure_labels, pretrained_head, renamed_head
    from zerofit.data.labelled.samples import class_weights, describe_weights
    from zerofit.data.pack import stats_rows
    from zerofit.model.configuration import check_task
    from zerofit.model.load import head_weights
    from zerofit.model.loss import logits_of_examples, loss_of_examples
    from zerofit.model.parameters import flops_per_token
    from zerofit.model.tokenizer import check_vocabulary, padding_values, set_padding_token
    from zerofit.record.meters import make_meter
    from zerofit.record.terminal import screen_width, table
    from zerofit.training.classification import (
        best_constant,
        evaluate_examples,
        figures_of,
        predict_examples,
        report_classes,
    )
    from zerofit.training.evaluation import eval_batches
    from zerofit.training.fit import answer, export, finish, fit
    from zerofit.training.prepare import prepare, start
    from zerofit.training.task import Task

    timeline.mark("imports")

    # Records -> checked texts and labels -> rows of token ids, one row an example.
    config = session.model_configuration(AutoModelForSequenceClassification)
    data = prepare_examples(recipe, config)
    weights = class_weights(recipe, data)
    held_out = data.held_out[0].samples.stats if data.held_out else None
    notes = [*data.notes, check_vocabulary(config, data.tokenizer, recipe)]
    auto_class, pretrained = AutoModelForSequenceClassification, recipe.model_name_or_path
    if data.labels.choices:
        auto_class = AutoModelForMultipleChoice
        check_task(recipe, config, auto_class)
        had = len(pretrained_head(config, pretrained) or ())  # of a classifier; choices have a head of one output
        other = had + 1
    else:
        if data.labels.of_words:
            auto_class = AutoModelForTokenClassification
            check_task(recipe, config, auto_class)
        notes.append(renamed_head(config, data.labels, pretrained))
        had = other = configure_labels(config, data.labels, pretrained, recipe.ignore_mismatched_sizes)
    headed = AutoModelForSequenceClassification if data.labels.choices else auto_class
    replaced = head_weights(headed, config, other) if had else []
    if replaced:
        notes.append(f"note      a new, random head: {', '.join(replaced)} had {had} outputs")
    set_padding_token(config, data.tokenizer)
    timeline.mark("data")

    # The model: the same weights under every strategy, then sharded and placed as the strategy says.
    started = start(session, data.samples_per_epoch)
    model, adapter = started.load(auto_class, config, ignored_weights=replaced)
    timeline.mark("model")
    prepared = prepare(started, model, adapter)
    engine = prepared.engine

    # The loss is a sum over examples; the loop divides by their number in the global batch, or by the sum of their
    # weights. The held-out loss is plain cross entropy.
    width = data.max_length if recipe.pad_to_max_length else None
    collate = ExampleCollator(padding_values(data.tokenizer), width, multiple_for(engine.device))
    on_device = None if weights is None else torch.tensor(weights, device=engine.device)

    def loss_sum(model, batch):
        logits = logits_of_examples(model, batch)
        return loss_of_examples(logits, batch.labels, on_device, recipe.label_smoothing, recipe.focal_gamma)

    def batches_of(engine, samples):
        return eval_batches(engine, samples, collate, recipe.per_device_eval_batch_size)

    def evaluate(engine):
        figures = {}
        for part in data.held_out:
            sources = part.sources or {"": part.samples}  # of a mixture, each source
            batches = {name: batches_of(engine, sources[name]) for name in sources}
            figures |= evaluate_examples(engine, batches, data.labels, part, session.folder)
        return figures

    def predict(engine):
        (part,) = data.held_out
        return predict_examples(engine, batches_of(engine, part.samples), data.labels, part, session.folder)

    task = Task(
        recipe=recipe,
        train_set=data.train,
        collate=collate if weights is None else replace(collate, class_weights=weights),
        loss_sum=loss_sum,
        evaluate=evaluate if data.held_out else None,
        num_held_out=sum(len(part.samples) for part in data.held_out),
        figures=figures_of(data.labels, data.held_out, recipe.task_name),
        unit=data.labels.unit,
        grouping=recipe.length_grouping,
        longest=data.longest,
        order=data.order,
        predict=predict,
        baseline=lambda: best_constant(data.labels, data.held_out),
        report=lambda: report_classes(session.folder, data.labels, data.held_out),
    )

    parts = (None, held_out) if recipe.predict_file else (held_out,)
    prepared.announce(
        f"data      {data.labels.describe}",
        *([describe_weights(weights, data.labels.names)] if weights else []),
        table(stats_rows(data.train and data.train.stats, *parts), screen_width()),
        *(note for note in notes if note),
    )
    if not recipe.trains:
        return answer(prepared, task)
    if session.measurement is not None:  # zerofit compare
        return session.measurement.run(prepared, task)
    meter = make_meter(engine, flops_per_token(model, data.row_length), recipe.peak_tflops)
    result = fit(prepared, task, meter, data.tokenizer)
    export(result)
    return finish(result)


if __name__ == "__main__":
    run_program("cls", main)
