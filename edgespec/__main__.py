"""`edgespec`, and `python -m edgespec`."""

from __future__ import annotations

from edgespec.cli import startup


def main() -> None:
    """Runs the command line and exits with its code."""
    startup.watch()
    from edgespec.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
