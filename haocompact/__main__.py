"""`python -m haocompact`."""

from haocompact.cli import main

main()
