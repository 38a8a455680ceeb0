"""Notices that a machine will be stopped: whom is asked, what counts, and what a run does."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dapo_jax import maintenance
from dapo_jax.maintenance import Notices
from dapo_jax.processes import Processes
from dapo_jax.progress import Progress
from dapo_jax.stop_signals import StopSignals
from dapo_jax.types import StopRequested
from tests.processes import Store
from tests.runs import finish, run, start

TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
ANNOUNCED = f"maintenance-event is {TERMINATE}"


class Metadata:
    """A metadata server: `said` gives the value of a key at its n-th request; None: an error."""

    def __init__(self, said):
        self.asked = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                prefix = "/computeMetadata/v1/instance/"
                assert self.path.startswith(prefix) and self.headers["Metadata-Flavor"] == "Google"
                key = self.path.removeprefix(prefix)
                number = server.asked[key] = server.asked.get(key, 0) + 1
                value = said(key, number)
                self.send_response(200 if value is not None else 503)
                self.end_headers()
                self.wfile.write((value or "").encode())

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def in_order(**values):
    """Each key's values, the last one again and again; other keys are FALSE."""
    of = {name.replace("_", "-"): each for name, each in values.items()}
    return lambda key, number: of.get(key, ["FALSE"])[min(number, len(of.get(key, [0]))) - 1]


@pytest.mark.parametrize(
    "values, told",
    [
        ({"maintenance_event": ["NONE", "NONE", TERMINATE]}, ANNOUNCED),
        ({"maintenance_event": [None, "NONE", None, TERMINATE]}, ANNOUNCED),
        ({"preempted": ["FALSE", "TRUE"]}, "preempted is TRUE"),
        ({"maintenance_event": ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"]}, None),
        ({"maintenance_event": [TERMINATE]}, None),  # since before the start
        ({"maintenance_event": [None, TERMINATE]}, None),
        ({"maintenance_event": [TERMINATE, "NONE", TERMINATE]}, ANNOUNCED),
        ({"maintenance_event": [None], "preempted": [None]}, None),
    ],
)  # fmt: skip
def test_what_counts_as_a_notice(values, told):
    found = []
    with (
        Metadata(in_order(**values)) as server,
        Notices(found.append, server.host, every_seconds=0.01) as notices,
    ):
        while notices._thread.is_alive() and server.asked.get("maintenance-event", 0) < 8:
            time.sleep(0.01)
    assert found == ([] if told is None else [told])


def test_machines_that_are_not_googles_ask_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv(maintenance.HOST_VARIABLE, raising=False)
    for text, host in (("Google Compute Engine\n", maintenance.HOST), ("KVM\n", None)):
        (tmp_path / "name").write_text(text)
        monkeypatch.setattr(maintenance, "PRODUCT", tmp_path / "name")
        assert maintenance.metadata_host() == host
    monkeypatch.setattr(maintenance, "PRODUCT", tmp_path / "none")
    assert maintenance.metadata_host() is None
    with Notices(print, None) as notices:
        assert not notices._thread.is_alive()


def test_the_signal_that_a_notice_announces_does_not_end_what_saves(capsys):
    """Another one after it does, as a second SIGTERM always has: see `StopSignals`."""
    with StopSignals(Progress(0, 0)) as signals:
        signals.check()
        signals.notice("preempted is TRUE")
        with pytest.raises(StopRequested):
            signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        signals.notice("again")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "this machine will be stopped (preempted is TRUE): saving, then stopping"
    assert second == "SIGTERM: saving, then stopping (again to stop at once)"


def test_the_signal_that_all_processes_are_sent_does_not_end_one_that_was_told(capsys):
    """A pod's shutdown sends SIGTERM to each; who hears of another's first is saving by then, or
    has saved and takes leave of the others."""
    store, before = Store(), [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    first, second = (StopSignals(Progress(0, 0), Processes(i, 2, store)) for i in range(2))
    first.notice("preempted is TRUE")
    with pytest.raises(StopRequested):
        first.check()
    try:
        with second, pytest.raises(StopRequested):
            second.check()
        assert signal.getsignal(signal.SIGTERM) not in dict(before).values()
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.received == signal.SIGTERM
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().out.count("saving, then stopping") == 2


@pytest.mark.slow
def test_a_run_stops_at_a_notice_and_goes_on_while_it_stands(tmp_path, home, monkeypatch):
    said = in_order(maintenance_event=["NONE", TERMINATE])
    with Metadata(said) as server:
        monkeypatch.setenv(maintenance.HOST_VARIABLE, server.host)
        many = {"train__num_steps": 400, "evaluation__every_steps": 400}
        code, out, err = finish(start(tmp_path / "run", home, **many))
        assert code == 143 and err == "", (out, err)
        assert f"({ANNOUNCED}): saving, then stopping" in out
        assert "the same command goes on from there" in out
        metrics = tmp_path / "run" / "metrics.jsonl"
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        out = run(tmp_path / "run", home, **many | {"train__num_steps": done + 2})
        assert "will be stopped" not in out and "held-out accuracy" in out
