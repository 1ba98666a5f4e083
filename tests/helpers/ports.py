"""Ports for servers that are processes of their own, and take a number."""

import socket


def held(address="127.0.0.1"):
    """A socket with a free port. As long as it is open the system gives the port to nobody who asks for any.

    It does not listen: a server that allows to use an address again, as servers do, may have the port all the same.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((address, 0))
    return found
