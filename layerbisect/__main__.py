"""Run the command line with ``python -m layerbisect``."""

from layerbisect.cli import main

main()
