"""`python -m crmctl` and the console script."""

import signal


def main() -> None:
    """Run the command line.

    Until a command takes the signals over, a Ctrl-C ends the process as any other does, without a traceback; once it
    has told its result, none changes the exit code.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from crmctl.cli.app import app
    from crmctl.cli.output import prepare_streams

    prepare_streams()
    try:
        app(prog_name="crmctl")
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)


if __name__ == "__main__":
    main()
