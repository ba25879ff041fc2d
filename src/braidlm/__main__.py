"""The command `braid`, which torchrun starts as `python -m braidlm`: signals are caught before its slow imports."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # Python puts the current folder first, where a stranger's module may lie

from braidlm.core.errors import until_stopped


def main() -> int:
    """Run the command of `sys.argv`; returns the exit code."""

    def command() -> int:
        from braidlm.cli.main import main as run_verb

        return run_verb()

    return until_stopped(command)


if __name__ == "__main__":
    sys.exit(main())
