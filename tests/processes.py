"""New processes that do not import torch again: forks of a server that has imported it and runs nothing else.

A fork of the tests' own process can hang: that has threads, whose locks nobody would release in the fork.
"""

from __future__ import annotations

import multiprocessing
import os

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["replaylab.sweep", "torch._dynamo"])  # the latter is imported by a first update


class Started:
    """A call in a new process, which has the methods of a subprocess."""

    def __init__(self, call, *arguments):
        self.process = SERVER.Process(target=_call, args=(os.getcwd(), call, arguments), daemon=True)
        self.process.start()
        self.pid, self.terminate = self.process.pid, self.process.terminate

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self.process.join(timeout)
        assert self.returncode is not None, f"still runs after {timeout} s"
        return self.returncode


def _call(where, call, arguments):
    os.chdir(where)
    call(*arguments)
