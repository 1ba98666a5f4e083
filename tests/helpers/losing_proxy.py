"""A reverse proxy that does what is asked of it and then says nothing: answers of a server that are lost."""

import http.client
import http.server
import re
import threading

WRITES = ("POST", "PATCH", "PUT", "DELETE")


class LosingProxy:
    """Forwards to `target`; of each kind of write the first `num_losses` answers are lost. Use as a context manager.

    A kind is a method and a path without ids. `lost`: kind -> how many were.
    """

    def __init__(self, target, num_losses=1, only=""):
        self._target = target.removeprefix("http://")
        self.num_losses = num_losses
        self._only = only
        self.lost = {}

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.uri = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method, path, headers, body):
        """(status, headers, body) of a request; None where the answer is lost."""
        connection = http.client.HTTPConnection(self._target, timeout=60)
        connection.request(
            method, path, body, {k: v for k, v in headers.items() if k.lower() not in ("host", "connection")}
        )
        response = connection.getresponse()
        content = response.read()
        connection.close()
        kind = f"{method} {re.sub(r'[0-9a-f]{32}', '*', path.partition('?')[0])}"
        is_write = method in WRITES and not path.endswith(("search", "get")) and self._only in kind
        if is_write and response.status < 400 and self.lost.get(kind, 0) < self.num_losses:
            self.lost[kind] = self.lost.get(kind, 0) + 1
            return None
        return response.status, {"Content-Type": response.getheader("Content-Type") or "text/plain"}, content


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
