"""Logs as JSON, an object a line, for programs that read them."""

import datetime
import json
import logging


class JsonFormatter(logging.Formatter):
    """Time (UTC), level, logger and message, and the `fields` that a record was given with `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def use_json() -> None:
    """Has all that this process logs written as JSON."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
