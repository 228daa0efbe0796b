"""Structured logs: one JSON object per line, with group, update_id and version where they are known."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

__all__ = ["FIELDS", "JsonFormatter"]

FIELDS = ("group", "update_id", "version", "correlation_id")


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", ...}``; install it on a handler of your own."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
