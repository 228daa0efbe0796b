"""``python -m weightplane.cli`` is the ``weightplane`` command."""

from .main import app

if __name__ == "__main__":
    app(prog_name="weightplane")
