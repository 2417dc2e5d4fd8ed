"""`python -m agentkv`: the command line without the script on the path."""

from agentkv.cli.main import main

main()
