"""A reverse proxy that asks for a user name and a password, as one in front of an MLflow server does."""

import base64
import http.client
import http.server
import threading


class AuthProxy:
    """Forwards to `target` what comes with the right credentials; 401 for the rest. Use as a context manager."""

    def __init__(self, target, username, password):
        self._target = target.removeprefix("http://")
        self._wanted = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        self.num_allowed = 0
        self.num_refused = 0

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method, path, headers, body):
        """(status, headers, body) of a request."""
        if headers.get("Authorization") != self._wanted:
            self.num_refused += 1
            return 401, {}, f"no access with {headers.get('Authorization')}".encode()
        self.num_allowed += 1
        connection = http.client.HTTPConnection(self._target, timeout=60)
        kept = {k: v for k, v in headers.items() if k.lower() not in ("host", "connection", "authorization")}
        connection.request(method, path, body, kept)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {"Content-Type": response.getheader("Content-Type") or "text/plain"}, content


def _handler(proxy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def _forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = proxy.answer(self.command, self.path, dict(self.headers), body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _forward  # noqa: N815

        def log_message(self, *arguments):
            pass

    return Handler
