"""The record of a run while it trains: metrics.jsonl, samples.jsonl, the trackers and the terminal."""

import contextlib
from typing import TYPE_CHECKING

from zerofit.record.metrics import UpdateMetrics
from zerofit.record.terminal import Bar, rounded

if TYPE_CHECKING:
    from zerofit.health.anomaly import Anomaly
    from zerofit.training.run import Run


class RunRecorder:
    """The record of one run. All ranks call its methods together; only the main process writes."""

    def __init__(self, run: "Run", bar: Bar) -> None:
        self.folder, self.environment = run.folder, run.environment
        self._engine, self._timeline, self._bar, self._data = run.engine, run.timeline, bar, run.data
        self._is_first = True

    def begin(self, updates: int) -> None:
        """Show what comes after this number of updates: at the start of a launch, and after a rewind."""
        self._bar.begin(updates)

    def write(self, metrics: UpdateMetrics) -> None:
        """A line of metrics.jsonl and of the trackers."""
        accelerator, line = self._engine.accelerator, metrics.to_line()
        if accelerator.trackers:
            ranks = {f"rank_seconds/{name}": value for name, value in line.get("rank_seconds", {}).items()}
            figures = {name: value for name, value in line.items() if name not in ("update", "rank_seconds")}
            figures |= {"anomaly": 1} if "anomaly" in line else {}  # the reason is a text: not every tracker takes one
            accelerator.log(figures | ranks, step=line["update"])
        if self._engine.is_main:
            self.folder.metrics.add(line)

    def write_samples(self, update: int, samples: list[int]) -> None:
        """A line of samples.jsonl: the samples of this update. Ranks of one replica have the same ones."""
        ranks = self._engine.gather_objects(samples)
        if ranks is not None:
            replicas = [ranks[rank] for rank in self._engine.layout.loss_ranks]
            self.folder.samples.add({"update": update, "samples": sorted(index for own in replicas for index in own)})

    def write_anomaly(self, anomaly: "Anomaly", action: str) -> None:
        """A line of anomalies.jsonl: an update that was refused, and what is done about it."""
        samples, tokenizer = self._data.train, self._data.tokenizer
        line = anomaly.report(self._engine, action, lambda index: tokenizer.decode(samples[index]["input_ids"]))
        if line is not None:
            self.folder.anomalies.add(line)

    def show(self, metrics: UpdateMetrics) -> None:
        """One update more at the terminal; after the first one also how long the start took, in environment.json."""
        self._bar.update(metrics)
        if self._is_first:
            self._is_first = False
            self._timeline.mark("first update")
            if self._engine.is_main:
                self.environment["seconds_to_first_update"] = self._timeline.seconds
                self.environment["bytes_held_by_rank_0"] = self._engine.held_bytes()
                with contextlib.suppress(OSError):  # a full disk: it is written again at the end
                    self.folder.write_environment(self.environment)

    def show_held_out(self, update: int, figures: dict[str, float]) -> None:
        named = (f"{name.removeprefix('eval_')} {rounded(value, 4)}" for name, value in figures.items())
        self.log_lines(f"update {update}: held-out " + ", ".join(named))

    def log_lines(self, *texts: str) -> None:
        """Print lines above the status line."""
        for text in texts:
            self._bar.log_line(text)

    def close(self) -> None:
        self._bar.close()
