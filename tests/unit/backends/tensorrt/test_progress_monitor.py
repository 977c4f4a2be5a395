"""Progress from nested phases, cancellation, and callbacks that never let an error through."""

from __future__ import annotations

import threading

from edgespec.backends.tensorrt.progress_monitor import BuildProgress, monitor_of


class Library:
    """What is used of the library's module."""

    class IProgressMonitor:
        pass


def shares_of(progress_calls: list[tuple[str, ...]]) -> list[float]:
    found: list[float] = []
    progress = BuildProgress(lambda share, _: found.append(round(share, 4)))
    for call in progress_calls:
        if call[0] == "start":
            progress.start(call[1], call[2] or None, int(call[3]))
        elif call[0] == "step":
            progress.step(call[1], int(call[2]))
        else:
            progress.finish(call[1])
    return found


def test_a_phase_inside_a_step_counts_by_its_own_steps() -> None:
    calls = [
        ("start", "build", "", "4"),
        ("step", "build", "0"),
        ("start", "optimize", "build", "2"),
        ("step", "optimize", "0"),
        ("start", "graph", "optimize", "2"),
        ("step", "graph", "0"),
        ("finish", "graph"),
        ("finish", "optimize"),
        ("step", "build", "1"),
    ]
    # 1/4; inside the second quarter a half, then three quarters of it; then the whole
    assert shares_of(calls) == [0.0, 0.25, 0.375, 0.4375, 0.5]


def test_a_phase_that_comes_again_takes_nothing_back() -> None:
    again = [("start", "cost", "build", "2"), ("step", "cost", "1"), ("finish", "cost")]
    found = shares_of([("start", "build", "", "2"), *again, *again, ("step", "build", "0")])
    assert found == sorted(found)
    assert found[-1] == 0.5


def test_a_build_that_does_fewer_steps_than_it_said_is_done_all_the_same() -> None:
    assert shares_of([("start", "build", "", "6"), ("finish", "build")]) == [0.0, 1.0]


def test_phases_of_an_unknown_parent_or_with_no_steps_do_no_harm() -> None:
    calls = [
        ("step", "nobody", "3"),
        ("finish", "nobody"),
        ("start", "alone", "nobody", "0"),
        ("step", "alone", "0"),
    ]
    assert shares_of(calls)[-1] == 1.0


def test_a_build_goes_on_until_it_is_cancelled() -> None:
    progress = BuildProgress(lambda share, phase: None)
    monitor = monitor_of(Library, progress)
    monitor.phase_start("build", None, 3)
    assert monitor.step_complete("build", 0) is True
    progress.cancel()
    assert monitor.step_complete("build", 1) is False


def test_an_error_in_a_listener_cancels_and_is_kept() -> None:
    wrong = ValueError("a listener's own")

    def listen(share: float, phase: str) -> None:
        raise wrong

    progress = BuildProgress(listen)
    monitor = monitor_of(Library, progress)
    monitor.phase_start("build", None, 3)
    assert progress.failure is wrong
    assert monitor.step_complete("build", 0) is False
    monitor.phase_finish("build")


def test_phases_of_many_threads_are_counted() -> None:
    found: list[float] = []
    progress = BuildProgress(lambda share, _: found.append(share))
    progress.start("build", None, 8)

    def work(number: int) -> None:
        name = f"tactics {number}"
        progress.start(name, "build", 50)
        for step in range(50):
            assert progress.step(name, step)
        progress.finish(name)
        progress.step("build", number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.roots["build"].share() == 1.0
    assert not progress.roots["build"].inside
    assert max(found) == 1.0
