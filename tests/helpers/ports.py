"""Ports for servers that are processes of their own, and take a number."""

import socket
import weakref


class Held:
    """A free port. As long as this object is there the system gives the port to nobody who asks for any.

    Its socket does not listen: a server that allows to use an address again, as servers do, may have the port all the
    same.
    """

    def __init__(self, address="127.0.0.1"):
        found = socket.socket()
        weakref.finalize(self, found.close)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, 0))
        self.number = found.getsockname()[1]
