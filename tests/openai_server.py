"""An OpenAI-compatible HTTP server around a real model, with the faults that servers have; for tests and by hand:

python -m tests.openai_server MODEL_FOLDER [PORT]
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from recipe.prepare.answer import Sampling
from recipe.prepare.local_engine import LocalEngine


class ModelServer(ThreadingHTTPServer):
    """``faults``: share of requests that end in a 429, 500, a reset connection, a cut answer or a long wait.
    ``strict``: refuses parameters that OpenAI does not have. ``answered``: completions per last user message."""

    daemon_threads = True

    def __init__(self, engine: LocalEngine, port: int = 0, faults: float = 0.0, strict: bool = False) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.engine, self.faults, self.strict = engine, faults, strict
        self.lock = threading.Lock()
        self.dice = random.Random(0)
        self.answered: Counter[str] = Counter()
        self.faulty: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None: ...  # clients that are killed are part of the plan

    def fault(self) -> str | None:
        with self.lock:
            if self.dice.random() >= self.faults:
                return None
            kind = self.dice.choice(["429", "500", "reset", "cut", "slow"])
            self.faulty[kind] += 1
            return kind

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        thinking = (request.get("chat_template_kwargs") or {}).get("enable_thinking")
        sampling = Sampling(request["max_tokens"], request["temperature"], thinking, 0)
        with self.lock:  # one model, one thread
            ids = self.engine.encode(request["messages"], request.get("tools"), sampling)
            (answer,) = self.engine.generate([ids], sampling, request.get("seed", 0))
            self.answered[request["messages"][-1]["content"]] += 1
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.message["content"]},
            "finish_reason": "length" if answer.truncated else "stop",
        }
        if request.get("return_token_ids"):
            choice["token_ids"] = answer.token_ids
        usage = {"prompt_tokens": len(ids), "completion_tokens": answer.completion_tokens}
        usage["total_tokens"] = sum(usage.values())
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": self.engine.name}
        return {**made, "choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _send(self, status: int, value: Any, cut: bool = False, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": self.server.engine.name, "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.strict and "return_token_ids" in request:
            return self._send(400, {"error": {"message": "unknown parameter: return_token_ids"}})
        kind = self.server.fault()
        if kind == "429":
            return self._send(429, {"error": {"message": "busy"}}, Retry_After="0.01")
        if kind == "500":
            return self._send(500, {"error": {"message": "internal"}})
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        if kind == "slow":
            time.sleep(1.0)
        self._send(200, self.server.complete(request), cut=kind == "cut")


if __name__ == "__main__":
    served = ModelServer(LocalEngine(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, faults=0.2)
    print(served.url, served.engine.name, flush=True)
    served.serve_forever()
