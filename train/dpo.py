r"""Preferences: a causal model learns from pairs of a better and a worse answer (DPO, IPO, hinge, SimPO, ORPO).

    accelerate launch train/dpo.py --config recipes/dpo/stories-dpo.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/dpo.py --model_name_or_path outputs/sft/model --train_file pairs.jsonl --lora --output_dir outputs/dpo

Read `main` from top to bottom, and change what you like. It is train/clm.py with another loss over other data:
`loss_sum` also counts how often the better answer is ahead, and by how much (`accuracy`, `reward_margin`).
"""

from zerofit.recipe import DpoRecipe
from zerofit.training.entry import Start, begin, end

if __name__ == "__main__":
    start = begin("dpo", DpoRecipe)  # a mistake in an option or a path is reported before the slow imports

from transformers import AutoModelForCausalLM

from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import CausalCollator, PreferenceCollator, multiple_for
from zerofit.model.loss import DEFAULT_BETA, PreferenceLoss, disable_dropout
from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary, padding_token
from zerofit.recipe.options import make_schedule
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.causal import check_kernels, choose_loss_and_attention, measure_reference
from zerofit.training.evaluation import held_out_batches, held_out_loss
from zerofit.training.generation import continue_prompts, sample_text
from zerofit.training.run import Run
from zerofit.training.setup import add_lora, build_model


def main(start: Start) -> int:
    # Read the launcher's strategy, the output folder and an earlier run. If settings contradict, the run ends here.
    run = Run.open(start)
    recipe = run.recipe  # every option with its effective value

    # Prompts with two answers -> token ids: a sample is a pair.
    config = run.model_config(AutoModelForCausalLM)
    data = prepare_causal_data(recipe, config)
    run.log_at_start(check_vocabulary(config, data.tokenizer, recipe), pad_vocabulary(config, recipe))
    run.start(data)  # the number of updates is known; the ranks' process group starts

    # The model: the same weights under every strategy. With dropout, it would differ from its own reference, and the
    # loss of the first update would not be that of two equal models.
    model = build_model(AutoModelForCausalLM, config, run)
    add_lora(model, run)  # if the recipe says so; everything else is frozen then
    choose_loss_and_attention(model, run)
    disable_dropout(model)

    # Accelerate or DeepSpeed wraps, shards and places model and optimizer as the strategy says.
    optimizer = make_optimizer(model, recipe, run.device, run.strategy)
    schedule = make_schedule(recipe, run.num_updates)  # update -> learning rate
    engine = run.prepare(model, optimizer, schedule)
    pad = padding_token(data.tokenizer)
    multiple = multiple_for(run.device, config)
    run.log_at_start(*check_kernels(engine, recipe, CausalCollator(pad, multiple=multiple)))

    # The loss compares log-probabilities of the two answers with those of the reference: the model as it is now. They
    # are measured once, before training, and kept with the prepared data, so no second model is held.
    beta = DEFAULT_BETA[recipe.preference_loss] if recipe.preference_beta is None else recipe.preference_beta
    loss_sum = PreferenceLoss(recipe.preference_loss, beta, recipe.simpo_gamma, recipe.preference_label_smoothing)
    collate = PreferenceCollator(pad, multiple)
    if loss_sum.needs_reference and recipe.trains:
        measure_reference(run, engine, {"train": data.train, "validation": data.validation}, collate)

    def evaluate() -> dict[str, float]:  # accuracy: pairs whose chosen answer has the higher reward
        loss_sum.begin()
        batches = held_out_batches(engine, data.parts, collate, recipe.per_device_eval_batch_size)
        losses = held_out_loss(engine, batches, loss_sum)
        found = loss_sum.figures(engine.sum_over_replicas(loss_sum.sums), data.num_held_out)
        del losses["eval_perplexity"]
        return losses | {"eval_accuracy": found.preference_accuracy, "eval_reward_margin": found.reward_margin}

    def predict() -> list[str]:  # the completions of predict_file's prompts
        return continue_prompts(engine, data, recipe, run.folder)

    run.log_start(data)
    if not recipe.trains:
        return run.answer(evaluate, predict, data.num_held_out)

    # From the first update that is not done. Update k has the same samples under every strategy.
    figures = ("loss", "accuracy", "reward_margin")
    updates = run.updates(data, collate, figures=figures, unit="pair", counter=loss_sum, evaluate_first=evaluate)
    for update in updates:
        # This rank's micro-batches. Their loss is a sum over pairs, divided by their number in the whole global batch.
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
