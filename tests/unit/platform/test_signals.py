from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from megarl.platform import signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A failing test must not leave its handlers to the others."""
    before = {number: signal.getsignal(number) for number in (*signals.ENDING, *signals.ASKING, signal.SIGALRM)}
    # Under nohup, or in the background of a script, the suite itself has inherited ignored signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.getsignal(number)  # handlers of Python run between two of its instructions


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_raises_with_the_code_of_a_shell(number: signal.Signals, code: int):
    with signals.handled(), pytest.raises(signals.Terminated) as ending:
        send(number)
    assert (ending.value.code, ending.value.signal) == (code, number)


def test_ctrl_c_is_an_interrupt():
    with signals.handled(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_signals_do_nothing_once_the_clean_up_has_begun_until_the_command_has_ended():
    with signals.handled():
        signals.hold()
        for number in signals.ENDING:
            send(number)
    with signals.handled(), pytest.raises(signals.Terminated):
        send(signal.SIGTERM)


def test_a_clean_up_that_hangs_can_be_interrupted_again(monkeypatch: pytest.MonkeyPatch):
    with signals.handled():
        signals.hold()
        monkeypatch.setattr(signals, "PATIENCE_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_signal_that_a_library_swallowed_is_raised_again_unless_the_clean_up_has_begun(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(signals, "REPEAT_S", 0.05)
    for _ in range(2):
        with signals.handled():
            for _ in range(2):
                with pytest.raises(signals.Terminated):
                    send(signal.SIGTERM)
            with pytest.raises(signals.Terminated):
                time.sleep(10)
            signals.hold()
            time.sleep(0.2)
    time.sleep(0.2)


def test_requests_raise_nothing_and_are_told_once_asked_for():
    with signals.handled():
        assert (signals.stop_asked(), signals.take_save()) == (None, False)
        send(signal.SIGUSR1)
        asked = signals.stop_asked()
        send(signal.SIGUSR1)
        assert asked is not None and signals.stop_asked() == asked
        send(signal.SIGUSR2)
        assert (signals.take_save(), signals.take_save()) == (True, False)
    with signals.handled():
        assert signals.stop_asked() is None


def test_earlier_handlers_come_back():
    signal.signal(signal.SIGTERM, ours := lambda *_: None)
    with signals.handled():
        assert signal.getsignal(signal.SIGTERM) is not ours
    assert signal.getsignal(signal.SIGTERM) is ours


def test_what_the_parent_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.handled():
        send(signal.SIGHUP)


def test_the_handler_of_a_library_is_replaced_by_installing_again_and_only_inside():
    def library(*_: object) -> None:
        raise AssertionError("the library's handler ran")

    with signals.handled():
        signal.signal(signal.SIGTERM, library)
        signals.install()
        with pytest.raises(signals.Terminated):
            send(signal.SIGTERM)
    signal.signal(signal.SIGTERM, library)
    signals.install()
    assert signal.getsignal(signal.SIGTERM) is library


def test_another_thread_may_run_a_command():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with signals.handled():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
