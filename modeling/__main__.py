"""`python -m transformer2` is the `transformer2` command."""

from transformer2_cli import main

main()
