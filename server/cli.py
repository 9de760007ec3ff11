"""The `chairlift` command. Help is quick: torch is imported by the commands that need it, inside their functions."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError

from config.load import SettingsLoader
from config.toml import SettingsError
from server import __version__, commands
from server.terminal import fail

_EPILOGUE = """\
Every setting is a flag, a key in a TOML file and an environment variable: --max-num-seqs, max_num_seqs and \
CHAIRLIFT_MAX_NUM_SEQS. A flag goes before the environment, that before the file. `chairlift config show` tells where \
each value came from.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0 well done, 1 it could not be done, 2 the command line or a setting is wrong."""
    loader = SettingsLoader()
    app = make_app(loader)
    try:
        sys.exit(app(sys.argv[1:] if arguments is None else list(arguments)))
    except (CycloptsError, SettingsError) as error:
        fail(str(error), status=2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `chairlift config show | head`
        sys.stderr.close()  # or Python complains about stdout at exit
        sys.exit(1)


def make_app(loader: SettingsLoader) -> App:
    """The command line with the commands of all modules in `server.commands`."""
    app = App(
        name="chairlift",
        help="An OpenAI-compatible server for language models, with continuous batching.",
        help_epilogue=_EPILOGUE,
        help_format="markdown",
        version=__version__,
        config=loader,
        result_action="return_value",
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    for module in pkgutil.iter_modules(commands.__path__, "server.commands."):
        importlib.import_module(module.name).register(app, loader)
    return app
