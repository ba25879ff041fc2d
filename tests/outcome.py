"""What a command run in the test's own process printed and returned."""

import json
from dataclasses import dataclass


@dataclass
class Outcome:
    """Exit code and both streams."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)
