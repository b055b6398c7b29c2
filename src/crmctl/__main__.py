"""`python -m crmctl` and the console script."""

from crmctl.cli.output import prepare_streams


def main() -> None:
    """Run the command line."""
    from crmctl.cli.app import app

    prepare_streams()
    app(prog_name="crmctl")


if __name__ == "__main__":
    main()
