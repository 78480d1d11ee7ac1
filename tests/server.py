"""A real HTTP server on 127.0.0.1 that speaks the chat completions protocol; its answers are scripted."""

import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SUMMARY = "## Goal\nWater the beans.\n\n## Next Steps\n1. Go on."
SOON = {"retry-after-ms": "5"}  # what the openai client waits before it tries again


def reply(text, finish="stop", usage=(100, 20), **message):
    """The JSON of a usual answer."""
    said = {"role": "assistant", "content": text, **message}
    body = {"choices": [{"index": 0, "finish_reason": finish, "message": said}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return body


def error(status, text, code=None, headers=None):
    return status, {"error": {"message": text, "code": code, "type": "invalid_request_error"}}, headers or {}


class Server(ThreadingHTTPServer):
    """`script`: answers in turn (the last one stays); each a JSON body, (status, body, headers) or a function.

    A function gets the request's JSON and returns an answer, or gets the handler, too, and writes it itself.
    `asked` and `headers`: all requests so far. `most`: the largest number of requests under way at once.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.headers, self.times = [reply(SUMMARY)], [], [], []
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def prompts(self):
        return [body["messages"][-1]["content"] for body in self.asked]

    def handle_error(self, request, client_address):
        pass  # a client that has gone


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.asked.append(body)
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
            answer = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        try:
            if callable(answer):
                answer = answer(body) if answer.__code__.co_argcount == 1 else answer(body, self)
            if answer is not None:
                self.send(*(answer if isinstance(answer, tuple) else (200, answer, {})))
        finally:
            with server.lock:
                server.now -= 1

    def send(self, status, body, headers):
        data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.send_response(status)
        for name, value in {
            "content-type": "application/json",
            **headers,
            "content-length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


def window_of(size, answer=SUMMARY):
    """A model with a context window of `size` tokens; it counts 3.5 characters as one."""

    def answered(body):
        sent = math.ceil(sum(len(m["content"]) for m in body["messages"]) / 3.5)
        asked = body.get("max_completion_tokens", body.get("max_tokens", 0))
        if sent + asked > size:
            return error(400, f"This model's maximum context length is {size} tokens. However, you requested "
                         f"{sent + asked} tokens ({sent} in the messages, {asked} in the completion).",
                         "context_length_exceeded")  # fmt: skip
        return reply(answer, usage=(sent, 40))

    return answered


@contextmanager
def running():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
