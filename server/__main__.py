"""`python -m server` is `chairlift`."""

from server.cli import main

if __name__ == "__main__":
    main()
