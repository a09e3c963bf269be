"""`python -m flatout` is the program `flatout`."""

from flatout.cli import main

if __name__ == "__main__":
    main()
