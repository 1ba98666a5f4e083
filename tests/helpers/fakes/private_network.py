"""Functions in a network of their own: nobody else's bytes pass through its loopback device."""

import ctypes
import fcntl
import multiprocessing
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SPAWN = multiprocessing.get_context("spawn")
WAIT_SECONDS = 1200.0


def run(function, *arguments):
    """What a function returns in a process of its own, in a network of its own; None where that is not allowed."""
    receive, send = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_run, args=(send, function, arguments))
    process.start()
    send.close()
    try:
        assert receive.poll(WAIT_SECONDS), "no answer"
        return receive.recv()
    finally:
        process.join(5.0)
        process.kill()


def problem():
    """Why there can be no network of one's own; empty where there can."""
    return run(str) if Path("/proc/self/ns/net").exists() else "networks of one's own need Linux"


def sent_bytes():
    """By all processes of this network so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (each for each in lines if each.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _run(pipe, function, arguments):
    error = _enter()
    pipe.send(error or function(*arguments))
    pipe.close()
    os._exit(0)  # what the parent has set up to run at its end is not the child's


def _enter():
    """Why it cannot be entered; empty once this process is in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    return ""
