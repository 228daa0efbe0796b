"""``python -m weightplane.cli`` is the ``weightplane`` command."""

from .main import app

app(prog_name="weightplane")
