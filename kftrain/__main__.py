"""`python -m kftrain`."""

from kftrain.cli import main

if __name__ == "__main__":
    main()
