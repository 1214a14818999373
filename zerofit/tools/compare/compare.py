r"""`zerofit compare`: the largest batch that each strategy holds, its memory and its speed, by running it.

    zerofit compare --config recipes/cls/deberta-xl-mrpc.yaml --strategies ddp,zero2 --num_processes 2 \
        --memory_limit 24GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies zero2,zero2:lora=true --memory_limit 1GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --memory_limit 1GiB --finish
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --simulate 512MiB --steps 2

Every trial is a real launch of the task with the recipe at one batch size; its rows have the greatest length that the
recipe allows. The journal in the output folder keeps all results: the same command resumes where it was interrupted,
and repeats nothing. Without a GPU the memory limit is that of simulated devices, and updates are timed on the CPU.

The report is one table of results at the terminal, and report.md, report.html and results.csv. report.html is one file
with its pictures, which loads nothing from elsewhere, for a wide screen and for a phone.
"""

import base64
import csv
import html
import math
import re
import shlex
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerofit.recipe.errors import UserError, escape_controls
from zerofit.recipe.files import counted, parse_bytes
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import duration, log_lines, rounded, screen_width, shortened, size, table
from zerofit.tools.compare.candidates import CompareOptions, check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.comparison import (
    TIMING_FIELDS,
    Comparison,
    StrategyRow,
    compute_speed_up,
    find_common_size,
    format_load,
    format_spread,
    summarize_results,
)
from zerofit.tools.compare.finish import (
    FinishedRun,
    describe_agreement,
    finished_table,
    make_finish_recipe,
    train_to_the_end,
)
from zerofit.tools.compare.trial import (
    NOT_COUNTED,
    choose_limit,
    inspect_trial_machine,
    peak_bytes,
    recipe_without_weights,
    simulated_machine,
    timed_precision,
)
from zerofit.tools.runs import ending_in_order
from zerofit.tools.tool_recipe import read_with_recipe, recipe_text

TRIAL_RECIPE = "recipe.yaml"
JOURNAL = "journal.jsonl"


def main(argv: list[str]) -> int:
    options, cls = read_with_recipe(CompareOptions, argv, prog="zerofit compare")
    candidates = read_candidates(options.names)
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"compare-{name}")
    check_folder_of(output, JOURNAL, "comparison")
    check_paths(options, output, "output")
    values, notes = make_recipe(options, cls)
    check_overrides(candidates, values, cls)
    to_finish = make_finish_recipe(options, cls) if options.finish else None
    if to_finish:
        check_overrides(candidates, to_finish, cls)
    real_machine = None
    device = options.simulate or options.memory_limit
    if not options.simulate or options.source("steps") or options.finish:  # updates are timed on this machine
        real_machine = inspect_trial_machine()
    if real_machine is not None and real_machine.devices and not options.simulate:
        machine = real_machine
        timer = None
    elif device:
        machine = simulated_machine(device, options.num_processes)
        timer = real_machine
        values = recipe_without_weights(values)
        notes = [*notes, NOT_COUNTED]
    else:
        raise UserError("there is no GPU here: set --memory_limit, e.g. 1GiB, for simulated devices of this size")
    limit_given = parse_bytes(options.memory_limit) if options.memory_limit else None
    limit, limit_notes = choose_limit(machine, options.num_processes, limit_given)
    notes += limit_notes
    output.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(output, "output")
    folder.lock()
    (output / TRIAL_RECIPE).write_text(recipe_text(values), encoding="utf-8")
    (output / JOURNAL).touch()
    log_lines(
        f"recipe    {options.source('config') or 'from flags'}",
        f"compared  {', '.join(candidate.name for candidate in candidates)}",
        f"machine   {machine.describe()}",
        f"folder    {output}",
        *(f"note      {note}" for note in notes),
    )
    comparison = Comparison(
        options, candidates, machine=machine, limit=limit, recipe=output / TRIAL_RECIPE, output=output, timer=timer
    )
    with ending_in_order():
        try:
            comparison.run()
            report = ComparisonReport(comparison, f"zerofit compare {shlex.join(argv)}", notes)
            report.write(output)
            log_lines("", report.for_terminal())
            if to_finish:
                recipe = output / "recipe-finish.yaml"
                recipe.write_text(recipe_text(to_finish), encoding="utf-8")
                rows = zip(candidates, comparison.rows())
                best = [(candidate, row.best["size"]) for candidate, row in rows if row.best]
                report.finished = [train_to_the_end(comparison, recipe, candidate, size) for candidate, size in best]
                report.write(output)
                log_lines("", report.for_terminal())
        except KeyboardInterrupt:
            log_lines(
                "", f"interrupted. The results so far are in {output / JOURNAL}: the same command resumes from there"
            )
            raise
    log_lines("", f"report    {output / 'report.html'}, report.md, results.csv")
    return 1 if comparison.problems or any(run.problem for run in report.finished) else 0


