"""A run on two machines: what a killed rank, a machine that is started twice, and a signal do to it."""

import signal

from helpers import launch


def test_a_run_outlives_what_happens_to_it(job, machines, tmp_path):
    """Only the launcher of its machine sees a rank end; both restart. A launcher too many is refused, and disturbs
    nothing. A signal to one machine ends all. The losses are those of a run on one machine."""
    run = job("run", steps=40, processes=2, flags=["--max_restarts", 2]).start_all()
    run.kept_up_to(12)
    run.machines[1].ranks()[1].kill()
    run.kept_up_to(20)
    assert "rank 1 was killed by SIGKILL" in run.said()
    assert "restart 1 of 2" in run.said()

    ranks = [process for machine in run.machines for process in machine.ranks().values()]
    twin_log = run.folder.parent / "twin.log"
    for process in ranks:
        process.suspend()  # the run is not over before the twin has come
    twin = machines[2].start(*run.command(1), log=twin_log)
    assert twin.wait(timeout=120) == 2, twin_log.read_text()
    for process in ranks:
        process.resume()
    assert "machine 1 takes part in this run already, and gpu02 has the same number" in twin_log.read_text()
    assert "restart 2 of 2" not in run.said()

    run.running[1].send_signal(signal.SIGTERM)
    codes, made = run.ends(120), run.last_update()
    assert codes == [85 if made < 40 else 0] * 2, run.said()[-6000:]

    expected = launch(tmp_path / "whole", *run.options, strategy="ddp", processes=2)
    assert run.losses() == {line["update"]: line["loss"] for line in expected if 1 <= line["update"] <= made}
    assert sorted(run.losses()) == list(range(1, made + 1))
