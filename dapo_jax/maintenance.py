"""Notices that a Google Compute Engine machine is about to be stopped.

Its metadata server says so before the shutdown that sends SIGTERM: of maintenance of machines with
GPUs (`maintenance-event`), and of the preemption of a spot machine (`preempted`). It is asked every
few seconds, on such machines alone. By Google's pages the first is not filled for TPUs, whose own
`upcoming-maintenance` announces a window days ahead and is not read here. Not run on such a
machine.

Source: cloud.google.com/compute/docs/metadata/getting-live-migration-notice,
cloud.google.com/tpu/docs/view-maintenance-notifications.
"""

import os
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

HOST_VARIABLE = "GCE_METADATA_HOST"  # that Google's own libraries read, too
HOST = "metadata.google.internal"
PRODUCT = Path("/sys/class/dmi/id/product_name")
ASK_EVERY_SECONDS = 5.0
TIMEOUT_SECONDS = 3.0
# Of a key below instance/ the values that announce a stop. A migration is none.
STOPS = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}


class Notices:
    """While active, `told` is called once, with what was announced, when a stop is. A stop that is
    announced already at the beginning is not told of: the run that was started again since would
    never get on.

    Args:
        told: called from a thread.
        host: of the metadata server; None: there is none.
    """

    def __init__(
        self,
        told: Callable[[str], None],
        host: str | None,
        every_seconds: float = ASK_EVERY_SECONDS,
    ):
        self.told, self.host, self.every_seconds = told, host, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="maintenance", daemon=True)

    def __enter__(self) -> "Notices":
        if self.host is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        before: dict[str, str] = {}
        while True:
            for key, stop in STOPS.items():
                value = self._ask(key)
                if value is None:
                    continue
                if value == stop and before.get(key, stop) != stop:
                    self.told(f"{key} is {value}")
                    return
                before[key] = value
            if self._over.wait(self.every_seconds):
                return

    def _ask(self, key: str) -> str | None:
        """None where it does not answer: what is to come is told again."""
        url = f"http://{self.host}/computeMetadata/v1/instance/{key}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read().decode().strip()
        except (OSError, ValueError):
            return None


def metadata_host() -> str | None:
    """Of this machine; None where it is not one of Google's."""
    if HOST_VARIABLE in os.environ:
        return os.environ[HOST_VARIABLE]
    try:
        ours = PRODUCT.read_text().strip() == "Google Compute Engine"
    except OSError:
        return None
    return HOST if ours else None