# Distinct also for colour-blind people: Okabe and Ito, jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = "os^Dv<>ph"


def plot_memory(rows: list[StrategyRow], limit: int | None) -> Figure:
    """Plot the peak memory of the rank that needs most against the batch size: a line for predictions, points for
    measurements, and a cross where memory ran out."""
    max_bytes = max([peak_bytes(line) for row in rows for line in row.fitting] + [limit or 0]) or 2**20
    unit, name = (2**30, "GiB") if max_bytes >= 2 * 2**30 else (2**20, "MiB")
    figure, axes = _figure("batch size", f"peak memory of a process, {name}")
    for index, row in enumerate(rows):
        style = _style(index)
        lines = row.fitting
        fails = row.smallest_misfit
        if row.predicted:
            line = [(size, peak / unit) for size, peak in sorted(row.predicted.items())]
            axes.plot(*zip(*line), color=style["color"], linewidth=1.2)
        sizes = [line["size"] for line in lines]
        peaks = [peak_bytes(line) / unit for line in lines]
        axes.plot(
            sizes, peaks, linestyle="none", label=shortened(row.name if lines else f"{row.name}: none", 40), **style
        )
        if fails:
            axes.plot(
                [fails["size"]],
                [(limit or max_bytes) / unit],
                "x",
                color=style["color"],
                markersize=9,
                markeredgewidth=2,
            )
    if limit:
        axes.axhline(limit / unit, color="#555555", linestyle="--", linewidth=1, label="limit (x: does not fit)")
    if any(row.predicted for row in rows):
        axes.plot([], [], color="#555555", linewidth=1.2, label="predicted (points: measured)")
    largest_tried = max((line["size"] for row in rows for line in row.trials), default=1)
    axes.set_xlim(0, 1.05 * largest_tried)  # predictions may go further
    axes.set_ylim(0, 1.08 * max_bytes / unit)  # from 0, so that heights are in proportion
    return _with_legend(figure, axes)


def plot_throughput(rows: list[StrategyRow]) -> Figure:
    """Plot samples per second of all processes together against the batch size per process."""
    figure, axes = _figure("batch size", "samples/s")
    for index, row in enumerate(rows):
        lines = row.timed
        best = row.best
        style = _style(index)
        if best:
            sizes = [line["size"] for line in lines]
            rates = [line["samples_per_s"] for line in lines]
            axes.plot(sizes, rates, linewidth=1.2, label=shortened(row.name, 40), **style)
            size = best["size"]
            rate = best["samples_per_s"]
            axes.plot([size], [rate], "o", color=style["color"], markersize=11, fillstyle="none")
    axes.set_xlim(0, 1.03 * axes.get_xlim()[1])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return _with_legend(figure, axes)


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 6}


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")  # readable at the width of a phone
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.locator_params("x", integer=True)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    """Add a legend below the axes, where it covers no points."""
    if labels := axes.get_legend_handles_labels()[1]:
        columns = 2 if max(map(len, labels)) > 20 else 3
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        figure.set_figheight(3.4 + 0.2 * math.ceil(len(labels) / columns))
    return figure


