"""`python -m microstrat`."""

from microstrat import _cli

if __name__ == "__main__":
    _cli.main()
