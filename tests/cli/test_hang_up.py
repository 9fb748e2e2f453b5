"""A terminal that is closed ends a command as Ctrl-C does; under nohup it does not."""

import signal

import pytest

from flopwise.cli import main


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_DFL, 130), (signal.SIG_IGN, 0)])
def test_a_hang_up_is_an_interruption_unless_it_is_ignored(cli, monkeypatch, before, code):
    monkeypatch.setattr(main.flopwise, "main", lambda *_, **__: signal.raise_signal(signal.SIGHUP))
    usual = signal.signal(signal.SIGHUP, before)
    try:
        assert cli("runs").returncode == code
    finally:
        signal.signal(signal.SIGHUP, usual)
