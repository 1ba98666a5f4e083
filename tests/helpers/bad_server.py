"""An S3 server that goes wrong: what it does with a request is told to it by method."""

import re
import socket
import threading
import time

BODY = bytes(range(256)) * 64
"""What every object holds, as far as it is sent."""

HEAD = b'HTTP/1.1 %d OK\r\nETag: "1"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n'

OK, PARTIAL_CONTENT, NOT_FOUND = 200, 206, 404


class BadServer:
    """`plan`: method -> what happens: answer, silent, drip, stall, cut, a status like 503, or who tells it each time.

    `objects`: path -> content; None: every object holds `BODY`.
    """

    def __init__(self, **plan):
        self.plan = {"HEAD": "answer", **plan}
        self.requests = []
        self.objects = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        port = self._listener.getsockname()[1]
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._closed.set()
        self._listener.close()

    def _accept(self):
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                received = connection.recv(65536)
                if not received:
                    return
                request += received
            method, path = request.split(b" ")[:2]
            self.requests.append((method.decode(), path.decode()))
            what = self.plan.get(method.decode(), "silent")
            try:
                self._answer(connection, request, what() if callable(what) else what)
            except OSError:  # the client has gone
                return

    def _answer(self, connection, request, what):
        status, body = self._content(request)
        if what == "silent":
            self._closed.wait()
        elif isinstance(what, int) or status == NOT_FOUND:
            what = what if isinstance(what, int) else status
            connection.sendall(b"HTTP/1.1 %d no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % what)
        else:
            connection.sendall(HEAD % (status, len(body)))
            if request.startswith(b"HEAD"):
                return
            connection.sendall({"answer": body, "drip": b""}.get(what, body[: min(1000, len(body) // 2)]))
            for byte in body if what == "drip" else b"":
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
            if what == "stall":
                self._closed.wait()

    def _content(self, request):
        """Status and body of a good answer."""
        if self.objects is None:
            return OK, BODY
        path = request.split(b" ")[1].decode().partition("?")[0]
        if path not in self.objects:
            return NOT_FOUND, b""
        found = re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)\r\n", request)
        if not found:
            return OK, self.objects[path]
        first, last = map(int, found.groups())
        return PARTIAL_CONTENT, self.objects[path][first : last + 1]
