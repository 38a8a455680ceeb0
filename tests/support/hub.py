"""A hub on loopback: what `huggingface_hub` asks, with files that a test makes."""

import base64
import hashlib
import http.server
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

COMMIT = "c0ffee" + 34 * "0"


def hub_environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a process that has this hub and keeps its files in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(("HF_", "HTTP"))}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "*"} | more


class Hub(http.server.ThreadingHTTPServer):
    """Answers for the data sets it was given until `close`; a context manager.

    Args:
        datasets: content of each file, by the id of its data set and its path there.
        models: the same of models.
        gated: ids whose list of files is public and whose files are not, as on the real hub.
        private: ids that look missing without a token.
        broken: ids for which the server fails.
        token: that uploads to `models` need, whose content they become; "": there are none.
    """

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, bytes]],
        *,
        models: Mapping[str, dict[str, bytes]] | None = None,
        gated: str = "",
        private: str = "",
        broken: str = "",
        token: str = "",
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models or {}
        self.datasets, self.gated, self.private, self.broken = datasets, gated, private, broken
        self.token = token
        self.asked: list[str] = []  # method and path of every request
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def downloads(self) -> list[str]:
        """The files that were fetched: repository, colon, path."""
        asked = [a.removeprefix("GET /") for a in self.asked if a.startswith("GET /")]
        fetched = [path.removeprefix("datasets/") for path in asked if not path.startswith("api/")]
        return [path.replace(f"/resolve/{COMMIT}/", ":") for path in fetched]

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self.server.asked.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if not self.server.token or self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._send(401, b"{}")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            url = f"{self.server.url}/{asked['organization']}/{asked['name']}"
            self._send(200, json.dumps({"url": url}).encode())
        elif path == "/api/validate-yaml":
            self._send(200, b'{"errors": [], "warnings": []}')
        elif repository == self.server.broken:
            self._send(501, b"")
        elif path.endswith("/preupload/main"):
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **mode} for file in json.loads(body)["files"]]
            self._send(200, json.dumps({"files": files}).encode())
        else:  # commit/main
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.models[repository][line["value"]["path"]] = content
            url = f"{self.server.url}/{repository}/commit/{COMMIT}"
            done = {"commitUrl": url, "commitOid": COMMIT}
            self._send(200, json.dumps(done | {"success": True}).encode())

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        is_api = path.startswith("/api/")
        path = path.removeprefix("/api")
        known = self.server.datasets if path.startswith("/datasets/") else self.server.models
        path = path.removeprefix("/datasets/").removeprefix("/models/").removeprefix("/")
        owner, name, *rest = path.split("/") if "/" in path else ("", path)
        repository = f"{owner}/{name}"
        files = known.get(repository)
        if repository == self.server.broken:
            self._send(501, b"")
        elif files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository == self.server.private:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif is_api and rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": _sha1(content)}
                for name, content in files.items()
            ]
            self._send(200, json.dumps(listed).encode())
        elif is_api:  # the data set itself, or /revision/main
            siblings = [{"rfilename": name} for name in files]
            about = {"_id": "0", "id": repository, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(about).encode())
        elif repository == self.server.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/".join(rest[2:]) not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:  # resolve/<commit>/<file>
            content = files["/".join(rest[2:])]
            self._send(200, content, {"ETag": f'"{_sha1(content)}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class SilentHub(http.server.ThreadingHTTPServer):
    """Takes every request and never answers, as behind a firewall that drops what comes back."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _SilentHandler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    url, __exit__ = Hub.url, Hub.__exit__


class _SilentHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(3600)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
