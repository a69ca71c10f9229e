"""Signals that end a run after its step."""

import os
import signal

import pytest

from jax_tformer.terminal import Interruption


@pytest.fixture(autouse=True)
def handlers():
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("kind", [signal.SIGHUP, signal.SIGTERM])
def test_the_first_signal_is_kept_and_the_handlers_come_back(kind):
    before = signal.getsignal(kind)
    with Interruption() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), kind)
        assert (stop.signal, stop.status) == (kind, 128 + kind)
    assert signal.getsignal(kind) is before


def test_a_second_one_breaks_off_but_a_terminal_that_closes_may_say_so_twice():
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_under_nohup_a_closing_terminal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
