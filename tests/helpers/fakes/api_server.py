"""A scripted Kubernetes API server over real HTTP: one namespace, watches and logs as streams, faults on script.

The real client talks to it, through a kubeconfig. What is in the namespace, and what happens there, is
`kube_namespace.Namespace`; here is how it answers, and how it fails to.
"""

import contextlib
import http.server
import json
import os
import re
import socket
import struct
import threading
import time
import urllib.parse
from dataclasses import dataclass, field

import yaml
from helpers.fakes.kube_namespace import NAME, PATH, Namespace, is_over

LOST, RESET = "lost", "reset"
"""Faults of the connection: it breaks after the request took effect, or before."""

WEBHOOK = 'Internal error occurred: failed calling webhook "validator.pytorchjob": no endpoints available'
REASONS = {
    401: "Unauthorized",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    403: "Forbidden",
    404: "NotFound",
}


def kubeconfig(address):
    """A kubeconfig for a server at this address."""
    document = {
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAME}}],
        "users": [{"name": "u", "user": {}}],
    }
    return yaml.safe_dump(document)


def _find_patch_type(path):
    """The content type of the patches that the official client sends: objects of operators know no other."""
    return f"application/{'strategic-' if path.startswith('/api/v1/') else ''}merge-patch+json"


@dataclass
class Fault:
    """The next `times` requests of this kind fail."""

    verb: str
    path: re.Pattern
    what: object
    """A status, LOST or RESET."""
    times: float
    headers: dict = field(default_factory=dict)
    message: str = ""


class ApiServer:
    """The server. Use as a context manager."""

    def __init__(self):
        self.namespace = Namespace()
        self.requests = []
        """(verb, path) of every request so far."""
        self.rights = None
        """(resource, verb) that whoever asks has, as roles say it; None: everything."""
        self.rights_used = set()
        """Those that were asked for and there."""
        self.is_away = False
        """Whether every connection is reset."""
        self.is_silent = False
        """Whether requests are taken and never answered."""
        self.num_failures = 0
        """How many requests have failed on script."""
        self._faults = []
        self._streams_cut = 0
        self._closed = threading.Event()

    def __enter__(self):
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.end_streams()
        self._http.shutdown()
        self._http.server_close()

    def write_kubeconfig(self, path):
        """Writes a kubeconfig that leads here; returns its path as text."""
        path.write_text(kubeconfig(f"http://127.0.0.1:{self._http.server_address[1]}"))
        return str(path)

    def fail(self, verb, path, what, times=1, **headers):
        """The next requests whose path contains the pattern fail: a status, LOST or RESET."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._faults.append(Fault(verb, re.compile(path), what, times, headers))

    def num_failures_left(self):
        """How many faults have not happened yet."""
        return sum(fault.times for fault in self._faults)

    @contextlib.contextmanager
    def away(self):
        """Within the block nothing answers, and no stream goes on."""
        self.is_away = True
        self.cut_streams()
        yield
        self.is_away = False

    def cut_streams(self):
        """Breaks all watches and logs that are read now."""
        with self.namespace.changed:
            self._streams_cut += 1
            self.namespace.changed.notify_all()

    def end_streams(self):
        """Breaks all watches and logs, now and from now on."""
        self._closed.set()
        with self.namespace.changed:
            self.namespace.changed.notify_all()

    def take_fault(self, verb, path):
        """The fault of this request; None: it goes well."""
        if self.is_away:
            return Fault(verb, re.compile(""), RESET, 1)
        for fault in self._faults:
            if fault.times > 0 and fault.verb == verb and fault.path.search(path):
                fault.times -= 1
                self.num_failures += 1
                return fault
        return None

    def refusal(self, verb, path, query):
        """403 where the right to a request is missing."""
        right = right_of(verb, path, query)
        if right is None or self.rights is None or right in self.rights:
            self.rights_used |= {right} - {None}
            return None
        return Fault(verb, re.compile(""), 403, 1, message=f"{right[0]} is forbidden: cannot {right[1]} it")

    def wait_while_silent(self):
        """Holds a request back while the server is silent."""
        while self.is_silent and not self._closed.is_set():
            time.sleep(0.01)

    def pod_changes(self, query):
        """Changes of pods as a watch tells them: first those that are there, until its time is over."""
        name = query["labelSelector"].partition("=")[2]
        with self.namespace.changed:
            seen, cut = len(self.namespace.pod_changes), self._streams_cut
            present = self.namespace.select("pods", query)
            lines = [json.dumps({"type": "ADDED", "object": pod}) for pod in present]
        yield from lines
        end = time.monotonic() + float(query["timeoutSeconds"])
        while time.monotonic() < end:
            with self.namespace.changed:
                if seen == len(self.namespace.pod_changes):
                    self.namespace.changed.wait(0.2)
                self._raise_if_cut(cut)
                news, seen = self.namespace.pod_changes[seen:], len(self.namespace.pod_changes)
            for change, pod in news:
                if pod["metadata"]["name"].startswith(f"{name}-worker-"):
                    yield json.dumps({"type": change, "object": pod})

    def log_lines(self, pod_name, query):
        """Lines of a pod's log with their times, until its container has ended. `sinceTime` is inclusive."""
        uid = self.namespace.get("pods", pod_name)["metadata"]["uid"]
        cut, sent = self._streams_cut, 0
        since = _nanoseconds(query.get("sinceTime", "1970-01-01T00:00:00Z"))
        while True:
            with self.namespace.changed:
                news = self.namespace.logs.get(uid, [])[sent:]
                pod = self.namespace.objects["pods"].get(pod_name)
                ended = pod is None or pod["metadata"]["uid"] != uid or is_over(pod) or query["follow"] == "false"
                if not news and not ended:
                    self.namespace.changed.wait(0.2)
                self._raise_if_cut(cut)
            sent += len(news)
            for stamp, line in news:
                self._raise_if_cut(cut)
                if _nanoseconds(stamp) >= since:
                    yield f"{stamp} {line}"
            if ended:
                return

    def _raise_if_cut(self, cut):
        if cut != self._streams_cut or self._closed.is_set():
            raise ConnectionResetError


