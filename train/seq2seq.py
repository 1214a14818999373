r"""Encoder-decoder training, for dialogue above all: BlenderBot, BART, T5 and every other AutoModelForSeq2SeqLM.

    accelerate launch train/seq2seq.py --config recipes/seq2seq/stdlib-functions.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/seq2seq.py --config recipes/seq2seq/blenderbot-400m-dialogue.yaml
    accelerate launch train/seq2seq.py --model_name_or_path t5-large --train_file articles.jsonl --precision bf16 \
        --source_prefix "summarize: " --max_source_length 512 --output_dir outputs/summaries

Read `main` from top to bottom: what is loaded, how conversations become batches, what the loss and the metrics are.
"""

from train.recipe import Seq2SeqRecipe, parse_recipe
from train.recipe.errors import leave, reports_user_errors
from train.run.session import open_session
from train.run.timeline import Timeline


@reports_user_errors
def main(argv: list[str] | None = None) -> int:
    timeline = Timeline()
    timeline.mark("interpreter")

    # What to train, and how. Whatever is wrong on paper is found here, before anything is read or waited for.
    recipe = parse_recipe(Seq2SeqRecipe, argv, prog="train/seq2seq.py")
    session = open_session("seq2seq", recipe, timeline)

    from transformers import AutoModelForSeq2SeqLM

    from train.data.collate import PairCollator, PromptCollator, multiple_for
    from train.data.pack import contents_rows
    from train.data.pairs import prepare_pairs
    from train.data.prompts import read_sources
    from train.model.loss import model_loss
    from train.model.parameters import flops_per_pair_token
    from train.model.settle import avoid_fp16_overflow, install_chosen_loss, settle_loss, settle_start_token
    from train.model.tokenizer import check_vocabulary, padding_token
    from train.run.evaluate import eval_batches, held_out_loss
    from train.run.generation import (
        FIGURES,
        evaluate_generation,
        generation_settings,
        predict_texts,
        shown,
        trivial_answers,
    )
    from train.run.job import Job
    from train.run.meters import make_meter
    from train.run.progress import screen_width, table

    timeline.mark("imports")

    # Conversations -> (history, reply) pairs -> rows of token ids.
    config = session.configuration(AutoModelForSeq2SeqLM)
    prompts, data = read_sources(recipe, config) if recipe.predict_file else (None, prepare_pairs(recipe, config))
    notes = [
        *data.notes,
        check_vocabulary(config, data.tokenizer, recipe),
        avoid_fp16_overflow(session.strategy, config),
    ]
    settle_start_token(config, data.tokenizer)
    session.plan(len(data.train or ()))
    timeline.mark("data")

    # The model: the same weights under every strategy, then sharded and placed as the strategy says.
    session.start_processes()
    model = session.load(AutoModelForSeq2SeqLM, config)
    session.add_adapter(model)
    install_chosen_loss(model, recipe)
    timeline.mark("model")
    engine = session.prepare(model)
    if not recipe.predict_file:
        notes.append(settle_loss(engine, recipe))

    # The loss is a sum over target tokens, teacher-forced (train/model/loss.py); the loop divides by their number.
    widths = data.widths if recipe.pad_to_max_length else None
    collate = PairCollator(padding_token(data.tokenizer), widths, multiple_for(engine.device))
    settings = generation_settings(recipe, data.widths)
    model.generation_config.update(**settings)  # saved with the model: whoever talks to it later is answered likewise

    def held_out_batches(engine):
        return eval_batches(engine, data.validation.samples, collate, recipe.per_device_eval_batch_size)

    def evaluate(engine):
        figures = held_out_loss(engine, held_out_batches(engine), model_loss)
        if recipe.predict_with_generate:
            figures |= evaluate_generation(engine, held_out_batches(engine), data, session.folder, settings)
        return figures

    def predict(engine):
        sources = PromptCollator(padding_token(data.tokenizer), left=False, multiple=multiple_for(engine.device))
        batches = eval_batches(engine, prompts, sources, recipe.per_device_eval_batch_size)
        return predict_texts(engine, batches, data.tokenizer, prompts, session.folder, settings)

    job = Job(
        recipe=recipe,
        train_set=data.train,
        collate=collate,
        loss_sum=model_loss,
        evaluate=evaluate if data.validation else None,
        num_held_out=len(data.validation.samples) if data.validation else 0,
        figures=("loss", "perplexity", *(FIGURES if recipe.predict_with_generate else ())),
        grouping=recipe.length_grouping,
        longest=dict(zip(("input_ids", "labels"), data.widths)),
        predict=predict,
        baseline=lambda: trivial_answers(data.validation),
    )

    parts = (data.train, data.validation and data.validation.samples, prompts)
    session.announce(
        table(contents_rows(*(part and part.contents for part in parts)), screen_width()),
        *(note for note in notes if note),
    )
    if not recipe.trains:
        return session.answer(job)
    meter = make_meter(engine, flops_per_pair_token(model, *data.train.mean_lengths()))
    results = session.train(job, meter, data.tokenizer)
    session.export(results)
    if data.validation and recipe.predict_with_generate and not session.stopped:
        session.say(*shown(session.folder, recipe.per_device_eval_batch_size, recipe.n_val_batch_generations))
    return session.close()


if __name__ == "__main__":
    leave(main())
