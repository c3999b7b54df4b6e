"""`python -m raggedmoe_command`, which is the console script."""

from raggedmoe_command import main

main()
