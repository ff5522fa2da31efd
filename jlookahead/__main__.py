"""`python -m jlookahead` is `jlookahead`."""

from jlookahead.cli import main

if __name__ == "__main__":
    main()
