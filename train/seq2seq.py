r"""Encoder-decoder training, for dialogue above all: BlenderBot, BART, T5 and every other AutoModelForSeq2SeqLM.

    accelerate launch train/seq2seq.py --config recipes/seq2seq/stdlib-functions.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/seq2seq.py --config recipes/seq2seq/blenderbot-400m-dialogue.yaml
    accelerate launch train/seq2seq.py --model_name_or_path t5-large --train_file articles.jsonl --precision bf16 \
        --source_prefix "summarize: " --max_source_length 512 --output_dir outputs/summaries

Read `main` from top to bottom, and change what you like: docs/own-loop.md has examples.
"""

from zerofit.recipe import Seq2SeqRecipe
from zerofit.training.entry import Start, begin, end

if __name__ == "__main__":
    start = begin("seq2seq", Seq2SeqRecipe)  # a mistake in an option or a path is reported before the slow imports

from transformers import AutoModelForSeq2SeqLM

from zerofit.data.collate import PairCollator, multiple_for
from zerofit.data.pairs import prepare_pairs
from zerofit.data.prompts import read_sources
from zerofit.model.loss import model_loss
from zerofit.model.preflight import check_loss, install_chosen_loss
from zerofit.model.tokenizer import check_vocabulary, first_target_tokens, padding_token, set_decoder_start_token
from zerofit.recipe.options import make_schedule
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.evaluation import eval_batches, held_out_batches, held_out_loss
from zerofit.training.generation import (
    GENERATION_FIGURES,
    cut_texts,
    evaluate_generation,
    generation_settings,
    predict_texts,
    prediction_lines,
)
from zerofit.training.run import Run
from zerofit.training.setup import add_lora, build_model


def main(start: Start) -> int:
    # Read the launcher's strategy, the output folder and an earlier run. If settings contradict, the run ends here.
    run = Run.open(start)
    recipe = run.recipe  # every option with its effective value

    # Conversations -> (history, reply) pairs -> rows of token ids.
    config = run.model_config(AutoModelForSeq2SeqLM)
    data = read_sources(recipe, config) if recipe.predict_file else prepare_pairs(recipe, config)
    run.log_at_start(check_vocabulary(config, data.tokenizer, recipe))
    set_decoder_start_token(config, data.tokenizer)
    run.start(data)  # the number of updates is known; the ranks' process group starts

    # The model: the same weights under every strategy.
    model = build_model(AutoModelForSeq2SeqLM, config, run)
    add_lora(model, run)  # if the recipe says so; everything else is frozen then
    install_chosen_loss(model, recipe)  # in full, or in chunks that never hold all logits

    # Accelerate or DeepSpeed wraps, shards and places model and optimizer as the strategy says.
    optimizer = make_optimizer(model, recipe, run.device, run.strategy)
    schedule = make_schedule(recipe, run.num_updates)  # update -> learning rate
    engine = run.prepare(model, optimizer, schedule)
    run.log_at_start(None if recipe.predict_file else check_loss(engine, recipe))

    widths = data.widths if recipe.pad_to_max_length else None
    collate = PairCollator(padding_token(data.tokenizer), widths, multiple_for(run.device, config))
    settings = generation_settings(recipe, data.widths, model.generation_config) | first_target_tokens(data.tokenizer)
    model.generation_config.update(**settings)  # saved with the model: whoever talks to it later is answered likewise

    def evaluate() -> dict[str, float]:
        size = recipe.per_device_eval_batch_size
        figures = held_out_loss(engine, held_out_batches(engine, data.parts, collate, size), model_loss)
        if recipe.predict_with_generate:
            batches = eval_batches(engine, data.validation, collate, size)
            figures |= evaluate_generation(engine, batches, data, run.folder, settings)
        return figures

    def predict() -> list[str]:
        return predict_texts(engine, data, recipe.per_device_eval_batch_size, run.folder, settings)

    def remarks() -> list[str]:
        return cut_texts(data.cut, len(data.targets), "val_max_target_length", settings)

    run.log_start(data)
    if not recipe.trains:
        return run.answer(evaluate, predict, data.num_held_out, remarks)

    # From the first update that is not done. Update k has the same samples under every strategy.
    figures = ("loss", "perplexity", *(GENERATION_FIGURES if recipe.predict_with_generate else ()))
    for update in run.updates(data, collate, figures=figures, evaluate_first=evaluate):
        # This rank's micro-batches. Their loss is a sum over target tokens (teacher-forced), divided by the number of
        # these in the whole global batch: it does not depend on how that is split.
        losses = engine.forward_backward(update.micro_batches, model_loss, update.scale)
        # Clip, and move the weights, unless the loss or the norm is out of bounds: all ranks decide alike.
        outcome = engine.step(losses, run.bounds())
        run.log(update, outcome)  # metrics.jsonl, terminal, trackers; on_anomaly
        if run.should_evaluate(update):
            run.log_held_out(update, evaluate())
        if run.should_save(update):
            run.save(update)

    run.export(remarks)  # model/: what from_pretrained loads
    run.log_lines(*prediction_lines(run, recipe))
    return run.finish()


if __name__ == "__main__":
    end(main, start)
