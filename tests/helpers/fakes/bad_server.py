"""An S3 server that goes wrong: what it does with a request is told to it by method."""

import re
import socket
import threading
import time

BODY = bytes(range(256)) * 64
"""What every object holds, as far as it is sent."""

HEAD = b'HTTP/1.1 %d OK\r\nETag: "1"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n'

OK, PARTIAL_CONTENT, NOT_FOUND = 200, 206, 404

PAGE = b"<html><body>This site is being worked on.</body></html>"
"""What a proxy answers in place of a store, with 200."""

OFFSET = 7
"""Of a range that is shifted."""


class BadServer:
    """`plan`: method -> what happens: answer, silent, drip, stall, cut, a status like 503, or who tells it each time.

    With 200 or 206, and a length that fits: page (of a proxy), short (half of it), whole (the range is ignored),
    shifted (another range). LIST is a method, too; by default what GET is.

    `objects`: path -> content; None: every object holds `BODY`.
    """

    def __init__(self, **plan):
        self.plan = {"HEAD": "answer", **plan}
        self.requests = []
        self.headers = []
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
            self.headers.append(request)
            what = self.plan.get(method.decode(), "silent")
            what = self.plan.get("LIST", what) if b"list-type=" in path else what
            try:
                self._answer(connection, request, what() if callable(what) else what)
            except OSError:  # the client has gone
                return

    def _answer(self, connection, request, what):
        status, body = self._content(request, what)
        if what == "silent":
            self._closed.wait()
        elif isinstance(what, int) or status == NOT_FOUND:
            what = what if isinstance(what, int) else status
            connection.sendall(b"HTTP/1.1 %d no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % what)
        else:
            span = self._describe_range(request) if status == PARTIAL_CONTENT else b""
            connection.sendall(HEAD.replace(b"\r\n\r\n", span + b"\r\n\r\n") % (status, len(body)))
            if request.startswith(b"HEAD"):
                return
            is_torn = what in ("drip", "stall", "cut")
            connection.sendall((b"" if what == "drip" else body[: min(1000, len(body) // 2)]) if is_torn else body)
            for byte in body if what == "drip" else b"":
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
            if what == "stall":
                self._closed.wait()

    def _describe_range(self, request):
        """The header that says which bytes of an object an answer should hold."""
        path = request.split(b" ")[1].decode().partition("?")[0]
        first, last = map(int, re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)\r\n", request).groups())
        size = len(self.objects[path])
        return b"\r\nContent-Range: bytes %d-%d/%d" % (first, min(last, size - 1), size)

    def _content(self, request, what):
        """Status and body of an answer."""
        if what == "page":
            return OK, PAGE
        if self.objects is None:
            return OK, BODY
        path = request.split(b" ")[1].decode().partition("?")[0]
        if b"list-type=" in request.split(b" ")[1]:
            return OK, self._listing(path.strip("/"))
        if path not in self.objects:
            return NOT_FOUND, b""
        found = re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)\r\n", request)
        first, last = map(int, found.groups()) if found else (0, len(self.objects[path]) - 1)
        if not found or what == "whole":
            return OK, self.objects[path][: len(self.objects[path]) // (2 if what == "short" else 1)]
        body = self.objects[path][first : last + 1]
        if what == "shifted":
            body = (self.objects[path] * 2)[first + OFFSET : last + 1 + OFFSET]
        return PARTIAL_CONTENT, body[: len(body) // (2 if what == "short" else 1)]

    def _listing(self, bucket):
        """All objects of a bucket."""
        found = "".join(
            f"<Contents><Key>{path.split('/', 2)[2]}</Key><Size>{len(content)}</Size><ETag>1</ETag></Contents>"
            for path, content in sorted(self.objects.items())
        )
        return f"<ListBucketResult><Name>{bucket}</Name>{found}</ListBucketResult>".encode()
