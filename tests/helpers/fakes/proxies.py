"""Reverse proxies for tests: one that loses answers, and one that asks for a password."""

import base64
import http.client
import http.server
import re
import threading

WRITES = ("POST", "PATCH", "PUT", "DELETE")


class ReverseProxy:
    """Forwards requests to `target`. Use as a context manager."""

    def __init__(self, target):
        self._target = target.removeprefix("http://")

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._http.server_address[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method, path, headers, body):
        """(status, headers, body) of a request; None where nothing is answered."""
        connection = http.client.HTTPConnection(self._target, timeout=60)
        kept = {k: v for k, v in headers.items() if k.lower() not in ("host", "connection", "authorization")}
        connection.request(method, path, body, kept)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {"Content-Type": response.getheader("Content-Type") or "text/plain"}, content


class LosingProxy(ReverseProxy):
    """Does what is asked and then says nothing: of each kind of write the first `num_losses` answers are lost.

    A kind is a method and a path without ids. `lost`: kind -> how many were.
    """

    def __init__(self, target, num_losses=1, only=""):
        super().__init__(target)
        self.num_losses = num_losses
        self._only = only
        self.lost = {}

    def answer(self, method, path, headers, body):
        answer = super().answer(method, path, headers, body)
        kind = f"{method} {re.sub(r'[0-9a-f]{32}', '*', path.partition('?')[0])}"
        is_write = method in WRITES and not path.endswith(("search", "get")) and self._only in kind
        if is_write and answer[0] < 400 and self.lost.get(kind, 0) < self.num_losses:
            self.lost[kind] = self.lost.get(kind, 0) + 1
            return None
        return answer


class AuthProxy(ReverseProxy):
    """Forwards what comes with a user name and a password; 401 for the rest."""

    def __init__(self, target, username, password):
        super().__init__(target)
        self._wanted = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        self.num_allowed = 0
        self.num_refused = 0

    def answer(self, method, path, headers, body):
        if headers.get("Authorization") != self._wanted:
            self.num_refused += 1
            return 401, {}, f"no access with {headers.get('Authorization')}".encode()
        self.num_allowed += 1
        return super().answer(method, path, headers, body)


def _handler(proxy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def _forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = proxy.answer(self.command, self.path, dict(self.headers), body)
            if found is None:
                self.close_connection = True
                return
            status, headers, content = found
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _forward  # noqa: N815

        def log_message(self, *arguments):
            pass

    return Handler
