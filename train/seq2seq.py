r"""Encoder-decoder training, for dialogue above all: BlenderBot, BART, T5 and every other AutoModelForSeq2SeqLM.

    accelerate launch train/seq2seq.py --config recipes/seq2seq/stdlib-functions.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/seq2seq.py --config recipes/seq2seq/blenderbot-400m-dialogue.yaml
    accelerate launch train/seq2seq.py --model_name_or_path t5-large --train_file articles.jsonl --precision bf16 \
        --source_prefix "summarize: " --max_source_length 512 --output_dir outputs/summaries

Read `main` from top to bottom: what is loaded, how conversations become batches, what the loss and the metrics are.
"""

from zerofit.recipe import Seq2SeqRecipe, parse_recipe
from zerofit.recipe.errors import reports_user_errors
from zerofit.record.timeline import Timeline
from zerofit.training.entry import open_session, run_program


@reports_user_errors
def main(argv: list[str] | None = None) -> int:
    timeline = Timeline()
    timeline.mark("interpreter")

    # What to train, and how. Whatever is wrong on paper is found here, before anything is read or waited for.
    recipe = parse_recipe(Seq2SeqRecipe, argv, prog="train/seq2seq.py")
    session = open_session("seq2seq", recipe, timeline)
    recipe = session.recipe  # every option with the value that holds

    from transformers import AutoModelForSeq2SeqLM

    from zerofit.data.collate import PairCollator, PromptCollator, multiple_for
    from zerofit.data.pack import stats_rows
    from zerofit.data.pairs.prepare import prepare_pairs
    from zerofit.data.prompts import read_sources
    from zerofit.data.token_updates import updates_by_tokens
    from zerofit.model.languages import first_target_tokens
    from zerofit.model.loss import model_loss
    from zerofit.model.parameters import flops_per_pair_token
    from zerofit.model.preflight import check_loss, install_chosen_loss, safe_precision
    from zerofit.model.tokenizer import check_vocabulary, padding_token, set_decoder_start_token
    from zerofit.record.meters import make_meter
    from zerofit.record.terminal import screen_width, table
    from zerofit.training.evaluation import eval_batches, held_out_loss
    from zerofit.training.fit import answer, export, finish, fit
    from zerofit.training.generation import (
        FIGURES,
        cut_texts,
        evaluate_generation,
        generation_settings,
        predict_texts,
        shown,
        trivial_answers,
    )
    from zerofit.training.prepare import prepare, start
    from zerofit.training.task import Task

    timeline.mark("imports")

    # Conversations -> (history, reply) pairs -> rows of token ids.
    config = session.model_configuration(AutoModelForSeq2SeqLM)
    prompts, data = read_sources(recipe, config) if recipe.predict_file else (None, prepare_pairs(recipe, config))
    precision, warning = safe_precision(session.strategy, config)
    session = session.with_strategy(session.strategy.with_precision(precision))
    notes = [*data.notes, check_vocabulary(config, data.tokenizer, recipe), warning]
    set_decoder_start_token(config, data.tokenizer)
    timeline.mark("data")

    # The model: the same weights under every strategy, then sharded and placed as the strategy says.
    by_tokens = updates_by_tokens(data.train, recipe.row_tokens, recipe.global_batch_size, recipe.seed)
    started = start(session, data.samples_per_epoch, by_tokens)
    model, adapter = started.load(AutoModelForSeq2SeqLM, config)
    install_chosen_loss(model, recipe)
    timeline.mark("model")
    prepared = prepare(started, model, adapter)
    engine = prepared.engine
    if not recipe.predict_file:
        notes.append(check_loss(engine, recipe))

    # The loss is a sum over target tokens, teacher-forced (zerofit/model/loss.py); the loop divides by their number.
    widths = data.widths if recipe.pad_to_max_length else None
    collate = PairCollator(padding_token(data.tokenizer), widths, multiple_for(engine.device))
    settings = generation_settings(recipe, data.widths, model.generation_config) | first_target_tokens(data.tokenizer)
    model.generation_config.update(**settings)  # saved with the model: whoever talks to it later is answered likewise

    def held_out_batches(engine, part):
        return eval_batches(engine, part, collate, recipe.per_device_eval_batch_size)

    def evaluate(engine):
        whole = data.validation.samples
        parts = data.held_out or {"": whole}  # of a mixture, that of each source
        figures = held_out_loss(engine, {name: held_out_batches(engine, parts[name]) for name in parts}, model_loss)
        if recipe.predict_with_generate:
            figures |= evaluate_generation(engine, held_out_batches(engine, whole), data, session.folder, settings)
        return figures

    def predict(engine):
        sources = PromptCollator(padding_token(data.tokenizer), left=False, multiple=multiple_for(engine.device))
        batches = eval_batches(engine, prompts, sources, recipe.per_device_eval_batch_size)
        return predict_texts(engine, batches, data.tokenizer, prompts, session.folder, settings)

    def remarks():
        held_out = data.validation
        cut = cut_texts(held_out.cut, len(held_out.targets), "val_max_target_length", settings) if held_out else []
        return [*trivial_answers(held_out), *cut]

    task = Task(
        recipe=recipe,
        train_set=data.train,
        collate=collate,
        loss_sum=model_loss,
        evaluate=evaluate if data.validation else None,
        num_held_out=len(data.validation.samples) if data.validation else 0,
        figures=("loss", "perplexity", *(FIGURES if recipe.predict_with_generate else ())),
        grouping=recipe.length_grouping,
        longest=dict(zip(("input_ids", "labels"), data.widths)),
        order=data.order,
        predict=predict,
        baseline=remarks,
    )

    parts = (data.train, data.validation and data.validation.samples, prompts)
    prepared.announce(
        table(stats_rows(*(part and part.stats for part in parts)), screen_width()),
        *([by_tokens.describe()] if by_tokens else []),
        *(note for note in notes if note),
    )
    if not recipe.trains:
        return answer(prepared, task)
    if session.measurement is not None:  # zerofit compare
        return session.measurement.run(prepared, task)
    meter = make_meter(engine, flops_per_pair_token(model, *data.train.stats.pair_lengths), recipe.peak_tflops)
    result = fit(prepared, task, meter, data.tokenizer)
    export(result)
    if data.validation and recipe.predict_with_generate and not result.stopped:
        session.say(*shown(session.folder, recipe.per_device_eval_batch_size, recipe.n_val_batch_generations))
    return finish(result)


if __name__ == "__main__":
    run_program("seq2seq", main)
