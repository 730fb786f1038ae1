"""`python -m flopwright`."""

from flopwright.cli import main

main()
