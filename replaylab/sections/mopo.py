"""MOPO's part of the report is GORMPO's."""

from replaylab.sections.gormpo import sections

__all__ = ["sections"]
