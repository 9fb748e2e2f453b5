"""`flopwise mcp`."""

import click

from flopwise.cli.options import runs_option
from flopwise.errors import FlopwiseError
from flopwise.integrations.mcp.folder import Folder


@click.command("mcp")
@click.option("--root", metavar="DIR", default=".", show_default=True, help="Only files below this folder are read.")
@runs_option
def command(root: str, runs: str | None) -> None:
    """Serve runs and traces to an agent over standard input and output (Model Context Protocol).

    \b
    Example: flopwise mcp --root .
      (waits for requests on standard input)

    Tools: runs, summary, findings, kernels, compare, account. They read and answer; nothing is run or changed. Runs are
    read only from --runs, which is DIR's own .flopwise/runs by default. Needs the extra: pip install 'flopwise[mcp]'.
    """
    folder = Folder.at(root, runs)
    try:
        from flopwise.integrations.mcp.server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "anyio"):
            raise
        raise FlopwiseError("the MCP SDK is not installed", "pip install 'flopwise[mcp]'") from None
    serve(folder)
