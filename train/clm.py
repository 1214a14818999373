r"""Causal language modelling: GPT-2, GPT-NeoX, Llama and every other AutoModelForCausalLM, from scratch or continued.

    accelerate launch train/clm.py --config recipes/clm/stdlib-gpt2.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/clm.py --config recipes/clm/gpt2-xl-wikitext2.yaml
    accelerate launch train/clm.py --model_name_or_path gpt2 --train_file notes.txt \
        --block_size 512 --output_dir outputs/notes

Read `main` from top to bottom, and change what you like: docs/own-loop.md has examples. Its order is that of the run:
data, model, LoRA, optimizer, schedule, strategy, evaluation, the loop of updates, export. All ranks run all of it;
`run.log_lines` prints on the first one only.
"""

from zerofit.recipe import ClmRecipe
from zerofit.training.entry import Start, begin, end

if __name__ == "__main__":
    start = begin("clm", ClmRecipe)  # a mistake in an option or a path is reported before the slow imports

from transformers import AutoModelForCausalLM

from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import CausalCollator, multiple_for
from zerofit.model.loss import model_loss
from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary, padding_token
from zerofit.recipe.options import make_schedule
from zerofit.strategy.optimizers import make_optimizer
from zerofit.training.causal import check_kernels, choose_loss_and_attention
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

    # The model: the same weights under every strategy. Under ZeRO-3 and FSDP2 a rank has a share of each, and
    # the whole weight only while its own layer runs.
    model = build_model(AutoModelForCausalLM, config, run)
    add_lora(model, run)  # if the recipe says so; everything else is frozen then
    choose_loss_and_attention(model, run)
    collate = CausalCollator(
        padding_token(data.tokenizer),
        multiple=multiple_for(run.device, config),
        marks_padding=model.routing is not None,
    )

    # The optimizer that --optim names, or the one in DeepSpeed's JSON; any other of torch may stand here.
    # Accelerate or DeepSpeed wraps, shards and places model and optimizer as the strategy says.
    optimizer = make_optimizer(model, recipe, run.device, run.strategy)
    schedule = make_schedule(recipe, run.num_updates)  # update -> learning rate
    engine = run.prepare(model, optimizer, schedule)
    # Check that the chunked loss equals the whole one, and that packed documents stay apart. `collate` learns how the
    # attention kernel wants packed rows.
    run.log_at_start(*check_kernels(engine, recipe, collate))

    def evaluate() -> dict[str, float]:
        batches = held_out_batches(engine, data.parts, collate, recipe.per_device_eval_batch_size)
        return held_out_loss(engine, batches, model_loss)

    def predict() -> list[str]:  # the completions of predict_file's prompts
        return continue_prompts(engine, data, recipe, run.folder)

    run.log_start(data)
    if not recipe.trains:
        return run.answer(evaluate, predict, data.num_held_out)

    # From the first update that is not done. Update k has the same samples under every strategy, and whatever the
    # number of processes, the micro-batch and the accumulation are.
    for update in run.updates(data, collate, evaluate_first=evaluate):
        # This rank's micro-batches. Their loss is a sum over target tokens, divided by the number of these in the
        # whole global batch: it does not depend on how that is split.
        losses = engine.forward_backward(update.micro_batches, model_loss, update.scale)
        # Clip, and move the weights, unless the loss or the norm is out of bounds: all ranks decide alike, in the one
        # exchange of the update. `run.bounds` loads the next micro-batches during it.
        outcome = engine.step(losses, run.bounds())
        run.log(update, outcome)  # metrics.jsonl, terminal, trackers; on_anomaly
        if run.should_evaluate(update):
            run.log_held_out(update, evaluate())
        if run.should_save(update):
            run.save(update)

    # model/ is what from_pretrained loads, with tokenizer and card; loss.png, metrics.jsonl and environment.json lie
    # next to it. A run that was stopped exports nothing: the same command resumes it.
    run.export()
    run.log_lines(*sample_text(run, data))
    return run.finish()


if __name__ == "__main__":
    end(main, start)