REPORTED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")
PAGE_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1180px; margin: auto; padding: 1rem; overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; overflow-wrap: normal }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
img { width: 40rem; max-width: 100% }
@media (max-width: 800px) { /* a block for each row, its cells below each other */
  table, tbody, tr { display: block }
  tr:first-child { display: none }
  tr { padding: .5rem 0; border-bottom: 1px solid #ddd }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: 0; border: 0 }
  td:first-child { font-weight: bold }
  td:not(:first-child)::before { content: attr(data-label); text-align: left; color: #555 }
}
"""
ReportSection = str | list[tuple[str, ...]] | list[str]  # a heading (# and ##) or a paragraph; a table; bullets


class ComparisonReport:
    """The report of a comparison: its text, table and plots.

    Args:
        command: the command that made it.
        notes: notes on how the trials differ from the recipe, for the list below the tables.
    """

    def __init__(self, comparison: Comparison, command: str, notes: list[str]):
        self.comparison = comparison
        self.options = comparison.options
        self.command = command
        self.notes = notes
        self.rows = comparison.rows()
        self.common = find_common_size(self.rows)
        self.finished: list[FinishedRun] = []  # the runs of --finish

    def write(self, output: Path) -> None:
        """Write the report, the plots and results.csv into the folder."""
        figures = {"memory": plot_memory(self.rows, self.comparison.limit)}
        if any(row.timed for row in self.rows):
            figures["throughput"] = plot_throughput(self.rows)
        pictures = {}
        for name, figure in figures.items():
            with rc_context({"svg.hashsalt": "zerofit"}):  # equal files for equal results
                figure.savefig(output / f"{name}.svg", metadata={"Date": None})
            pictures[name] = (output / f"{name}.svg").read_bytes()
        parts = self._parts()
        (output / "report.md").write_text(escape_controls(render_markdown(parts, [*pictures])), encoding="utf-8")
        (output / "report.html").write_text(render_html(parts, pictures), encoding="utf-8")
        lines: list[dict[str, Any]] = []  # a cell is empty where a size does not fit, or was not timed
        for row in self.rows:
            for trial in row.trials:
                cells = {"strategy": row.name, "batch_size": trial["size"], "outcome": trial["outcome"]}
                cells |= {name: trial.get(name, "") for name in ("where", "phase")}
                for name in ("allocated", "reserved", "host"):
                    cells[f"{name}_bytes"] = peak_bytes(trial, name) if trial["outcome"] == "fits" else ""
                lines.append(cells | {name: trial.get(name, "") for name in TIMING_FIELDS})
        with (output / "results.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0] if lines else ())
            writer.writeheader()
            writer.writerows(lines)

    def for_terminal(self) -> str:
        """Return the table and the conclusion; with --finish those of the finished runs."""
        if self.finished:
            text = "\n".join(self._about_finished())
            return "\n\n".join(["trained to the end:", table(finished_table(self.finished), screen_width()), text])
        problems = [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        return "\n".join([table(self.results_table(), screen_width()), "", *problems, summarize_results(self.rows)])

    def results_table(self) -> list[tuple[str, ...]]:
        """Return the column names and a row for each candidate, whose factor and speed-up are against the first."""
        rows = [self._cells(row) for row in self.rows]
        names = [name for name in rows[0] if any(cells[name] != "-" for cells in rows)]
        return [tuple(names), *(tuple(cells[name] for name in names) for cells in rows)]

    def _cells(self, row: StrategyRow) -> dict[str, str]:
        first = self.rows[0]
        largest = row.at(row.largest)
        common = row.at(self.common)
        best = row.best
        speed_up = compute_speed_up(row, first)
        return {
            "strategy": row.name,
            "largest batch": row.limit_text,
            "factor": f"{row.largest / first.largest:.2f}" if largest and first.largest else "-",
            "its peak": size(peak_bytes(largest)) if largest else "-",
            "predicted": size(row.predicted_peak(row.largest)) if largest and row.predicted else "-",
            f"peak at {self.common}": size(peak_bytes(common)) if common else "-",
            f"samples/s at {self.common}": rounded(common["samples_per_s"]) if common in row.timed else "-",
            "best batch": str(best["size"]) if best else "-",
            "samples/s there": rounded(best["samples_per_s"]) if best else "-",
            "spread": format_spread(best) if best else "-",
            "load": format_load(best) if best else "-",
            "tokens/s there": rounded(best["tokens_per_s"]) if best else "-",
            "speed-up": f"{speed_up:.2f}" if speed_up else "-",
            "an epoch": duration(row.about["num_samples"] / best["samples_per_s"]) if best and row.about else "-",
        }

    def _parts(self) -> list[ReportSection]:
        """Return the parts of report.md and report.html, in order."""
        simulated = ", simulated" if self.comparison.machine.simulated else ""
        name = name_of_recipe(self.options.source("config"), self.options.task)
        parts: list[ReportSection] = [f"# Batch sizes{simulated}: {name}", summarize_results(self.rows)]
        sentences = [f"{row.name}: {row.problem}." for row in self.rows if row.problem]
        if about := next((row.about for row in self.rows if row.about), None):
            lengths = " and ".join(f"{length:,}" for length in about["longest"].values())
            sentences.append(
                f"{counted(self.options.num_processes, 'process')}; {about['parameters']:,} parameters, "
                f"{about['precision']}; all rows have the greatest length of {lengths} tokens (the data: "
                f"{about['mean_sample']:,} on average); accumulation {about['accumulation']}. Sizes are those of one "
                "process, rates of all together, factor and speed-up against the first strategy. Peaks are of the "
                "process that needs most, evaluation included; predicted is the peak of the largest batch by `zerofit "
                "plan`. Spread is the range of the timed updates, load the machine's load average before and after "
                "them."
            )
            if timer := self.comparison.timer:
                precision, why = timed_precision(timer, about["precision"])
                because = f", for {why}" if why else ""
                sentences.append(f"Timed on {timer.describe()} without a memory limit, in {precision}{because}.")
        parts += [self.results_table(), " ".join(sentences)]
        if self.finished:
            about_runs = (
                "A run of the task for each strategy, as the recipe says, at its best batch and without the limit of "
                "the trials. Training is the sum of all updates' seconds, an evaluation the one of median duration."
            )
            parts += [
                "## Trained to the end",
                finished_table(self.finished),
                " ".join([about_runs, *self._about_finished()]),
            ]
        machine = self.comparison.machine
        limit = self.comparison.limit
        environment = machine.environment
        packages = environment["packages"]
        versions = ", ".join(f"{name} {packages[name]}" for name in REPORTED_PACKAGES if name in packages)
        changed = ", with changes that are not committed" if environment["zerofit_changed"] else ""
        launches = sum(row.launches for row in self.rows)
        seconds = sum(row.seconds for row in self.rows)
        limit_text = f"{size(limit)} for each process, of what its allocator reserves" if limit else "none"
        provenance = [
            f"Command: `{self.command}`",
            f"Hardware: {machine.describe()}",
            f"Limit: {limit_text}; what the driver takes for each process (CUDA: 640 MiB) is extra",
            f"Versions: zerofit {(environment['zerofit_commit'] or 'unknown')[:12]}{changed}, Python "
            f"{environment['python']}, {versions}",
            f"Launches: {launches}, {seconds / 60:.1f} minutes; {self.options.steps} timed updates of each size",
            *(f"Note: {note}" for note in self.notes),
        ]
        return [*parts, provenance]

    def _about_finished(self) -> list[str]:
        """Return sentences on the agreement and the problems of the finished runs."""
        agreement = describe_agreement(self.finished)
        problems = [f"{run.name}: {run.problem}" for run in self.finished if run.problem]
        return [f"{agreement}.", *problems] if agreement else problems


def render_markdown(parts: list[ReportSection], pictures: list[str]) -> str:
    """Return the parts as Markdown; the pictures follow the first table."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part[0], tuple):
            head, *body = [[cell.replace("|", "\\|") for cell in row] for row in part]
            alignment = [":--", *["--:"] * (len(head) - 1)]
            texts.append("\n".join("| " + " | ".join(row) + " |" for row in (head, alignment, *body)))
            texts += [f"![{name} against batch size]({name}.svg)" for name in pictures]
            pictures = []
        else:
            texts.append("\n".join(f"* {line}" for line in part))
    return "\n\n".join(texts) + "\n"


def render_html(parts: list[ReportSection], pictures: dict[str, bytes]) -> str:
    """Return the parts as one HTML page. `pictures`: {name: SVG file}, embedded after the first table."""
    title = next(part for part in parts if isinstance(part, str)).lstrip("# ")
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{_escape_html(title)}</title><style>{PAGE_STYLE}</style></head><body>",
    ]
    for part in parts:
        if isinstance(part, str):
            level = len(part) - len(part.lstrip("#"))
            tag = f"h{level}" if level else "p"
            lines.append(f"<{tag}>{_escape_html(part.lstrip('# '))}</{tag}>")
        elif isinstance(part[0], tuple):
            # "1.2 MiB" stays on one line
            unbroken = [[re.sub(r"(?<=\d) (?=\S+$)", "\N{NO-BREAK SPACE}", cell) for cell in row] for row in part]
            names, *body = [[_escape_html(cell) for cell in row] for row in unbroken]
            rows = ["".join(f"<th>{name}</th>" for name in names)]
            for row in body:  # a narrow screen shows the name of its column next to each cell
                rows.append("".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, row)))
            lines.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
            for name, content in pictures.items():
                image = base64.b64encode(content).decode()
                lines.append(f'<img alt="{name}" src="data:image/svg+xml;base64,{image}">')
            pictures = {}
        else:
            lines += ["<ul>", *(f"<li>{_escape_html(line)}</li>" for line in part), "</ul>"]
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _escape_html(text: str) -> str:
    """Escape a text for HTML; words in backquotes become code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(escape_controls(text)))
