"""Logged experience: the Episodes type, readers and writers."""

from replaylab.data.episodes import Episodes, concatenate, from_rows
from replaylab.data.formats import FORMATS
from replaylab.data.formats.common import parse_columns
from replaylab.data.read import SAMPLES, load
from replaylab.data.write import save

__all__ = ["FORMATS", "SAMPLES", "Episodes", "concatenate", "from_rows", "load", "parse_columns", "save"]
