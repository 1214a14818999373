"""BLEU by sacrebleu and ROUGE by rouge_score, as a local metric of the evaluate library."""

import datasets
import evaluate
import sacrebleu
from rouge_score import rouge_scorer

DESCRIPTION = """bleu (sacrebleu's corpus BLEU, 0 to 100) and rouge1, rouge2, rougeL (F-measure, 0 to 100, mean over
examples). Predictions and references are texts, one reference each."""
ROUGE = ("rouge1", "rouge2", "rougeL")


class Generation(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        bleu = sacrebleu.corpus_bleu(predictions, [references])
        scorer = rouge_scorer.RougeScorer(ROUGE, use_stemmer=True)
        scores = [scorer.score(reference, prediction) for reference, prediction in zip(references, predictions)]
        rouge = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
        return {"bleu": float(bleu.score), **rouge}
