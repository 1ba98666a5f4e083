"""A proxy in front of a store's server that goes wrong as a script says, by the number of the request.

The server behind it is a real one, so that what is written is really there, or not: an answer can be lost after the
work was done. `bad_server` needs no server, and writes nothing.
"""

import contextlib
import http.client
import http.server
import re
import threading
import time

DELAY_SECONDS = 0.3

FAULTS = ("drop", "delay", "truncate", "unavailable", "lose", "silent", "damage")
"""Hangs up before it asks; answers late; hangs up within the body; 503; hangs up when it is done; never answers; bits
of the body are others."""

NOT_FORWARDED = ("host", "connection", "transfer-encoding")

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"


class FaultProxy:
    """Forwards requests to `target`, http://HOST:PORT. Use as a context manager.

    `only`: pattern of `METHOD /path` of those requests that are counted; the others are forwarded. `script`: number of
    such a request, from 0 on -> a fault; or a function from number to fault or None, which may do more than that.
    """

    def __init__(self, target, script=None, only=r"GET .*\.tar"):
        self._target = target.removeprefix("http://")
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.use(script or {}, only)

    def use(self, script, only):
        """Begin another script, and count from 0 on."""
        with self._lock:
            self._script, self._only, self._num_requests = script, only, 0
            self.happened = []
            """Faults that came, as (number, fault, request)."""

    @property
    def num_requests(self):
        """Requests that were counted."""
        return self._num_requests

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.uri = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()

    def choose_fault(self, request):
        """Fault of a request like `GET /bucket/name`, or None."""
        with self._lock:
            if not re.match(self._only, request):
                return None
            number, self._num_requests = self._num_requests, self._num_requests + 1
            fault = self._script(number) if callable(self._script) else self._script.get(number)
            if fault is not None:
                assert fault in FAULTS, fault
                self.happened.append((number, fault, request))
            return fault

    def wait_for_end(self):
        self._closed.wait()

    def ask(self, method, path, headers, body):
        """Status, headers and body of the server's own answer."""
        kept = {name: value for name, value in headers.items() if name.lower() not in NOT_FORWARDED}
        length = {"Content-Length": str(len(body))} if body else {}
        with contextlib.closing(http.client.HTTPConnection(self._target, timeout=60)) as connection:
            connection.request(method, path, body, kept | length)
            response = connection.getresponse()
            content = response.read()
        named = {name: value for name, value in response.getheaders() if name.lower() not in NOT_FORWARDED}
        if "Range" in headers:  # S3 tells no checksum of a part, moto does
            named = {name: value for name, value in named.items() if not name.lower().startswith("x-amz-checksum")}
        return response.status, named, content


def _read_body(headers, stream):
    """Body of a request, as it came: of one in chunks its content, each chunk of which has a line before it."""
    if headers.get("Transfer-Encoding", "").lower() != "chunked":
        return stream.read(int(headers.get("Content-Length") or 0))
    body = b""
    while size := int(stream.readline().split(b";")[0], 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body


def _damage(content):
    """The same with a bit of every thousandth byte turned: some of them lie in what is used."""
    damaged = bytearray(content)
    damaged[::1000] = bytes(byte ^ 1 for byte in damaged[::1000])
    return bytes(damaged)


def _handler(proxy):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self):
            body = _read_body(self.headers, self.rfile)
            fault = proxy.choose_fault(f"{self.command} {self.path}")
            if fault == "silent":
                proxy.wait_for_end()
            if fault in ("drop", "silent"):
                self.close_connection = True
                return
            if fault == "unavailable":
                self._send(503, {"Content-Type": "application/xml", "Content-Length": str(len(SLOW_DOWN))}, SLOW_DOWN)
                return
            status, headers, content = proxy.ask(self.command, self.path, dict(self.headers), body)
            if fault == "delay":
                time.sleep(DELAY_SECONDS)
            if fault == "lose":
                self.close_connection = True
                return
            if self.command != "HEAD":
                headers["Content-Length"] = str(len(content))
            if fault == "truncate":
                self.close_connection, content = True, content[: len(content) // 2]
            self._send(status, headers, _damage(content) if fault == "damage" and content else content)

        def _send(self, status, headers, content):
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _forward  # noqa: N815

        def handle_one_request(self):
            try:
                super().handle_one_request()
            except ConnectionError:  # the client has gone
                self.close_connection = True

        def log_message(self, *arguments):
            pass

    return Handler
