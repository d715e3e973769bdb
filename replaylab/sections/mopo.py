"""Report of MOPO: the same as that of GORMPO."""

from replaylab.sections.gormpo import sections

__all__ = ["sections"]
