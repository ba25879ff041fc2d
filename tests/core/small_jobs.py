"""Jobs for tests: in a file of their own, which the processes of a cluster import fast."""

from braidlm.core.files import explained_disk_errors


def add(*numbers: int) -> int:
    return sum(numbers)


def write_on_full_disk() -> int:
    with explained_disk_errors("runs/mine"), open("/dev/full", "w") as file:
        return file.write("a checkpoint")
