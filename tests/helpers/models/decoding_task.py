"""Language modeling that augments: it replaces a random token of each row; also in data workers that die or raise.

`DECODE_SCRIPT` is JSON: number of rows that a data worker's process decodes -> what it does then; `mark`: a file that
says it was done, so that it strikes once.
"""

import json
import os
import signal
import sys

from kftrain.errors import DataError
from kftrain.tasks.language_modeling import LanguageModeling


class Augmenting(LanguageModeling):
    """A row of tokens, one of them replaced."""

    def __init__(self, *, sequence_length: int = 32, tokenizer: str = "bytes") -> None:
        super().__init__(sequence_length=sequence_length, tokenizer=tokenizer)
        self.script = json.loads(os.environ.get("DECODE_SCRIPT", "{}"))
        self.num_rows = 0

    def decode(self, sample, generator):
        if "data_worker" in sys.argv[0]:
            self.num_rows += 1
            if self.num_rows == self.script.get("row") and is_first(self.script["mark"]):
                globals()[self.script["do"]]()
        tokens = sample["tokens"].copy()
        if generator is not None:
            if self.script.get("bad_modulus") and int(tokens.sum()) % self.script["bad_modulus"] == 0:
                raise ValueError("damaged")
            tokens[generator.integers(len(tokens))] = generator.integers(256)
        return {"tokens": tokens}


def is_first(mark):
    """Of all that come to it, one is."""
    try:
        open(mark, "x").close()
    except FileExistsError:
        return False
    return True


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise DataError("scripted", where="task.decode")
