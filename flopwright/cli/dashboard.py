"""`flopwright dashboard`: starts the Streamlit app on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import Annotated, Final

import typer

_LOOK_S: Final = 0.1


def dashboard(
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="port on 127.0.0.1")
    ] = 8501,
    store: Annotated[
        str | None, typer.Option("--store", help="store of measurements: path or database URL")
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="do not open a browser window")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print address and command as JSON; start nothing")
    ] = False,
) -> None:
    """Open the dashboard in a browser: Explore, Plan, Rollouts, Compare, Export. Ctrl-C ends it.

    It listens on this machine alone (127.0.0.1). Its address is printed once it answers.
    With `streamlit run dashboards/app.py` the same pages are served.

    Example: flopwright dashboard --port 8501
    """
    _check(port)
    command = streamlit_command(port, headless=headless)
    if as_json:
        typer.echo(json.dumps({"url": f"http://127.0.0.1:{port}", "command": command}))
        return
    environment = os.environ | ({"FLOPWRIGHT_STORE": store} if store is not None else {})
    code = _serve(command, environment, port)
    if code:
        raise typer.Exit(code)


def _serve(command: list[str], environment: dict[str, str], port: int) -> int:
    """Runs the server until it ends; returns its exit code, 0 where it was asked to end.

    SIGINT and SIGTERM are passed on and waited for: a server left behind would keep the
    port. A second signal ends it at once.
    """
    process: subprocess.Popen[bytes] | None = None
    asked = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal asked
        if process is not None:
            process.kill() if asked else process.terminate()
        asked = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, env=environment)
        if asked:
            process.terminate()
        while process.poll() is None and not _answers(port):
            time.sleep(_LOOK_S)
        if process.poll() is None:
            typer.echo(f"dashboard at http://127.0.0.1:{port} (Ctrl-C ends it)")
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if asked else code


def _answers(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def streamlit_command(port: int, *, headless: bool) -> list[str]:
    """Returns the command that serves the app on the loopback address only."""
    options = {
        "server.address": "127.0.0.1",
        "server.port": str(port),
        "server.headless": "true" if headless else "false",
        "server.fileWatcherType": "none",
        "server.maxUploadSize": "1",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorLinks": "false",
        "logger.hideWelcomeMessage": "true",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "flopwright.dashboards.serve", *flags]


def _check(port: int) -> None:
    """Refuses what would only fail after the start: no Streamlit, or a taken port."""
    import socket

    from flopwright.errors import InputError, Violation

    missing = [m for m in ("streamlit", "plotly") if importlib.util.find_spec(m) is None]
    if missing:
        raise InputError(
            Violation(
                rule=f"the dashboard needs {' and '.join(missing)}, not installed here",
                nearest_fix="pip install 'flopwright[dashboard]'",
            )
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                Violation(
                    field="--port",
                    value=str(port),
                    rule=f"cannot be used: {error.strerror}",
                    nearest_fix=f"try --port {port % 65535 + 1}",
                )
            ) from error