def right_of(verb, path, query):
    """(resource, verb) of a request, as RBAC names them; None for what everybody may."""
    known = PATH.fullmatch(path.removesuffix("/log"))
    if known is None:
        return None
    kind, name = known.groups()
    if path.endswith("/log"):
        return "pods/log", "get"
    if verb != "GET":
        return kind, {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[verb]
    return kind, "get" if name else "watch" if query.get("watch") == "true" else "list"


def _nanoseconds(stamp):
    """A time of 2026-11-21, as whole nanoseconds of that day."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    hours, minutes, whole = seconds[-8:].split(":")
    day = 0 if seconds.startswith("1970") else 10**15
    return day + ((int(hours) * 60 + int(minutes)) * 60 + int(whole)) * 10**9 + int(f"{fraction:0<9}")


def _handler(server):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *arguments):
            pass

        def handle_one_request(self):
            with contextlib.suppress(ConnectionError):  # the client hung up
                super().handle_one_request()

        def serve(self):
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            server.requests.append((self.command, url.path))
            server.wait_while_silent()
            fault = server.take_fault(self.command, self.path) or server.refusal(self.command, url.path, query)
            if fault is not None and fault.what == RESET:
                self.reset()
            elif fault is not None and fault.what != LOST:
                self.refuse(fault)
            elif url.path.endswith("/log"):
                self.stream_log(url.path.split("/")[-2], query)
            elif query.get("watch") == "true":
                self.stream(server.pod_changes(query))
            elif self.command == "PATCH" and self.headers["Content-Type"] != _find_patch_type(url.path):
                self.send(415, {"reason": "UnsupportedMediaType"})
            else:
                answer = server.namespace.answer(self.command, url.path, query, body)
                self.reset() if fault is not None else self.send(*answer)

        do_GET = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815

        def refuse(self, fault):
            message = fault.message or (WEBHOOK if fault.what == 500 else REASONS[fault.what])
            self.send(fault.what, {"reason": REASONS[fault.what], "message": message}, fault.headers)

        def send(self, status, document, headers=None):
            content = json.dumps(document).encode()
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def stream_log(self, pod_name, query):
            pod = server.namespace.objects["pods"].get(pod_name)
            if pod is None:
                self.send(404, {"reason": "NotFound", "message": f'pods "{pod_name}" not found'})
            elif pod["status"]["phase"] == "Pending":
                self.send(400, {"reason": "BadRequest", "message": "container is waiting to start"})
            else:
                self.stream(server.log_lines(pod_name, query))

        def stream(self, lines):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for line in lines:
                    content = line.encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionResetError:
                self.reset()

        def reset(self):
            """Breaks the connection: the client sees a reset, not an end."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
            self.close_connection = True

    return Handler
