"""The report of a comparison: report.md, report.html, results.csv, and the table in the terminal."""

import csv
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import printable
from zerofit.recipe.parsing import counted
from zerofit.recipe.paths import name_of_recipe
from zerofit.record.terminal import decimals, duration, rounded, screen_width, size, table
from zerofit.tools.compare.finish import Finished, agreement, finished_table
from zerofit.tools.compare.plots import memory_plot, png, svg, throughput_plot
from zerofit.tools.compare.report_page import html_report
from zerofit.tools.compare.results import (
    StrategyRow,
    common_size,
    conclusion,
    factor,
    load_text,
    outcome_text,
    speed_up,
    spread,
)
from zerofit.tools.compare.search import LENGTHS
from zerofit.tools.compare.trial_files import peak_of
from zerofit.tools.lengths_option import micro_batch_of

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")
EVALUATION = ("evaluation_samples_per_s", "evaluation_seconds")
PEAKS, RATES = ("allocated", "reserved", "total", "host"), ("samples_per_s", "tokens_per_s", "loss", *EVALUATION)


class ComparisonReport:
    """The report of a comparison.

    Args:
        comparison: zerofit.tools.compare.comparison.Comparison.
        command: the command line that made it.
        notes: how the trials' recipe differs from the user's.
    """

    def __init__(self, comparison, command: str, notes: list[str]):
        self.comparison = comparison
        self.options, self.machine, self.limits = comparison.options, comparison.machine, comparison.limits
        self.command, self.notes = command, notes
        self.finished: list[Finished] = []  # the runs of --finish
        self.simulated = bool(self.machine.simulated)  # its times mean nothing
        self.variable = comparison.variable
        title = name_of_recipe(self.options.source("config"), self.options.task)
        self.title = f"{self.variable.size.capitalize()}s{', simulated' * self.simulated}: {title}"

    @property
    def rows(self) -> list[StrategyRow]:
        """The results so far."""
        return self.comparison.rows()

    @property
    def timed(self) -> bool:
        return any(row.timed for row in self.rows)

    @property
    def common(self) -> int | None:
        return common_size(self.rows)

    def write(self, output: Path) -> None:
        """Write all files into the folder."""
        figures = {"memory": memory_plot(self.rows, self.limits.device, self.variable)}
        if self.timed:
            figures["throughput"] = throughput_plot(self.rows, self.variable)
        pictures = {f"{name}.{form.__name__}": form(each) for name, each in figures.items() for form in (png, svg)}
        for name, picture in pictures.items():
            (output / name).write_bytes(picture)
        blocks = self._blocks()
        html = html_report(self.title, self.conclusion, blocks, pictures, self._provenance())
        (output / "report.html").write_text(html, encoding="utf-8")
        (output / "report.md").write_text(printable(self._markdown(blocks)), encoding="utf-8")
        with (output / "results.csv").open("w", newline="", encoding="utf-8") as file:
            lines = [self._values(row, line) for row in self.rows for line in row.trials]
            writer = csv.DictWriter(file, lines[0] if lines else ())
            writer.writeheader()
            writer.writerows(lines)

    @property
    def conclusion(self) -> str:
        return conclusion(self.rows, self.variable)

    def for_terminal(self) -> str:
        """The tables and the conclusion."""
        problems = [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        tables = [self.main_table(), *([self.speed_table()] if self.has_speed_table else [])]
        lines = [line for rows in tables for line in (table(rows, screen_width()), "")]
        lines += [*problems, self.conclusion]
        if self.finished:
            lines += ["", "trained to the end, each at its best batch:"]
            lines += [table(finished_table(self.finished), screen_width()), "", self._finished_text()]
        return "\n".join(lines)

    def _finished_text(self) -> str:
        problems = [f"{run.name}: {run.problem}" for run in self.finished if run.problem]
        agree = agreement(self.finished)
        return "\n".join([*([f"{agree}."] if agree else []), *problems])

    # ---------------------------------------------------------------------------------------------------------- tables

    def main_table(self) -> list[tuple[str, ...]]:
        """A row for each candidate; the others are compared with the first."""
        at = f" at {self.common:,}" if self.common else " at the same"
        head = ("strategy", self.variable.largest, "factor", "its peak", f"peak{at}")
        head += ("tokens/s", f"tokens/s{at}") if self.has_rates else ()
        return [head, *(self._memory(row, self.rows[0]) for row in self.rows)]

    @property
    def has_rates(self) -> bool:
        """Whether the first table has rates: there is no best length, and so no table of speeds."""
        return self.timed and self.variable is LENGTHS

    def _memory(self, row: StrategyRow, first: StrategyRow) -> tuple[str, ...]:
        at, common, times = row.at(row.largest), row.at(self.common), factor(row, first)
        if not at:
            return (row.name, row.limit_text, *["-"] * (5 if self.has_rates else 3))
        both = [size(peak_of(line)) if line else "-" for line in (at, common)]
        both += [rounded(line["tokens_per_s"]) if line else "-" for line in (at, common)] if self.has_rates else []
        return (row.name, row.limit_text, f"{times:.2f}" if times else "-", *both)

    @property
    def has_speed_table(self) -> bool:
        return self.timed and self.variable is not LENGTHS

    def speed_table(self) -> list[tuple[str, ...]]:
        """Rates of all processes together: at the largest batch that all hold, and at each one's best."""
        head = f"strategy|samples/s at {self.common}|best batch|samples/s there|spread|load|tokens/s there|speed-up"
        head = (*head.split("|"), "an epoch", "evaluation samples/s", "its seconds")
        return [head, *(self._speed(row, self.rows[0]) for row in self.rows)]

    def _speed(self, row: StrategyRow, first: StrategyRow) -> tuple[str, ...]:
        common, best, faster = row.at(self.common), row.best, speed_up(row, first)
        if not best:
            return (row.name, *["-"] * 10)
        return (
            row.name,
            rounded(common["samples_per_s"]) if common in row.timed else "-",
            str(best["size"]),
            rounded(best["samples_per_s"]),
            spread(best),
            load_text(best),
            rounded(best["tokens_per_s"]),
            f"{faster:.2f}" if faster else "-",
            duration(row.epoch_s) if row.epoch_s else "-",
            *([rounded(row.evaluation[name]) for name in EVALUATION] if row.evaluation else ["-", "-"]),
        )

    def held_table(self) -> list[tuple[str, ...]]:
        """Memory that a process keeps from update to update, and memory of each sample."""
        head = ("strategy", "weights", "optimizer state", "each sample or token", "limit confirmed")
        rows = []
        for row in self.rows:
            held, per_sample = row.held, row.bytes_per_sample
            sizes = [size(held.get(name, 0)) if held else "-" for name in ("parameters", "optimizer")]
            sure = "yes" if row.is_confirmed else "no"
            if row.largest and row.fails and row.is_confirmed:
                sure = f"yes: {row.largest} runs, {row.fails['size']} {outcome_text(row.fails)}"
            rows.append((row.name, *sizes, size(per_sample) if per_sample else "-", sure))
        return [head, *rows]

    def predicted_table(self) -> list[tuple[str, ...]]:
        """What was predicted before the first launch beside what was measured."""
        head = "strategy|largest predicted|largest measured|peak predicted|peak measured|error|launches".split("|")
        rows = []
        for row in self.rows:
            at = row.at(row.largest)
            if row.guess and at:
                predicted, measured = row.guess.peak_at(row.largest), peak_of(at)
                cells = (row.guess.size, row.largest, size(predicted), size(measured))
                error = f"{100 * (predicted / measured - 1):+.1f} %"
                rows.append((row.name, *map(str, cells), error, str(row.launches)))
        return [tuple(head), *rows]

    def trials_table(self) -> list[tuple[str, ...]]:
        """Every size that was tried, also those that do not fit."""
        last = ("host",) if self.simulated else ("samples/s", "tokens/s", "loss")
        head = ("strategy", self.variable.short, "outcome", "fresh process", *PEAKS[:3], *last)
        rows = []
        for row in self.rows:
            for line in sorted(row.trials, key=lambda line: (line["size"], line["fresh"])):
                fresh = "yes" if line["fresh"] else "no"
                if line["outcome"] != "fits":
                    rows.append((row.name, str(line["size"]), outcome_text(line), fresh, *["-"] * (len(head) - 4)))
                    continue
                peaks = [size(peak_of(line, name)) for name in PEAKS[:3]]
                if self.simulated:
                    rest = [size(peak_of(line, "host"))]
                else:
                    rest = [rounded(line["samples_per_s"]), rounded(line["tokens_per_s"]), decimals(line["loss"])]
                rows.append((row.name, str(line["size"]), "fits", fresh, *peaks, *rest))
        return [head, *rows]

    def _blocks(self) -> list[tuple[str, str, list[tuple[str, ...]]]]:
        """(heading, text, table) of each part."""
        problems = [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        blocks = [(self.variable.largest.capitalize(), " ".join([self._batches_text(), *problems]), self.main_table())]
        if self.has_speed_table:
            blocks.append(("Speed", self._speed_text(), self.speed_table()))
        if self.finished:
            text = f"{_ABOUT_RUNS} {self._finished_text()}"
            blocks.append(("Trained to the end", text, finished_table(self.finished)))
        blocks.append(("What a process holds", _ABOUT_HELD, self.held_table()))
        if any(row.guess for row in self.rows):
            blocks.append(("Predicted and measured", _ABOUT_PREDICTED, self.predicted_table()))
        return [*blocks, ("All trials", _ABOUT_TRIALS + _ABOUT_HOST * self.simulated, self.trials_table())]

    def _batches_text(self) -> str:
        about = next((row.about for row in self.rows if row.about), {})
        if not about:
            return ""
        lengths = " and ".join(f"{length:,}" for length in about["longest"].values())
        rows = f"all rows have the greatest length of {lengths} tokens (the data: {about['mean_sample']:,} on average)"
        if self.variable is LENGTHS:
            rows = f"micro-batch {micro_batch_of(self.options)}; all rows have the length, all tokens are trained on"
        processes = counted(self.options.num_processes, "process")
        return (
            f"{processes}; {about['parameters']:,} parameters, {about['precision']}; {rows}; accumulation "
            f"{about['accumulation']}. Sizes are those of one process, rates of all together; factor is against the "
            f"first strategy.{' The devices are simulated.' * self.simulated}"
        )

    def _speed_text(self) -> str:
        timer, about = self.comparison.timer, next(row.about for row in self.rows if row.about)
        where = f" {timer.note(about['precision'])}." if timer else ""
        return (
            "Rates are of all processes together, each at its best; spread is the range of the timed updates, load "
            f"the machine's load average before and after them.{where}{self._evaluation_text()}"
        )

    def _evaluation_text(self) -> str:
        evaluations = [row.evaluation for row in self.rows if row.evaluation]
        if not evaluations:
            return ""
        samples = " or ".join(dict.fromkeys(f"{line['evaluation_samples']:,}" for line in evaluations))
        return f" Evaluation is one batch of {samples} samples, generation included, not a full evaluation."

    def _values(self, row: StrategyRow, line: dict[str, Any]) -> dict[str, Any]:
        """A line of results.csv; empty is what a size that does not fit, or a simulated device, does not have."""
        fits = line["outcome"] == "fits"
        peaks = {f"{name}_bytes": peak_of(line, name, with_evaluation=False) if fits else "" for name in PEAKS}
        return {
            "strategy": row.name,
            self.variable.size.replace(" ", "_"): line["size"],
            "outcome": line["outcome"],
            "where": line.get("where", ""),
            "phase": line.get("phase", ""),
            "fresh_process": line["fresh"],
            **peaks,
            "peak_with_evaluation_bytes": peak_of(line) if fits else "",
            **{name: "" if self.simulated else line.get(name, "") for name in RATES},
            "launch": line["launch"],
        }

    # ------------------------------------------------------------------------------------------------------ provenance

    def _provenance(self) -> list[str]:
        environment = self.machine.environment
        packages = environment["packages"]
        versions = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
        changed = ", with changes that are not committed" if environment["zerofit_changed"] else ""
        launches, seconds = sum(row.launches for row in self.rows), sum(row.seconds for row in self.rows)
        limit = f"{size(self.limits.device)} for each process" if self.limits.device else "none"
        timed = f"; {self.options.steps} timed updates of each size" if self.timed else ""
        settings = " ".join(f"{name}={value}" for name, value in self.machine.settings.items())
        return [
            f"Command: `{self.command}`",
            f"Hardware: {self.machine.describe()}",
            f"Limit: {limit} ({_LIMIT_OF_DEVICE if self.machine.devices else _LIMIT_OF_CPU})",
            *([f"Trials run with {settings}"] if settings else []),
            f"Versions: zerofit {(environment['zerofit_commit'] or 'unknown')[:12]}{changed}, Python "
            f"{environment['python']}, {versions}",
            f"Launches: {launches}, {seconds / 60:.1f} minutes{timed}",
            *(f"Note: {note}" for note in (*self.notes, *self.limits.notes)),
        ]

    def _markdown(self, blocks) -> str:
        parts = [f"# {self.title}", self.conclusion]
        for heading, text, rows in blocks:
            parts += [f"## {heading}", *([text] if text else []), markdown_table(rows)]
        parts += [f"![memory against {self.variable.size}](memory.svg)"]
        parts += [f"![throughput against {self.variable.size}](throughput.svg)"] if self.timed else []
        parts += ["\n".join(f"* {line}" for line in self._provenance())]
        return "\n\n".join(parts) + "\n"


_ABOUT_HELD = "Kept between updates by the process that keeps most, and how much a sample or token adds."
_ABOUT_RUNS = (
    "A run of the task for each strategy, as the recipe says, at its best batch and without the limit of the trials. "
    "Training is the sum of all updates' seconds, an evaluation the one of median duration."
)
_ABOUT_PREDICTED = "`zerofit plan` predicted the size that the first launch of each strategy begins with."
_ABOUT_TRIALS = "Peaks of the process that needs most: allocated by torch, reserved (limited), total of the device."
_ABOUT_HOST = " Host: what the process' floating-point tensors there would take."
_LIMIT_OF_CPU = "RLIMIT_DATA: of what the process has asked for and not given back, the program included"
_LIMIT_OF_DEVICE = "of what the allocator reserves; what the driver takes for each process (CUDA: 640 MiB) is extra"


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """A pipe table; all columns but the first to the right."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    marks = [":--", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rest))
