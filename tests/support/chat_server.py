"""A stand-in for an OpenAI-compatible endpoint: replies are a function of the prompt."""

import http.server
import json
import re
import threading
import time
from typing import Any


class ChatServer(http.server.ThreadingHTTPServer):
    """Answers POST /v1/chat/completions; used as a context manager.

    Attributes:
        asked: prompts, in the order of the requests.
        keys: Authorization headers.
        failures: HTTP statuses of the next answers, before any reply.
        refused: requests with this text get HTTP 400.
        seconds: how long a reply takes.
        most: choices of one answer at most.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.failures: list[int] = []
        self.refused: str | None = None
        self.seconds, self.most = 0.0, 3
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        """A client that was killed is no error of the server."""

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": "no such path"})
            return
        (message,) = body["messages"]
        self.server.asked.append(message["content"])
        self.server.keys.add(self.headers["Authorization"])
        if self.server.failures:
            self._send(self.server.failures.pop(0), {"error": "not now"})
            return
        if self.server.refused is not None and self.server.refused in message["content"]:
            self._send(400, {"error": "content filter"})
            return
        time.sleep(self.server.seconds)
        number = min(body["n"], self.server.most)
        texts = [reply(message["content"], body["seed"] + i) for i in range(number)]
        self._send(200, {"choices": [{"message": {"content": text}} for text in texts]})

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def reply(prompt: str, seed: int) -> str:
    """Rewrites fractions, pairs and formulas, and no roots; solves fractions alone."""
    answer = re.findall(r"^Answer: (.*)$", prompt, re.M)[-1]
    fraction = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", answer)
    if prompt.startswith("Rewrite"):
        problem = prompt.rpartition("\nProblem: ")[2].partition("\nAnswer:")[0]
        if "sqrt" in answer:
            return "I will not."
        return f"**Form:** some form\n**Rewritten problem:** {problem} Add the numbers of it.\n"
    if fraction:
        return f"It is {answer}.\nAnswer: $\\boxed{{{int(fraction[1]) + int(fraction[2])}}}$."
    return f"Answer: {seed}" if answer.startswith("(") else "Answer: n + 1"
