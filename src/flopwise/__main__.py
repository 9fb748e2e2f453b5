"""The program `flopwise`, and `python -m flopwise`: Ctrl-C is answered quietly even while the program is being loaded."""

import sys

from flopwise.marked import all_with_the_program


def main() -> None:
    """Load the command line and run it."""
    with all_with_the_program(sys.argv):
        try:
            from flopwise.cli.main import main as run
        except KeyboardInterrupt:
            sys.stderr.write("error: interrupted\n")
            sys.exit(130)  # as where a verb is interrupted
        run()


if __name__ == "__main__":
    main()
