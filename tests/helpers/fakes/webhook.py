"""A webhook as chats have it: remembers the texts that it is sent, and answers as it is told."""

import http.server
import json
import threading


class Webhook:
    """Takes alerts. Use as a context manager."""

    def __init__(self):
        webhook = self
        self.texts = []
        self.answer = 200

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.texts.append(json.loads(body)["text"])
                self.send_response(webhook.answer)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/T0KEN"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()
