r"""Causal language modelling: GPT-2, GPT-NeoX, Llama and every other AutoModelForCausalLM, from scratch or continued.

    accelerate launch train/clm.py --config recipes/clm/stdlib-gpt2.yaml
    accelerate launch --config_file accelerate_configs/zero2.yaml \
        train/clm.py --config recipes/clm/gpt2-xl-wikitext2.yaml
    accelerate launch train/clm.py --model_name_or_path gpt2 --train_file notes.txt \
        --block_size 512 --output_dir outputs/notes

Read `main` from top to bottom: what is loaded, how text becomes batches, what the loss is, what is left behind.
"""

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.recipe.errors import reports_user_errors
from zerofit.record.timeline import Timeline
from zerofit.training.entry import open_session, run_program


@reports_user_errors
def main(argv: list[str] | None = None) -> int:
    timeline = Timeline()
    timeline.mark("interpreter")

    # What to train, and how. Whatever is wrong on paper is found here, before anything is read or waited for.
    recipe = parse_recipe(ClmRecipe, argv, prog="train/clm.py")
    session = open_session("clm", recipe, timeline)
    recipe = session.recipe  # every option with the value that holds

    from transformers import AutoModelForCausalLM

    from zerofit.data.causal import prepare_causal_data
    from zerofit.data.collate import CausalCollator, PreferenceCollator, PromptCollator, multiple_for
    from zerofit.data.lengths import growing_blocks
    from zerofit.data.token_updates import updates_by_tokens
    from zerofit.model.loss import model_loss
    from zerofit.model.parameters import flops_per_token
    from zerofit.model.preference import without_dropout
    from zerofit.model.preflight import (
        check_loss,
        check_mask_support,
        check_packing,
        check_split_rows,
        choose_packed_attention,
        install_chosen_loss,
    )
    from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary, padding_token
    from zerofit.record.meters import make_meter
    from zerofit.record.terminal import screen_width, table
    from zerofit.training.evaluation import eval_batches, held_out_loss
    from zerofit.training.fit import answer, export, finish, fit
    from zerofit.training.generation import predict_texts, writing_settings
    from zerofit.training.preferences import held_out_pairs, measure_reference, preference_loss
    from zerofit.training.prepare import prepare, start
    from zerofit.training.task import Task
    from zerofit.training.teacher import load_teacher

    timeline.mark("imports")

    # Text, chats or a tokenised corpus -> documents -> token ids -> blocks. No process group exists yet that could
    # time out meanwhile.
    config = session.model_configuration(AutoModelForCausalLM)
    data = prepare_causal_data(recipe, config, session.strategy.batches.consumed)
    notes = [*data.notes, check_vocabulary(config, data.tokenizer, recipe), pad_vocabulary(config, recipe)]
    timeline.mark("data")

    # The model: the same weights under every strategy, then sharded and placed as the strategy says.
    by_tokens = updates_by_tokens(data.train, recipe.row_tokens, recipe.global_batch_size, recipe.seed)
    started = start(session, data.samples_per_epoch, by_tokens)
    model, adapter = started.load(AutoModelForCausalLM, config)
    install_chosen_loss(model, recipe)
    if recipe.preference_loss:
        without_dropout(model)
    if recipe.is_packed:
        notes.append(choose_packed_attention(model, recipe, session.strategy.precision))
    timeline.mark("model")
    prepared = prepare(started, model, adapter)
    engine = prepared.engine
    routing = model.routing
    notes += routing.describe(session.strategy.autocasts and not recipe.lora) if routing else []
    collate = CausalCollator(
        padding_token(data.tokenizer), multiple=multiple_for(engine.device), marks_filling=routing is not None
    )
    if recipe.is_packed:
        notes.append(check_packing(engine, recipe, collate))
    elif recipe.reset_attention_mask or recipe.reset_position_ids:
        check_mask_support(engine)
    if not recipe.predict_file:
        notes.append(check_loss(engine, recipe))
        notes.append(check_split_rows(engine, collate, recipe.is_packed))

    # A teacher beside the student: both read each micro-batch, and the loss compares them.
    loss_sum = model_loss
    if recipe.teacher and recipe.trains:
        loss_sum = load_teacher(session, model, data, collate, engine.device)

    # Pairs of answers: another loss, of two rows a sample. The reference is the model as it is now.
    preference, figures, unit = None, ("loss", "perplexity"), "token"
    if recipe.preference_loss and not recipe.predict_file:
        loss_sum = preference = preference_loss(recipe)
        collate = PreferenceCollator(padding_token(data.tokenizer), multiple_for(engine.device))
        figures, unit = ("loss", "accuracy", "reward_margin"), "pair"
        if preference.needs_reference and session.measurement is None:
            parts = {"train": data.train, "validation": data.validation}
            measure_reference(session, engine, {name: part for name, part in parts.items() if part}, collate)

    def predict(engine):
        padded = PromptCollator(padding_token(data.tokenizer), left=True, multiple=multiple_for(engine.device))
        batches = eval_batches(engine, data.prompts, padded, recipe.per_device_eval_batch_size)
        settings = writing_settings(recipe, engine.module.config, data.tokenizer, data.prompts.ends)
        return predict_texts(engine, batches, data.tokenizer, data.prompts, session.folder, settings)

    def evaluate(engine):
        parts = data.held_out or {"": data.validation}  # of a mixture, that of each source
        batches = {
            name: eval_batches(engine, part, collate, recipe.per_device_eval_batch_size)
            for name, part in parts.items()
        }
        if preference is not None:
            return held_out_pairs(engine, batches, preference, len(data.validation))
        return held_out_loss(engine, batches, model_loss)

    growth = None
    if recipe.trains and recipe.block_size_warmup:
        stated = recipe.source("block_size_warmup")
        growth = growing_blocks(recipe.block_size_warmup, stated, data.block_size, data.is_chat)
    task = Task(
        recipe=recipe,
        train_set=data.train,
        collate=collate,
        loss_sum=loss_sum,  # over next tokens, or pairs; the loop divides by their number in the global batch
        figures=figures,
        unit=unit,
        evaluate=evaluate if data.validation else None,
        num_held_out=len(data.validation or ()),
        longest={"input_ids": data.block_size},
        lengths=growth,
        order=data.order,
        predict=predict,
        routing=None if preference else routing,
        preference=preference,
    )

    prepared.announce(
        f"data      {data.kind}",
        table(data.report, screen_width()),
        *([by_tokens.describe()] if by_tokens else []),
        *(note for note in notes if note),
        *data.shown,
    )
    if not recipe.trains:
        return answer(prepared, task)
    if session.measurement is not None:  # zerofit compare
        return session.measurement.run(prepared, task)
    meter = make_meter(engine, flops_per_token(engine.whole, data.train.stats.mean_length), recipe.peak_tflops)
    result = fit(prepared, task, meter, data.tokenizer)
    export(result)
    if recipe.sample_tokens and not result.stopped and engine.layout.pipeline > 1:
        command = f"zerofit generate --model {session.folder.model} --prompt TEXT"
        session.say(f"note      no sample: no rank of a pipeline has all layers. Use {command}")
    elif recipe.sample_tokens and not result.stopped:
        text = sample(engine, recipe, data.tokenizer, data.is_chat)
        session.say("a sample of what it writes:", *("  | " + line for line in text.splitlines()))
    return finish(result)


def sample(engine, recipe: ClmRecipe, tokenizer, is_chat: bool) -> str:
    """What the trained model writes after `sample_prompt` (in a chat: its answer), as long as its positions allow."""
    import torch

    from zerofit.model.chat import question_ids

    if is_chat and recipe.sample_prompt:
        ids = torch.tensor([question_ids(tokenizer, recipe.sample_prompt, recipe.system_prompt)])
    else:
        prompt = recipe.sample_prompt or tokenizer.bos_token or tokenizer.eos_token or "\n"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    room = getattr(engine.module.config, "max_position_embeddings", 10**6) - ids.shape[1]
    torch.manual_seed(recipe.seed)  # all ranks draw the same tokens
    written = engine.generate(
        ids,
        max_new_tokens=max(1, min(recipe.sample_tokens, room)),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)


if __name__ == "__main__":
    run_program("clm", main)
